"""train.compile where a step is a list of actions (pipelines, ZeRO-3, what goes to the host): a run's losses, norms,
held-out losses and weights are those without it. The graphs are in question, not their code: nothing is generated."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from tilemesh.comm import run_threads
from tilemesh.model import huggingface
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.host import HostLink
from tilemesh.runs.folder import new_run
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.metrics import latest
from tilemesh.runs.names import CHECKPOINTS
from tilemesh.runs.reader import Reader
from tilemesh.train.load import load
from tilemesh.train.rank import train_here

SETS = (
    "model.layers=4,model.width=16,model.heads=2,model.kv_heads=1,model.mlp_width=32,model.context=16,"
    "model.dropout=0,train.steps=2,train.batch=8,checkpoint.every=2,evaluate.every=2,evaluate.sequences=5,"
    "sample.tokens=0,optimizer.warmup=1,optimizer.lr=0.01,train.trace_steps=0,train.device=cpu,plan.precision=fp64,"
    "checkpoint.background=false"
)
BOUND = 1e-8
CASES = (
    ("pp=2", "plan.schedule=interleaved,plan.interleave=2,plan.offload=activations"),
    ("pp=2", "plan.schedule=1f1b,plan.recompute=full"),
    ("pp=2", "plan.schedule=zb-v"),  # products whose weight's gradient is put off
    ("tp=2,pp=2", "plan.schedule=dualpipe,plan.sequence_parallel=true"),
    ("pp=2", "plan.schedule=terapipe,plan.slices=2"),  # keys and values that later slices share
    ("pp=2", "plan.schedule=pipedream,optimizer.clip=0"),
    ("pp=2", "plan.schedule=pipemare,optimizer.clip=0"),
    ("dp=2,pp=2", "plan.zero=3,plan.schedule=interleaved,plan.interleave=2"),
    ("dp=2", "plan.zero=3,plan.recompute=operators,model.dropout=0.1"),
    ("dp=1", "plan.offload=activations+weights,plan.accumulation=2"),
    ("tp=2,pp=2", "plan.schedule=terapipe,plan.slices=2,distill.hidden=0.5,distill.teacher=TEACHER"),
)


def trained(folder: Path, text: Path, mesh: str, *sets: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and norms of a run, and its last weights."""
    config = load(mesh=mesh, sets=[SETS, f"data.source={text}", *sets])
    new_run(TRAIN, config.to_toml(), folder)
    run_threads(config.plan.world, lambda comm: train_here(config, folder, comm))
    lines = [line for line in latest(folder) if line["kind"] == "step"]
    reader = Reader(folder / CHECKPOINTS / "step-00000002")
    numbers = [line[key] for line in lines for key in ("loss", "norm", "held_out") if key in line]
    return numbers, {name: reader.whole(name) for name in reader.names}


@pytest.mark.parametrize(
    ("mesh", "sets"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_compiled_passes_train_as_the_models_own(
    mesh: str, sets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number}: jumps over {number * 7} dogs\n" for number in range(300)))
    if "TEACHER" in sets:
        huggingface.save(Transformer(load(sets=[SETS]).model, seed=5).double(), tmp_path / "teacher")
        sets = sets.replace("TEACHER", str(tmp_path / "teacher"))
    graphs: list[int] = []
    moved_bytes: list[int] = []
    out = HostLink.out

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return aot_eager(graph, inputs)

    def counted(link: HostLink, pairs: Any, *after: Any, **options: Any) -> Any:
        pairs = list(pairs)
        moved_bytes[-1] += sum(tensor.numel() for tensor, _ in pairs)
        return out(link, pairs, *after, **options)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(HostLink, "out", counted)
    torch._dynamo.reset()
    found = []
    for choice in ("false", "true"):
        moved_bytes.append(0)
        found.append(trained(tmp_path / choice, text, mesh, sets, f"train.compile={choice}"))
        assert bool(graphs) == (choice == "true")
    (numbers, weights), (compiled_numbers, compiled_weights) = found
    assert compiled_numbers == pytest.approx(numbers, rel=BOUND)
    assert compiled_weights.keys() == weights.keys()
    for name, weight in weights.items():
        difference = float((compiled_weights[name] - weight).abs().max())
        assert difference <= BOUND * max(1e-3, float(weight.abs().max())), name
    # What is kept goes to the host, whoever made it: a compiler keeps other tensors, and about as much.
    assert moved_bytes[1] >= moved_bytes[0] / 2
    assert bool(moved_bytes[0]) == ("offload" in sets)
