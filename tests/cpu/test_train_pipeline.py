"""Training over the stages of a pipeline, on ranks that are threads: as one process trains; gone on in any layout."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sampled import sampled

from tilemesh.comm import run_threads
from tilemesh.core import config
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import CPU, Cluster, make_node
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.program import one_rank
from tilemesh.measure.machine import this_machine
from tilemesh.plan.grade import expected_kept
from tilemesh.plan.memory import Room
from tilemesh.report.pipeline_part import memory_lines, memory_over_step
from tilemesh.report.run import read
from tilemesh.runs.folder import new_run
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.metrics import latest
from tilemesh.runs.names import CHECKPOINTS, SAMPLE
from tilemesh.runs.reader import Reader
from tilemesh.train.check import check_machine
from tilemesh.train.config import TrainConfig
from tilemesh.train.load import load
from tilemesh.train.rank import choose_device, train_here

SETS = (
    "model.layers=4,model.width=16,model.heads=4,model.kv_heads=2,model.mlp_width=32,model.context=16,model.tied=true,"
    "train.steps=4,train.batch=8,checkpoint.every=2,evaluate.every=2,evaluate.sequences=5,sample.tokens=6,"
    "optimizer.warmup=1,optimizer.lr=0.01,optimizer.clip=0.5,train.trace_steps=1,train.device=cpu"
)
EXACT = "plan.precision=fp64,model.dropout=0.1"
BOUND = 1e-10
RUNS = ("run", "alone")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {number}: jumps over {number * 7} dogs\n" for number in range(300)))
    return str(path)


def made(text: str, mesh: str, *sets: str) -> TrainConfig:
    return load(mesh=mesh, sets=[SETS, f"data.source={text}", *sets])


def trained(config: TrainConfig, folder: Path, **options: Any) -> None:
    if not (folder / "config.toml").exists():
        new_run(TRAIN, config.to_toml(), folder)
    run_threads(config.plan.world, lambda comm: train_here(config, folder, comm, **options))


def numbers(folder: Path) -> list[float]:
    """Losses, norms and held-out losses of all steps, in order."""
    lines = [line for line in latest(folder) if line["kind"] == "step"]
    found = [line[key] for line in lines for key in ("loss", "norm", "held_out") if key in line]
    assert len(found) == 2 * 4 + 2
    return found


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    reader = Reader(folder / CHECKPOINTS / f"step-{step:08d}")
    return {name: reader.whole(name) for name in reader.names}


@pytest.fixture(scope="module")
def alone(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one process that never stopped."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    trained(made(text, "dp=1", EXACT), folder)
    return folder


def require_alike(folder: Path, alone: Path) -> None:
    assert numbers(folder) == pytest.approx(numbers(alone), rel=BOUND)
    assert (folder / SAMPLE).read_text() == (alone / SAMPLE).read_text()
    ours, theirs = state(folder, 4), state(alone, 4)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert float((ours[name] - value).abs().max()) <= 1e-8 * max(1e-3, float(value.abs().max())), name


@pytest.mark.parametrize(
    ("mesh", "sets"),
    [
        ("pp=2", "plan.schedule=1f1b,plan.chunk_layers=[3,1],plan.recompute=full"),
        pytest.param("dp=2,pp=2", "plan.schedule=zb-v", marks=pytest.mark.slow),
        ("tp=2,pp=2", "plan.schedule=dualpipe,plan.sequence_parallel=true"),
        ("dp=1", "plan.offload=optimizer+activations+weights,plan.accumulation=2"),
        ("dp=2,pp=2", "plan.offload=activations,plan.zero=1"),
    ],
)
def test_it_trains_as_one_process(text: str, alone: Path, tmp_path: Path, mesh: str, sets: str) -> None:
    config = made(text, mesh, EXACT, sets)
    trained(config, tmp_path / "run")
    require_alike(tmp_path / "run", alone)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    passes = {event["name"] for event in events if event.get("cat") == "action"}
    assert {f"0F{m}" for m in range(config.plan.accumulation)} < passes


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("pp=2", "plan.schedule=zb-v"), ("dp=2,tp=2", "")),
        (("dp=2", ""), ("pp=2", "plan.schedule=interleaved,plan.interleave=2")),
        (("pp=2", "plan.schedule=chimera"), ("dp=2,pp=2", "plan.schedule=zb-h1")),
        (("dp=1", "plan.offload=weights"), ("tp=2", "plan.offload=activations")),
    ],
)
def test_a_run_goes_on_in_another_layout(
    text: str, alone: Path, tmp_path: Path, first: tuple[str, str], then: tuple[str, str]
) -> None:
    folder = tmp_path / "run"
    trained(made(text, first[0], EXACT, *filter(None, [first[1]])), folder, stop_after=2)
    trained(made(text, then[0], EXACT, *filter(None, [then[1]])), folder, resume=True)
    require_alike(folder, alone)


@pytest.mark.parametrize("precision", sampled(["bf16", "bf16-master", "fp16"], ["bf16-master", "fp16"]))
def test_every_precision_goes_on_bit_for_bit(text: str, tmp_path: Path, precision: str) -> None:
    config = made(text, "pp=2", f"plan.schedule=zb-h1,plan.precision={precision},model.dropout=0.1")
    trained(config, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "again", ignore=shutil.ignore_patterns("step-00000004"))
    trained(config, tmp_path / "again", resume=True)
    ours, theirs = state(tmp_path / "run", 4), state(tmp_path / "again", 4)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    # Against one process in the same precision: products round to eight bits in bf16, and a loss is a mean of many.
    sets = f"plan.precision={precision},model.dropout=0.1,plan.microbatch=2"  # as many rows: they overflow alike
    trained(made(text, "dp=1", sets), tmp_path / "alone")
    losses = ([line["loss"] for line in latest(tmp_path / name) if line["kind"] == "step"] for name in RUNS)
    assert next(losses) == pytest.approx(next(losses), rel=2**-8)


def test_ranks_that_are_threads_are_refused_a_gpu(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their backward passes share one thread of autograd, and would wait for one another there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = made(text, "dp=2", "train.device=auto")
    with pytest.raises(UsageError, match="2 ranks that are threads on a GPU"):
        run_threads(2, lambda comm: choose_device(config, comm))


def test_microbatches_fill_the_pipeline_unless_something_was_said(text: str) -> None:
    plan = made(text, "dp=2,pp=2").plan
    assert (plan.accumulation, plan.microbatch) == (4, 1)
    plan = made(text, "pp=2", "plan.schedule=dualpipe", "train.batch=12").plan
    assert (plan.accumulation, plan.microbatch) == (4, 3)
    plan = made(text, "pp=2", "plan.accumulation=2").plan
    assert (plan.accumulation, plan.microbatch) == (2, 4)


@pytest.mark.parametrize(
    ("mesh", "sets", "words"),
    [
        ("pp=8", "", "plan.pp 8 needs as many layers, the model has 4: pp 4 at most"),
        ("pp=4", "plan.schedule=zb-v", "2 chunks of zb-v needs as many layers, the model has 4: pp 2 at most"),
        ("pp=2", "plan.schedule=dualpipe,plan.accumulation=2", "accumulation is 2, 4 is the next that can"),
        ("pp=2", "plan.schedule=interleaved,plan.interleave=2,plan.accumulation=1", "accumulation is 1, 2 is the next"),
        ("pp=2", "plan.schedule=terapipe,plan.slices=17", "slices is 17 and train.context is 16: .*slices=16"),
        ("pp=2", "plan.recompute=full,plan.recompute_stages=[2]", r"the stages of pp 2 are 0 to 1; set plan.recompute"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_before_a_rank_starts(text: str, mesh: str, sets: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        made(text, mesh, *filter(None, [sets]))


@pytest.mark.parametrize(
    ("mesh", "sets", "passes"),
    [
        ("dp=1", "plan.accumulation=2", 4),
        ("dp=1", "plan.accumulation=1,plan.recompute=full", 2),
        ("dp=1", "plan.accumulation=2,plan.offload=activations", 16),
        ("dp=2", "plan.accumulation=1,plan.zero=3", 8),
    ],
)
def test_memory_over_the_step_is_on_the_page_without_stages_too(
    text: str, tmp_path: Path, mesh: str, sets: str, passes: int
) -> None:
    """Counted in the first step, after each pass, beside what liveness says: to the byte, but for some hundred bytes of
    tokens and masks where layers come and go or are computed again."""
    trained(made(text, mesh, sets), tmp_path / "run")
    run = read(tmp_path / "run")
    kept = expected_kept(run.config, run.predicted, run.summary)
    assert kept is not None
    page = str(memory_over_step(run, kept))
    assert "Memory of a rank over the step" in page
    plan = config.from_dict(ParallelPlan, dict(run.plan), "run")
    guess, counted = memory_lines(run, plan, one_rank(len(kept.kept), plan.accumulation), kept)
    assert len(counted[0]) == passes + 1
    is_plain = not (plan.layer_by_layer or plan.recompute != "none")
    assert counted[0] == (guess[0] if is_plain else pytest.approx(guess[0], rel=0.01))
    assert max(guess[0]) > 0


@pytest.mark.parametrize(
    ("mesh", "offload", "gigabytes", "words"),
    [
        ("dp=2", "optimizer", 3e-3, "that of 2 ranks takes .*the nearest layout that works: --set plan.zero=[12]$"),
        ("dp=1", "optimizer+activations", 3e-3, "the nearest layout that works: --set plan.offload=optimizer$"),
        ("dp=1", "optimizer", 1e-3, "the nearest layout that works: --set plan.offload=$"),
    ],
)
def test_states_that_the_host_does_not_hold_are_refused_with_what_it_does(
    text: str, mesh: str, offload: str, gigabytes: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = made(text, mesh, f"plan.offload={offload},model.width=128,train.device=auto")
    machine = dataclasses.replace(this_machine(), memory_bytes=int(gigabytes * 1e9))
    monkeypatch.setattr("tilemesh.train.check.this_machine", lambda: machine)
    monkeypatch.setattr("tilemesh.train.check.usable_gpus", lambda: ("NVIDIA H200",))
    with pytest.raises(UsageError, match=words):
        check_machine(config)


@pytest.mark.parametrize(
    ("mesh", "offload", "share", "words"),
    [
        ("dp=2", "optimizer", 0.9, "of which 2 ranks take .* the nearest layout that works: --set plan.zero=[12]$"),
        ("dp=1", "weights", 0.97, "of which 1 rank takes .* the nearest layout that works: --set plan.offload=$"),
        ("dp=1", "activations", 0.1, "no layout near it fits either: train a smaller model"),
    ],
)
def test_on_a_cpu_what_is_moved_stays_in_its_memory_and_must_fit_there(
    text: str, mesh: str, offload: str, share: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = f"plan.offload={offload},model.layers=8,model.width=1024,train.batch=2"
    config = made(text, mesh, sets)
    counts = (config.model.layers,)
    room = Room(config.model, Cluster((make_node(CPU, config.ranks),)), config.context, "eager")
    needed = config.ranks * room.fullest(config.plan, counts).total_bytes

    def check(memory_bytes: int) -> None:
        machine = dataclasses.replace(this_machine(), memory_bytes=memory_bytes)
        monkeypatch.setattr("tilemesh.train.check.this_machine", lambda: machine)
        check_machine(config)

    check(needed)
    with pytest.raises(UsageError, match=words):
        check(int(share * needed))
