"""A pipeline schedule of another package, made of docs/extending.md alone: one file and an entry point, and it is
planned, drawn, proved, trained and held to one process like any other."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tilemesh.cli.commands.verify import train_optimizer
from tilemesh.cli.main import main
from tilemesh.comm import run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step import book, pace
from tilemesh.core.step.check import check
from tilemesh.core.step.memory import StepBytes, memory_peaks
from tilemesh.core.step.program import step_program
from tilemesh.core.step.schedule import PipelineSchedule, PipeShape
from tilemesh.parallel.gate.cases import cases
from tilemesh.parallel.gate.compare import Gate
from tilemesh.parallel.gate.pairs import _chosen, combinations
from tilemesh.plan import search
from tilemesh.plan.space import Pins, searched
from tilemesh.runs.folder import new_run
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.metrics import latest
from tilemesh.train.load import load
from tilemesh.train.rank import train_here
from tilemesh.train.reference import reference_page

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
SETS = (
    "model.layers=6,model.width=16,model.heads=2,model.kv_heads=2,model.mlp_width=32,model.context=16,"
    "train.steps=2,train.batch=4,sample.tokens=0,evaluate.every=2,evaluate.sequences=4,optimizer.warmup=1,"
    "train.device=cpu,train.trace_steps=0,plan.precision=fp64"
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as pip installs it: the example's code, and what the page says to put into pyproject.toml."""
    text = PAGE.read_text(encoding="utf-8").partition("## Add a pipeline schedule")[2]
    (code,) = re.findall(r"```python\n(.*?)```", text.partition("\n## ")[0], re.S)
    (point,) = re.findall(r"```toml\n\[project.entry-points.\"(\S+)\"\]\n(\w+) = \"(\S+)\"\n```", text)
    place = tmp_path_factory.mktemp("site")
    (place / "my_package").mkdir()
    (place / "my_package" / "waves.py").write_text(code)
    described = place / "my_package-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1\n")
    (described / "entry_points.txt").write_text(f"[{point[0]}]\n{point[1]} = {point[2]}\n")
    return place


@pytest.fixture
def waves(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PipelineSchedule]:
    """The schedule, as long as its package is installed."""
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setattr(book, "_known", dict(book._known))
    book._join_packages.cache_clear()
    yield book.find("waves")
    book._join_packages.cache_clear()
    _chosen.cache_clear()


def test_it_is_unknown_without_its_package() -> None:
    with pytest.raises(UsageError, match="unknown schedule 'waves'"):
        ParallelPlan(pp=2, schedule="waves")


def test_it_is_named_drawn_and_proved(waves: PipelineSchedule, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ParallelPlan(pp=2, schedule="waves", accumulation=4)
    assert (plan.chunks, plan.chunks_words) == (6, "pp 2 x 3 chunks of waves")
    check(step_program(plan, 7).program)
    assert f"| `waves` | {waves.meaning} |" in reference_page()
    assert main(["plan", "--draw", "waves", "--stages", "2", "--microbatches", "4"]) == 0
    assert "waves: 2 stages, 4 microbatches, 3 chunks per rank (wave)" in capsys.readouterr().out
    assert main(["plan", "--draw", "wavs"]) == 2
    assert "did you mean 'waves'?" in capsys.readouterr().err


def test_the_planner_counts_its_memory_and_times_it(waves: PipelineSchedule) -> None:
    """What the planner says is what lists and simulation say; and it is tried where it is said to be."""
    program = waves.build(PipeShape(2, 40))
    assert max(memory_peaks(program, StepBytes.activations(6))) == 120
    assert pace.program_for_memory("waves", 2, 40, 1).actions == program.actions
    bubble = pace.bubble_fraction("waves", 2, 8)
    assert 0 < bubble < pace.bubble_fraction("1f1b", 2, 8)  # a third of the model fills the pipeline
    fixed = search("gpt2-124m", "2xa100", batch=32, pins=Pins(pp=2, schedule="waves"))
    assert (fixed.best.plan.schedule, fixed.best.plan.chunks) == ("waves", 6)
    assert fixed.best.bubble_fraction == pace.bubble_fraction("waves", 2, fixed.best.plan.accumulation)
    assert "waves" not in searched()
    book.register(dataclasses.replace(waves, name="surf", is_searched=True))
    found = search("gpt2-124m", "2xa100", batch=32, pins=Pins(pp=2))
    assert {"surf", "1f1b"} <= {point.layout.schedule for point in found.points}


@pytest.mark.parametrize("sampled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_gate_runs_it_equal_to_one_process(waves: PipelineSchedule, sampled: bool) -> None:
    _chosen.cache_clear()
    every = cases(2) if sampled else [*cases(2), *combinations(2)]
    chosen = [case for case in every if case.layout.schedule == "waves"]
    assert sampled or {case.layout.recompute for case in chosen} == {"none", "full", "operators"}
    torch.set_num_threads(1)
    results = run_threads(2, lambda comm: list(Gate(comm, optimizer=train_optimizer).run(chosen)), timeout_s=100)[0]
    assert len(results) == len(chosen) > 0
    assert [result for result in results if not result.passed] == []
    assert max(result.apart.loss for result in results) < 1e-10


def test_training_is_that_of_one_process(waves: PipelineSchedule, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {number} of the text\n" for number in range(300)))
    losses = []
    for mesh, more in (("dp=1", ""), ("pp=2", "plan.schedule=waves"), ("dp=2,pp=2", "plan.schedule=waves,plan.zero=2")):
        config = load("tiny", mesh=mesh, sets=[SETS, f"data.source={tmp_path / 'text.txt'}", *filter(None, [more])])
        folder = tmp_path / mesh
        new_run(TRAIN, config.to_toml(), folder)
        run_threads(config.plan.world, lambda comm, config=config, folder=folder: train_here(config, folder, comm))
        losses.append([line["loss"] for line in latest(folder) if line["kind"] == "step"])
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    assert losses[2] == pytest.approx(losses[0], rel=1e-10)


@pytest.mark.slow
def test_the_command_trains_it_on_processes(package: Path, tmp_path: Path) -> None:
    """Every rank is a process of its own, which finds the schedule where pip put it."""
    paths = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    words = ["train", "tiny", "--mesh", "pp=2", "--set", f"{SETS},plan.schedule=waves", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "tilemesh", *words]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in latest(tmp_path / "run") if line["kind"] == "step"]) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "schedule 'waves' is there already"),
        ({"name": "a,b"}, "choose another name"),
        ({"name": "odd", "is_split": False}, "schedule 'odd': its lists have I, and is_split says otherwise"),
        ({"name": "odd", "refuses": lambda *shape: "odd is for nobody"}, "takes none of 2 to 4 stages"),
        ({"name": "odd", "lists": lambda shape: [()] * shape.stages}, "odd: nobody does 0F0"),
        ({"name": "odd", "place": lambda stages: book.find("zb-v").placement(stages)}, "odd: "),
    ],
)
def test_what_is_not_what_it_says_is_refused(waves: PipelineSchedule, changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        book.register(dataclasses.replace(waves, **changes))  # type: ignore[arg-type]


def test_a_package_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = tmp_path / "broken-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (described / "entry_points.txt").write_text("[tilemesh.schedules]\nlost = no_such_module:LOST\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    book._join_packages.cache_clear()
    with pytest.raises(
        UsageError, match=r"'lost' \(tilemesh.schedules\) of another package cannot be loaded: No module named 'no_such"
    ):
        book.all_schedules()
    monkeypatch.undo()
    book._join_packages.cache_clear()
