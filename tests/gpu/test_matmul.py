"""The fused matmul on a GPU: every kernel of the family against float64, gradients, compilation, large sizes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from kernel_bounds import gradient_error_bounds
from torch.autograd import forward_ad

import tilemesh as tm
from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.launch import program
from tilemesh.kernels.matmul import reference
from tilemesh.kernels.matmul.arguments import allows_tf32
from tilemesh.kernels.matmul.problem import Matrix, dense
from tilemesh.kernels.matmul.trial import MatmulBench

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

Config = tm.kernels.Config
fused = tm.kernels.fused_matmul

CONFIGS = [
    Config("pointer", 64, 64, 32),
    Config("pointer", 16, 64, 64),
    Config("pointer", 128, 128, 64, 8, 3, subtile=2, c_first=True),
    Config("tma", 128, 128, 64, 8, 3),
    Config("tma", 128, 128, 64, 4, 3, tma_epilogue=True, subtile=2),
    Config("tma", 64, 128, 64, 4, 3, c_first=True),
    Config("persistent", 128, 128, 64, 8, 3, tma_epilogue=True, subtile=2),
    Config("persistent", 128, 256, 64, 8, 3, tma_epilogue=True, subtile=4),
    Config("persistent", 128, 128, 64, 8, 3, flatten=False, c_first=True),
    Config("persistent", 64, 128, 64, 4, 3, per_sm=2),
    Config("persistent", 128, 128, 64, 8, 3, tail=True, split_k=2),
    Config("split", 64, 128, 64, 4, 3, split_k=3),
    Config("split", 16, 64, 64, 4, 3, split_k=4, tma_loads=False),
    Config("tma", 128, 128, 64, 4, 3, c_early=True, tma_epilogue=True),
    Config("persistent", 128, 128, 64, 8, 3, tma_epilogue=True, prefetch=True, copy="ab", tail=True, split_k=3),
    Config("pingpong", 128, 128, 64, 4, 5),
    Config("pingpong", 64, 256, 64, 4, 4, group=2),
    Config("pingpong", 128, 256, 64, 4, 3, paired=True),
    Config("library"),
    Config("torch"),
]
SHAPES = [(256, 256, 256), (264, 520, 200), (1, 8, 16), (7, 5, 3), (129, 131, 67), (16, 1024, 1000), (1500, 1400, 96)]
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "squared_relu")


def inputs(m, n, k, dtype, c_kind="full", *, turned=(False, False), seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)

    a = draw(k, m).t() if turned[0] else draw(m, k)
    b = draw(n, k).t() if turned[1] else draw(k, n)
    c = {"full": lambda: draw(m, n), "row": lambda: draw(n), "column": lambda: draw(m, 1), "none": lambda: None}[
        c_kind
    ]()
    return a, b, c


def assert_close(result, a, b, c, activation, note=""):
    """What arithmetic allows, or twice plain torch's error against float64: tensor cores round in ways of their own."""
    exact = reference.exact(a, b, c, activation)
    plain = reference.fused_matmul(a, b, c, activation)
    tf32 = a.dtype is torch.float32 and allows_tf32()
    bound = reference.error_bound(a, b, c, activation, separate=True, tf32=tf32)
    bound = bound.clamp(min=2 * (plain.double() - exact).abs().max().item())
    assert (result.dtype, result.shape) == (a.dtype, exact.shape), note
    assert (wrong := excess(result, exact, bound)) is None, f"{note}: {wrong}"


VARIANTS = list(
    itertools.product([(False, False), (False, True), (True, False), (True, True)], ("full", "row", "column", "none"))
)


def check_config(config, shape, dtype, number):
    """One of the layouts, C kinds and activations: each compiles anew, so the numbers share them out."""
    (turned, c_kind), activation = VARIANTS[number * 5 % len(VARIANTS)], ACTIVATIONS[number % len(ACTIVATIONS)]
    a, b, c = inputs(*shape, dtype, c_kind, turned=turned)
    if config.kind == "pingpong" and shape[1] % 8:
        with pytest.raises(UsageError, match="aligned rows"):
            fused(a, b, c, activation=activation, config=config)
        return
    d = fused(a, b, c, activation=activation, config=config)
    assert_close(d, a, b, c, activation, f"{config.label} {shape} {dtype} {turned} {c_kind} {activation}")


@pytest.mark.parametrize("part", range(10))
def test_every_config(part):
    cases = list(enumerate(itertools.product(CONFIGS, SHAPES)))
    for number, (config, shape) in cases[part::10]:
        check_config(config, shape, torch.float16, number)


@pytest.mark.parametrize("part", range(2))
def test_bfloat16(part):
    """The same kernels but for two instructions: one shape that cuts tiles is enough."""
    cases = list(enumerate(itertools.product(CONFIGS, SHAPES[1:2])))
    for number, (config, shape) in cases[part::2]:
        check_config(config, shape, torch.bfloat16, number + 3)


def test_float32_both_precisions():
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            for kind in ("pointer", "tma", "persistent", "split", "library", "torch", "auto"):
                for turned in ((False, False), (True, True)):
                    a, b, c = inputs(264, 520, 200, torch.float32, turned=turned)
                    assert_close(
                        fused(a, b, c, implementation=kind), a, b, c, "relu", f"{kind} tf32={allowed} {turned}"
                    )
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_auto_and_defaults_over_odd_shapes():
    generator = torch.Generator().manual_seed(7)
    for number in range(24):
        m, n, k = (int(x) for x in torch.randint(1, 700, (3,), generator=generator))
        kind = ("auto", "pointer", "tma", "persistent", "split", "library")[number % 6]
        dtype = (torch.float16, torch.bfloat16)[number % 2]
        a, b, c = inputs(m, n, k, dtype, seed=number)
        assert_close(fused(a, b, c, implementation=kind), a, b, c, "relu", f"{kind} {m}x{n}x{k} {dtype}")


def test_empty_and_k_zero():
    for m, n, k in ((0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0)):
        a, b, c = inputs(m, n, k, torch.float16)
        for kind in ("auto", "pointer", "tma", "persistent", "split", "library", "torch"):
            d = fused(a, b, c, implementation=kind)
            assert torch.equal(d, torch.relu(c)), (kind, m, n, k)


def test_views_offsets_and_out():
    base = torch.randn(300, 401, device="cuda", dtype=torch.float16)
    a, b = base[3:131, 5:205], base[7:207, 1:129]  # rows of 401 elements, addresses not 16-byte aligned
    c = torch.randn(128, 128, device="cuda", dtype=torch.float16).t()
    for kind in ("auto", "pointer", "tma", "persistent", "split", "library"):
        assert_close(fused(a, b, c, implementation=kind), a, b, c, "relu", kind)
        held = torch.full((130, 140), float("nan"), device="cuda", dtype=torch.float16)
        out = held[1:129, 3:131]
        assert fused(a, b, c, out=out, implementation=kind) is out
        assert_close(out.clone(), a, b, c, "relu", f"{kind} out")
        held[1:129, 3:131] = float("nan")
        assert bool(held.isnan().all()), f"{kind} wrote outside out"
        turned = torch.empty(128, 128, device="cuda", dtype=torch.float16).t()
        fused(a, b, c, out=turned, implementation=kind)
        assert_close(turned.contiguous(), a, b, c, "relu", f"{kind} transposed out")


def test_batched():
    a = torch.randn(3, 5, 64, 96, device="cuda", dtype=torch.float16)
    b = torch.randn(96, 72, device="cuda", dtype=torch.float16)
    for shape in ((72,), (64, 72), (3, 5, 64, 72), (64, 1), (3, 5, 64, 1), (1,)):
        c = torch.randn(shape, device="cuda", dtype=torch.float16)
        assert_close(fused(a, b, c), a, b, c, "relu", str(shape))
    assert_close(fused(a.transpose(1, 2), b), a.transpose(1, 2), b, None, "relu")


def test_nan_and_infinity_as_torch():
    a, b, c = inputs(130, 120, 100, torch.float16)
    a[3, 5], a[70, 2], c[9, 9] = float("inf"), float("nan"), float("-inf")
    for kind, activation in itertools.product(("pointer", "tma", "persistent", "split", "library"), ("none", "relu")):
        d = fused(a, b, c, implementation=kind, activation=activation)
        want = reference.fused_matmul(a, b, c, activation)
        assert torch.equal(d.isnan(), want.isnan()), (kind, activation)
        assert torch.equal(d.isinf(), want.isinf()), (kind, activation)


def test_gradients():
    kinds, c_kinds = ("auto", "pointer", "persistent", "split"), ("full", "row", "column", "none")
    for number, (activation, c_kind) in enumerate(itertools.product(ACTIVATIONS, c_kinds)):
        kind = kinds[number % 4]
        a, b, c = inputs(130, 200, 72, torch.float16, c_kind)
        b = b / 8
        leaves = [t.detach().clone().requires_grad_() for t in (a, b, c) if t is not None]
        grad = torch.randn(130, 200, device="cuda", dtype=torch.float16)
        fused(*leaves, activation=activation, implementation=kind).backward(grad)
        plain = [t.detach().clone().requires_grad_() for t in leaves]
        reference.fused_matmul(*plain, *([None] * (3 - len(plain))), activation).backward(grad)
        exact = [t.detach().double().requires_grad_() for t in leaves]
        reference.fused_matmul(*exact, *([None] * (3 - len(exact))), activation).backward(grad.double())
        bounds = gradient_error_bounds(a, b, c, activation, grad)
        for name, ours, theirs, true, bound in zip("abc", leaves, plain, exact, bounds, strict=False):
            bound = bound.clamp(min=2 * (theirs.grad.double() - true.grad).abs().max().item())
            wrong = excess(ours.grad, true.grad, bound)
            assert wrong is None, f"d{name} {kind} {activation} {c_kind}: {wrong}"


@pytest.mark.parametrize("shape", [(257, 131, 263), (64, 63, 64), (96, 128, 77)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_rows_that_start_anywhere(shape, dtype):
    """Both products of the backward pass go where a forward one would: near the exact gradient as torch's own are."""
    m, n, k = shape
    generator = torch.Generator("cuda").manual_seed(3)
    a, b, c, upstream = (
        torch.randn(size, device="cuda", dtype=dtype, generator=generator, requires_grad=True)
        for size in ((m, k), (k, n), (m, n), (m, n))
    )
    ours = torch.autograd.grad(tm.kernels.fused_matmul(a, b, c, activation="none"), (a, b), upstream.detach())
    plain = torch.autograd.grad(a @ b + c, (a, b), upstream.detach())
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (a, b)]
    exact = torch.autograd.grad(exact_inputs[0] @ exact_inputs[1], exact_inputs, upstream.detach().double())
    for got, theirs, wanted in zip(ours, plain, exact, strict=True):
        rounding = torch.finfo(dtype).eps * wanted.abs().max().item()
        assert (got - wanted).abs().max().item() <= 2 * (theirs - wanted).abs().max().item() + rounding


def test_deterministic():
    a, b, c = inputs(64, 512, 4096, torch.float16)
    for kind in ("split", "persistent", "pointer", "auto"):
        first = fused(a, b, c, implementation=kind)
        for _ in range(5):
            assert torch.equal(first, fused(a, b, c, implementation=kind)), kind


def test_compile_forward_and_backward():
    for activation in ("relu", "gelu"):
        call = torch.compile(lambda a, b, c, act=activation: fused(a, b, c, activation=act) * 2, fullgraph=True)
        a, b, c = (t.requires_grad_() for t in inputs(256, 256, 256, torch.float16, "row"))
        d = call(a, b, c)
        assert_close(d.detach() / 2, a.detach(), b.detach(), c.detach(), activation)
        d.sum().backward()
        assert all(t.grad is not None and bool(t.grad.isfinite().all()) for t in (a, b, c))


def test_autocast_and_graph_capture():
    a, b = torch.randn(128, 64, device="cuda"), torch.randn(64, 128, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert fused(a, b).dtype == torch.bfloat16
    a, b = a.half(), b.half()
    want = fused(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fused(a, b)
    got.fill_(float("nan"))
    graph.replay()
    assert torch.equal(got, want)


def test_changing_addresses():
    """Prepared arguments are kept by address: other tensors of one shape must not see each other's."""
    kept = [inputs(256, 256, 256, torch.float16, seed=seed) for seed in range(8)]
    for kind in ("tma", "persistent", "split", "pointer", "library"):
        for a, b, c in kept + kept:
            assert_close(fused(a, b, c, implementation=kind), a, b, c, "relu", kind)


def test_other_stream():
    a, b, c = inputs(512, 512, 512, torch.float16)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        d = fused(a, b, c, implementation="persistent")
    stream.synchronize()
    assert_close(d, a, b, c, "relu")


def test_past_two_to_the_31():
    """M x N of 2**31 + elements: the last rows are right, so 64-bit index math is."""
    m, n, k = 65536 + 64, 32768 + 8, 64
    a = torch.randn(m, k, device="cuda", dtype=torch.float16)
    b = torch.randn(k, n, device="cuda", dtype=torch.float16)
    c = torch.randn(n, device="cuda", dtype=torch.float16)
    for kind in ("pointer", "tma", "persistent", "library", "auto"):
        d = fused(a, b, c, implementation=kind)
        assert_close(d[-64:], a[-64:], b, c, "relu", kind)
        assert_close(d[:64], a[:64], b, c, "relu", kind)
        del d


def test_aligned_copy_past_two_to_the_31():
    """Rows of 17 are copied to rows of 64: the copy has 2**31 elements and more, A itself a quarter of that."""
    m, n, k = 2**25 + 128, 32, 17
    a = torch.randn(m, k, device="cuda", dtype=torch.float16)
    b = torch.randn(k, n, device="cuda", dtype=torch.float16)
    for config in (Config("tma", 128, 32, 32, 4, 3), Config("persistent", 128, 32, 32, 4, 3), None):
        d = fused(a, b, config=config)
        for rows in (slice(-256, None), slice(0, 256), slice(2**24 - 128, 2**24 + 128)):
            assert_close(d[rows], a[rows], b, None, "relu", f"{config} {rows}")
        del d


@pytest.mark.parametrize("c_kind", ["full", "row", "column", "none"])
def test_rows_that_start_anywhere(c_kind):
    """Every way to compute an odd shape, several tiles a multiprocessor."""
    ways = [
        Config("persistent", 64, 256, 64, 8, 4, subtile=2, tma_epilogue=True),
        Config("tma", 64, 128, 64, 4, 4, c_early=True),
        Config("library", padded=True),
    ]
    for dtype in (torch.float16, torch.bfloat16):
        turned = {"full": (False, False), "row": (False, True), "column": (True, False), "none": (True, True)}[c_kind]
        a, b, c = inputs(2049, 2047, 517, dtype, c_kind, turned=turned)
        for config in ways:
            assert_close(fused(a, b, c, config=config), a, b, c, "relu", f"{config.label} {dtype}")


def test_sizes_within_a_tile_of_two_to_the_31():
    a = torch.ones(1, 1, device="cuda", dtype=torch.float16).expand(2**31 - 5, 1)
    d = fused(a, torch.full((1, 1), 2.0, device="cuda", dtype=torch.float16), implementation="pointer")
    assert bool((d == 2).all())


def test_columns_as_long_as_d_is_wide():
    for kind, shape in itertools.product(("auto", "pointer", "tma", "persistent", "split"), ((72, 1), (3, 72, 1))):
        a = torch.randn(3, 72, 64, device="cuda", dtype=torch.float16)
        b = torch.randn(64, 72, device="cuda", dtype=torch.float16)
        c = torch.randn(shape, device="cuda", dtype=torch.float16)
        assert_close(fused(a, b, c, implementation=kind), a, b, c, "relu", f"{kind} {shape}")


@pytest.mark.parametrize("kind", ["auto", "pointer", "tma", "persistent", "split", "library"])
def test_out_is_seen_by_autograd_and_tangents_survive(kind):
    a, b, c = inputs(128, 128, 64, torch.float16)
    x, w = torch.ones(128, 128, device="cuda", dtype=torch.float16), torch.ones(1, device="cuda", requires_grad=True)
    y = w * x.float() * x
    fused(a, b, c, out=x, implementation=kind)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()
    with forward_ad.dual_level():
        d = fused(forward_ad.make_dual(a, torch.ones_like(a)), b, c, implementation=kind)
        assert forward_ad.unpack_dual(d).tangent is not None


def test_tuning_reads_and_writes_only_what_it_allocated():
    """C, D and A at strides of their own: every trial is right, so each tensor lies as its kernel believes."""
    plain = dense(64, 64, 96)
    strided = [
        replace(plain, c=Matrix(64, 64, 128, 1)),
        replace(plain, c=Matrix(64, 64, 1, 64)),
        replace(plain, d=Matrix(64, 64, 200, 1)),
        replace(plain, a=Matrix(64, 96, 3, 300)),
        replace(plain, b=Matrix(96, 64, 65, 1, aligned=False)),
    ]
    for problem in strided:
        bench = MatmulBench(problem, torch.device("cuda", torch.cuda.current_device()))
        for config in (
            Config("pointer", 64, 64, 32),
            Config("tma", 64, 64, 32),
            Config("split", 64, 64, 32, split_k=2),
        ):
            assert bench.time(config, readings=1).failure is None, (problem.layout, config.label)


def test_a_batch_whose_length_changes_shares_its_kernels():
    b = torch.randn(64, 128, device="cuda", dtype=torch.float16)
    config = Config("persistent", 64, 128, 64, 4, 3, tma_epilogue=True)
    fused(torch.randn(2000, 64, device="cuda", dtype=torch.float16), b, config=config)
    before = len(program.KERNELS)
    for m in range(2001, 2060):
        a = torch.randn(m, 64, device="cuda", dtype=torch.float16)
        assert_close(fused(a, b, config=config), a, b, None, "relu", str(m))
    assert len(program.KERNELS) == before


def test_newer_precision_setting():
    code = (
        "import torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'; from tilemesh.kernels import fused_matmul; "
        "[fused_matmul(*torch.ones(2, 64, 64, device='cuda', dtype=d)) for d in (torch.float16, torch.float32)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("paired", [False, True])
def test_pingpong_over_many_tiles(paired):
    """More tiles than multiprocessors and more steps than stages: both groups, every barrier's both phases."""
    config = Config("pingpong", 128, 256, 64, 4, 3, paired=True) if paired else Config("pingpong", 128, 128, 64, 4, 5)
    shapes = [(2048, 2048, 2048), (1000, 7000, 200), (130, 9000, 64), (4097, 4104, 520)]
    cases = itertools.product(shapes, ("full", "row", "column", "none"))
    for number, (shape, c_kind) in enumerate(cases):
        activation = ACTIVATIONS[number % len(ACTIVATIONS)]
        a, b, c = inputs(*shape, torch.float16, c_kind, turned=(False, number % 2 == 1), seed=number)
        for _ in range(3):  # a race would not show every time
            d = fused(a, b, c, activation=activation, config=config)
            assert_close(d, a, b, c, activation, f"{shape} {c_kind} {activation}")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_passes_the_librarys_own_epilogue(activation):
    """A row's bias and some activations are cuBLASLt's: its relu must not make a NaN zero."""
    a, b, c = inputs(256, 256, 256, torch.float16, "row")
    a[3, 5], b[7, 9], c[11] = float("nan"), float("inf"), float("nan")
    d = fused(a, b, c, activation=activation, implementation="library")
    want = reference.fused_matmul(a, b, c, activation)
    assert torch.equal(d.isnan(), want.isnan())
    assert torch.equal(d.isinf(), want.isinf())


def test_pingpong_keeps_what_gradients_need():
    a, b, c = (t.requires_grad_() for t in inputs(520, 1032, 264, torch.float16))
    grad = torch.randn(520, 1032, device="cuda", dtype=torch.float16)
    ours = torch.autograd.grad(fused(a, b, c, activation="gelu", implementation="pingpong"), (a, b, c), grad)
    exact = [t.detach().double().requires_grad_() for t in (a, b, c)]
    right = torch.autograd.grad(reference.exact(*exact, "gelu"), exact, grad.double())
    plain = torch.autograd.grad(reference.fused_matmul(a, b, c, "gelu"), (a, b, c), grad)
    bounds = gradient_error_bounds(a.detach(), b.detach(), c.detach(), "gelu", grad)
    for mine, torchs, want, bound in zip(ours, plain, right, bounds, strict=True):
        wrong = excess(mine, want, bound.clamp(min=2 * (torchs - want).abs().max().item()))
        assert wrong is None, wrong


def test_bad_config_is_refused_before_launch():
    a, b, c = inputs(128, 128, 128, torch.float16)
    for config in (Config("tma", 256, 256, 64, 4), Config("tma", 128, 256, 128, 8, 6), Config("split", split_k=1)):
        with pytest.raises(UsageError, match="cannot compute"):
            fused(a, b, c, config=config)
