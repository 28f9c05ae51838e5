"""Activations and their derivatives in Gluon, for epilogues that tensor cores wait for: two instructions per sigmoid.

A sigmoid by Triton's own `exp` and division is about twice as many instructions: the factor log2(e) is multiplied in
separately, and the division is refined to half a unit. Here the factor is part of the polynomial's coefficients, and
the reciprocal is the hardware's (one unit in the last place of float32, where results are 16 bits wide). The
activations that need no sigmoid are those of kernel.py. Compiled only, as everything in Gluon.
"""

# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilemesh.kernels.activations.kernel import activate, through


@gluon.jit
def hardware_exp2(x):
    """2**x, to about two units in the last place."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def hardware_reciprocal(x):
    """1 / x, to one unit in the last place."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def quick_gate(x, ACTIVATION: gl.constexpr):
    """The sigmoid that x is multiplied by: of 1.5958 x + 0.0714 x^3 for gelu_tanh, of x for silu."""
    if ACTIVATION == "gelu_tanh":
        exponent = x * (-2.302208198144325 - 0.1029432395800235 * (x * x))  # both times -log2(e)
    else:
        exponent = x * -1.4426950408889634
    return hardware_reciprocal(1.0 + hardware_exp2(exponent))


@gluon.jit
def quick_activate(x, ACTIVATION: gl.constexpr):
    """kernel.activate, of float32."""
    if ACTIVATION == "gelu_tanh" or ACTIVATION == "silu":
        x = x * quick_gate(x, ACTIVATION)
    else:
        x = activate(x, ACTIVATION)
    return x


@gluon.jit
def quick_through(grad, x, ACTIVATION: gl.constexpr):
    """kernel.through, of float32: grad times the activation's derivative at x (at D for relu)."""
    if ACTIVATION == "gelu_tanh":
        gate = quick_gate(x, ACTIVATION)
        made = grad * (gate * (1.0 + x * (1.0 - gate) * (1.5957691216057308 + 0.21406444881780073 * (x * x))))
    elif ACTIVATION == "silu":
        gate = quick_gate(x, ACTIVATION)
        made = grad * (gate * (1.0 + x * (1.0 - gate)))
    else:
        made = through(grad, x, ACTIVATION)
    return made
