"""Training on ranks that share each sequence: what one process, or as many replicas, trains; resumed too."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.conflicts import ConflictError
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.model import huggingface
from tilemesh.model.transformer import Transformer
from tilemesh.parallel import Mesh, lay
from tilemesh.runs import folder as folders
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.names import METRICS
from tilemesh.runs.reader import open_checkpoint
from tilemesh.train import load_config
from tilemesh.train.config import TrainConfig
from tilemesh.train.rank import train_here

SMALL = (
    "model.layers=2", "model.width=16", "model.heads=4", "model.kv_heads=2", "model.context=16", "train.context=13",
    "train.steps=3", "train.batch=4", "model.dropout=0.1", "plan.precision=fp64", "optimizer.clip=0.5",
    "evaluate.every=3", "evaluate.sequences=3", "checkpoint.every=3", "sample.tokens=2", "optimizer.fused=false",
    "train.trace_steps=0", "checkpoint.background=false", "train.device=cpu",
)  # fmt: skip
TEXT = Path(__file__)


def config(mesh: str, *sets: str) -> TrainConfig:
    return load_config(sets=[*SMALL, f"data.source={TEXT}", *sets], mesh=mesh)


def train(chosen: TrainConfig, folder: Path, *, stop_after: int | None = None, resume: bool = False) -> list[float]:
    """All that a run says of its steps: losses, norms, and the held-out loss."""
    if not resume:
        folders.new_run(TRAIN, chosen.to_toml(), folder)
    run_threads(chosen.ranks, lambda comm: train_here(chosen, folder, comm, resume=resume, stop_after=stop_after))
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [line[key] for line in lines for key in ("loss", "norm", "held_out") if line.get(key) is not None]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    reader = open_checkpoint(folder)
    return {name: reader.whole(name) for name in sorted(reader.names)}


def assert_trained_alike(mesh: str, base: str, folder: Path, *sets: str) -> None:
    figures = [train(config(shape, *sets), folder / shape) for shape in (mesh, base)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-10), f"{mesh} beside {base}"
    trained, alone = weights(folder / mesh), weights(folder / base)
    assert trained.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(
            trained[name], value, rtol=0, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("exchange", "ranks"), [("ring", 2), ("heads", 2), ("gather", 2), ("heads-ring", 4)])
def test_ranks_that_share_sequences_train_what_one_process_trains(exchange: str, ranks: int, tmp_path: Path) -> None:
    """Padded documents: sequences of different lengths, whose padding counts for nothing."""
    assert_trained_alike(f"cp={ranks}", "dp=1", tmp_path, f"plan.cp_exchange={exchange}", "data.packing=none")


def test_all_axes_and_packed_documents(tmp_path: Path) -> None:
    sets = ("plan.sequence_parallel=true", "data.packing=documents", "plan.zero=1", "model.layers=3")
    figures = train(config("dp=2,cp=2,tp=2", *sets), tmp_path / "eight")
    assert figures == pytest.approx(train(config("dp=1", *sets[1:2], *sets[3:]), tmp_path / "one"), rel=1e-10)


@pytest.mark.parametrize("exchange", ["ring", "heads"])
def test_a_replica_without_held_out_text_stands_by_for_experts(exchange: str, tmp_path: Path) -> None:
    """One held-out sequence and two replicas: the other makes a pass too, in which each rank of cp has tokens."""
    sets = (
        "model.experts=4",
        "evaluate.sequences=1",
        "train.steps=2",
        "evaluate.every=2",
        f"plan.cp_exchange={exchange}",
    )
    assert_trained_alike("dp=2,cp=2,ep=2", "dp=1", tmp_path, *sets)


@pytest.mark.parametrize(
    ("mesh", "base", "sets"),
    [
        ("dp=2,cp=2", "dp=2", ("train.method=local", "method.period=3", "method.outer_momentum=0.5")),
        pytest.param("dp=2,cp=2", "dp=2", ("method.compress=top-k", "method.start=1"), marks=pytest.mark.slow),
        ("dp=2,cp=2", "dp=2", ("method.compress=int8", "plan.zero=2")),
        ("dp=1,cp=2,pp=2", "dp=1,pp=2", ("plan.schedule=pipedream-2bw", "optimizer.clip=0", "model.tied=false")),
    ],
    ids=["local updates", "compressed gradients", "compressed rows", "asynchronous pipeline"],
)
def test_methods_take_the_ranks_of_a_sequence_for_one_replica(
    mesh: str, base: str, sets: tuple[str, ...], tmp_path: Path
) -> None:
    """Also what they remember: of ranks that share sequences each has the same, and one writes it."""
    assert_trained_alike(mesh, base, tmp_path, *sets)


def test_a_run_goes_on_bit_by_bit_where_ranks_share_sequences(tmp_path: Path) -> None:
    chosen = config("dp=2,cp=2", "method.compress=top-k")
    train(chosen, tmp_path / "whole")
    train(chosen, tmp_path / "parts", stop_after=2)
    train(chosen, tmp_path / "parts", resume=True)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert [name for name, value in whole.items() if not torch.equal(value, parts[name])] == []


def test_a_checkpoint_goes_on_with_other_ranks_per_sequence(tmp_path: Path) -> None:
    figures = train(config("dp=2"), tmp_path / "whole")
    train(config("dp=1,cp=2", "plan.zero=1"), tmp_path / "parts", stop_after=2)
    assert train(config("dp=1,cp=4"), tmp_path / "parts", resume=True) == pytest.approx(figures, rel=1e-10)


def test_a_teacher_beside_a_student_whose_ranks_share_sequences(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    base = config("dp=1")
    huggingface.save(Transformer(base.model, seed=5), tmp_path / "teacher")
    assert_trained_alike("cp=2", "dp=1", tmp_path, f"distill.teacher={tmp_path / 'teacher'}")


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="2 kv_heads are not divisible by tp 1 x cp 4; set cp_exchange=ring"):
        config("cp=4", "plan.cp_exchange=heads")
    with pytest.raises(ConflictError, match=r"plan.cp is 8 and train.context is 5: each of the ranks .*set plan.cp=5"):
        config("cp=8", "train.context=5")
    with pytest.raises(UsageError, match=r"known are dp, tp, pp, cp, ep\)"):
        config("xp=2")


@pytest.mark.parametrize("exchange", ["ring", "gather", "heads"])
def test_a_microbatch_without_rows_adds_nothing(exchange: str) -> None:
    model, text = config("dp=1").model.replace(dropout=0), torch.randint(64, (2, 14))

    def norm(comm: Communicator, **plan: Any) -> float:
        layout = ParallelPlan(precision="fp64", **plan)
        laid = lay(Transformer(model, seed=1, dtype=torch.float64), Mesh(comm, **layout.axes), layout)
        laid.gradients.backward(*laid.loss(text[:, :-1], text[:, 1:]), last=False)
        laid.gradients.backward(*laid.loss(text[:0, :-1], text[:0, 1:]))
        return laid.gradients.finish().norm

    [wanted] = run_threads(1, norm)
    assert run_threads(2, partial(norm, cp=2, cp_exchange=exchange)) == pytest.approx([wanted] * 2, rel=1e-10)
