"""Operators of torch and callers get tensors that lie in memory as torch traced them; nothing else is copied."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sampled import sampled
from torch import nn

from tilemesh.graph import build, trace
from tilemesh.graph.backend import Backend
from tilemesh.graph.by_torch import run_torch
from tilemesh.graph.emit import program
from tilemesh.graph.ir import Graph, make
from tilemesh.graph.opaque import contiguous, laid, lies
from tilemesh.graph.recorded import own_memory

Tensor = torch.Tensor


@torch.library.custom_op("tilemesh_test::in_order", mutates_args=())
def in_order(x: Tensor) -> Tensor:
    """The elements as they lie in memory, as a kernel in C reads them."""
    assert x.untyped_storage().nbytes() >= x.numel() * x.element_size(), "a kernel would read what is not there"
    return torch.as_strided(x, (x.numel(),), (1,), x.storage_offset()).clone()


@in_order.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.numel())


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed and made contiguous": lambda x: in_order((x * 1.5).t().contiguous()) + 1,
    "an input": lambda x: in_order(x.t().contiguous()),
    "a view": lambda x: in_order((x * 1.5).t()) + 1,
    "read twice": lambda x: in_order(x.t().contiguous()) + in_order(x.t()),
    "ones": lambda x: in_order(torch.ones(3, 4)) + x.reshape(-1),
    "repeated": lambda x: in_order(x.mean(0, keepdim=True).expand(3, 4).contiguous()),
    "complex": lambda x: torch.view_as_complex((x * 2).reshape(2, 6).t().contiguous()).abs(),
    "another dtype": lambda x: (x * 2).t().contiguous().view(torch.int32).sum(0),
    "a slice": lambda x: in_order((x + 1)[:, 1:3].t().contiguous()),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


def _lays(backend: Backend) -> int:
    return sum(node.op == "lay" for piece in backend.report.pieces for node in piece.graph.nodes())  # type: ignore[union-attr]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_operator_that_reads_memory_in_order(name: str, kernels: bool) -> None:
    x, run = torch.randn(3, 4), PROGRAMS[name]
    torch.testing.assert_close(torch.compile(run, backend=Backend(kernels))(x), run(x))


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "complex"])
def test_a_traced_program_by_every_way_to_run_it(name: str) -> None:
    x, run = torch.randn(3, 4), PROGRAMS[name]
    traced = trace(run, [x])
    for given in (x, torch.randn(4, 3).t()):
        expected = run(given.contiguous())  # as it was traced, however this input lies
        torch.testing.assert_close(traced.run(given)[0], expected)
        torch.testing.assert_close(program(traced.graph)(given)[0], expected)
        torch.testing.assert_close(run_torch(traced.graph, given)[0], expected)


@pytest.mark.parametrize(
    ("kind", "batch_first"),
    sampled(
        itertools.product((nn.LSTM, nn.GRU, nn.RNN), (True, False)), [(nn.LSTM, True), (nn.GRU, False), (nn.RNN, True)]
    ),
)
def test_recurrent_layers(kind: Any, batch_first: bool) -> None:
    model, x = kind(3, 4, batch_first=batch_first), torch.randn(2, 5, 3)
    with torch.no_grad():
        expected = model(x)[0]
        torch.testing.assert_close(trace(model, [x]).run(x)[0], expected)
        torch.testing.assert_close(torch.compile(model, backend=Backend())(x)[0], expected)


def _results(x: Tensor) -> tuple[Tensor, ...]:
    y = x + 1
    return (
        y.t().contiguous(), x.t().contiguous(), x.t() + 1, y.t(), x[:, ::2], y[:, 1:].clone(), torch.zeros(2, 3),
        x.sum(0).expand(2, 4), x.t().clone(), x + 0.0, x.t() * 1.0,
    )  # fmt: skip


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("given", [torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(3, 8)[:, ::2]])
def test_results_lie_as_in_eager(given: Tensor, kernels: bool) -> None:
    expected = _results(given)
    for results in (torch.compile(_results, backend=Backend(kernels))(given), trace(_results, [given]).run(given)):
        for ours, theirs in zip(results, expected, strict=True):
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs)


def test_a_view_after_a_graph_break() -> None:
    def broken(x: Tensor) -> Tensor:
        y = (x + 1).t().contiguous()
        torch._dynamo.graph_break()
        return y.view(-1) * 2

    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.compile(broken, backend=Backend())(x), broken(x))


def test_sizes_that_change_with_other_strides() -> None:
    compiled, run = torch.compile(PROGRAMS["a view"], backend=Backend(), dynamic=True), PROGRAMS["a view"]
    for given in (torch.randn(3, 4), torch.randn(5, 6), torch.randn(6, 5).t(), torch.randn(5, 6)):
        torch.testing.assert_close(compiled(given), run(given))


def test_what_the_forward_program_leaves_is_read_as_it_lies() -> None:
    """The backward program is compiled for the strides of what the forward one saved: right, and without copies."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            heads = torch.tanh(self.first(x)).unflatten(-1, (2, 4)).transpose(0, 1).contiguous()
            mixed = (torch.exp(heads) * heads).transpose(0, 1).contiguous().view(x.shape)
            return self.second(mixed)  # type: ignore[no-any-return]

    model, x, backend = Layer().double(), torch.randn(6, 8, dtype=torch.float64), Backend()
    slopes = []
    for call in (model, torch.compile(model, backend=backend)):
        model.zero_grad()
        call(x).square().sum().backward()
        slopes.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    for ours, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert ours.stride() == theirs.stride()
    assert _lays(backend) == 0, str(backend.report)


def test_channels_last_stays() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3))
    model = model.to(memory_format=torch.channels_last)
    x, backend = torch.randn(2, 3, 12, 12).contiguous(memory_format=torch.channels_last), Backend()
    expected, result = model(x), torch.compile(model, backend=backend)(x)
    assert expected.is_contiguous(memory_format=torch.channels_last)
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    assert _lays(backend) == 0, str(backend.report)


def test_one_copy_serves_all_who_need_it_and_none_is_made_for_nothing() -> None:
    def run(x: Tensor) -> Tensor:
        y = x.t().contiguous()
        return in_order(y) + torch.ops.tilemesh_test.in_order(y).exp() + y.view(torch.int32).reshape(-1)

    backend, x = Backend(), torch.randn(3, 4)
    torch.testing.assert_close(torch.compile(run, backend=backend)(x), run(x))
    assert _lays(backend) == 1
    backend = Backend()
    torch.compile(lambda x: in_order(x * 2) + in_order(x), backend=backend)(x)
    assert _lays(backend) == 0


def test_laid_is_itself_or_a_copy_with_these_strides() -> None:
    x = torch.randn(3, 4)
    assert laid(x, (4, 1)) is x
    assert laid(x.t(), (3, 1)).stride() == (3, 1)
    assert torch.equal(laid(x.t(), (3, 1)), x.t())
    assert laid(x, (16, 3)).stride() == (16, 3)
    repeated = laid(torch.ones(3, 4), (0, 1))
    assert repeated.stride() == (0, 1)
    assert torch.equal(repeated, torch.ones(3, 4))
    one = torch.randn(1, 4)
    assert laid(one, (77, 1)) is one, "a dim of one element can have any stride"
    assert laid(x, (1, 1)) is x, "elements that share memory cannot be copied there"
    assert contiguous((2, 0, 3)) == torch.empty(2, 0, 3).stride()
    assert lies(torch.empty(2, 0), (5, 7))


def test_a_lay_node_runs_by_every_evaluator() -> None:
    x = build.argument("x", [3, 4])
    graph = Graph((x,), (make("lay", build.transpose(x, [1, 0]), strides=(3, 1)),))
    given = torch.randn(3, 4)
    for (result,) in (run_torch(graph, given), program(graph)(given)):
        assert result.stride() == (3, 1)
        assert torch.equal(result, given.t())


def test_results_of_a_recorded_program_keep_their_strides() -> None:
    x = torch.randn(3, 8)
    values = [x, x.t(), x[:, ::2], x[0].expand(5, 8), None, x.sum()]
    made = own_memory(values)
    for ours, theirs in zip(made, values, strict=True):
        if theirs is not None:
            assert ours.stride() == theirs.stride()
            assert ours.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
            assert torch.equal(ours, theirs)


def test_results_can_be_changed_in_place() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    made = torch.compile(lambda x: (x + 1).t().contiguous(), backend=Backend())(x)
    made.mul_(2).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 2.0))


def test_a_copy_that_repeats_nothing_is_no_view() -> None:
    x = torch.randn(3, 4)
    assert not laid(x.t(), (3, 1))._is_view()
    assert laid(x[:1].expand(5, 4), (0, 1)).stride() == (0, 1)


def test_results_of_a_recorded_program_can_be_changed_in_place() -> None:
    """As those of eager can: Mixtral adds its experts' results to zeros that another piece of it made."""
    (zeros,) = own_memory([torch.zeros(4, 3)])
    part = torch.ones(2, 3, requires_grad=True)
    zeros.index_add_(0, torch.tensor([0, 2]), part)
    zeros.sum().backward()
    assert torch.equal(part.grad, torch.ones(2, 3))
