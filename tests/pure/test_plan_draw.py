"""`tilemesh plan draw`: what it prints, writes and refuses; the pictures in the documents are its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tilemesh.cli.commands.plan.draw import DrawOptions, draw, drawn_slice_time
from tilemesh.cli.typed import run
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.book import build, synchronous
from tilemesh.core.step.draw import curves, svg
from tilemesh.core.step.memory import StepBytes, memory_curve
from tilemesh.core.step.program import step_program
from tilemesh.core.step.search import PassTimes
from tilemesh.core.step.simulate import StepTimes, simulate
from tilemesh.core.step.text import from_csv

PICTURES = Path(__file__).parents[2] / "docs" / "parallel" / "schedules"


def asked(name: str, **settings: Any) -> DrawOptions:
    return DrawOptions(schedule=name, **settings)


def test_a_schedule_is_drawn_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {kind: str(tmp_path / f"step.{kind}") for kind in ("svg", "csv", "json", "html")}
    run(draw, asked("zb-v", stages=4, microbatches=8, **files))
    said = capsys.readouterr().out
    assert said.startswith("zb-v: 4 stages, 8 microbatches, 2 chunks per rank (v)\nstep 25.5 with F 1, I 1, W 1")
    words = " ".join(said.split())  # lines break at the terminal's width
    assert "bubble 5.9% of all ranks' time, 0.0% between" in words
    assert "at most 4 (by rank: 4, 4, 4, 4)" in words
    figures = json.loads(Path(files["json"]).read_text())
    assert (figures["step_s"], figures["bubble_rate"], figures["peak_microbatches"]) == (25.5, 0.0, [4.0] * 4)
    assert from_csv(Path(files["csv"]).read_text()).actions == build("zb-v", 4, 8).actions
    page = Path(files["html"]).read_text()
    assert "gradient of weights" in page
    assert "Memory" in page
    run(draw, asked(files["csv"]))
    assert "step 25.5 with" in capsys.readouterr().out


@pytest.mark.parametrize("name", [*synchronous(), "search"])
def test_the_pictures_in_the_documents_are_what_the_code_draws(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"terapipe": {"microbatches": 2}, "dualpipe-v": {"microbatches": 10}}.get(name, {})
    if name == "search":
        settings = {"times": "1,1.2,0.7,0.1", "memory": 3}
    run(draw, asked(name, svg=str(tmp_path / "drawn.svg"), **settings))
    assert (tmp_path / "drawn.svg").read_text() == (PICTURES / f"{name}.svg").read_text()


def test_slices_of_a_drawing_are_found_for_attention_that_grows(capsys: pytest.CaptureFixture[str]) -> None:
    run(draw, asked("terapipe", microbatches=2, json="-"))
    figures = json.loads(capsys.readouterr().out)
    assert figures["slice_tokens"] == [18, 16, 15, 15]
    shares = [drawn_slice_time(16, 16 * place) for place in range(4)]
    times = PassTimes(slice_shares=tuple(share / sum(shares) for share in shares))
    program = build("terapipe", 4, 2, slices=4)
    assert figures["step_s"] < simulate(program, times.times(program)).total_s  # equal slices wait for the last one
    with pytest.raises(UsageError, match="65 slices of a sequence of 64 tokens"):
        run(draw, asked("terapipe", microbatches=2, slices=65))


def zero_picture(stage: int) -> str:
    """ZeRO-2 on two stages, ZeRO-3 layer by layer: the step's own list, with time for what it exchanges."""
    plan = ParallelPlan(dp=2, pp=2, zero=2, accumulation=3) if stage == 2 else ParallelPlan(dp=2, zero=3)
    program = step_program(plan, 4, update=True).program
    one = [1.0] * program.chunks
    times = StepTimes(one, one, one, gather_s=0.6, reduce_s=0.6, update_s=0.3)
    timeline = simulate(program, times, keep_slots=True)
    sizes = StepBytes(weights=one if stage == 3 else (), gradients=one, reduced=[0.5] * program.chunks)
    memory = curves(program, timeline, memory_curve(program, sizes))
    title = f"ZeRO-{stage}: one rank's step" if stage == 3 else "ZeRO-2: a step of two stages, each with replicas"
    areas = "weights whole, gradients" if stage == 3 else "gradients"
    return svg(program, timeline, memory, title, areas)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_pictures_of_zero_are_its_lists(stage: int) -> None:
    assert "gradients summed" in zero_picture(stage)
    assert zero_picture(stage) == (PICTURES / f"zero-{stage}.svg").read_text()


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (asked("zbv"), "did you mean 'zb-v'"),
        (asked("1f1b", stages=0), "stages is 0: expected a whole number, at least 1"),
        (asked("search", microbatches=0), "microbatches is 0: expected a whole number, at least 1"),
        (asked("search", memory=0.1), "the least found is"),
        (asked("1f1b", memory=2), "limit for search"),
        (asked("1f1b", times="1,2"), "expected seconds of F, I, W"),
        (asked("1f1b", times="1,-2,1"), "expected seconds of F, I, W"),
        (asked("1f1b", times="nan,1,1"), "expected seconds of F, I, W"),
        (asked("zb-v", times="1e308,1e308,1e308"), r"such as 1,1,1,0\.1, each 0 or from 1e-09 to 1e\+09"),
        (asked("zb-v", times="1,1,1,1e-320"), "each 0 or from"),
        (asked("search", memory=float("nan")), "memory is nan: expected a number above 0"),
        (asked("search", memory=float("inf")), "memory is inf: expected a number above 0"),
        (asked("terapipe", slices=0), "slices is 0: expected a whole number, at least 1"),
        (asked("terapipe", slices=-1), "slices is -1: expected a whole number, at least 1"),
        (asked("search", slices=2), "--slices with search: it finds that itself"),
        (asked("search", chunks=2), "--chunks with search: it finds that itself"),
        (asked("1f1b", stages=1000, microbatches=1000), "too many to draw"),
        (asked("dualpipe", microbatches=6), "at least 8"),
        (asked("nowhere.csv"), r"^nowhere\.csv does not exist: expected a file"),
        (asked("nowhere.csv", stages=3), "leave it out"),
    ],
)
def test_what_cannot_be_drawn_is_refused(question: DrawOptions, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(draw, question)


def test_rows_to_experts_have_a_lane_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pass takes what it computes and what of its exchanges nothing hides: of 0.5 there 0.1, of 0.3 back all."""
    files = {kind: str(tmp_path / f"step.{kind}") for kind in ("svg", "html", "json")}
    settings: dict[str, Any] = {"stages": 2, "microbatches": 4}
    run(draw, asked("1f1b", **settings, experts="0.5,0.3,0.4", **files))
    said = capsys.readouterr().out
    assert "dispatch 0.5, 0.4 computed beside it, combine 0.3" in " ".join(said.split())
    assert said.count("\nexperts |") == 2
    assert json.loads(Path(files["json"]).read_text())["step_s"] == pytest.approx((4 + 1) * (1.4 + 2.4))
    assert Path(files["svg"]).read_text() == (PICTURES / "experts.svg").read_text()
    assert "0DISPATCH_F0/0" in Path(files["html"]).read_text()
    run(draw, asked("1f1b", **settings, experts="0.4,0,0.4"))
    assert "step 15 with" in capsys.readouterr().out  # nothing is left of it
    for wrong in ("1", "a,b", "0.1,0.1,2"):
        with pytest.raises(UsageError, match=f"--experts {wrong}"):
            run(draw, asked("1f1b", experts=wrong))
