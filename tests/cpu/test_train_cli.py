"""The commands around training, in one process: what they print, what they refuse, and `fit` from Python."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import tilemesh as tm
from tilemesh.cli.main import main
from tilemesh.cli.output import program
from tilemesh.cli.pages import beside
from tilemesh.core.errors import UsageError
from tilemesh.measure.row import Row
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.operations import published_flops
from tilemesh.plan.local import AnyMachine, MeasuredCluster
from tilemesh.report import run_page
from tilemesh.report.run import read as read_run
from tilemesh.runs import names
from tilemesh.runs.files import read_object
from tilemesh.runs.folder import kind_of
from tilemesh.runs.metrics import FAILED, STEP, STOPPED, last_line, latest
from tilemesh.train import predict
from tilemesh.train.check import RankProgram
from tilemesh.train.events import sink_to
from tilemesh.train.load import load
from tilemesh.train.preview import preview
from tilemesh.train.progress import Shown, step_words
from tilemesh.train.rows import TAKING_TURNS, rows, run_mfu_words

SMALL = (
    "model.layers=1,model.width=16,model.heads=2,model.kv_heads=2,model.mlp_width=32,model.context=16,train.steps=6,"
    "train.batch=4,plan.dp=1,plan.tp=1,checkpoint.every=3,evaluate.every=3,evaluate.sequences=2,sample.tokens=6,"
    "train.device=cpu"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank, by `fit`, in this process."""
    place = tmp_path_factory.mktemp("cli")
    (place / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    config = tm.train.load_config(sets=[SMALL, f"data.source={place / 'text.txt'}"])
    result = tm.train.fit(config, run=place / "run")
    assert (result.step, result.interrupted) == (6, False)
    assert result.held_out is not None
    assert "step time" in [row.name for row in result.rows]
    return place / "run"


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_fit_writes_what_the_command_writes_except_the_page(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command starts a rank through the launcher, `fit` trained in this process: the folders are alike."""
    monkeypatch.delenv("COLUMNS", raising=False)
    other, source = tmp_path / "run", f"data.source={run.parent / 'text.txt'}"
    assert main(["train", "--set", SMALL, "--set", source, "--out", str(other)]) == 0
    (first,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("dp 1 x tp 1"))
    assert "= 1 rank, batch 4" in first
    assert "fp32; on the CPU with " in first  # alone it talks to nobody
    assert len(first) <= 100
    assert files_of(other) == {*files_of(run), names.PAGE}
    assert {names.PREDICTED, names.ENVIRONMENT, names.SUMMARY, names.ROWS, names.ABOUT, names.SAMPLE} <= files_of(run)
    assert kind_of(run) == kind_of(other) == "train"
    for name in (names.PREDICTED, names.ENVIRONMENT, names.SUMMARY):
        assert read_object(run / name).keys() == read_object(other / name).keys()
    assert read_object(run / names.SUMMARY)["loss"] == read_object(other / names.SUMMARY)["loss"]
    steps = [[line["loss"] for line in latest(place) if line["kind"] == STEP] for place in (run, other)]
    assert steps[0] == steps[1]


def test_fit_tells_its_listener_and_prints_nothing(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    events: list[Mapping[str, Any]] = []
    source = f"data.source={run.parent / 'text.txt'}"
    config = tm.train.load_config(sets=[SMALL, source, "evaluate.every=0,sample.tokens=0"])
    result = tm.train.fit(config, run=tmp_path / "run", stop_after=2, on_event=events.append)
    assert (result.step, result.interrupted) == (2, True)
    assert events[0] == {"kind": "run", "folder": str(tmp_path / "run")}
    assert [event["step"] for event in events if event["kind"] == STEP] == [1, 2]
    assert (events[-1]["kind"], events[-1]["step"], events[-1]["saved_step"]) == ("end", 2, 2)
    assert capfd.readouterr() == ("", "")
    # Another number of steps: what the run was until then stays beside it.
    longer = tm.train.load_config(sets=[SMALL, source, "evaluate.every=0,sample.tokens=0,train.steps=4"])
    assert tm.train.fit(longer, resume=tmp_path / "run").step == 4
    assert (tmp_path / "run" / names.earlier_config(2)).exists()
    assert len(read_object(tmp_path / "run" / names.ENVIRONMENT)["commands"]) == 2


def test_ranks_that_fail_are_an_error_that_names_the_folder(run: Path, tmp_path: Path) -> None:
    sets = [SMALL, f"data.source={run.parent / 'text.txt'}", "optimizer.lr=1e30,optimizer.clip=0,sample.tokens=0"]
    with pytest.raises(tm.train.RanksFailedError, match=r"rank 0.*step \d") as raised:
        tm.train.fit(tm.train.load_config(sets=sets), run=tmp_path / "run", in_process=False)
    assert (raised.value.folder, raised.value.interrupted) == (tmp_path / "run", False)
    assert last_line(tmp_path / "run")["kind"] == STOPPED
    two = tm.train.load_config(sets=[SMALL, "plan.dp=2"])
    with pytest.raises(ValueError, match="one process is one rank"):
        tm.train.fit(two, run=tmp_path / "two", in_process=True)
    assert not (tmp_path / "two").exists()


def test_a_run_in_this_process_that_fails_says_so_in_its_metrics(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("the widget is bent")

    monkeypatch.setattr("tilemesh.train.rank.lay_model", broken)
    config = tm.train.load_config(sets=[SMALL, f"data.source={run.parent / 'text.txt'}"])
    with pytest.raises(RuntimeError, match="the widget is bent"):
        tm.train.fit(config, run=tmp_path / "run", in_process=True)
    told = last_line(tmp_path / "run")
    assert (told["kind"], told["why"]) == (FAILED, "RuntimeError: the widget is bent")


def test_weights_from_a_folder_without_a_model_are_refused_before_there_is_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json there"):
        tm.train.fit(tm.train.load_config(sets=[SMALL]), run=tmp_path / "run", init=tmp_path)
    assert not (tmp_path / "run").exists()


def test_generate_export_and_what_they_refuse(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), "--prompt", "to be", "--tokens", "10"]) == 0
    wrote = capsys.readouterr().out
    assert wrote.startswith("to be")
    assert main(["generate", str(run), "--prompt", "to be", "--tokens", "10", "--step", "3"]) == 0
    assert main(["export", str(run), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "config.json").exists()
    capsys.readouterr()
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert "is no run" in capsys.readouterr().err
    assert main(["generate", str(run), "--prompt", "x", "--step", "5"]) == 2
    assert "there are 3, 6" in capsys.readouterr().err


def test_data_prepare(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(run.parent / "text.txt")
    assert main(["data", "prepare", source, str(tmp_path / "shards"), "--held-out", "0.1"]) == 0
    assert "8,201 tokens in 2 shards of uint8, vocabulary 256" in capsys.readouterr().out
    assert main(["data", "prepare", source, str(tmp_path / "shards")]) == 2
    assert main(["data", "prepare", str(tmp_path / "none"), str(tmp_path / "b")]) == 2


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["train", "--set", "train.step=3"], "did you mean 'train.steps'"),
        (["train", "gpt2"], "did you mean 'gpt2-124m'"),
        (["train", "llama-3-405b", "--set", "train.device=cpu"], "for weights, gradients and optimizer states alone"),
        (["train", "--mesh", "dp=3"], "does not divide among dp=3"),
        (["train", "--resume", "nowhere"], "is no run"),
        (["train", "--resume", "nowhere", "--init", "x"], "leave --init out"),
        (["train", "--plan", "none.toml"], "does not exist"),
        (["train", "--set", "data.source=/nowhere/at/all"], "data.source '/nowhere/at/all' does not exist"),
        (["train", "--restarts", "-1"], "expected 0 or more"),
        (["train", "--transport", "mpl"], "did you mean 'mpi'"),
        (["train", "--stop-after", "0"], "expected a step from 1 to 120"),
        (["bench", "train", "--peers", "eagre"], "did you mean 'eager'"),
        (["bench", "train", "--blocks", "0"], "--blocks is 0: expected a whole number, between 1 and"),
    ],
)
def test_wrong_use_is_one_line(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert error in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ("model.layers=2", "model.layers is 1 there and 2 here"),
        ("optimizer.name=sgd", "optimizer.name is adamw there and sgd here"),
    ],
)
def test_a_run_goes_on_as_what_it_is(run: Path, sets: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And its folder still says what it was: the line that resumes it works."""
    before = (run / "config.toml").read_text()
    assert main(["train", "--resume", str(run), "--set", sets]) == 2
    assert words in capsys.readouterr().err
    assert (run / "config.toml").read_text() == before
    with pytest.raises(ValueError, match=words):
        tm.train.fit(tm.train.load_config(sets=[SMALL, sets]), resume=run)


def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--out", str(tmp_path / "run"), "--restarts", "-1"]) == 2
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_stopped_at_a_step_that_is_past(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", str(run), "--set", "train.steps=9", "--stop-after", "4"]) == 2
    assert "expected a step from 7 to 9" in capsys.readouterr().err


def test_a_runs_rows_say_what_is_missing_and_why(run: Path) -> None:
    found = read_object(run / "summary.json")
    made = rows(found, {"missing": "nobody asked"})
    shown = ["step time", "throughput", "MFU", "HFU", "peak memory per rank"]  # one rank has nothing to exchange
    shown += ["energy per step", "energy per token"]
    assert [row.name for row in made] == shown
    assert made[0].missing["predicted"] == "nobody asked"
    predicted = rows(found, {"step_time_s": 0.5, "tokens_per_s": 128.0, "mfu": 0.1, "memory_bytes": 1e6})
    assert predicted[0].predicted == 0.5
    assert predicted[1].predicted == 128.0


def test_mfu_as_published_tables_count_stands_beside(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_object(run / "summary.json")
    monkeypatch.setattr("tilemesh.train.rows.calibrated_peak", lambda found: (1e12, ""))
    tokens = found["batch"] * found["context"]
    published = published_flops(ModelConfig(**found["model"]), found["context"]) * tokens
    timed = {**found, "step_time_s": {"median": 0.5, "p20": 0.4, "p80": 0.6, "n": 3}}
    share = 100 * published / 0.5 / 1e12
    words = run_mfu_words(timed, rows(timed, {}))
    assert words.endswith(f"as published tables count, without masked scores, it is {share:.1f} %")
    untimed = {**found, "step_time_s": None}
    assert run_mfu_words(untimed, rows(untimed, {})) == ""
    # The page says the same, also where another calibration is, or none: its rows and words are of the run's.
    shown = beside(dataclasses.replace(read_run(run), summary=timed, rows=rows(timed, {})))
    monkeypatch.undo()
    assert shown.mfu_words == words
    assert f"{words}." in run_page.render(read_run(run), shown).replace("\u00a0", " ")


def test_of_a_gpu_the_memory_that_torch_allocates_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run reads what torch allocated: what the context and the libraries reserve is not in it."""

    def no_calibration(name: str, machine: AnyMachine) -> list[MeasuredCluster]:
        raise UsageError(f"{name} was not calibrated")

    monkeypatch.setattr(predict, "local_readings", no_calibration)
    told = predict.predict_run(load("gpt2-124m", gpus=1), ["NVIDIA H200"])
    assert told["memory"]["reserved_bytes"] > 0
    assert told["memory_bytes"] == told["memory"]["total_bytes"] - told["memory"]["reserved_bytes"]


def test_the_exchange_share_is_that_of_the_rank_that_waited_least(run: Path) -> None:
    """The planner predicts the exchange itself; a rank that comes early to it waits, and that is not foreseen."""
    # On a busy machine all of so short a run's steps may fall beside a checkpoint's writing, and none be timed.
    found = read_object(run / "summary.json") | {"step_time_s": {"median": 1.0, "p20": 1.0, "p80": 1.0, "n": 5}}
    ranks = [{"step_s": 1.0, "exchange_s": one, "data_s": 0.0, "idle_s": 0.01} for one in (0.3, 0.1)]
    told = {"step_time_s": 1.0, "exchange_share": 0.08}
    share = next(r for r in rows({**found, "ranks": ranks, "cores": 2, "world": 2}, told) if r.name == "exchange share")
    assert share.measured is not None
    assert share.measured.median == pytest.approx(0.11)
    assert share.predicted == 0.08
    # Ranks that take turns on a core wait for each other's turns: that is measured as exchange, predicted as computing.
    crowded = rows({**found, "ranks": ranks, "cores": 2, "world": 4}, told)
    share = next(r for r in crowded if r.name == "exchange share")
    assert share.predicted is None
    assert share.missing["predicted"] == TAKING_TURNS


def test_fit_says_what_it_needs(run: Path) -> None:
    with pytest.raises(ValueError, match="a config, or a run to resume"):
        tm.train.fit()
    with pytest.raises(ValueError, match="leave run and init out"):
        tm.train.fit(resume=run, run="x")
    again = tm.train.fit(resume=run)  # there is nothing left to do
    assert again.step == 6


def test_events_become_lines(capsys: pytest.CaptureFixture[str]) -> None:
    event = {
        "kind": "step", "step": 3, "steps": 10, "loss": 2.5, "held_out": 2.75, "tokens_per_s": 4100.0,
        "memory_bytes": 3 << 20, "left_s": 12.0,
    }  # fmt: skip
    words = step_words(event)
    assert words.split("  ")[0].startswith("step")
    assert "held-out 2.7500" in words
    assert "4.1k tokens/s" in words
    assert "12 s left" in words
    assert "reward 0.2500  held-out reward 0.3000" in step_words(event | {"reward": 0.25, "held_out": -0.3})
    scored = {"reward": 0.0, "held_out": 0.0, "unscored": 0.25, "unscored_why": "task: ValueError: no"}
    assert "held-out reward 0.0000  25% of answers not scored: task: ValueError: no  " in step_words(event | scored)
    heard = {"reward": 0.0, "unheard": 0.5, "unheard_why": "ValueError: no"}
    assert "50% of answers not heard by the environment: ValueError: no  " in step_words(event | heard)
    line = sink_to(Shown())
    line(0, "out", b"\x1e" + b'{"kind": "say", "text": "hello"}')
    line(1, "out", b"plain")
    line(0, "out", b"\x1e{half")
    line(1, "err", b"bad")
    said = capsys.readouterr()
    assert said.out == "hello\n[1] plain\n"
    assert said.err == "[1] bad\n"


def test_the_lines_to_copy_call_what_a_shell_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `make train` the command lies in .venv/bin, where no shell looks."""
    commands = tmp_path / ".venv" / "bin"
    commands.mkdir(parents=True)
    (commands / "tilemesh").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(commands / "python"))
    monkeypatch.setenv("PATH", "")
    assert program() == ".venv/bin/tilemesh"
    monkeypatch.setenv("PATH", str(commands))
    assert program() == "tilemesh"
    monkeypatch.setenv("PATH", "")
    (commands / "tilemesh").unlink()
    assert program() == ".venv/bin/python -m tilemesh"


# ---- what would run --------------------------------------------------------------------------------------------


def test_a_dry_run_shows_what_would_run_and_writes_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = f"data.source={run.parent / 'text.txt'}"
    assert main(["train", "--dry-run", "--set", SMALL, "--set", source, "--json", "rows.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert [line.split(":")[0] for line in shown.splitlines() if line[:1] not in ("", " ")] == [
        "model", "data", "layout", "steps", "memory", "time", "files", "nothing was started", "rows",
    ]  # fmt: skip
    assert "6 of 4 x 16 = 64 tokens, 384 tokens in all" in shown
    assert all(len(line) <= 100 for line in shown.splitlines())
    assert files_of(tmp_path) == {"rows.jsonl"}
    assert [Row.from_json(line).measured for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == [None] * 4


@pytest.mark.usefixtures("warm")
def test_training_says_that_text_looks_like_json_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text('{"text": "some words of a line"}\n' * 200)
    asked = ["--set", SMALL, "--set", "data.mixture=[text.txt=3,stdlib=1]"]
    assert main(["train", *asked, "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "data: 75 % text.txt and 25 % this Python's standard library, bytes as tokens" in shown
    assert "text.txt looks like JSON lines and is read as text" in shown
    assert main(["train", *asked, "--set", "train.steps=1"]) == 0
    assert "text.txt looks like JSON lines and is read as text" in " ".join(capsys.readouterr().out.split())


def test_a_dry_run_refuses_what_training_refuses(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--set", SMALL, "--set", "data.source=/nowhere"]) == 2
    assert "data.source '/nowhere' does not exist" in capsys.readouterr().err


def test_a_preview_counts_the_bytes_of_a_checkpoint_and_the_steps_left(run: Path) -> None:
    seen = preview(tm.train.load_config(resume=run), resume=run)
    assert (seen.done, seen.steps, seen.folder) == (6, 0, str(run))
    files = sorted((run / names.CHECKPOINTS / "step-00000006").glob("*.safetensors"))
    stored = sum(path.stat().st_size for path in files)
    # A safetensors file begins with a header of names and shapes, of some hundred bytes a tensor.
    tensors = 3 * len(list(Transformer(seen.config.model, device="meta").parameters()))
    assert seen.checkpoint_bytes < stored < seen.checkpoint_bytes + 300 * tensors


def test_a_preview_says_what_the_planner_says_of_memory_and_time() -> None:
    config = tm.train.load_config(sets=[SMALL, "train.steps=1000,checkpoint.every=100"])
    parts = dict.fromkeys(
        ("weights", "gradients", "optimizer", "activations", "logits", "working", "reserved"), 1 << 30
    )
    memory = {f"{name}_bytes": size for name, size in parts.items()} | {"total_bytes": 7 << 30, "usable_bytes": 6 << 30}
    told = {"memory": memory, "fits": False, "step_time_s": 0.5, "tokens_per_s": 128.0}
    seen = preview(config, program=RankProgram(predict=lambda config, gpus: told))
    lines = dict(seen.lines())
    assert seen.seconds == 500
    assert "7 GiB per rank of 6 GiB: DOES NOT FIT" in lines["memory"]
    assert "500 ms per step, 128 tokens/s, 8.33 min for all steps" in lines["time"]
    assert seen.disk_bytes == 4 * seen.checkpoint_bytes  # three that are kept, and one that is being written
    for steps, count in ((200, 5), (40, 1), (50, 1), (51, 2), (120, 4)):  # and the best: of every 50th or 60th step
        sets = [f"checkpoint.keep_best=true,evaluate.every=60,checkpoint.every=50,train.steps={steps}"]
        best = preview(load("tiny", mesh="dp=1", sets=sets))
        assert (steps, best.disk_bytes) == (steps, count * best.checkpoint_bytes)
    assert ", and the best; " in dict(best.lines())["files"]
    full = dataclasses.replace(seen, free_bytes=0)
    assert "TOO LITTLE SPACE" in dict(full.lines())["files"]


def test_a_run_of_another_kind_is_resumed_by_its_own_command(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(run, tmp_path / "taught")
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {"kind": "align"}))
    assert main(["train", "--resume", str(folder), "--set", "train.steps=9"]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert f"is a run of kind 'align': go on with `tilemesh align --resume {folder}`" in words.replace("/ ", "/")
