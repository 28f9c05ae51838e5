"""The last line of commands that measure and of runs' pages: what to try next, and what that is predicted to bring."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tilemesh.cli import next_command
from tilemesh.cli.main import main
from tilemesh.cli.next_command import after_layout, after_recipes, after_run, again
from tilemesh.cli.output import Output, show
from tilemesh.core.advice import TYPED, NextCommand
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.report.run import read
from tilemesh.train import load_config, predict


def test_a_gain_is_both_times_and_their_ratio() -> None:
    assert NextCommand.faster("train", 6e-3, 5e-3) == NextCommand(
        "train", "5 ms per step instead of 6 ms, 1.20 times as fast"
    )


def test_it_is_the_last_line_with_its_gain_below(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(Output(["measured"], next=NextCommand("train --plan a.toml", "5 ms per step")), object()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "measured"
    assert lines[-2].startswith("next: ")
    assert lines[-2].endswith(" train --plan a.toml")
    assert lines[-1].split() == ["predicted:", "5", "ms", "per", "step"]


@pytest.mark.parametrize("command", ["calibrate", "doctor", "plan/align", "plan/grade", "plan/serve", "plan/train"])
def test_what_a_machine_s_commands_say_to_type_next_has_no_word_to_fill_in(command: str) -> None:
    text = (Path(__file__).parents[2] / "src/tilemesh/cli/commands" / f"{command}.py").read_text()
    said = re.findall(r'(?:NextCommand\(|words = |command = )f?"([^"]*)"', text)
    assert said or command == "plan/grade"  # which prints the words of others
    assert not [words for words in said if re.search(r"\b[A-Z]{2,}\b", re.sub(r"{.*?}", "", words))]


def test_what_is_fixed_anew_stands_in_place_of_what_was_typed() -> None:
    token = TYPED.set(("plan", "tiny", "--fix", "tp=4,expert_tp=2"))
    try:
        assert again("", "expert_tp=1").words == "plan tiny --fix tp=4,expert_tp=1"
        assert again("", "dp=2,tp=2,pp=1").words == "plan tiny --fix tp=2,expert_tp=2 --fix dp=2,pp=1"
    finally:
        TYPED.reset(token)


@pytest.mark.parametrize(
    ("then_s", "words", "gain"),
    [
        (4e-3, "go plan.zero=1,plan.microbatch=4", "4 ms per step instead of 6 ms, 1.50 times as fast"),
        (5.95e-3, "otherwise", ""),  # the same within 2 %
        (None, "calibrate", ""),
    ],
)
def test_the_layout_that_is_predicted_to_be_quicker_is_what_differs_from_the_run(
    then_s: float | None, words: str, gain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("tiny", mesh="dp=2", sets=["plan.zero=0,plan.microbatch=8"])

    def best(asked: Any, gpus: Any) -> tuple[ParallelPlan, float, float]:
        assert asked is config
        if then_s is None:
            raise UsageError("this machine was not measured")
        return config.changed(plan={"zero": 1, "microbatch": 4}).plan, then_s, 6e-3

    monkeypatch.setattr(predict, "best_layout", best)
    assert after_layout(config, lambda changes: f"go {','.join(changes)}", "otherwise") == NextCommand(words, gain)


def test_the_smallest_recipe_that_costs_nothing_is_next() -> None:
    points = [
        {
            "recipe": name,
            "loss": loss,
            "plain_loss": 2.0,
            "bytes": nbytes,
            "plain_decode_s": 3e-3,
            "predicted_decode_s": then,
        }
        for name, loss, nbytes, then in (("int8", 2.0, 50, 2e-3), ("int4", 2.005, 30, 1.5e-3), ("int2", 2.5, 20, 1e-3))
    ]
    best = after_recipes("runs/a", points)
    assert best.words == "compress runs/a --recipe int4 --out small"
    assert best.gain == "1.5 ms per decoded token instead of 3 ms, 2.00 times as fast"
    assert after_recipes("runs/a", points[2:]).words.split()[3] == "int2"


@pytest.mark.usefixtures("warm")
def test_a_run_its_page_and_its_grade_say_what_is_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = "train.steps=4,train.batch=4,model.layers=1,model.width=16,model.heads=2,model.context=16"
    assert main(["train", "tiny", "--mesh", "dp=1", "--set", settings, "--out", "run"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("next: ")
    after = after_run(read("run"))
    assert after is not None
    assert line.endswith(f" {after.words}")
    assert f"<code>tilemesh {after.words}</code>" in (tmp_path / "run" / "report.html").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary | {"machine": "another"}))
    assert after_run(read("run")) == NextCommand("plan grade run")
    written = (tmp_path / "run" / "config.toml").read_text()
    assert written.count('name = "adamw"') == 1
    (tmp_path / "run" / "config.toml").write_text(written.replace('name = "adamw"', 'name = "muon"'))
    assert after_run(read("run")) == NextCommand("serve run"), "what the planner does not model cannot be graded"
    (tmp_path / "run" / "config.toml").write_text("no configuration")
    assert after_run(read("run")) == NextCommand("report run")


def test_a_plan_is_followed_by_what_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "serve", "tiny", "--cluster", "1xcpu", "--prompt", "8", "--output", "8"]
    assert main([*words, "--out", str(tmp_path / "a.toml")]) == 0
    line, gain = capsys.readouterr().out.splitlines()[-2:]
    random_weights = "bench serve tiny --rates 1 --prompt 8 --output 8 --dtype fp32 --device cpu"
    assert line.endswith(random_weights)
    assert "requests/s at most" in gain
    assert next_command.again("--out plan.toml").words.endswith(" --out plan.toml")
