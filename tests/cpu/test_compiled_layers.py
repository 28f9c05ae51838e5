"""train.compile=layers: one layer is compiled and the others find its code; losses and gradients are those of eager."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from tilemesh.comm.connection import connect
from tilemesh.comm.runtime.mirror import mirror
from tilemesh.model import huggingface
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.mesh import Mesh
from tilemesh.train.load import load
from tilemesh.train.rank import lay_model
from tilemesh.train.source import next_token
from tilemesh.train.teach import from_teacher

SMALL = "model.layers=5,model.width=32,model.heads=2,model.context=16,model.vocabulary=300,model.dropout=0.0"


def compiled_and_own(sets: str, monkeypatch: pytest.MonkeyPatch, tp: int = 1) -> int:
    """How many graphs served a pass whose loss and gradients are those of the model's own layers."""
    config = load(mesh=f"dp=1,tp={tp}", sets=[SMALL, sets, "train.compile=layers,train.device=cpu"])
    comm = connect("alone") if tp == 1 else mirror(tp)
    laid = lay_model(config, Mesh(comm, tp=tp), torch.device("cpu"))
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return aot_eager(graph, inputs)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    objective = next_token(config, laid)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(300, (2, 16), generator=generator) for _ in range(2))
    dropping = {"dropout_seed": torch.tensor(3)} if config.model.dropout else {}
    parameters = list(laid.module.parameters())
    found = []
    for loss in (objective.loss, objective.held_out):
        total, count = loss(tokens, targets, **dropping)
        assert count == 32
        found.append((total, *torch.autograd.grad(total, parameters)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)
    return len(graphs)


@pytest.mark.parametrize(
    "sets",
    [
        "plan.precision=fp64",
        pytest.param("plan.precision=fp64,plan.recompute=full,plan.recompute_every=2", marks=pytest.mark.slow),
    ],
)
def test_three_graphs_serve_five_layers(sets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first layer, where nothing is added before the norm; the others; what follows the last.
    assert compiled_and_own(sets, monkeypatch) <= 3


@pytest.mark.parametrize(
    "sets",
    [
        "plan.sequence_parallel=true,model.norm=rmsnorm,model.qk_norm=full",
        pytest.param("plan.sequence_parallel=false", marks=pytest.mark.slow),
        pytest.param("plan.sequence_parallel=true,plan.recompute=operators", marks=pytest.mark.slow),
    ],
)
def test_a_layer_cut_over_ranks_is_one_graph(sets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As above; the head's stops at the loss, whose exchanges stay outside, and goes on behind it.
    assert compiled_and_own(f"plan.precision=fp64,{sets}", monkeypatch, tp=2) <= 2 + 2


def test_ranks_run_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's flag is one for the process: what a thread runs meanwhile sums as ever, and does not ask the tracer."""
    config = load(mesh="dp=1,tp=2", sets=[SMALL, "plan.precision=fp64,train.compile=false,train.device=cpu"])
    laid = lay_model(config, Mesh(mirror(2), tp=2), torch.device("cpu"))
    tokens, targets = torch.randint(300, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    passes = []
    for is_compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", is_compiling)
        total, _ = next_token(config, laid).loss(tokens, targets)
        passes.append((total, *torch.autograd.grad(total, list(laid.module.parameters()))))
    torch.testing.assert_close(passes[1], passes[0], rtol=1e-10, atol=1e-12)


def test_layers_that_read_their_number_are_all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compiles a function so often, and runs it as it is from then on: every layer is one more."""
    with torch._dynamo.config.patch(recompile_limit=1):  # monkeypatch does not put it back
        assert compiled_and_own("plan.precision=fp64,model.dropout=0.1,model.layers=2", monkeypatch) == 2 + 1


@pytest.mark.parametrize("way", ["layers", pytest.param("true", marks=pytest.mark.slow)])
def test_a_compiled_student_is_taught_the_same(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_layer = load(mesh="dp=1", sets=[SMALL, "model.layers=1"]).model
    huggingface.save(Transformer(one_layer, seed=5).double(), tmp_path / "teacher")
    sets = f"distill.teacher={tmp_path / 'teacher'},distill.hidden=0.5,plan.precision=fp64,train.device=cpu"
    asked = [
        load(mesh="dp=1", sets=[SMALL, "model.layers=2", sets, f"train.compile={text}"]) for text in ("false", way)
    ]
    laid = lay_model(asked[0], Mesh(connect("alone")), torch.device("cpu"))
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    plain, compiled = (from_teacher(config, laid).loss for config in asked)
    for turn in range(2):
        tokens, targets = torch.randint(300, (2, 2, 16), generator=torch.Generator().manual_seed(turn))
        found = []
        for loss in (plain, compiled):
            total, count = loss(tokens, targets)
            assert count == 32
            found.append((total, *torch.autograd.grad(total, list(laid.module.parameters()))))
        torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)
        # The student's two layers and its head, and the teacher's layer; or each of the two whole.
        assert len(graphs) == (4 if way == "layers" else 2)
