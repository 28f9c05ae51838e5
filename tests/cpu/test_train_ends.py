"""How a run ends and what is kept: early stopping, the best checkpoint, a limit on time; bits per byte; loggers."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_run import made, state, trained

from tilemesh.cli.main import main
from tilemesh.core.errors import UsageError
from tilemesh.core.units import parse_seconds
from tilemesh.data.corpus import open_corpus
from tilemesh.parallel.mesh import Axis
from tilemesh.runs.checkpoint import Writer
from tilemesh.runs.manifest import checkpoints
from tilemesh.runs.metrics import latest
from tilemesh.runs.reader import read_step
from tilemesh.train.check import check_machine, check_values
from tilemesh.train.config import LogConfig
from tilemesh.train.lessons import Lessons
from tilemesh.train.loggers import NAMES, Loggers
from tilemesh.train.loop import Interrupt, Progress
from tilemesh.train.source import TextSource
from tilemesh.train.steps import Stepper


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {number}: {number * 7} dogs and {number * 13} foxes\n" for number in range(400)))
    return str(path)


def held_out(folder: Path) -> dict[int, float]:
    return {line["step"]: line["held_out"] for line in latest(folder) if line.get("held_out") is not None}


def steps_of(folder: Path) -> list[int]:
    return sorted(step for step, _ in checkpoints(folder / "checkpoints"))


def test_a_loss_has_to_be_lower_by_the_smallest_improvement() -> None:
    progress = Progress()
    verdicts = []
    for step, loss in enumerate([3.0, 2.95, 2.8, 2.79, 2.75, math.inf], start=1):
        progress.step, progress.held_out = step, loss
        verdicts.append(progress.judge(0.1))
    assert verdicts == [True, False, True, False, False, False]
    assert (progress.best_step, progress.best_held_out, progress.evaluations_since_best) == (3, 2.8, 3)
    again = Progress()
    again.load_best({"step": 3, "held_out": 2.8, "evaluations_since": 3})
    assert (again.best_step, again.best_held_out, again.evaluations_since_best) == (3, 2.8, 3)


class TestEarlyStopping:
    # No loss gets better by 10 nats: the first evaluation stays the best.
    SETS = "evaluate.every=2,evaluate.patience=2,evaluate.min_improvement=10,checkpoint.every=0,train.steps=30"
    BEST = "checkpoint.keep_best=true,checkpoint.keep=1,sample.prompt="

    @pytest.fixture(scope="class")
    @classmethod
    def stopped(cls, text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("early") / "run"
        result, said = trained(made(text, "dp=2,tp=1", cls.SETS, cls.BEST), folder)
        assert not result.interrupted
        assert any("early stopping" in line for line in said)
        return folder

    def test_it_ends_after_so_many_evaluations_without_a_better_one(self, stopped: Path) -> None:
        seen = held_out(stopped)
        assert sorted(seen) == [2, 4, 6]
        summary = json.loads((stopped / "summary.json").read_text())
        assert summary["best"] == {"step": 2, "held_out": seen[2]}
        assert summary["ended_early"].startswith("early stopping")
        assert "evaluate.patience" in summary["ended_early"]

    def test_it_ends_where_no_loss_was_ever_a_number(
        self, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Stepper, "evaluate", lambda self: math.nan)
        result, said = trained(made(text, "dp=1,tp=1", self.SETS, "sample.tokens=0"), tmp_path / "run")
        assert result.step == 4
        assert any("no held-out loss that is a number in 2 evaluations" in line for line in said)

    def test_the_sample_begins_as_the_own_text_does(self, stopped: Path, text: str) -> None:
        begin = Path(text).read_text()[:8]
        assert (stopped / "sample.txt").read_text().startswith(begin)

    def test_the_best_and_the_last_checkpoint_are_kept(self, stopped: Path) -> None:
        assert steps_of(stopped) == [2, 6]
        assert (read_step(stopped, "best"), read_step(stopped, "6")) == (2, 6)
        assert state(stopped, 2).keys() == state(stopped, 6).keys()

    def test_resumed_it_has_ended_until_there_is_more_patience(self, text: str, stopped: Path, tmp_path: Path) -> None:
        shutil.copytree(stopped, folder := tmp_path / "run")
        config = made(text, "dp=2,tp=1", self.SETS, self.BEST)
        for _ in range(2):
            result, said = trained(config, folder, resume=True)
            assert (result.step, result.held_out) == (6, held_out(stopped)[6])
            assert any("nothing left to do: it has ended early" in line for line in said)
            for file in ("summary.json", "metrics.jsonl"):
                assert (folder / file).read_bytes() == (stopped / file).read_bytes()
        more = made(text, "dp=2,tp=1", self.SETS, "evaluate.patience=3")
        assert trained(more, folder, resume=True)[0].step == 8

    @pytest.mark.parametrize("held", ["evaluate.sequences=3", "data.held_out=0.1"])
    def test_losses_of_other_held_out_text_are_not_compared(
        self, text: str, stopped: Path, tmp_path: Path, held: str
    ) -> None:
        shutil.copytree(stopped, folder := tmp_path / "run")
        more = made(text, "dp=2,tp=1", self.SETS, self.BEST, "evaluate.patience=3,train.steps=8", held)
        result, said = trained(more, folder, resume=True)
        assert result.step == 8
        assert json.loads((folder / "summary.json").read_text())["best"] == {"step": 8, "held_out": result.held_out}
        assert any("OTHER TEXT IS HELD OUT" in line and "of step 2, is of what was" in line for line in said)
        assert steps_of(folder) == [8]

    def test_a_step_that_is_none(self, stopped: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="expected a number, or best"):
            read_step(stopped, "bset")
        with pytest.raises(UsageError, match="knows of no best step"):
            read_step(tmp_path, "best")

    def test_a_best_checkpoint_that_was_not_written_is_named_nowhere(
        self, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def judge(progress: Progress, min_improvement: float) -> bool:
            is_best = progress.step in (2, 4)
            if is_best:
                progress.best_held_out, progress.best_step = progress.held_out, progress.step
            return is_best

        def commit(writer: Writer, step: int, place: Path) -> int:
            if step == 4:
                raise OSError(28, "No space left on device", str(place))
            return usual(writer, step, place)

        usual = Writer._commit
        monkeypatch.setattr(Progress, "judge", judge)
        monkeypatch.setattr(Writer, "_commit", commit)
        sets = ("evaluate.every=2", "checkpoint.every=0", self.BEST)
        for steps in (6, 8):
            trained(
                made(text, "dp=1,tp=1", *sets, f"train.steps={steps}"), folder := tmp_path / "run", resume=steps > 6
            )
            assert steps_of(folder) == [2, steps]
            assert read_step(folder, "best") == 2

    @pytest.mark.parametrize("key", ["evaluate.every", "evaluate.sequences", "data.held_out"])
    def test_without_a_held_out_loss_it_is_refused(self, text: str, key: str) -> None:
        with pytest.raises(UsageError, match=f"evaluate.patience is 2 and {key} is 0"):
            check_values(made(text, "dp=1,tp=1", f"evaluate.patience=2,{key}=0"))


class TestTime:
    def test_a_run_stops_with_a_checkpoint_when_its_time_is_over(self, text: str, tmp_path: Path) -> None:
        config = made(text, "dp=2,tp=1", "train.max_time_s=1e-6,sample.tokens=0")
        result, _ = trained(config, tmp_path / "run")
        assert (result.interrupted, result.step) == (True, 1)
        assert steps_of(tmp_path / "run") == [1]
        (line,) = [line for line in latest(tmp_path / "run") if line["kind"] == "stopped"]
        assert line["why"] == "train.max_time_s is over"

    def test_without_a_limit_it_is_never_over(self) -> None:
        assert not Interrupt().is_time_over

    def test_durations(self) -> None:
        known = {"90": 90, "90s": 90, "1.5h": 5400, "30m": 1800, "1h30m": 5400, "2d": 172800}
        assert {text: parse_seconds(text) for text in known} == known
        for wrong in ("", "h", "1h30", "5x", "-3", "1 h", "90 90"):
            with pytest.raises(UsageError, match="is no duration"):
                parse_seconds(wrong)

    def test_no_time_at_all_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["train", "--max-time", "0", "--dry-run"]) == 2
        assert "--max-time is 0: expected more than nothing" in " ".join(capsys.readouterr().err.split())


def test_bits_per_byte_of_bytes_are_nats_over_ln_2(text: str, tmp_path: Path) -> None:
    trained(made(text, "dp=2,tp=1", "train.steps=2,evaluate.every=2,sample.tokens=0"), tmp_path / "run")
    (line,) = [line for line in latest(tmp_path / "run") if line.get("held_out") is not None]
    assert line["bits_per_byte"] == pytest.approx(line["held_out"] / math.log(2))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["bits_per_byte"] == line["bits_per_byte"]


def test_a_step_in_which_no_target_counts_has_no_loss(tmp_path: Path) -> None:
    """Its mean over nothing would be the best of all."""
    talk = {
        "messages": [{"role": "user", "content": "why? " * 16}, {"role": "assistant", "content": "Because it is so."}]
    }
    (tmp_path / "talk.jsonl").write_text("\n".join(json.dumps(talk) for _ in range(40)))
    sets = (
        "data.chat=true,data.held_out=0,model.context=16,train.batch=1,plan.microbatch=1,train.steps=12,sample.tokens=0"
    )
    trained(made(str(tmp_path / "talk.jsonl"), "dp=1,tp=1", sets), tmp_path / "run")
    steps = [line for line in latest(tmp_path / "run") if line["kind"] == "step"]
    losses = [line["loss"] for line in steps if "loss" in line]
    assert 0 < len(losses) < len(steps) == 12
    assert min(losses) > 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["loss"] == losses[-1]


def test_what_is_held_out_and_holds_no_sequence_is_said_and_no_loss_to_go_by(text: str) -> None:
    short = "data.held_out=0.005,model.context=256,evaluate.every=1,evaluate.sequences=4"
    lessons = Lessons(made(text, "dp=1,tp=1", short))
    lessons.open()
    assert re.fullmatch(r"no held-out loss: the \d+ tokens held out hold no sequence of 257: .*", lessons.notes())
    for waits in ("evaluate.patience=1", "checkpoint.keep_best=true"):
        with pytest.raises(UsageError, match=r"tokens held out hold no sequence of 257: set data\.held_out higher"):
            Lessons(made(text, "dp=1,tp=1", f"{short},{waits}")).open()


def test_bits_per_byte_count_the_bytes_of_text_alone(tmp_path: Path) -> None:
    """Tokens that end documents are none, and a character that two tokens share has its own bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = {letter: place for place, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    lines = [json.dumps({"text": "caf\u00e9" * (1 + number % 3)}) for number in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    data = f"data.tokenizer={tmp_path / 'tokenizer.json'},data.held_out=0.5,model.context=8,model.vocabulary=257"
    config = made(str(tmp_path / "text.jsonl"), "dp=1,tp=1", data)
    source = TextSource(config, open_corpus(config.data), Axis("dp", 1, 0, (0,), None), torch.device("cpu"))
    targets = torch.cat([batch.tensors[1].flatten() for batch in source.held_out()])
    share = (targets != 256).double().mean().item()  # each other token is a byte
    assert 0.5 < share < 0.95
    assert source.held_out_bytes_per_token() == pytest.approx(share)


class TestLoggers:
    def test_a_package_that_is_missing_is_named(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(UsageError, match=r"log.wandb is on and the package `wandb` is not installed: pip install"):
            check_machine(made(text, "dp=1,tp=1", "log.wandb=offline"))

    def test_both_get_every_figure_and_one_that_fails_is_left_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        logged: list[tuple[dict[str, float], int]] = []

        class Run:
            def log(self, values: dict[str, float], step: int) -> None:
                logged.append((values, step))

            def finish(self) -> None:
                raise OSError("no connection")

        def init(**options: Any) -> Run:
            assert options["mode"] == "offline"
            assert options["id"] == options["name"] == tmp_path.name
            return Run()

        fake = types.SimpleNamespace(init=init, Settings=lambda **options: None)
        monkeypatch.setitem(sys.modules, "wandb", fake)
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        said: list[str] = []
        loggers = Loggers(LogConfig(tensorboard=True, wandb="offline"), tmp_path, {}, said.append)
        assert said[0].startswith("LOG.TENSORBOARD FAILED")
        loggers.add(3, {**dict.fromkeys(NAMES, 2.0), "norm": None, "loss": math.nan})
        assert logged == [({name: 2.0 for key, name in NAMES.items() if key not in ("norm", "loss")}, 3)]
        loggers.close()
        assert "no connection" in said[1]
        assert not loggers.open

    def test_ranks_but_the_first_write_nothing(self, tmp_path: Path) -> None:
        assert not Loggers(LogConfig(tensorboard=True), tmp_path, {}, print, on=False).open

    def test_tensorboard_reads_back_what_was_written(self, tmp_path: Path) -> None:
        reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        loggers = Loggers(LogConfig(tensorboard=True), tmp_path, {}, pytest.fail)
        for step in (1, 2):
            loggers.add(step, {"loss": 3.0 / step, "rate": 0.1})
        loggers.close()
        found = reading.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(1, 3.0), (2, 1.5)]
