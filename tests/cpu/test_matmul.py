"""The fused matmul on a CPU: plain torch under `auto`, and every Triton kernel of the family in the interpreter.

Errors are held to the honest rule: against float64, at most twice what plain torch makes in the same dtype.
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilemesh as tm
from tilemesh.core.errors import UsageError
from tilemesh.kernels.matmul import reference

pytest.importorskip("triton")

Config = tm.kernels.Config
fused = tm.kernels.fused_matmul

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "squared_relu")
C_KINDS = ("full", "row", "column", "none")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# One of each path through each kernel; tiles of 64 and more, which the interpreter runs far faster than small ones.
FAMILY = [
    Config("pointer", 64, 64, 64),
    Config("pointer", 64, 128, 32, subtile=4),
    Config("pointer", 128, 64, 64, c_first=True, group=1),
    Config("tma", 64, 64, 64),
    Config("tma", 64, 128, 64, tma_epilogue=True, subtile=2),
    Config("tma", 64, 64, 64, c_first=True),
    Config("tma", 64, 64, 64, c_early=True, tma_epilogue=True),
    Config("tma", 64, 64, 64, copy="ab", tail=True, split_k=2),
    Config("persistent", 64, 64, 64, tma_epilogue=True, subtile=2),
    Config("persistent", 64, 64, 64, flatten=False, c_first=True, per_sm=2),
    Config("persistent", 64, 64, 64, tail=True, split_k=3, prefetch=True),
    Config("split", 64, 64, 32, split_k=3),
    Config("split", 64, 64, 32, split_k=2, tma_loads=False),
    Config("library"),
]


def draw(shape, dtype, seed, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def inputs(m, n, k, dtype=torch.float16, c_kind="full", turned=(False, False), seed=0):
    a = draw((k, m), dtype, seed).t() if turned[0] else draw((m, k), dtype, seed)
    b = draw((n, k), dtype, seed + 1).t() if turned[1] else draw((k, n), dtype, seed + 1)
    shape = {"full": (m, n), "row": (n,), "column": (m, 1), "none": None}[c_kind]
    return a, b, None if shape is None else draw(shape, dtype, seed + 2)


def assert_close(result, a, b, c, activation):
    exact = reference.exact(a, b, c, activation)
    plain = reference.fused_matmul(a, b, c, activation)
    assert result.dtype == a.dtype
    assert result.shape == exact.shape
    if result.numel():
        # One unit in the last place is always allowed: of few elements, plain torch may happen to round all well.
        rounding = exact.abs().max().item() * torch.finfo(a.dtype).eps
        allowed = max(2 * (plain.double() - exact).abs().max().item(), rounding) + 1e-12
        error = (result.double() - exact).abs().max().item()
        assert error <= allowed, f"error {error}, allowed {allowed}"


@pytest.mark.parametrize("number", range(len(FAMILY)), ids=[config.label for config in FAMILY])
def test_every_kernel(number):
    """Odd and aligned sizes, each layout, C kind, activation and dtype, shared out over the family."""
    config = FAMILY[number]
    turns = list(itertools.product((False, True), repeat=2))
    for step, shape in enumerate([(130, 330, 100), (136, 72, 96), (1, 40, 16), (70, 5, 3)]):
        at = number + step
        dtype, turned, c_kind = DTYPES[at % 3], turns[at % 4], C_KINDS[(at + number) % 4]
        a, b, c = inputs(*shape, dtype, c_kind, turned, seed=at)
        activation = ACTIVATIONS[(at * 5) % 6]
        assert_close(
            fused(a, b, c, activation=activation, implementation="interpret", config=config), a, b, c, activation
        )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("c_kind", C_KINDS)
def test_every_activation_and_c_kind(activation, c_kind):
    a, b, c = inputs(70, 66, 40, c_kind=c_kind)
    for implementation in ("auto", "interpret"):
        assert_close(fused(a, b, c, activation=activation, implementation=implementation), a, b, c, activation)


sizes = st.one_of(st.integers(1, 20), st.integers(60, 70), st.sampled_from([128, 130]))


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    m=sizes, n=sizes, k=sizes, config=st.sampled_from(FAMILY[:-1]), dtype=st.sampled_from(DTYPES),
    c_kind=st.sampled_from(C_KINDS), activation=st.sampled_from(ACTIVATIONS),
    turned=st.tuples(st.booleans(), st.booleans()), offset=st.integers(0, 3),
)  # fmt: skip
def test_any_shape_stride_and_dtype(m, n, k, config, dtype, c_kind, activation, turned, offset):
    a, b, c = inputs(m, n, k + offset, dtype, c_kind, turned)
    a, b = a[:, offset:], b[offset:]  # views: unaligned addresses, rows longer than K
    assert_close(fused(a, b, c, activation=activation, implementation="interpret", config=config), a, b, c, activation)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    m=st.integers(0, 40), n=st.integers(0, 40), k=st.integers(0, 40), c_kind=st.sampled_from(C_KINDS),
    dtype=st.sampled_from((*DTYPES, torch.float64)), activation=st.sampled_from(ACTIVATIONS),
)  # fmt: skip
def test_auto_on_a_cpu_is_torch_for_any_size(m, n, k, c_kind, dtype, activation):
    a, b, c = inputs(m, n, k, dtype, c_kind)
    assert_close(fused(a, b, c, activation=activation), a, b, c, activation)


@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0)])
@pytest.mark.parametrize("config", [None, *FAMILY[::3]], ids=lambda c: "auto" if c is None else c.label)
def test_empty_sizes(shape, config):
    a, b, c = inputs(*shape)
    implementation = "auto" if config is None else "interpret"
    assert torch.equal(fused(a, b, c, implementation=implementation, config=config), torch.relu(c))


@pytest.mark.parametrize("config", FAMILY[::2], ids=lambda c: c.label)
def test_nan_and_infinity_behave_as_in_torch(config):
    a, b, c = inputs(70, 72, 40, torch.float32)
    a[3, 5], a[60, 2], c[9, 9], c[10, 10] = float("inf"), float("nan"), float("-inf"), float("nan")
    for activation in ("none", "relu", "squared_relu"):
        d = fused(a, b, c, activation=activation, implementation="interpret", config=config)
        want = reference.fused_matmul(a, b, c, activation)
        assert torch.equal(d.isnan(), want.isnan())
        assert torch.equal(d.isinf(), want.isinf())


def test_tf32_rounds_to_nearest_and_keeps_what_is_not_finite():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        a = torch.tensor([[1 + 2**-11, 1 + 2**-12, float("inf"), -1 - 2**-11]], dtype=torch.float32).t().contiguous()
        d = fused(a, torch.ones(1, 1), None, activation="none", implementation="interpret")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert d.flatten().tolist() == [1 + 2**-10, 1.0, float("inf"), -1 - 2**-10]


def test_out_is_written_in_place_and_nowhere_else():
    a, b, c = inputs(60, 50, 30)
    for config in (None, *FAMILY[::4]):
        held = torch.full((64, 60), float("nan"), dtype=torch.float16)
        out = held[2:62, 5:55]
        assert fused(a, b, c, out=out, implementation="interpret" if config else "auto", config=config) is out
        assert_close(out.clone(), a, b, c, "relu")
        out.fill_(float("nan"))
        assert held.isnan().all()


@pytest.mark.parametrize(
    "config", [None, FAMILY[0], FAMILY[8], FAMILY[-1]], ids=lambda c: "auto" if c is None else c.label
)
def test_out_may_share_memory_with_an_input(config):
    for shared in range(3):
        tensors = [draw((70, 70), torch.float32, seed) for seed in range(3)]
        want = torch.relu(torch.addmm(tensors[2], tensors[0], tensors[1]))
        fused(*tensors, out=tensors[shared], implementation="interpret" if config else "auto", config=config)
        torch.testing.assert_close(tensors[shared], want, rtol=1e-4, atol=1e-4)


def test_lazily_negated_views_are_read_negated():
    negated = torch.conj(torch.complex(torch.zeros(4, 4), torch.ones(4, 4))).imag
    assert negated.is_neg()
    assert torch.equal(fused(negated, torch.eye(4), activation="none"), -torch.ones(4, 4))


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 5, 7), (5, 1), (2, 3, 5, 1), (1,), (1, 1), (3, 1, 1)])
@pytest.mark.parametrize("implementation", ["auto", "interpret"])
def test_batched_a_and_every_c_that_broadcasts(shape, implementation):
    a, b, c = draw((2, 3, 5, 8), torch.float32, 0), draw((8, 7), torch.float32, 1), draw(shape, torch.float32, 2)
    assert_close(fused(a, b, c, implementation=implementation), a, b, c, "relu")
    swapped = a.transpose(0, 2)
    assert_close(fused(swapped, b, implementation=implementation), swapped, b, None, "relu")


a44, h44 = torch.ones(4, 4), torch.ones(4, 4, dtype=torch.float16)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fused(a44, torch.ones(5, 4)), r"a \(4, 4\), b \(5, 4\); expected a \(…, M, K\)"),
        (lambda: fused(torch.ones(4), a44), "do not multiply"),
        (lambda: fused(a44, torch.ones(2, 4, 4)), "do not multiply"),
        (lambda: fused(a44, a44, torch.ones(3)), "does not broadcast"),
        (lambda: fused(a44, a44, torch.ones(2, 4, 4)), "does not broadcast"),
        (lambda: fused(a44, h44), "b float16: expected one dtype"),
        (lambda: fused(a44.int(), a44.int()), "a int32"),
        (lambda: fused(a44, a44, a44.to("meta")), "c on meta"),
        (lambda: fused(a44, a44, activation="rellu"), "did you mean 'relu'"),
        (lambda: fused(a44, a44, implementation="trition"), "unknown implementation"),
        (lambda: fused(a44, a44, implementation="tma"), "needs CUDA tensors"),
        (lambda: fused(a44, a44, implementation="pointer", config=Config("tma")), "give one of the two"),
        (lambda: fused(h44, h44, implementation="interpret", config=Config("tma", 256, 256, 64)), "registers"),
        (lambda: fused(a44, a44, out=torch.ones(4, 5)), r"out is \(4, 5\)"),
        (lambda: fused(a44, a44, out=h44.clone()), "out is"),
        (lambda: fused(a44, a44, out=torch.ones(1, 4).expand(4, 4)), "expanded"),
        (lambda: fused(torch.ones(4, 4, requires_grad=True), a44, out=torch.ones(4, 4)), "out="),
        (lambda: tm.kernels.FusedLinear(4, 4, activation="tanh"), "unknown activation"),
    ],
)
def test_bad_input_is_refused_with_what_was_given(call, words):
    with pytest.raises(UsageError, match=words):
        call()


def test_a_signature_seen_before_is_still_told_apart_by_everything_that_matters():
    a, b, c = inputs(8, 8, 8, torch.float32)
    first = fused(a, b, c, activation="relu")
    assert not torch.equal(first, fused(a, b, c, activation="none"))
    assert torch.equal(fused(a, b, c.t(), activation="relu"), torch.relu(torch.addmm(c.t(), a, b)))
    with pytest.raises(UsageError):
        fused(a, b, c.half())


def test_kernels_load_late():
    code = (
        "import sys, tilemesh, tilemesh.kernels, tilemesh.kernels.matmul.cost, tilemesh.kernels.matmul.select; "
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
