"""Operators made by `@operator` on a GPU: the compiled kernels against float64, gradients, compilation."""

from __future__ import annotations

import pytest
import torch

import tilemesh as tm
from tilemesh.comm import connect
from tilemesh.core.plan import ParallelPlan
from tilemesh.kernels import context
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.activations.names import ACTIVATIONS
from tilemesh.kernels.grouped_linear import reference as grouped
from tilemesh.kernels.launch import native
from tilemesh.kernels.problems import SizedProblem
from tilemesh.kernels.scale_shift import reference
from tilemesh.model.config import ModelConfig
from tilemesh.model.programs.grouped_experts import stacked
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.apply import lay
from tilemesh.parallel.mesh import Mesh

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

scale_shift = tm.kernels.scale_shift


def inputs(*shape, dtype=torch.float32):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (shape, shape[-1:], shape[-1:])
    return [torch.randn(s, generator=generator, device="cuda").to(dtype) for s in shapes]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_is_within_its_bound(activation, dtype):
    for shape in ((1,), (7, 5), (3, 130, 1000), (2048, 4096)):
        given = inputs(*shape, dtype=dtype)
        y = scale_shift(*given, activation=activation, implementation="triton")
        wrong = excess(y, reference.exact(*given, activation), reference.error_bound(*given, activation))
        assert wrong is None, f"{shape}: {wrong}"
    x, scale, shift = inputs(130, 257, dtype=dtype)
    for view in (x.t().contiguous().t(), x[:, 1:], x[::2]):
        given = (view, scale[-view.shape[1] :], shift[-view.shape[1] :])
        y = scale_shift(*given, activation=activation)
        assert excess(y, reference.exact(*given, activation), reference.error_bound(*given, activation)) is None


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_gradients(activation):
    given = [tensor.requires_grad_() for tensor in inputs(6, 70, dtype=torch.float64)]
    torch.autograd.gradcheck(lambda *t: scale_shift(*t, activation=activation, implementation="triton"), given)
    many = [tensor.requires_grad_() for tensor in inputs(3000, 513)]
    found = []
    for implementation in ("triton", "triton", "torch"):
        y = scale_shift(*many, activation=activation, implementation=implementation)
        found.append(torch.autograd.grad(y.square().mean(), many))
    assert all(torch.equal(first, again) for first, again in zip(found[0], found[1], strict=True))
    for mine, torchs in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("load", ["even", "skewed"])
@pytest.mark.parametrize("sizes", [(300, 64, 136, 7), (4096, 1024, 512, 16), (2048, 768, 2048, 128)], ids=str)
def test_grouped_products_and_both_gradients(sizes, load):
    problem = SizedProblem(sizes, "bfloat16", {"load": load, "passes": "forward"})
    x, weight, ends = grouped.arguments(problem, torch.device("cuda"), 1)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    y = grouped.grouped_linear(*leaves, ends, implementation="triton")
    bare = [leaf.detach() for leaf in leaves]
    assert excess(y.detach(), grouped.exact(*bare, ends), grouped.error_bound(*bare, ends)) is None
    upstream = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, upstream)
    plain = torch.autograd.grad(grouped.grouped_linear(*leaves, ends, implementation="torch"), leaves, upstream)
    wide = [leaf.double().requires_grad_() for leaf in bare]
    exact = torch.autograd.grad(grouped.grouped_linear(*wide, ends, implementation="torch"), wide, upstream.double())
    for mine, torchs, true in zip(found, plain, exact, strict=True):
        assert (mine.double() - true).norm() <= 2 * (torchs.double() - true).norm()
    assert not found[1][ends.diff(prepend=ends.new_zeros(1)) == 0].any()


@pytest.mark.parametrize(("tokens", "experts", "picked"), [(1, 8, 2), (5000, 8, 2), (777, 128, 8), (40, 1000, 3)])
def test_routing_there_and_back(tokens, experts, picked):
    """Places of a stable sort, weights and every gradient against float64 in plain torch."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    scores, x, upstream = (
        torch.randn(tokens, size, generator=generator, device="cuda") for size in (experts, 264, 264)
    )
    factor = torch.randint(-4, 5, (tokens * picked, 1), generator=generator, device="cuda")
    found, leaves = [], [scores.requires_grad_(), x.bfloat16().requires_grad_()]
    for wide in (False, True):
        of_scores, of_rows = (leaf.detach().double().requires_grad_() for leaf in leaves) if wide else leaves
        options = {"implementation": "torch" if wide else "triton"}
        weights, _, slots, counts = tm.kernels.route_tokens(of_scores, picked=picked, **options)
        rows = tm.kernels.permute_rows(of_rows, slots, **options) * factor.to(of_rows.dtype)  # experts differ
        y = tm.kernels.unpermute_rows(rows, weights, slots, **options)
        grads = torch.autograd.grad(y, [of_scores, of_rows], upstream.to(y.dtype))
        found.append((slots, counts, weights.detach(), y.detach(), *grads))
    (slots, counts, *mine), (wanted, expected, *true) = found
    assert torch.equal(slots, wanted)
    assert torch.equal(counts, expected)
    for ours, exact, eps in zip(mine, true, (2**-18, 2**-7, 2**-5, 2**-7), strict=True):
        assert (ours.double() - exact).norm() <= eps * exact.norm() + 1e-6


def test_experts_train_by_grouped_products():
    """As one expert after the other, in bf16 under autocast: the loss and the gradients of a step."""
    config = ModelConfig(
        layers=2, width=64, heads=4, vocabulary=97, context=32, mlp_width=96, activation="swiglu", biases=False,
        norm="rmsnorm", positions="rotary", tied=False, experts=8, experts_per_token=2, balance_loss=0.01,
    )  # fmt: skip
    tokens = torch.randint(97, (8, 32), generator=torch.Generator().manual_seed(1)).cuda()
    plan, results = ParallelPlan(precision="bf16"), []
    for is_grouped in (True, False):
        laid = lay(Transformer(config, device="meta"), Mesh(connect("alone")), plan, device="cuda")
        laid.initialize(3)
        blocks = [layer.mlp for layer in laid.model.layers]
        assert all(block.computation is not None for block in blocks), "chosen on a GPU"
        for block in blocks:
            weights = [mlp.fc_in.weight for mlp in block.experts]
            assert stacked(weights).data_ptr() == weights[0].data_ptr(), "nothing is copied"
            block.computation = block.computation if is_grouped else None
        total, count = laid.loss(tokens, tokens)
        laid.gradients.backward(total, count)
        results.append((total.item(), [mine.tensor.grad.clone() for mine in laid.held.values()]))
    (mine, ours), (theirs, wanted) = results
    assert abs(mine - theirs) < 1e-3 * abs(theirs)
    off = sum(float((a - b).square().sum()) for a, b in zip(ours, wanted, strict=True))
    assert off**0.5 < 0.02 * sum(float(b.square().sum()) for b in wanted) ** 0.5


def test_compile_and_graph_capture(recording):
    call = torch.compile(lambda *t: scale_shift(*t, activation="gelu") * 2, fullgraph=True)
    ours, plain = ([tensor.requires_grad_() for tensor in inputs(64, 100)] for _ in range(2))
    call(*ours).sum().backward()
    (scale_shift(*plain, activation="gelu", implementation="torch") * 2).sum().backward()
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    given = inputs(64, 100)
    want = scale_shift(*given)
    backend, recorded = recording
    torch.testing.assert_close(torch.compile(lambda *t: scale_shift(*t), fullgraph=True, backend=backend)(*given), want)
    assert "tilemesh.scale_shift.default" in recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = scale_shift(*given)
    found.fill_(float("nan"))
    graph.replay()
    assert torch.equal(found, want)


def test_calls_with_gradients_by_the_compiled_node(monkeypatch):
    """As by Python's autograd function, bit for bit: alone, on another stream, and in a captured graph."""
    native.NATIVE.load()
    assert native.NATIVE.functions is not None, native.NATIVE.why_not
    x = torch.randn(300, 1000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1000, device="cuda", requires_grad=True)
    names = []

    def gradients():
        """Returns nothing that keeps autograd's graph: its leaves would still belong to the stream of this call, and
        no other stream could be captured then, whatever computes the gradients."""
        y = tm.kernels.rms_norm(x, weight)
        names.append(y.grad_fn.name())
        return y.detach(), *torch.autograd.grad(y, (x, weight), x.detach())

    monkeypatch.setattr(native.NATIVE, "functions", None)
    with context.use(context.Context()):
        exact = gradients()
    monkeypatch.undo()
    for turn in range(4):
        with torch.cuda.stream(torch.cuda.Stream() if turn == 3 else None):
            found = gradients()
        torch.cuda.synchronize()
        assert turn == 0 or names[-1] == "rms_normBackward"
        assert all(map(torch.equal, found, exact))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    assert names[-1] == "rms_normBackward"
    for tensor in captured:
        tensor.fill_(float("nan"))
    graph.replay()
    assert all(map(torch.equal, captured, exact))
