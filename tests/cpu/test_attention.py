"""Attention: the Triton code by the interpreter, against float64; as torch sees it; what it refuses."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.nn import functional

import tilemesh as tm
from tilemesh.bench.kernel.attention import BENCH
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import device_for
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.attention import reference
from tilemesh.kernels.attention.cost import FORM, cost, pairs

pytest.importorskip("triton")

attention = tm.kernels.attention
INTERPRET = {"implementation": "interpret"}


def normal(*shape, dtype=torch.float64, seed=0, grad=False):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return made.requires_grad_(grad)


def heads(batch, count, tokens, width, *, turned=False, **how):
    """(B, H, T, E); turned: tokens before heads in memory, and every other element of a head."""
    if turned:
        return normal(batch, tokens, count, 2 * width, **how).detach()[..., ::2].transpose(1, 2)
    return normal(batch, count, tokens, width, **how)


def gradients(given, upstream, implementation, **options):
    inputs = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in given]
    y = attention(*inputs, **options, implementation=implementation)
    return torch.autograd.grad(y, [tensor for tensor in inputs if tensor.requires_grad], upstream)


def distance(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


# ---- against float64 -------------------------------------------------------------------------------------------------

MASKS = [
    {},
    {"causal": True, "window": 7},
    {"causal": True, "starts": torch.tensor([0, 3, 3, 20, 37])},
    {"window": 18, "starts": torch.tensor([0, 19, 37], dtype=torch.int32)},
    {"causal": True, "starts": torch.tensor([0, 3, 3, 20, 37]), "window": 7, "sinks": 2 * normal(2, seed=7)},
]


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(
    queries=st.integers(1, 20), more=st.integers(0, 14), width=st.sampled_from([1, 5, 16, 40]),
    kv_heads=st.just(1), group=st.integers(1, 2), turned=st.booleans(), causal=st.booleans(),
    window=st.sampled_from([0, 1, 6, 30]), scale=st.sampled_from([0.0, 0.7, -1.0]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)  # fmt: skip
def test_any_size_strides_and_mask(queries, more, width, kv_heads, group, turned, causal, window, scale, dtype):
    q = heads(1, kv_heads * group, queries, width, turned=turned, dtype=dtype)
    k, v = (heads(1, kv_heads, queries + more, width, turned=turned, dtype=dtype, seed=seed) for seed in (1, 2))
    options = {"causal": causal, "window": window, "scale": scale}
    y = attention(q, k, v, **options, **INTERPRET)
    assert (y.shape, y.dtype) == (q.shape, dtype)
    assert excess(y, reference.exact(q, k, v, **options), reference.error_bound(q, k, v, **options)) is None


@pytest.mark.parametrize("options", MASKS[2:4])
def test_packed_sequences_do_not_see_each_other(options):
    q, k, v = (heads(1, count, 37, 8, seed=seed) for seed, count in enumerate((2, 1, 1)))
    y = attention(q, k, v, **options, **INTERPRET)
    bounds = options["starts"].tolist()
    rest = {name: value for name, value in options.items() if name != "starts"}
    for begin, end in itertools.pairwise(bounds):
        if end > begin:
            alone = reference.exact(*(tensor[:, :, begin:end] for tensor in (q, k, v)), **rest)
            torch.testing.assert_close(y[:, :, begin:end], alone)


@pytest.mark.parametrize("options", MASKS)
def test_gradients_against_float64(options):
    given = [heads(1, count, 37, 8, turned=True, seed=seed) for seed, count in enumerate((2, 1, 1))]
    options = dict(options)
    sinks = options.pop("sinks", None)
    given += [] if sinks is None else [options.pop("starts"), sinks]
    upstream = heads(1, 2, 37, 8, turned=True, seed=4)
    inputs = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in given]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    exact = torch.autograd.grad(reference.exact(*inputs, **options), wanted, upstream)
    for how in ("interpret", "torch") if sinks is not None else ("interpret",):
        for mine, true in zip(gradients(given, upstream, how, **options), exact, strict=True):
            assert distance(mine, true) < 1e-14


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_may_be_as_long_as_numbers_go(causal):
    given = [heads(1, 1, 20, 8, seed=seed) for seed in range(3)]
    upstream = heads(1, 1, 20, 8, seed=3)
    all_keys = gradients(given, upstream, "interpret", causal=causal, window=20)
    for window in (2**31 - 5000, 2**63 - 1):
        found = gradients(given, upstream, "interpret", causal=causal, window=window)
        assert all(torch.equal(one, other) for one, other in zip(found, all_keys, strict=True))


def test_gradients_are_as_near_as_torchs_and_repeat():
    dtype = torch.bfloat16
    given = [heads(1, count, 24, 16, seed=seed, dtype=dtype) for seed, count in enumerate((2, 1, 1))]
    upstream = heads(1, 2, 24, 16, seed=4, dtype=dtype)
    mine, again, torchs = (gradients(given, upstream, how, causal=True) for how in ("interpret", "interpret", "torch"))
    exact = gradients([tensor.double() for tensor in given], upstream.double(), "torch", causal=True)
    for found, repeated, theirs, true in zip(mine, again, torchs, exact, strict=True):
        assert torch.equal(found, repeated)
        assert distance(found, true) <= 2 * distance(theirs, true) + torch.finfo(dtype).eps


def test_the_bound_sees_real_faults():
    q, k, v = (heads(1, 1, 40, 16, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    exact, bound = reference.exact(q, k, v, causal=True), reference.error_bound(q, k, v, causal=True)
    for fault in (
        reference.exact(q, k, v),
        reference.exact(q, k, v, causal=True, window=39),
        reference.exact(q, k.roll(1, 2), v, causal=True),
        exact + 0.02,
    ):
        assert excess(fault.to(torch.bfloat16), exact, bound) is not None


def test_a_large_score_does_not_overflow():
    q, k, v = (100 * heads(1, 1, 20, 8, seed=seed) for seed in range(3))
    y = attention(q, k, v, causal=True, **INTERPRET)
    torch.testing.assert_close(y, reference.exact(q, k, v, causal=True))


# ---- as torch sees it ------------------------------------------------------------------------------------------------


def test_on_a_cpu_it_is_torchs_attention():
    q, k, v = (heads(2, 2, 9, 8, seed=seed, dtype=torch.float32) for seed in range(3))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(attention(q, k, v, causal=True), expected)
    torch.testing.assert_close(
        attention(q, k, v, causal=True, scale=-3.0), reference.exact(q, k, v, causal=True, scale=-3.0).float()
    )
    module = tm.kernels.SelfAttention(12, 4, kv_heads=2, causal=True, window=3)
    x = normal(2, 7, 12, dtype=torch.float32)
    q, k, v = (linear(x).unflatten(-1, (-1, 3)).transpose(1, 2) for linear in (module.fc_q, module.fc_k, module.fc_v))
    expected = module.fc_o(reference.exact(q, k, v, causal=True, window=3).float().transpose(1, 2).flatten(-2))
    torch.testing.assert_close(module(x), expected)


def test_compiled_in_one_graph(recording):
    q, k, v = (heads(1, 2, 20, 8, seed=seed, dtype=torch.float32, grad=True) for seed in range(3))

    def function(q, k, v):
        return attention(q * 2, k, v, causal=True, **INTERPRET).sin()

    backend, recorded = recording
    y = torch.compile(function, fullgraph=True, backend=backend)(q, k, v)
    assert "tilemesh.attention.default" in recorded
    mine = torch.autograd.grad(y.sum(), (q, k, v))
    y = function(q, k, v)
    for compiled, eager in zip(mine, torch.autograd.grad(y.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(compiled, eager)


def test_opcheck_and_fake_tensors():
    q, k, v = (heads(1, 2, 5, 4, seed=seed, dtype=torch.float32, grad=True) for seed in range(3))
    given = (q, k, v, torch.tensor([0, 2, 5]), normal(2, grad=True), True, 2, 0.0, False, "interpret")
    opcheck(torch.ops.tilemesh.attention.default, given)
    with FakeTensorMode():
        q = torch.empty(2, 6, 30, 64, dtype=torch.bfloat16)
        k = torch.empty(2, 3, 40, 64, dtype=torch.bfloat16)
        made = attention(q, k, k, causal=True, **INTERPRET)
    assert (made.shape, made.dtype) == (q.shape, torch.bfloat16)


def test_autocast_casts_all_three():
    q, k, v = (heads(1, 1, 5, 4, seed=seed, dtype=torch.float32) for seed in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        y = attention(q, k.bfloat16(), v, **INTERPRET)
    assert y.dtype is torch.bfloat16


def test_second_derivatives_are_the_references():
    q, k, v = (heads(1, 1, 2, 2, seed=seed, grad=True) for seed in range(3))
    function = functools.partial(attention, causal=True, **INTERPRET)
    assert torch.autograd.gradgradcheck(function, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("implementation", ["auto", "interpret"])
@pytest.mark.parametrize(("queries", "keys"), [((0, 2, 3, 4), (0, 2, 3, 4)), ((1, 2, 0, 4), (1, 2, 5, 4))])
def test_sizes_of_zero(queries, keys, implementation):
    q, k = torch.randn(queries, requires_grad=True), torch.randn(keys, requires_grad=True)
    y = attention(q, k, k, causal=True, implementation=implementation)
    assert y.shape == queries
    y.sum().backward()
    assert q.grad.shape == queries
    assert not k.grad.any()


# ---- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "options", "said"),
    [
        (((2, 3, 4), (2, 3, 4)), {}, r"expected q \(B, H, T, E\)"),
        (((1, 2, 4, 8), (1, 2, 4, 16)), {}, "heads of one width E, from 1 to 256"),
        (((1, 2, 4, 320), (1, 2, 4, 320)), {}, "from 1 to 256 .64 and 128 are the fastest"),
        (((1, 3, 4, 8), (1, 2, 4, 8)), {}, "3 heads of queries over 2 of keys and values: expected a multiple"),
        (((1, 1, 4, 8), (1, 1, 3, 8)), {"causal": True}, "causal attention of 4 queries over 3 keys"),
        (((1, 1, 4, 8), (1, 1, 4, 8)), {"window": -1}, "window is -1"),
        (((2, 1, 4, 8), (2, 1, 4, 8)), {"starts": torch.tensor([0, 4])}, "in a batch of 1"),
        (((1, 1, 4, 8), (1, 1, 4, 8)), {"starts": torch.tensor([0.0, 4])}, "expected int32 or int64"),
        (((1, 1, 4, 8), (1, 1, 4, 8)), {"starts": torch.tensor([0, 3, 2, 4])}, "ascending numbers from 0 to the 4"),
        (((1, 1, 4, 8), (1, 1, 4, 8)), {"starts": torch.tensor([0, 2])}, "ascending numbers from 0 to the 4"),
    ],
)
@pytest.mark.parametrize("implementation", ["auto", "interpret"])
def test_bad_input_is_named(shapes, options, said, implementation):
    q, k = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(UsageError, match=said):
        attention(q, k, k, **options, implementation=implementation)


def test_mixed_dtypes_are_refused():
    q, k = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    with pytest.raises(UsageError, match="expected one dtype for all"):
        attention(q, k, k)


def test_the_bench_tells_a_wrong_gradient():
    problem = FORM.problem("1x40x1x2x8", {"passes": "both", "dtype": "float32"})
    given = BENCH.arguments(problem, torch.device("cpu"), 0)
    dq = BENCH.timed(problem, BENCH.calls(problem)["eager"])(*given)[0]
    assert BENCH.wrong(problem, given, dq) is None
    assert BENCH.wrong(problem, given, dq.roll(1, 2)) is not None
    assert BENCH.chosen(problem, torch.device("cpu")) == {"auto": "torch"}
    assert BENCH.chosen(FORM.problem("1x40x1x2x8", {"mask": "packed"}), torch.device("cpu")) == {"auto": "ours"}
    assert BENCH.predict_s(problem, torch.device("cpu"), device_for("NVIDIA H200")) > 0


# ---- what it costs ---------------------------------------------------------------------------------------------------


@given(queries=st.integers(1, 12), more=st.integers(0, 5), causal=st.booleans(), window=st.integers(0, 20))
@settings(deadline=None, derandomize=True, database=None, max_examples=50)
def test_pairs_are_those_of_the_mask(queries, more, causal, window):
    q, k = torch.zeros(1, 1, queries, 1), torch.zeros(1, 1, queries + more, 1)
    mask = reference.seen(q, k, None, causal, window)
    assert pairs(queries, queries + more, causal=causal, window=window) == int(mask.sum())


def test_what_a_pass_costs():
    once = cost(2, 4, 2, 8, 16, seen=pairs(8, 8, causal=True))
    assert once.flops == 4 * 2 * 4 * 36 * 16
    assert once.bytes_moved == 2 * 16 * 2 * 8 * (4 + 2 + 2 + 4)
    both = FORM.cost(FORM.problem("2x8x2x2x16", {"passes": "both"}))
    assert both.flops == once.flops * 7 // 2
    packed = FORM.problem("2x64x2x2x16", {"mask": "packed"})
    assert sum(packed.lengths) == 128
    assert FORM.cost(packed).flops == 4 * 4 * 16 * sum(length * (length + 1) // 2 for length in packed.lengths)
