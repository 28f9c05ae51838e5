"""`fused_matmul`: check, choose, launch.

There are three ways in. Eager without gradients: a dictionary finds a prepared runner by everything that
could change the choice, so checks and choices are made once a signature. Eager with gradients: the same inside an
autograd function. Traced (torch.compile, export, fake tensors): an operator registered with torch.library, whose
implementation is the first way again.

This is a dispatch of its own beside `@operator` (launch/operator.py), although both find checks, plan and launch by one
look-up in as much host time: here are out=, config= and a choice among implementations, only one of D and Z is kept
for the backward pass, that pass computes no gradient that nobody asked for, and a compiler sees through it. Both launch
by `launch/call.py`.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tilemesh.core.errors import UsageError
from tilemesh.kernels import context
from tilemesh.kernels.launch.replay import signature
from tilemesh.kernels.launch.steps import FitError
from tilemesh.kernels.launch.tensors import autocast, autocasts, is_plain, is_traced, is_transformed, is_watched
from tilemesh.kernels.matmul import gradient, reference
from tilemesh.kernels.matmul.arguments import (
    allows_tf32,
    apart,
    check_given,
    check_out,
    check_strides,
    checked_shape,
    problem_of,
    two_dim,
)
from tilemesh.kernels.matmul.choose import choose
from tilemesh.kernels.matmul.config import Config, decode, encode
from tilemesh.kernels.matmul.problem import LIBRARY_GROUP_BYTES, Problem
from tilemesh.kernels.matmul.run import Runner, prepare

LIBRARY_GROUP = LIBRARY_GROUP_BYTES // 2  # elements of 16 bits


def fused_matmul(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    activation: str | None = "relu",
    out: Tensor | None = None,
    implementation: str = "auto",
    config: Config | None = None,
) -> Tensor:
    """D = act(A @ B + C) in one pass: C is added and the activation applied before D is written.

    a: (…, M, K); b: (K, N); c: (…, M, N), (N,), (…, M, 1) or None; all of one dtype and device, any strides.
    activation: none, relu, gelu (exact), gelu_tanh, silu or squared_relu. Sums are float32 (float64 for float64).
    implementation: `auto` uses what was fastest when tuned; the others force one (`interpret`: Triton's interpreter on
    the CPU). config: a tile configuration to use instead of the tuned or default one.
    """
    if activation is None:
        activation = "none"
    signed = None if is_compiling() or is_watched() else signature((a, b, c, out))
    if signed is None or a.is_meta:
        # Transforms first, while compiling too: one operator in the graph would hide the tangent from them.
        if is_transformed(a, b, c, out):
            return _transformed(a, b, c, activation, out, implementation, config)
        # A kernel launched directly would be missing from a graph, and takes no sizes that are tensors.
        if not _is_plain(a, b, c, out):
            return _traced(a, b, c, activation, out, implementation, config)
    if autocasts(a):
        (a, b, c), signed = _autocast(a, b, c), None
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or (c is not None and c.requires_grad)):
        if out is not None:
            raise UsageError("out= with inputs that require gradients: leave out= away, or use torch.no_grad()")
        result: Tensor = _with_gradients(a, b, c, activation, implementation, config, signed)
        return result
    if out is not None and out.requires_grad and torch.is_grad_enabled():
        raise UsageError("out= requires gradients itself: give a tensor that does not, or use torch.no_grad()")
    return _eager(a, b, c, activation, out, implementation, config, False, signed)[0]


def _eager(
    a: Tensor, b: Tensor, c: Tensor | None, activation: str, out: Tensor | None, implementation: str,
    config: Config | None, keep: bool, signed: tuple[list[object], list[int]] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(D, Z): Z is the value before the activation when `keep` asks for it. signed: what `signature` made of them."""
    try:
        if out is not None:
            a, b, c, signed = apart(a, out), apart(b, out), None if c is None else apart(c, out), None
        # This decides what is right or fast; equal keys may share a runner.
        key = (
            *(signed or signature((a, b, c, out)))[0],  # type: ignore[index]
            activation, implementation, config, keep, a.dtype is torch.float32 and allows_tf32(),
        )  # fmt: skip
        runners = context.current.runners
        prepared = runners.recent.get(key)
    except (RuntimeError, TypeError):  # no address (a sparse tensor), or no hash (a list or a dict): say which
        check_given(a, b, c, out)
        checked_shape(a, b, c, activation, implementation, config)
        raise
    if prepared is None:
        prepared = runners.older.get(key) or _prepare(a, b, c, activation, out, implementation, config, keep)
        runners.keep(key, prepared)
    runner, shape = prepared
    d = a.new_empty(shape) if out is None else out
    z = a.new_empty(shape) if keep else None
    if len(shape) == 2 and (c is None or c.dim() == 2 or c.dim() == 1) and a.dim() == 2:
        runner(a, b, c, d, z)
    else:
        runner(*two_dim(a, b, c, d, z))
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)  # kernels write behind autograd's back
    return d, z


def product_and_sum(
    a: Tensor, b: Tensor, c: Tensor | None, activation: str, implementation: str
) -> tuple[Tensor, Tensor]:
    """(act(A @ B + C), A @ B + C) without gradients, for operators that have a gradient of their own."""
    d, z = _eager(a, b, c, activation, None, implementation, None, True)
    assert z is not None
    return d, z


def _prepare(
    a: Tensor, b: Tensor, c: Tensor | None, activation: str, out: Tensor | None, implementation: str,
    config: Config | None, keep: bool,
) -> tuple[Runner, tuple[int, ...]]:  # fmt: skip
    """Check everything, choose, and make ready: done once for each signature."""
    shape = checked_shape(a, b, c, activation, implementation, config)
    if out is not None:
        check_given(a, b, c, out)
        check_out(out, shape, a)
        check_strides(out)
    d = torch.empty(shape, dtype=a.dtype, device=a.device) if out is None else out
    problem = problem_of(*two_dim(a, b, c, d, None)[:4], activation=activation, keep=keep)
    return prepare_on(problem, implementation, config, a.device), shape


def prepare_on(problem: Problem, implementation: str, config: Config | None, device: torch.device) -> Runner:
    """Choose and make ready. What `auto` chose by itself and cannot be loaded after all gives way to the library."""
    if implementation == "auto" and config is None:
        return _prepare_auto(problem, device)
    chosen = choose(problem, implementation, config, device)
    return _prepare_chosen(problem, chosen, device, interpret=implementation == "interpret")


def _prepare_auto(problem: Problem, device: torch.device) -> Runner:
    """What an earlier process used, where this device can run that; else what `choose` says; else the library."""
    earlier = context.current.state("matmul").kept.get(_name(problem))
    if earlier is not None:
        with contextlib.suppress(UsageError):
            return _noted(problem, decode(earlier), device)
    try:
        return _noted(problem, choose(problem, "auto", None, device), device)
    except FitError:
        return _noted(problem, Config("library"), device)


def _noted(problem: Problem, chosen: Config, device: torch.device) -> Runner:
    runner = _prepare_chosen(problem, chosen, device)
    context.current.state("matmul").picked[_name(problem)] = encode(chosen)
    return runner


def _name(problem: Problem) -> str:
    return problem.key + " keep" * problem.keep


def _prepare_chosen(problem: Problem, chosen: Config, device: torch.device, interpret: bool = False) -> Runner:
    if device.type != "cuda" or interpret:
        return prepare(problem, chosen, device, interpret=interpret)
    with torch.cuda.device(device):
        return prepare(problem, chosen, device)


def _is_plain(*given: Tensor | None) -> bool:
    """Real tensors and nobody watching: no subclass, no dispatch mode (fake tensors, tracing), no lazy negation."""
    return not is_traced() and all(tensor is None or is_plain(tensor) for tensor in given)


def _autocast(a: Tensor, b: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    return autocast(a), autocast(b), None if c is None else autocast(c)


def _transformed(
    a: Tensor, b: Tensor, c: Tensor | None, activation: str, out: Tensor | None, implementation: str,
    config: Config | None,
) -> Tensor:  # fmt: skip
    """Function transforms (torch.func) and forward-mode derivatives look through plain torch only."""
    check_given(a, b, c, out)
    if out is not None:
        raise UsageError("out= under a function transform or with a forward-mode tangent: leave out= away")
    if autocasts(a):
        a, b, c = _autocast(a, b, c)
    checked_shape(a, b, c, activation, implementation, config)
    return reference.fused_matmul(a, b, c, activation)


# ---- gradients -------------------------------------------------------------------------------------------------


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, c, activation, implementation, config, signed):  # type: ignore[no-untyped-def]
        keep = gradient.keeps_sum(activation)
        d, z = _eager(a, b, c, activation, None, implementation, config, keep, signed)
        _remember(ctx, a, b, c, d, z, activation, implementation)
        return d

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return (*_gradients(ctx, grad), None, None, None, None)


# Without `apply`'s own questions about transforms, which were answered before: 4 µs.
_with_gradients = super(torch.autograd.Function, _Fused).apply


def _remember(ctx, a, b, c, d, z, activation, implementation) -> None:  # type: ignore[no-untyped-def]
    """Save the least: D for relu, Z for smooth activations; C itself only to differentiate twice through those."""
    saved = z if gradient.keeps_sum(activation) else d if activation == "relu" else None
    ctx.save_for_backward(a, b, c if gradient.keeps_sum(activation) else None, saved)
    ctx.c_shape = None if c is None else c.shape
    ctx.choice = (activation, implementation)


def _gradients(ctx, grad: Tensor | None) -> gradient.Gradients:  # type: ignore[no-untyped-def]
    if grad is None:
        return None, None, None
    a, b, c, saved = ctx.saved_tensors
    activation, implementation = ctx.choice
    twice = grad.requires_grad or a.requires_grad or b.requires_grad or (c is not None and c.requires_grad)
    if torch.is_grad_enabled() and twice:
        stand_in = c if c is not None else None if ctx.c_shape is None else grad.new_empty(ctx.c_shape)
        return gradient.differentiable(grad, a, b, stand_in, saved, activation)
    grad_2d, a_2d = grad.flatten(0, -2), a.flatten(0, -2)
    saved_2d = grad_2d if saved is None else saved.flatten(0, -2)
    # Under tracing plain torch is best: the compiler fuses the pass with its neighbours, and sees through it.
    traced = not _is_plain(grad, a, b)
    how = "torch" if traced else _how(implementation, grad)
    if traced:
        implementation = "torch"
    c_kind = _summed_kind(ctx.c_shape, grad.shape) if ctx.needs_input_grad[2] else "none"
    dz, dc = gradient.activation_gradient(grad_2d, saved_2d, activation, c_kind, how)
    if ctx.needs_input_grad[2]:
        dc = dz.reshape(grad.shape).sum_to_size(ctx.c_shape) if dc is None else dc.reshape(ctx.c_shape)
    da = _product(dz, b.mT, implementation).reshape(a.shape) if ctx.needs_input_grad[0] else None
    db = _weight_gradient(a_2d, b, dz, implementation) if ctx.needs_input_grad[1] else None
    return da, db, dc


def _weight_gradient(a: Tensor, b: Tensor, dz: Tensor, implementation: str) -> Tensor:
    """dB = A' dZ, laid out as B is: a linear layer's B is its weight transposed, and so is what it expects back."""
    if b.stride(0) == 1 and b.stride(1) != 1:
        return _product(dz.mT, a, implementation).mT
    return _product(a.mT, dz, implementation)


def _how(implementation: str, grad: Tensor) -> str:
    if grad.numel() == 0:
        return "torch"
    if implementation == "interpret":
        return "interpret"
    tiles = grad.device.type == "cuda" and grad.dtype != torch.float64 and implementation != "torch"
    return "triton" if tiles else "torch"


def _summed_kind(c_shape: torch.Size, shape: torch.Size) -> str:
    """Row or column where the fused pass can sum C's gradient, else full (summed by torch, if at all)."""
    rows, columns = shape[:-1].numel(), shape[-1]
    if len(c_shape) >= 1 and c_shape.numel() == columns and c_shape[-1] == columns and rows != 1:
        return "row"
    if len(c_shape) >= 2 and c_shape[-1] == 1 and c_shape.numel() == rows and columns != 1:
        return "column"
    return "full"


def _product(x: Tensor, y: Tensor, implementation: str) -> Tensor:
    """A plain product: the forced kernel where one was forced and takes any layout; under `auto` the vendor's.

    Where the vendor reads 16-bit rows that start anywhere at a quarter of its speed, `auto` chooses as in a forward.
    """
    if implementation in ("library", "torch", "pingpong") or 0 in (*x.shape, *y.shape):
        return x @ y
    if implementation == "auto" and not (x.is_cuda and _reads_slowly(x, y)):
        return x @ y
    return _eager(x, y, None, "none", None, implementation, None, False)[0]


def _reads_slowly(x: Tensor, y: Tensor) -> bool:
    """`Problem.slow_operands` of a 16-bit product, without making a problem of it: this runs in every backward."""
    if x.dtype is not torch.float16 and x.dtype is not torch.bfloat16:
        return False
    leading = x.stride(0) if x.stride(1) == 1 else x.stride(1)
    leading_y = y.stride(0) if y.stride(1) == 1 else y.stride(1)
    apart = (x.shape[1] | y.shape[1] | leading | leading_y) % LIBRARY_GROUP != 0
    return apart or (x.data_ptr() | y.data_ptr()) % LIBRARY_GROUP_BYTES != 0


# ---- the traced operator ---------------------------------------------------------------------------------------

_library = torch.library.Library("tilemesh", "DEF")
_library.define(
    "fused_matmul(Tensor a, Tensor b, Tensor? c, str activation, str implementation, str config, bool keep)"
    " -> (Tensor, Tensor)"
)


def _traced(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    activation: str,
    out: Tensor | None,
    implementation: str,
    config: Config | None,
) -> Tensor:
    """The call as one operator in a graph; a configuration travels as text."""
    check_given(a, b, c, out)
    if config is not None and not isinstance(config, Config):
        checked_shape(a, b, c, activation, implementation, config)
    if autocasts(a):
        a, b, c = _autocast(a, b, c)
    if out is not None:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, b, c, out)):
            raise UsageError("out= with tensors that require gradients: leave out= away, or use torch.no_grad()")
        check_out(out, (*a.shape[:-1], *b.shape[-1:]), a)
    needs = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or (c is not None and c.requires_grad))
    keep = needs and gradient.keeps_sum(activation)
    encoded = "" if config is None else encode(config)
    d = torch.ops.tilemesh.fused_matmul.default(a, b, c, activation, implementation, encoded, keep)[0]
    return d if out is None else out.copy_(d)


def _decoded(config: str) -> Config | None:
    return decode(config) if config else None


def _op(a, b, c, activation, implementation, config, keep):  # type: ignore[no-untyped-def]
    d, z = _eager(a, b, c, activation, None, implementation, _decoded(config), keep)
    return d, a.new_empty(0) if z is None else z


def _op_fake(a, b, c, activation, implementation, config, keep):  # type: ignore[no-untyped-def]
    shape = checked_shape(a, b, c, activation, implementation, _decoded(config))
    return a.new_empty(shape), a.new_empty(shape if keep else 0)


def _op_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    a, b, c, activation, implementation, _, keep = inputs
    if gradient.keeps_sum(activation) and not keep:
        raise UsageError(
            f"tilemesh::fused_matmul with '{activation}' and gradients needs keep=True: call fused_matmul instead"
        )
    _remember(ctx, a, b, c, output[0], output[1], activation, implementation)
    ctx.set_materialize_grads(False)


def _op_backward(ctx, grad, grad_z):  # type: ignore[no-untyped-def]
    return (*_gradients(ctx, grad), None, None, None, None)


_library.impl("fused_matmul", _op, "CPU")
_library.impl("fused_matmul", _op, "CUDA")
torch.library.register_fake("tilemesh::fused_matmul", _op_fake, lib=_library)
torch.library.register_autograd("tilemesh::fused_matmul", _op_backward, setup_context=_op_setup, lib=_library)
