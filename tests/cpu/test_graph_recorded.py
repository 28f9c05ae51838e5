"""Which programs become CUDA graphs, and that their results are the caller's. The recorder is a stand-in here."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from tilemesh.graph import build
from tilemesh.graph.backend import Backend
from tilemesh.graph.ir import Graph, make
from tilemesh.graph.recorded import reason_against, waits_for_host


def _recorder(run: Any, inputs: Any, fixed: Any, **named: Any) -> Any:
    """As torch's recorder: results are in memory that the next call writes over."""
    kept: list[torch.Tensor | None] = []

    def replay(given: list[Any]) -> list[torch.Tensor | None]:
        made = run(given)
        if not kept:
            kept.extend(value if value is None else torch.empty_like(value) for value in made)
        for memory, value in zip(kept, made, strict=True):
            if memory is not None:
                memory.copy_(value)
        return [memory if memory is None else memory.view_as(memory) for memory in kept]

    return replay


@pytest.mark.parametrize("forward", [True, False])
def test_recorded_programs(forward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are memory of their own although the recorder's is written over; without the forward program, whose
    results lie at other places then, no backward program is recorded."""
    monkeypatch.setattr("torch._inductor.cudagraph_trees.cudagraphify_impl", _recorder)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    reasons = iter(["", "", ""] if forward else ["for a reason"])
    monkeypatch.setattr("tilemesh.graph.backend.reason_against", lambda *_: next(reasons))
    backend = Backend()
    known: dict[str, bool] = {}
    compilers = {
        f"{short}_compiler": functools.partial(backend._recorded, way="c", kind=kind, known=known)
        for short, kind in (("fw", "forward"), ("bw", "backward"), ("inference", "inference"))
    }
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
    fast = torch.compile(model, backend=aot_autograd(**compilers))
    inputs = [torch.randn(6, 4, dtype=torch.float64) for _ in range(3)]
    kept = []
    for call in (fast, model):
        results = []
        for x in inputs:
            model.zero_grad(set_to_none=True)
            results.append(call(x))
            results[-1].square().sum().backward()
            results += [weight.grad for weight in model.parameters() if weight.grad is not None]
        kept.append(results)
    torch.testing.assert_close(*kept, rtol=1e-12, atol=1e-12)
    assert [piece.recorded for piece in backend.report.pieces] == [forward, forward]
    assert ("one CUDA graph" if forward else "not recorded: for a reason") in str(backend.report)


def test_what_waits_for_the_host_is_recorded() -> None:
    def layers(width: int) -> Graph:
        x = value = build.argument("x", [width, width], "bfloat16")
        for _ in range(20):
            value = build.tanh(build.dot(value, x))
        return Graph((x,), (value,))

    assert waits_for_host(layers(256))
    assert not waits_for_host(layers(8192))


class Halved(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x * torch.tensor(0.5, dtype=x.dtype)).sum(-1)


def test_a_number_of_the_host_is_part_of_the_program() -> None:
    """Mistral and Gemma2 have such numbers; read from the host's memory, they kept a program from being recorded."""
    torch._dynamo.reset()
    backend = Backend()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(torch.compile(Halved(), backend=backend)(x), Halved()(x), rtol=1e-12, atol=1e-12)
    (piece, *_) = backend.report.pieces
    assert not piece.held
    assert reason_against(piece.graph, fx.symbolic_trace(Halved()), [], []) == ""


def test_what_cannot_be_recorded_says_why() -> None:
    x = build.argument("x", [3], "float32")
    module = fx.symbolic_trace(Halved())
    assert reason_against(Graph((x,), (x,)), module, [torch.zeros(3)], []) == "a tensor on cpu"

    def opaque(target: str, *args: Any, **kwargs: Any) -> Graph:
        node = make("opaque", x, target=target, args=args, kwargs=tuple(kwargs.items()), shape=(3,), dtype="float32")
        return Graph((x,), (node,))

    reason = reason_against(opaque("_c10d_functional.all_reduce.default"), module, [], [])
    assert reason == "_c10d_functional.all_reduce.default is not known to be safe to record"
    reason = reason_against(opaque("aten.zeros.default", (3,), device=torch.device("cpu")), module, [], [])
    assert reason == "aten.zeros.default makes a tensor on the host"
    assert "depends on values" in reason_against(opaque("aten.nonzero.default"), module, [], [])
