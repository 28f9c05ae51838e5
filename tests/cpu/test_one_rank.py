"""One rank of many on one device: it holds what that rank holds among real ones, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tilemesh.comm import Communicator, run_threads
from tilemesh.comm.runtime.mirror import mirror
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import Cluster
from tilemesh.model.fresh import draw
from tilemesh.model.transformer import Transformer
from tilemesh.plan.local import MeasuredCluster
from tilemesh.train import load_config, one_rank, summary
from tilemesh.train.config import TrainConfig
from tilemesh.train.lessons import Lessons
from tilemesh.train.one_rank import rank_of_many, run_one_rank
from tilemesh.train.rank import RankTask, make_loop

SMALL = (
    "model.layers=4", "model.width=16", "model.heads=4", "model.kv_heads=2", "model.context=16", "train.batch=8",
    "plan.precision=fp32", "train.trace_steps=0", "train.device=cpu", f"data.source={__file__}", "train.steps=20",
)  # fmt: skip
LAYOUTS = {
    "dp=4": ("plan.zero=3",),
    "dp=2,tp=2": ("plan.sequence_parallel=true", "plan.zero=1"),
    "dp=1,pp=4": ("plan.microbatch=2",),
    "cp=4": (),
    "dp=4,ep=2": ("model.experts=4", "model.experts_per_token=2"),
}


def config(mesh: str) -> TrainConfig:
    return load_config(sets=[*SMALL, *LAYOUTS[mesh]], mesh=mesh)


def kept(chosen: TrainConfig, comm: Communicator, folder: Path) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Bytes of each kind after a step, and those of its exchanges by axis."""
    lessons = Lessons(chosen)
    lessons.open()
    loop = make_loop(RankTask(chosen, folder), comm, None, lessons, torch.device("cpu"))
    loop.step()
    loop.read()
    figures: dict[str, Any] = summary.gather(loop, 0, 0.0)["memory_bytes"]
    exchanged = loop.recorder.bytes_by_axis()
    loop.stepper.close()
    return {kind: figures[kind][comm.rank] for kind in summary.KEPT if kind in figures}, exchanged


@pytest.mark.parametrize("mesh", LAYOUTS)
def test_a_rank_alone_holds_and_exchanges_what_it_does_among_others(mesh: str, tmp_path: Path) -> None:
    chosen = config(mesh)
    real = run_threads(4, lambda comm: kept(chosen, comm, tmp_path))
    for rank in (0, 3):
        memory, exchanged = kept(chosen, mirror(4, rank), tmp_path)
        if "ep" in mesh:  # how many rows an expert gets depends on the values
            memory.pop("activations"), real[rank][0].pop("activations")
            assert memory == real[rank][0]
            assert exchanged.keys() == real[rank][1].keys()
        else:
            assert (memory, exchanged) == real[rank]


def on_local(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """As if this machine had been measured; its figures are not looked at."""
    from tilemesh.core.calibration import Rates
    from tilemesh.core.hardware import CPU, make_node

    device = dataclasses.replace(CPU, memory_bytes=1 << 34, usable_bytes=1 << 34)
    known = MeasuredCluster(Cluster((make_node(device, ranks),)), Rates({"fp32": 1e10}), "")
    monkeypatch.setattr(one_rank, "local_machine", lambda text, machine: known)


def test_rows_say_what_was_computed_and_what_was_not_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    on_local(monkeypatch, 4)
    job = rank_of_many(config("dp=1,pp=4"), "4xlocal-cpu")
    rows = {row.name: row for row in run_one_rank(job, steps=5)}
    computing, sent = rows["computing of one rank"], rows["exchanges and waiting"]
    whole = rows["step: computing + predicted exchanges"]
    assert computing.measured is not None
    assert whole.measured is not None
    assert sent.predicted is not None
    assert sent.measured is None
    assert computing.measured.n == 2
    assert whole.measured.median == pytest.approx(computing.measured.median + sent.predicted)
    assert list(tmp_path.iterdir()) == []  # no run, no checkpoint


def test_of_a_cpu_a_rank_alone_is_predicted_without_turns_and_the_others_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four ranks on two cores take turns; one of them alone does not, and passes no messages."""
    from tilemesh.core.calibration import Calibration, Rates
    from tilemesh.measure.machine import this_machine
    from tilemesh.plan.local import local_cpu

    rates = Rates({"fp32": 1e11}, copy_bytes_per_s=1e10)
    known = Calibration("id", "a CPU, 2 cores, 8 GiB", "today", one_core=rates, all_cores=rates)
    machine = dataclasses.replace(this_machine(), cores=2)
    monkeypatch.setattr(one_rank, "this_machine", lambda: machine)
    monkeypatch.setattr(
        one_rank, "local_machine", lambda text, there: local_cpu(known, int(text[0]), there.cores, 1 << 33)
    )
    job = rank_of_many(config("dp=4"), "4xlocal-cpu")
    assert 1.5 < job.predicted.times.compute_s / job.alone.times.compute_s <= 2  # a call of the optimizer is no longer
    assert job.compute_s + job.beside_s < job.predicted.step_time_s
    assert job.memory_bytes < job.predicted.memory.seen_bytes("cpu")


def test_a_rank_draws_its_own_part_of_the_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole parameter of every name, drawn on the host, took a minute for 8 B; steps are as many as one asks for."""
    on_local(monkeypatch, 4)
    drawn: list[int] = []

    def noted(name: str, shape: tuple[int, ...], *more: Any) -> Any:
        drawn.append(math.prod(shape))
        return draw(name, shape, *more)

    monkeypatch.setattr(one_rank, "draw", noted)
    monkeypatch.setattr("tilemesh.model.fresh.draw", None)
    monkeypatch.setattr("tilemesh.parallel.whole.draw", None)
    chosen = config("dp=4")
    rows = run_one_rank(rank_of_many(chosen, "4xlocal-cpu"), steps=4)
    assert sum(drawn) == sum(part.numel() for part in Transformer(chosen.model, device="meta").parameters()) // 4
    assert [row.measured.n for row in rows if row.measured is not None and row.unit == "s"] == [1, 1]
    with pytest.raises(UsageError, match="stop_after is 3"):
        run_one_rank(rank_of_many(chosen, "4xlocal-cpu"), steps=3)


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="8x8xh200 needs a h200 here and there is no GPU"):
        rank_of_many(config("dp=4"), "8x8xh200")
    on_local(monkeypatch, 2)
    with pytest.raises(UsageError, match="2xlocal-cpu is 2 devices and the mesh has 4 ranks"):
        rank_of_many(config("dp=4"), "2xlocal-cpu")


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ({"optimizer": {"name": "muon"}}, "what Muon takes to make matrices orthogonal is not modelled"),
        ({"distill": {"teacher": "runs/teacher"}}, "what a teacher beside the student takes is not modelled"),
        ({"method": {"compress": "top-k"}}, "what method.compress=top-k takes to make its messages is not modelled"),
    ],
)
def test_what_is_measured_and_not_predicted_is_refused(
    sets: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_local(monkeypatch, 4)
    with pytest.raises(UsageError, match=words):
        rank_of_many(config("dp=4").changed(**sets), "4xlocal-cpu")
