"""Rotary embedding and gated activations: the Triton code by the interpreter, against float64 and torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

import tilemesh as tm
from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.gated import reference as gates
from tilemesh.kernels.rotary import reference as rotaries
from tilemesh.model.rotary import rotate

pytest.importorskip("triton")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTERPRET = {"implementation": "interpret"}
kernels = tm.kernels


def normal(*shape, dtype=torch.float64, seed=0, grad=False):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return made.requires_grad_(grad)


def tables(*shape, dtype=torch.float32):
    angle = normal(*shape, seed=7) * 3
    return angle.cos().to(dtype), angle.sin().to(dtype)


# ---- rotary ----------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 9)), half=st.sampled_from([1, 3, 16, 33]),
    dtype=st.sampled_from(DTYPES), own=st.booleans(), shown=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    turned=st.booleans(), step=st.integers(1, 2),
)  # fmt: skip
def test_rotary_of_any_size_strides_and_tables(sizes, half, dtype, own, shown, turned, step):
    x = normal(*sizes, 2 * half * step, dtype=dtype)[..., ::step]
    x = x.transpose(1, 2) if turned else x
    shape = [size if is_shown else 1 for size, is_shown in zip(x.shape, shown, strict=False)]
    cos, sin = tables(*shape, half, dtype=dtype if own else torch.float32)
    y = kernels.rotary(x, cos, sin, **INTERPRET)
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert excess(y, rotaries.exact(x, cos, sin), rotaries.error_bound(x, cos, sin)) is None


def test_rotary_is_the_models():
    x, positions = normal(2, 5, 3, 8, dtype=torch.float32), tables(5, 4)
    mine = kernels.rotary(x.transpose(1, 2), *positions, **INTERPRET)
    torch.testing.assert_close(mine, rotate(x.transpose(1, 2), *positions), rtol=1e-6, atol=1e-6)
    by_token = [table.view(1, 5, 1, 4).expand(2, 5, 1, 4) for table in positions]
    torch.testing.assert_close(kernels.rotary(x, *by_token, **INTERPRET), mine.transpose(1, 2), rtol=0, atol=0)


def test_rotary_backward_undoes_it():
    x, (cos, sin) = normal(2, 3, 4, 6, grad=True), tables(4, 3, dtype=torch.float64)
    (back,) = torch.autograd.grad(kernels.rotary(x, cos, sin, **INTERPRET), x, kernels.rotary(x, cos, sin).detach())
    torch.testing.assert_close(back, x.detach())


def test_tables_that_need_a_gradient_get_it():
    x, cos, sin = normal(3, 4, grad=True), *(table.requires_grad_() for table in tables(3, 2, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda *t: kernels.rotary(*t, **INTERPRET), (x, cos, sin), fast_mode=True)


# ---- gated activations -----------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    rows=st.integers(1, 9), columns=st.sampled_from([1, 5, 64, 129, 1025]), dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["plain", "halves", "turned", "spread"]),
    approximate=st.sampled_from([None, "tanh", "none"]),
)  # fmt: skip
def test_gates_of_any_size_and_strides(rows, columns, dtype, layout, approximate):
    if layout == "halves":
        gate, x = normal(rows, 2 * columns, dtype=dtype).chunk(2, -1)
    elif layout == "spread":
        gate, x = normal(2, rows, 2 * columns, dtype=dtype)[..., ::2]
    else:
        gate, x = (
            normal(2, columns, rows, dtype=dtype).mT if layout == "turned" else normal(2, rows, columns, dtype=dtype)
        )
    gate = 3 * gate if layout == "plain" else gate
    if approximate is None:
        y, activation = kernels.swiglu(gate, x, **INTERPRET), "silu"
    else:
        y, activation = kernels.geglu(gate, x, approximate=approximate, **INTERPRET), gates.GELUS[approximate]
    assert excess(y, gates.exact(gate, x, activation), gates.error_bound(gate, x, activation)) is None


# ---- gradients and how torch sees them -------------------------------------------------------------------------------


def calls():
    x, gate = normal(1, 3, 2, 2, grad=True), normal(1, 3, 2, 2, seed=1, grad=True)
    cos, sin = tables(2, 1, dtype=torch.float64)
    return {
        "rotary": (lambda *t: kernels.rotary(*t, **INTERPRET), (x, cos, sin)),
        "swiglu": (lambda *t: kernels.swiglu(*t, **INTERPRET), (gate, x)),
        "geglu": (lambda *t: kernels.geglu(*t, approximate="none", **INTERPRET), (gate, x)),
    }


@pytest.mark.parametrize("name", calls())
def test_gradients_by_finite_differences(name):
    assert torch.autograd.gradcheck(*calls()[name], fast_mode=True)


def test_the_tanh_form_by_finite_differences():
    given = (normal(2, 3, grad=True), normal(2, 3, seed=1, grad=True))
    assert torch.autograd.gradcheck(lambda *t: kernels.geglu(*t, **INTERPRET), given, fast_mode=True)


@pytest.mark.parametrize("name", calls())
def test_it_compiles_to_one_graph_forward_and_backward(name, recording):
    function, given = calls()[name]
    backend, recorded = recording
    wanted = [tensor for tensor in given if tensor.requires_grad]
    plain = torch.autograd.grad(function(*given).square().sum(), wanted)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    found = torch.autograd.grad(compiled(*given).square().sum(), wanted)
    for mine, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert f"tilemesh.{name}_backward.default" in recorded


def test_torchs_own_check_of_operators():
    for name, options in (("rotary", ()), ("swiglu", ()), ("geglu", ("tanh",))):
        opcheck(getattr(torch.ops.tilemesh, name).default, (*calls()[name][1], *options, "interpret"))


@pytest.mark.parametrize("implementation", ["auto", "interpret"])
def test_sizes_of_zero_and_scalars(implementation):
    for shape in ((0,), (0, 4), (4, 0), ()):
        gate = torch.zeros(shape, requires_grad=True)
        kernels.swiglu(gate, gate, implementation=implementation).sum().backward()
    x = torch.zeros(2, 0, 3, 4, requires_grad=True)
    kernels.rotary(x, *tables(3, 2), implementation=implementation).sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kernels.rotary(torch.ones(2, 3), *tables(2, 1)), "with an even E"),
        (lambda: kernels.rotary(torch.ones(1, 1, 1, 1, 4), *tables(1, 2)), "(B, T, H, E) or (B, H, T, E)"),
        (lambda: kernels.rotary(torch.ones(2, 5, 4), *tables(4, 2)), "broadcasts to (2, 5, 2)"),
        (lambda: kernels.rotary(torch.ones(2, 4), tables(2, 2)[0], tables(2)[0]), "expected one shape"),
        (lambda: kernels.rotary(torch.ones(2, 4), *(t.long() for t in tables(2, 2))), "one floating point dtype"),
        (lambda: kernels.swiglu(torch.ones(2, 4), torch.ones(4)), "expected the same"),
        (lambda: kernels.swiglu(torch.ones(2), torch.ones(2).half()), "one dtype for all"),
        (lambda: kernels.geglu(torch.ones(2), torch.ones(2), approximate="tan"), "did you mean 'tanh'"),
    ],
)
def test_bad_arguments_get_a_reason(call, words):
    with pytest.raises(UsageError) as caught:
        call()
    assert words in str(caught.value)
