"""What a run's weights survive: a disk without room at the end, two jobs in one folder, edits of any file."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import tilemesh as tm
from tilemesh.cli.main import main, make_app
from tilemesh.comm import run_threads
from tilemesh.core.errors import RunError, UsageError
from tilemesh.model.config import ModelConfig
from tilemesh.model.read import read_weights
from tilemesh.runs import checkpoint, manifest
from tilemesh.runs.folder import newest_whole_checkpoint
from tilemesh.runs.lock import RunLock
from tilemesh.runs.manifest import MANIFEST_FILE, checkpoints
from tilemesh.runs.names import CHECKPOINTS, CONFIG, LOCK, METRICS
from tilemesh.runs.reader import Reader, open_checkpoint
from tilemesh.serve.write import generate
from tilemesh.train import export, final
from tilemesh.train.config import TrainConfig, of_run
from tilemesh.train.result import WeightsLostError
from tilemesh.train.resume import _problems, sound_checkpoint

SETS = (
    "model.layers=1,model.width=16,model.heads=2,model.kv_heads=2,model.mlp_width=32,model.context=16,train.steps=6,"
    "train.batch=4,checkpoint.every=2,evaluate.every=0,evaluate.sequences=2,sample.tokens=0,train.trace_steps=0,"
    "train.device=cpu,checkpoint.retry_s=0"
)


def made(folder: Path, *sets: str) -> TrainConfig:
    text = folder / "text.txt"
    text.write_text("".join(f"{number} bottles on the wall\n" for number in range(300)))
    return tm.train.load_config(sets=[SETS, f"data.source={text}", *sets], mesh="dp=1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, with the checkpoints of steps 2, 4 and 6."""
    place = tmp_path_factory.mktemp("whole")
    return tm.train.fit(made(place), run=place / "run").folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    reader = Reader(folder / CHECKPOINTS / f"step-{step:08d}")
    return {name: reader.whole(name) for name in reader.names}


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- the last checkpoint ---------------------------------------------------------------------------------------


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """No file can be written below a folder whose path has one of these words in it."""
    words: set[str] = set()
    real = checkpoint.write_tensors

    def write(path: Path, tensors: Any) -> Any:
        if any(word in str(path) for word in words):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, tensors)

    monkeypatch.setattr(checkpoint, "write_tensors", write)
    return words


def test_lost_weights_are_an_error_that_says_which_step_is_safe(tmp_path: Path, no_room: set[str]) -> None:
    no_room |= {"step-00000004", "step-00000006"}
    with pytest.raises(
        WeightsLostError, match=r"the weights of step 6 could not be saved: step 2 is safe, in .*run$"
    ) as lost:
        tm.train.fit(made(tmp_path), run=tmp_path / "run")
    result = lost.value.result
    assert (result.step, result.saved_step, result.saved_in) == (6, 2, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["saved_step"] == 2
    said: list[str] = []
    generate(tmp_path / "run", "1", tokens=1, say=said.append)
    assert said == [f"{tmp_path / 'run'} was trained to step 6; step 2 is used"]
    no_room.clear()
    again = tm.train.fit(resume=tmp_path / "run")
    assert (again.step, again.saved_step) == (6, 6)
    said.clear()
    generate(tmp_path / "run", "1", tokens=1, say=said.append)
    assert said == []


def test_where_nothing_was_ever_saved_that_is_said(tmp_path: Path, no_room: set[str]) -> None:
    no_room.add("step-")
    with pytest.raises(WeightsLostError, match="step 6 could not be saved: no checkpoint was written"):
        tm.train.fit(made(tmp_path), run=tmp_path / "run")


def test_a_second_place_gets_the_last_weights_and_is_a_run_of_its_own(
    whole: Path, tmp_path: Path, no_room: set[str]
) -> None:
    no_room.add(str(tmp_path / "run"))
    config = made(tmp_path, f"checkpoint.fallback_dir={tmp_path / 'second'}")
    result = tm.train.fit(config, run=tmp_path / "run")
    second = tmp_path / "second" / "run"
    assert (result.saved_step, result.saved_in) == (6, second)
    assert are_equal(weights(second, 6), weights(whole, 6))
    longer = made(tmp_path, f"checkpoint.fallback_dir={tmp_path / 'second'}", "train.steps=8")
    assert tm.train.fit(longer, resume=second).saved_in == second
    with pytest.raises(RunError, match="has no checkpoint yet"):
        generate(tmp_path / "run", "1", tokens=1)
    # The same again takes another name, and touches nothing.
    shutil.rmtree(tmp_path / "run")
    assert tm.train.fit(config, run=tmp_path / "run").saved_in == tmp_path / "second" / "run-1"


@pytest.mark.parametrize("name", [LOCK, "run.json", CONFIG, "predicted.json"])
def test_a_folder_that_takes_no_file_at_all_gives_way_to_the_second_folder(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A disk that is full from the beginning: at the run's lock, or at any of the files that follow."""
    real = Path.write_text

    def write(path: Path, *arguments: Any, **options: Any) -> int:
        if path.parent == tmp_path / "run" and name in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises((RunError, OSError), match="No space left on device"):
        tm.train.fit(made(tmp_path), run=tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    heard: list[str] = []
    config = made(tmp_path, f"checkpoint.fallback_dir={tmp_path / 'second'}")
    result = tm.train.fit(config, run=tmp_path / "run", on_event=lambda event: heard.append(str(event.get("text"))))
    assert result.folder == result.saved_in == tmp_path / "second" / "run"
    assert are_equal(weights(result.folder, 6), weights(whole, 6))
    assert any(f"THE RUN IS IN {result.folder}: " in text and "No space left" in text for text in heard)
    if name != "predicted.json":
        assert not any((tmp_path / "run").iterdir())


def test_a_run_whose_folder_is_full_goes_on_in_the_second(
    whole: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (4, 6):
        shutil.rmtree(run / CHECKPOINTS / f"step-{step:08d}")
    real = Path.write_text

    def write(path: Path, *arguments: Any, **options: Any) -> int:
        if run in path.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", write)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    config = of_run(run)
    second = dataclasses.replace(config.checkpoint, fallback_dir=tmp_path / "second")
    result = tm.train.fit(dataclasses.replace(config, checkpoint=second), resume=run)
    assert result.folder == result.saved_in == tmp_path / "second" / "run"
    assert are_equal(weights(result.folder, 6), weights(whole, 6))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_run_that_had_ended_gets_no_line_when_it_is_resumed(run: Path) -> None:
    before = (run / METRICS).read_bytes()
    assert tm.train.fit(resume=run).step == 6
    assert (run / METRICS).read_bytes() == before
    tm.train.fit(dataclasses.replace(of_run(run), train=dataclasses.replace(of_run(run).train, steps=7)), resume=run)
    added = [json.loads(line)["kind"] for line in (run / METRICS).read_bytes()[len(before) :].splitlines()]
    assert added.count("resumed") == 1
    assert "step" in added


def test_room_that_somebody_makes_in_time_is_used(
    tmp_path: Path, no_room: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room.add("step-00000006")
    monkeypatch.setattr(final, "RETRY_EVERY_S", 0.01)
    heard: list[str] = []

    def hear(event: Any) -> None:
        if event["kind"] == "say":
            heard.append(event["text"])
            if "make room for" in event["text"]:
                no_room.clear()

    result = tm.train.fit(made(tmp_path, "checkpoint.retry_s=30"), run=tmp_path / "run", on_event=hear)
    assert result.saved_step == 6
    (asked,) = (text for text in heard if "make room for" in text)
    assert f"KiB per rank in {tmp_path / 'run' / CHECKPOINTS}; trying again for 30 s" in asked


def test_asking_ends_when_its_time_is_over_or_somebody_interrupts(
    tmp_path: Path, no_room: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room.add("step-00000006")
    monkeypatch.setattr(final, "RETRY_EVERY_S", 0.01)
    with pytest.raises(WeightsLostError):
        tm.train.fit(made(tmp_path, "checkpoint.retry_s=0.05"), run=tmp_path / "a")

    def hear(event: Any) -> None:
        if "make room for" in event.get("text", ""):
            os.kill(os.getpid(), 2)

    with pytest.raises(WeightsLostError):
        tm.train.fit(made(tmp_path, "checkpoint.retry_s=3600"), run=tmp_path / "b", on_event=hear)


def test_the_command_ends_with_the_step_that_is_safe(tmp_path: Path) -> None:
    """A real file system without room: files may not grow beyond what the small ones need."""
    config = made(tmp_path)
    (tmp_path / "run.toml").write_text(config.to_toml())
    code = (
        "import resource, sys; from tilemesh.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); sys.exit(main())"
    )
    command = ["train", str(tmp_path / "run.toml"), "--mesh", "dp=1", "--out", "run", "--transport", "torch"]
    done = subprocess.run(
        [sys.executable, "-c", code, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    last = "tilemesh: the weights of step 6 could not be saved: no checkpoint was written"
    assert done.stderr.splitlines()[-1] == last, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "generate" not in done.stdout


# ---- two jobs in one folder ------------------------------------------------------------------------------------


def test_a_folder_in_which_a_job_runs_is_refused(run: Path, tmp_path: Path) -> None:
    before = sorted(run.iterdir())
    with RunLock(run):
        with pytest.raises(UsageError, match=rf"{run} is in use by process {os.getpid()} on"):
            tm.train.fit(made(tmp_path, "train.steps=8"), resume=run)
        with pytest.raises(UsageError, match="has a run already"):
            tm.train.fit(made(tmp_path), run=run)
    assert sorted(run.iterdir()) == before
    with pytest.raises(UsageError, match="has a run already"):
        tm.train.fit(made(tmp_path), run=run)
    assert sorted(run.iterdir()) == before


def test_a_job_holds_its_folder_while_it_trains_and_no_longer(tmp_path: Path) -> None:
    seen: list[bool] = []
    tm.train.fit(
        made(tmp_path), run=tmp_path / "run", on_event=lambda _: seen.append((tmp_path / "run" / LOCK).exists())
    )
    assert all(seen)
    assert not (tmp_path / "run" / LOCK).exists()


# ---- what was edited -------------------------------------------------------------------------------------------


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    told = json.loads(path.read_text())
    changed = change(told)
    path.write_text(json.dumps(told if changed is None else changed))


EDITS: dict[str, Callable[[Any], Any]] = {
    "position": lambda told: told["values"].update(position=told["values"]["position"] + 4),
    "step": lambda told: told.update(step=told["step"] + 3),
    "optimizer_steps": lambda told: told["values"].update(optimizer_steps=0),
    "empty values": lambda told: told.update(values={}),
    "a piece removed": lambda told: told["pieces"].pop(),
    "an unknown key": lambda told: told.update(more=1),
    "begin": lambda told: told["pieces"][0].update(begin=["x"]),
    "dtype": lambda told: told["pieces"][0].update(dtype="F7"),
    "shape": lambda told: told["pieces"][0].update(shape=None),
    "no digest": lambda told: told.pop("digest"),
    "an earlier schema": lambda told: told.update(schema=1),
    "a list": lambda told: [told],
    "swapped keys": lambda told: (
        [
            one.update(key=key)
            for one, key in zip(told["pieces"][:2], [told["pieces"][1]["key"], told["pieces"][0]["key"]], strict=True)
        ]
        and None
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_manifest_falls_back_to_the_checkpoint_before(run: Path, tmp_path: Path, name: str) -> None:
    edit(run / CHECKPOINTS / "step-00000006" / MANIFEST_FILE, EDITS[name])
    said: list[str] = []
    generate(run, "1", tokens=1, say=said.append)
    assert said[0].endswith("; step 4 is used")
    with pytest.raises(RunError, match=r"no checkpoint of .* is whole: .*step-00000006/manifest.json"):
        export.export(run, tmp_path / "out", 6)
    heard: list[str] = []
    before = run / CHECKPOINTS / "step-00000004"
    assert run_threads(2, lambda comm: sound_checkpoint(run, comm, heard.append)) == [before, before]
    assert heard
    assert all(text.startswith("DAMAGED CHECKPOINT: ") and text.endswith("tried, step-00000004") for text in heard)
    assert (run / CHECKPOINTS / "damaged-step-00000006").is_dir()


def test_a_run_with_an_edited_manifest_comes_to_the_same_weights(run: Path, whole: Path) -> None:
    edit(run / CHECKPOINTS / "step-00000006" / MANIFEST_FILE, EDITS["position"])
    edit(run / CHECKPOINTS / "step-00000004" / MANIFEST_FILE, EDITS["a piece removed"])
    heard: list[str] = []
    result = tm.train.fit(resume=run, on_event=lambda event: heard.append(event.get("text", "")))
    assert any("going on from step 2" in text for text in heard)
    assert result.step == 6
    assert are_equal(weights(run, 6), weights(whole, 6))


def test_a_checkpoint_under_another_steps_name_is_not_taken_for_it(run: Path) -> None:
    os.rename(run / CHECKPOINTS / "step-00000004", run / CHECKPOINTS / "step-00000009")
    assert open_checkpoint(run).manifest.step == 6


def test_where_all_are_damaged_nothing_is_begun(run: Path) -> None:
    assert newest_whole_checkpoint(run) == 6
    for step, path in checkpoints(run / CHECKPOINTS):
        (path / "shard-00000.safetensors").write_bytes(b"x")
        assert newest_whole_checkpoint(run) == (step - 2 or None)
    for _ in range(2):  # also the next time
        with pytest.raises(
            RunError, match=r"no checkpoint of .* is whole .*nothing was changed\. To train it again from step 1"
        ):
            tm.train.fit(resume=run)
        assert [step for step, _ in checkpoints(run / CHECKPOINTS)] == [6, 4, 2]
    # One that was set aside earlier counts as one that there was.
    for _, path in checkpoints(run / CHECKPOINTS):
        os.rename(path, path.with_name(f"damaged-{path.name}"))
    with pytest.raises(RunError, match=r"no checkpoint of .* is whole \(damaged-step-00000002, "):
        tm.train.fit(resume=run)


def test_where_no_manifest_can_be_read_no_rank_is_started(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("tilemesh.launch.start.processes", refuse)
    for _, path in checkpoints(run / CHECKPOINTS):
        (path / MANIFEST_FILE).write_text("{}")
    before = sorted(path.name for path in run.rglob("*"))
    assert main(["train", "--resume", str(run)]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "is whole (step-00000006, step-00000004, step-00000002): stopped, and nothing was changed" in said.err
    assert sorted(path.name for path in run.rglob("*")) == before


@pytest.mark.parametrize(
    ("line", "other"),
    [("width = 16", "width = 32"), ("heads = 2", "heads = 4"), ("norm_epsilon = 1e-05", "norm_epsilon = 0.1")],
)
def test_an_edited_configuration_is_refused(run: Path, tmp_path: Path, line: str, other: str) -> None:
    path = run / CONFIG
    text = path.read_text()
    assert f"\n{line}\n" in text
    path.write_text(text.replace(f"\n{line}\n", f"\n{other}\n", 1))
    name = line.split()[0]
    words = rf"config.toml is not the configuration that step 6 was written with: model\.{name} is .* there and .* here"
    for what in (
        lambda: generate(run, "1", tokens=1),
        lambda: export.export(run, tmp_path / "out"),
        lambda: tm.train.fit(resume=run),
    ):
        with pytest.raises(UsageError, match=words):
            what()
    assert not (tmp_path / "out").exists()


# ---- any edit --------------------------------------------------------------------------------------------------

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 100), st.just(1 << 80), st.floats(), st.text(max_size=3), st.just([]),
    st.just({}), st.just("../text.txt"), st.just([0, 0]),
)  # fmt: skip


@st.composite
def edits(draw: st.DrawFn) -> Callable[[Any], Any]:
    """Somewhere in a JSON value: replaced, removed, added or exchanged with its neighbour."""
    turns = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    how, leaf = draw(st.sampled_from(["replace", "remove", "add", "exchange"])), draw(LEAVES)

    def change(told: Any) -> Any:
        place: Any = None
        key: Any = None
        value = told
        for turn in turns:
            if not isinstance(value, dict | list) or not value:
                break
            place, keys = value, list(value) if isinstance(value, dict) else list(range(len(value)))
            key = keys[turn % len(keys)]
            value = place[key]
        if how == "replace":
            place[key] = leaf
        elif how == "remove":
            del place[key]
        elif how == "exchange":
            other = next(iter(place)) if isinstance(place, dict) else 0
            place[key], place[other] = place[other], place[key]
        elif isinstance(place, dict):
            place["more"] = leaf
        else:
            place.insert(key, leaf)
        return told

    return change


def read(run: Path, model: ModelConfig) -> tuple[int, list[str], dict[str, torch.Tensor]]:
    """Of a run: the step that is used, what was said of it, and the weights; step 0 is one line of error."""
    said: list[str] = []
    try:
        reader = open_checkpoint(run, say=said.append)
        return reader.manifest.step, said, read_weights(model, reader)
    except (RunError, UsageError) as error:
        return 0, [str(error)], {}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=edits())
def test_any_edit_of_a_manifest_is_found(run: Path, whole: Path, change: Callable[[Any], Any]) -> None:
    """The same weights as before, or those of the checkpoint before and a word on it."""
    path = run / CHECKPOINTS / "step-00000006" / MANIFEST_FILE
    shutil.copyfile(whole / CHECKPOINTS / "step-00000006" / MANIFEST_FILE, path)
    edit(path, change)
    step, said, found = read(run, of_run(whole).model)
    assert (step, len(said)) in ((6, 0), (4, 1))
    expected = weights(whole, step)
    assert all(torch.equal(found[name], expected[f"weight:{name}"]) for name in found)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=edits())
def test_what_no_writer_writes_is_refused_for_what_it_is(run: Path, whole: Path, change: Callable[[Any], Any]) -> None:
    """The digest made anew after the edit: whatever is in the manifest then, there is no traceback."""
    path = run / CHECKPOINTS / "step-00000006" / MANIFEST_FILE
    shutil.copyfile(whole / CHECKPOINTS / "step-00000006" / MANIFEST_FILE, path)

    def changed(told: Any) -> Any:
        told = change(told)
        told.pop("digest", None)
        return {**told, "digest": manifest._digest_of(told)}

    edit(path, changed)
    _, said, _ = read(run, of_run(whole).model)
    assert not any("\n" in text for text in said)
    assert isinstance(run_threads(1, lambda comm: _problems(path.parent, comm))[0], list)


@pytest.mark.parametrize("name", ["begin", "dtype", "shape"])
@pytest.mark.parametrize("command", ["generate", "export"])
def test_commands_say_it_in_one_line(run: Path, tmp_path: Path, command: str, name: str) -> None:
    for _, path in checkpoints(run / CHECKPOINTS):
        edit(path / MANIFEST_FILE, EDITS[name])
    rest = ["--prompt", "1"] if command == "generate" else [str(tmp_path / "out")]
    done = CliRunner().invoke(make_app(), [command, str(run), *rest])
    assert isinstance(done.exception, RunError), done.exception
    assert "\n" not in str(done.exception)
