"""`torch.compile` through our graphs equals eager: losses and gradients of small models in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tilemesh.graph.backend import Backend
from tilemesh.graph.ir import Graph
from tilemesh.graph.memory import arena, lifetimes, live_bytes


class Residual(nn.Module):
    """Convolutions, batch norm, pooling, a branch that joins again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = nn.functional.max_pool2d(x + self.second(x), 2)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.head = nn.Embedding(11, 6), nn.LSTM(6, 7, batch_first=True), nn.Linear(7, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(self.table(tokens))[0])  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, activation="gelu")
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.table(tokens)))  # type: ignore[no-any-return]


class Odd(nn.Module):
    """Views, slices, in-place changes, comparisons, powers, a constant of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.mask: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x @ self.weight.t()) ** 2 + x[:, ::2].sum(1, keepdim=True)
        y = torch.where(y > 0.5, y.exp().clamp(max=9.0), 1.0 - y) + torch.arange(3, dtype=x.dtype)
        z = y.clone()
        z[:, 0] += 1
        z = z.transpose(0, 1).reshape(-1)[1:-1].view(-1, 2).flip(0)
        return (z * 1.0 + 0.0).masked_fill(z < 0, 0.25).float().double() + x.masked_fill(~self.mask, 0.0).amax()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "convolutions": (Residual, lambda: torch.randn(4, 3, 8, 8)),
    "lstm": (Recurrent, lambda: torch.randint(0, 11, (3, 5))),
    "attention": (Attention, lambda: torch.randint(0, 11, (3, 5))),
    "odd": (Odd, lambda: torch.randn(6, 4)),
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 9), nn.SiLU(), nn.Linear(9, 2)), lambda: torch.randn(6, 4)),
}


def grads(model: nn.Module, call: Any, x: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    out = call(x)
    loss = (out * torch.linspace(0.1, 1.0, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.fixture(autouse=True)
def _doubles() -> Any:
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def check_arena(graph: Graph) -> None:
    """Values that live at one moment lie apart, in at most 1.05 of the least memory that any plan needs."""
    plan = arena(graph)
    lives = plan.lifetimes
    assert plan.bound == max(live_bytes(lives))
    assert plan.bound <= plan.size <= 1.05 * plan.bound
    for first in range(len(lives)):
        for second in range(first):
            one, other = lives[first], lives[second]
            if one.born <= other.dies and other.born <= one.dies:
                apart = plan.offsets[first] >= plan.offsets[second] + other.size
                assert apart or plan.offsets[second] >= plan.offsets[first] + one.size


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_eager_and_its_values_fit_an_arena(name: str) -> None:
    make, data = MODELS[name]
    model, x, backend = make(), data(), Backend()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected, slopes = grads(model, model, x)
    model.load_state_dict(state)
    torch._dynamo.config.allow_rnn = True
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        model.load_state_dict(state)
        loss, gradients = grads(model, compiled, x)
        assert loss == pytest.approx(expected, rel=1e-12)
        distance = (
            sum(float((ours - theirs).square().sum()) for ours, theirs in zip(gradients, slopes, strict=True)) ** 0.5
        )
        assert distance <= 1e-10 * sum(float(theirs.square().sum()) for theirs in slopes) ** 0.5
    pieces = backend.report.pieces
    assert len(pieces) >= 2, "a forward and a backward graph"
    assert all(piece.graph is not None for piece in pieces), str(backend.report)
    assert "operators became" in str(backend.report)
    for piece in pieces if name in ("convolutions", "attention", "mlp") else ():
        assert piece.graph is not None
        check_arena(piece.graph)
    if name == "convolutions":
        assert any(node.op == "opaque" and node.flops for piece in pieces for node in piece.graph.nodes())  # type: ignore[union-attr]


def test_dropout_draws_what_eager_draws() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.3))
    compiled, x = torch.compile(model, backend=Backend()), torch.randn(16, 8)
    torch.manual_seed(3)
    first = compiled(x)
    second = compiled(x)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(first, compiled(x))
    assert 0.2 < float((first == 0).double().mean()) < 0.4


def test_sizes_that_change_get_one_program() -> None:
    """The first size is compiled as it is; once torch knows that it changes, one program serves the others."""
    backend = Backend()
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.LayerNorm(3))
    compiled = torch.compile(model, backend=backend)
    for rows in (2, 5, 9, 5, 2, 9):
        x = torch.randn(rows, 4)
        expected, slopes = grads(model, model, x)
        loss, gradients = grads(model, compiled, x)
        assert loss == pytest.approx(expected, rel=1e-12)
        for ours, theirs in zip(gradients, slopes, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    pieces = backend.report.pieces
    assert all(piece.graph is not None for piece in pieces)
    # A forward and a backward program each: for the first size, and for all sizes once torch knows that it changes.
    assert len(pieces) == 2 * (1 + 1)


def test_results_are_memory_of_their_own() -> None:
    """What torch makes anew may be changed by the caller: it is no input, no constant and no other result."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 0.0, x.clone(), x * 1.0, torch.zeros(4), torch.zeros(4), x.detach()

    compiled = torch.compile(program, backend=Backend())
    x = torch.arange(4.0)
    for _ in range(2):
        results = compiled(x)
        for result in results[:5]:
            result += 7.0
        assert torch.equal(x, torch.arange(4.0))
        assert torch.equal(results[0], x + 7.0)
        assert torch.equal(results[4], torch.full((4,), 7.0))


def test_an_input_that_is_changed_in_place() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0)
        return x[1:] + y

    ours, theirs = torch.ones(4), torch.ones(4)
    got = torch.compile(step, backend=Backend())(ours, torch.ones(3))
    assert torch.equal(got, step(theirs, torch.ones(3)))
    assert torch.equal(ours, theirs)


def test_an_output_that_is_an_input() -> None:
    def same(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x, x.view(2, 2), x + 0.0

    x = torch.arange(4.0)
    one, two, three = torch.compile(same, backend=Backend())(x)
    assert one is x or one.data_ptr() == x.data_ptr()
    assert two.data_ptr() == x.data_ptr()
    torch.testing.assert_close(three, x)


def test_a_piece_with_checks_of_its_own_runs_as_torch_traced_it() -> None:
    """torch gives such a piece a token beside its tensors, which is None in a call."""
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    inverse = torch.compile(lambda x: torch.linalg.inv(x) * 2, backend=Backend())(x)
    assert torch.equal(inverse, torch.linalg.inv(x) * 2)


def test_fullgraph_raises_torchs_own_error() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if float(x.sum()) > 0 else x - 1

    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        torch.compile(breaks, backend=Backend(), fullgraph=True)(torch.ones(2))
    assert torch.equal(torch.compile(breaks, backend=Backend())(torch.ones(2)), torch.full((2,), 2.0))


def test_torch_finds_it_by_name() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    if "tilemesh" not in torch._dynamo.list_backends(exclude_tags=()):
        pytest.skip("tilemesh runs from source: entry points exist where it is installed")
    torch.testing.assert_close(torch.compile(model, backend="tilemesh")(x), model(x))


def test_execution_uses_the_arena() -> None:
    """A chain of layers at inference needs two buffers: the input of a layer and its output."""
    from tilemesh.graph import build

    node = x = build.argument("x", [32, 32], "float64")
    for _ in range(9):
        node = build.tanh(build.dot(node, x))
    graph = Graph((x,), (node,))
    plan = arena(graph)
    assert plan.size == plan.bound == 2 * 32 * 32 * 8
    assert len(lifetimes(graph)) == 18


@pytest.mark.parametrize(
    ("shape", "settings", "repeated"),
    [
        ((2, 3, 4, 5), {"scale_factor": 2}, True),
        ((1, 2, 3, 5), {"scale_factor": (4.0, 1.0)}, True),
        ((2, 3, 4), {"scale_factor": 8}, True),
        ((1, 2, 3, 2, 3), {"scale_factor": 2}, True),
        ((1, 2, 6, 6), {"scale_factor": 0.5}, False),
        ((1, 2, 6, 6), {"scale_factor": 3}, False),
        ((1, 2, 6, 6), {"size": (12, 12)}, False),
        ((1, 2, 6, 6), {"scale_factor": 2, "mode": "bilinear"}, False),
        ((1, 2, 6, 6), {"scale_factor": 2, "recompute_scale_factor": True}, False),
    ],
)
def test_enlarged_pictures(shape: tuple[int, ...], settings: dict[str, Any], repeated: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend = Backend()
    results = []
    for compiling in (False, True):
        x = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape).sin().requires_grad_()

        def enlarge(value: torch.Tensor) -> torch.Tensor:
            return nn.functional.interpolate(value * 2.0, **settings).tanh()

        y = (torch.compile(enlarge, backend=backend) if compiling else enlarge)(x)
        (y * torch.linspace(0, 1, y.numel(), dtype=y.dtype).reshape(y.shape)).sum().backward()
        results.append((y.detach(), x.grad))
    assert results[0][0].stride() == results[1][0].stride()
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)
    indexed = any("index" in name for piece in backend.report.pieces for name in piece.opaque)
    assert not (repeated and indexed)


@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
def test_attention_gets_rows_whose_numbers_lie_together(gradients: bool) -> None:
    """torch's kernel on a CPU reads others as if they did."""
    torch._dynamo.reset()
    torch.manual_seed(0)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(*[x.transpose(-1, -2).contiguous()] * 3)

    data, results = torch.randn(2, 4, 16, 24), []
    for run in (turned, torch.compile(turned, backend=Backend())):
        x = data.clone().requires_grad_(gradients)
        y = run(x)
        if gradients:
            y.square().sum().backward()
        results.append((y.detach(), x.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 6000, 1, 6000), (2, 0, 2, 2, 2, 2), (2, 3, 2, 0, 2, 2), (2, 3, 2, 2, 2, 2)]
)
def test_sums_over_windows_are_those_of_torch(shape: tuple[int, ...]) -> None:
    """A pooling adds one float32 after the other (16,777,216 of 36,000,000 ones), and nothing where nothing is."""
    torch._dynamo.reset()
    x = torch.ones(shape)
    sums = torch.compile(lambda x: x.sum((3, 5)), backend=Backend())(x)
    torch.testing.assert_close(sums, x.sum((3, 5)))
