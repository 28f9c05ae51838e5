"""Patterns computed by the kernels of `tilemesh.kernels`, in Triton's interpreter; products that are joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tilemesh as tm
from tilemesh.core.errors import UsageError
from tilemesh.graph import backend, build, joining
from tilemesh.graph.backend import as_kernels
from tilemesh.graph.by_torch import run_torch
from tilemesh.graph.emit import program
from tilemesh.graph.generated import server
from tilemesh.graph.ir import Graph
from tilemesh.graph.joining import joined_products, saved_bytes
from tilemesh.graph.kernel_call import kernel_of
from tilemesh.graph.regions import fused
from tilemesh.graph.rules import simplify
from tilemesh.graph.templates import KernelUse, template

functional = nn.functional
WIDTH = 32
Given = tuple[torch.Tensor, ...]


def _llama_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As transformers writes it."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(x.dtype)


def _new_gelu(h: torch.Tensor) -> torch.Tensor:
    """GPT-2's, as transformers writes it."""
    return 0.5 * h * (1.0 + torch.tanh(0.7978845608028654 * (h + 0.044715 * torch.pow(h, 3.0))))


def _with_sum(x: torch.Tensor, m: torch.Tensor, b: torch.Tensor) -> Given:
    h = functional.linear(x, m, b)
    return functional.gelu(h) @ m, h


CASES: dict[str, tuple[Callable[..., Any], str, int]] = {
    "layer norm": (lambda x, w, b, m, t: functional.layer_norm(x, (WIDTH,), w, b), "layer_norm", 1),
    "its statistics": (
        lambda x, w, b, m, t: torch.ops.aten.native_layer_norm(x, (WIDTH,), w, b, 1e-5), "layer_norm", 3,
    ),
    "RMS norm": (lambda x, w, b, m, t: functional.rms_norm(x, (WIDTH,), w, 1e-5), "rms_norm", 1),
    "Llama's norm": (lambda x, w, b, m, t: _llama_norm(x, w), "rms_norm", 1),
    "softmax": (lambda x, w, b, m, t: torch.softmax(x, -1), "softmax", 1),
    "loss": (lambda x, w, b, m, t: functional.cross_entropy(x.view(-1, WIDTH), t), "cross_entropy", 2),
    "gelu": (lambda x, w, b, m, t: functional.gelu(functional.linear(x, m, b)) @ m, "fused_matmul", 1),
    "gelu, sum kept": (lambda x, w, b, m, t: _with_sum(x, m, b), "fused_matmul", 2),
    "GPT-2's gelu": (lambda x, w, b, m, t: _new_gelu(functional.linear(x, m, b)) @ m, "fused_matmul", 1),
    "silu": (lambda x, w, b, m, t: functional.silu(functional.linear(x, m)) @ m, "fused_matmul", 1),
    "relu": (lambda x, w, b, m, t: functional.relu(functional.linear(x, m, b)) @ m, "fused_matmul", 1),
}  # fmt: skip


def _given() -> Given:
    torch.manual_seed(0)
    target = torch.randint(0, WIDTH, (24,))
    target[3] = -100
    return torch.randn(4, 6, WIDTH), torch.randn(WIDTH), torch.randn(WIDTH), torch.randn(WIDTH, WIDTH) / 5, target


def _uses(graph: Graph) -> list[KernelUse]:
    return [use for node in graph.nodes() if node.op == "region" and (use := kernel_of(node)) is not None]


@pytest.mark.parametrize("name", CASES)
def test_a_pattern_is_computed_by_its_kernel(name: str) -> None:
    function, kernel, results = CASES[name]
    given = _given()
    graph, _ = simplify(tm.graph.trace(function, given).graph)
    better = as_kernels(graph, "interpret")
    (use,) = _uses(better)
    assert (use.kernel, len(use.results)) == (kernel, results)
    expected = function(*given)
    ours = program(better, way="interpret")(*given)
    for mine, theirs in zip(ours, expected if isinstance(expected, tuple) else (expected,), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-6)
    for mine, theirs in zip(run_torch(better, *given), ours, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-6)


def test_what_is_no_pattern_stays_a_generated_kernel() -> None:
    """A norm over pairs of rows, one of float64 that was cast down, a GELU whose parts are read elsewhere."""

    def program_of(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, m: torch.Tensor, t: torch.Tensor) -> Given:
        h = functional.linear(x, m, b)
        inner = torch.erf(h * 0.7071067811865476)
        return h * 0.5 * (inner + 1.0), inner, torch.softmax(x.double().float(), -1) + 1.0

    graph, _ = simplify(tm.graph.trace(program_of, _given()).graph)
    assert _uses(as_kernels(graph, "interpret")) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: functional.relu((x @ w).view(6, 2, 4) + b),
        lambda x, w, b: functional.relu((x @ w).unsqueeze(0).expand(3, -1, -1)),
    ],
    ids=["a vector of each head", "repeated"],
)
def test_an_activation_of_another_shape_than_the_product_is_no_part_of_it(function: Callable[..., Any]) -> None:
    """The kernel adds one vector to each row of the product, and has no element twice."""
    given = [torch.randn(6, 5), torch.randn(5, 8), torch.randn(4)]
    graph = as_kernels(simplify(tm.graph.trace(function, given).graph)[0], "interpret")
    assert _uses(graph) == []
    torch.testing.assert_close(program(graph, way="interpret")(*given)[0], function(*given))


@pytest.mark.parametrize("text", ["exp(x)", "exp(x) = x", "x = softmax(x)"])
def test_a_template_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="template wrong"):
        template("wrong", text)


def _attention(rows: int, width: int) -> Graph:
    x = build.argument("x", [rows, width], "float64")
    weights = [build.argument(name, [width, width], "float64") for name in "qkv"]
    q, k, v = (build.dot(x, build.transpose(weight)) for weight in weights)
    mixed = build.dot(build.softmax(build.dot(q, build.transpose(k))), v)
    return Graph((x, *weights), (mixed, v))


def test_q_k_and_v_become_one_product() -> None:
    graph = _attention(64, 8)
    joined, count = joined_products(graph)
    assert count == 2
    assert sum(node.op == "dot" for node in joined.nodes()) == 3
    products = [node for node in graph.nodes() if node.op == "dot"][:1] * 3
    assert saved_bytes(products) == 2 * 64 * 8 * 8
    torch.manual_seed(0)
    given = [torch.randn(64, 8, dtype=torch.float64), *(torch.randn(8, 8, dtype=torch.float64) for _ in range(3))]
    for mine, theirs in zip(program(joined)(*given), program(graph)(*given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


class _Branches(nn.Module):
    """Three convolutions of one picture, with a bias each."""

    def __init__(self, taps: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(4, out, taps, padding=taps // 2) for out in (3, 5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x).relu() for branch in self.branches], 1)


def test_few_rows_are_not_worth_joining() -> None:
    graph = _attention(8, 64)
    assert joined_products(graph) == (graph, 0)


@pytest.mark.parametrize(("side", "taps", "joins"), [(6, 3, True), (6, 1, True), (300, 3, True), (300, 1, False)])
def test_convolutions_of_one_picture_become_one_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, side: int, taps: int, joins: bool
) -> None:
    """A block of Inception: where a launch, or reading the picture for every tap, is worth more than reading slices."""
    used = backend.Backend()
    with torch.no_grad():
        compiled = torch.compile(_Branches(taps).double(), backend=used, dynamic=False)
        compiled(torch.randn(2, 4, side, side, dtype=torch.float64))
    graph = used.report.pieces[0].before
    assert graph is not None
    assert joined_products(graph) == (graph, 0)
    monkeypatch.setitem(joining.LAUNCH, "interpret", 1 << 20)
    joined, count = joined_products(graph, "interpret")
    assert count == (2 if joins else 0)
    if side == 6:
        torch.manual_seed(0)
        given = [torch.randn([int(size) for size in node.shape], dtype=torch.float64) for node in graph.inputs]
        torch.testing.assert_close(run_torch(joined, *given), run_torch(graph, *given), rtol=1e-12, atol=1e-12)


def test_weights_that_every_step_reads_are_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four products in each of five steps, as of NasRNN's cell: one step's bytes alone do not pay for its weights."""
    monkeypatch.setitem(joining.LAUNCH, "interpret", 1000)
    weights = [build.argument(name, [16, 16], "float64") for name in "abcd"]
    for steps, dots in ((1, 4), (5, 5)):
        state = x = build.argument("x", [2, 16], "float64")
        for _ in range(steps):
            first, second, third, fourth = (build.dot(state, weight) for weight in weights)
            state = build.add(build.multiply(build.relu(first), second), build.multiply(build.sigmoid(third), fourth))
        graph = Graph((x, *weights), (state,))
        joined, _ = joined_products(graph, "interpret")
        assert sum(node.op == "dot" for node in joined.nodes()) == dots
        assert sum(node.op == "concat" for node in joined.nodes()) == (steps > 1)
        given = [torch.randn([int(size) for size in node.shape], dtype=torch.float64) for node in graph.inputs]
        torch.testing.assert_close(run_torch(joined, *given), run_torch(graph, *given), rtol=1e-12, atol=1e-12)


def _trained_equally(monkeypatch: pytest.MonkeyPatch, module: nn.Module, *given: torch.Tensor) -> list[Graph]:
    """The programs of a training step by interpreted kernels, after it was compared with eager mode."""
    monkeypatch.setattr(backend, "way_for", lambda device: "interpret")
    module(*given).backward()
    expected = [weight.grad for weight in module.parameters()]
    module.zero_grad(set_to_none=True)
    used = backend.Backend(rematerialise=True)
    torch.compile(module, backend=used)(*given).backward()
    for weight, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-6)
    return [piece.graph for piece in used.report.pieces if piece.graph is not None]


class _Rotated(nn.Module):
    def __init__(self, sliced: bool) -> None:
        super().__init__()
        self.sliced = sliced
        self.q = nn.Linear(8, 24, bias=False)
        self.cosine, self.sine = torch.randn(3, 8), torch.randn(3, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (3, 8)).transpose(1, 2)
        left, right = (q[..., :4], q[..., 4:]) if self.sliced else q.chunk(2, -1)
        turned = q * self.cosine + torch.cat([-right, left], -1) * self.sine
        return turned.transpose(1, 2).flatten(-2).square().sum()


@pytest.mark.parametrize("sliced", [False, True])
def test_rotary_positions_are_read_not_copied(monkeypatch: pytest.MonkeyPatch, sliced: bool) -> None:
    """Only the small tables of angles and signs are put together; activations are not. The gradients of slices are
    halves between zeros, which are added."""
    torch.manual_seed(0)
    programs = _trained_equally(monkeypatch, _Rotated(sliced), torch.randn(2, 3, 8))
    nodes = [node for graph in programs for node in graph.nodes()]
    assert any(node.op == "concat" for node in nodes)
    assert all(len(node.shape) <= 2 for node in nodes if node.op == "concat")
    assert not any(node.op in ("negate", "pad", "opaque") for node in nodes)


def test_gradients_of_the_parts_of_a_row_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a part of each head is turned: neither zeros nor a sum of them."""

    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.q(x)
            return (q[..., :2].exp().sum() + q[..., 2:].square().sum()) + q.sin().sum()

    torch.manual_seed(0)
    nodes = [node for graph in _trained_equally(monkeypatch, Cut(), torch.randn(3, 8)) for node in graph.nodes()]
    assert not any(node.op in ("pad", "opaque") for node in nodes)


class _WideLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 17_000, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(x), target)


def test_a_loss_keeps_logits_and_writes_no_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    target = torch.randint(0, 17_000, (5,))
    target[2] = -100
    forward, backward = _trained_equally(monkeypatch, _WideLoss(), torch.randn(5, 8), target)
    wide = [node for node in forward.nodes() if node.shape == (5, 17_000) and node.op == "item"]
    assert wide == []  # the product itself, and numbers per row
    (region,) = [node for node in backward.nodes() if node.op == "region"]
    assert region["columns"] == 17_000


def test_a_result_lies_in_memory_as_its_operand_does() -> None:
    x, y = build.argument("x", [2, 3, 5, 4]), build.argument("y", [5, 4])
    spread = build.expand(y, x.shape)
    graph = fused(Graph((x, y), (build.multiply(build.add(x, spread), spread),)), server("c"))
    given = torch.randn(2, 5, 3, 4).transpose(1, 2), torch.randn(5, 4)
    (ours,) = program(graph, inputs=given)(*given)
    expected = (given[0] + given[1]) * given[1]
    torch.testing.assert_close(ours, expected)
    assert ours.stride() == expected.stride()


class _Masked(nn.Module):
    """Attention with a mask that is written out, as libraries of models do, behind a cache that begins empty."""

    def __init__(self, mask: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.mask, self.q, self.kv = mask, nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, 4, 4).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2, 4, 4).permute(2, 0, 3, 1, 4)
        row, column = torch.arange(length)[None, None, :, None], torch.arange(length)[None, None, None, :]
        mask = self.mask(row, column, x).expand(batch, -1, length, length)
        k = torch.cat([torch.tensor([], dtype=x.dtype), k], -2)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask), k


MASKS: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "hides nothing": (lambda row, column, x: row >= 0, "open"),
    "what comes later": (lambda row, column, x: (column <= row) & row.new_ones((), dtype=torch.bool), "causal"),
    "by numbers": (
        lambda row, column, x: torch.where(column <= row, 0.0, float("-inf")).to(x.dtype),
        "causal",
    ),
    "a window": (lambda row, column, x: (column <= row) & (column > row - 3), "masked"),
    "a row too few": (lambda row, column, x: column < row + 2, "masked"),
    "numbers in between": (lambda row, column, x: torch.where(column <= row, 0.0, -1.0).to(x.dtype), "masked"),
    "by data": (lambda row, column, x: (x.sum(-1) > 0)[:, None, None, :] | (column == row), "masked"),
    "changed in place": (lambda row, column, x: (column <= row).logical_or_(column == 1), "masked"),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_are_known_are_told_to_the_attention(name: str) -> None:
    mask, kind = MASKS[name]
    torch.manual_seed(0)
    module, x = _Masked(mask).double(), torch.randn(2, 7, 16, dtype=torch.float64)
    used = backend.Backend()
    results = []
    for call in (module, torch.compile(module, backend=used)):
        module.zero_grad(set_to_none=True)
        y, k = call(x)
        (y.sin().sum() + k.cos().sum()).backward()
        results.append([y, k, *(weight.grad for weight in module.parameters())])
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
        assert ours.stride() == expected.stride()
    (node,) = [
        node for node in used.report.pieces[0].graph.nodes()
        if node.op == "opaque" and node["target"].startswith("aten._scaled_dot_product_flash")
    ]  # fmt: skip
    settings = dict(node["kwargs"])
    found = "causal" if True in node["args"] else "open" if settings.get("attn_mask") is None else "masked"
    assert found == kind
