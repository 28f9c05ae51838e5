"""Bad input of the commands around training: refused in one line, before there is a run's folder or a rank.

Each case was once a traceback, a failure inside ranks or after all training, a setting that was ignored, or minutes of
computing. A command and `fit` from Python refuse the same, in the same words.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fuzz_cases
import pytest

import tilemesh as tm
from tilemesh.cli.main import main
from tilemesh.cli.models import load_model
from tilemesh.core.config import split_sets
from tilemesh.core.errors import UsageError
from tilemesh.core.files import filling
from tilemesh.data.config import DataConfig
from tilemesh.data.prepare import prepare
from tilemesh.model.families.book import from_json, read_config
from tilemesh.runs.names import CHOICES, CONFIG
from tilemesh.train.config import OptimizerConfig, TrainConfig, of_run
from tilemesh.train.load import load

SMALL = (
    "model.layers=1,model.width=16,model.heads=2,model.kv_heads=2,model.mlp_width=32,model.context=16,train.steps=2,"
    "train.batch=4,plan.dp=1,plan.tp=1,evaluate.every=0,evaluate.sequences=0,sample.tokens=0,train.device=cpu"
)
MANY_DIGITS = "9" * 5000


@pytest.fixture
def nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to be in, where no run may be made and no rank may start."""

    def started(*arguments: object, **options: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("tilemesh.train.job.launch_ranks", started)
    monkeypatch.setattr("tilemesh.train.job._train_here", started)
    place = tmp_path / "empty"
    place.mkdir()
    monkeypatch.chdir(place)
    yield place
    assert not list(place.iterdir())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one rank."""
    place = tmp_path_factory.mktemp("bad")
    (place / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    tm.train.fit(load(sets=[SMALL, f"data.source={place / 'text.txt'}"]), run=place / "run")
    return place / "run"


def refusal(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """What a command says that must refuse: one line."""
    assert main(words) == code, capsys.readouterr()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("tilemesh: ")
    assert len(err) < 700
    return err


SETTINGS = [
    ("sample.temperature=-1", "sample.temperature is -1.0: expected 0 or more"),
    ("sample.temperature=nan", "sample.temperature is nan: expected 0 or more"),
    ("sample.temperature=inf", "sample.temperature is inf: expected 0 or more"),
    ("sample.tokens=1000000000000", "sample.tokens is 1000000000000: expected a whole number, between 0 and 1,000,000"),
    ("train.seed=99999999999999999999", "train.seed is '99999999999999999999', expected a whole number below 2**63"),
    ("train.seed=-1", "train.seed is -1: expected a whole number, between 0 and"),
    # was found only inside ranks
    ("plan.tp=3,plan.dp=1", "plan.tp is 3: 4 heads are not divisible by it; the nearest that can are 2 and 4"),
    ("plan.tp=64,plan.dp=1", "plan.tp is 64: 4 heads are not divisible by it"),
    ("plan.dp=4096,train.batch=4096", "a plan of 8192 ranks"),
    ("optimizer.epsilon=-1", "optimizer.epsilon is -1.0: expected 0 or more"),
    ("optimizer.betas=1.5,2", "optimizer.betas is 1.5: expected at least 0 and below 1"),
    ("optimizer.betas=0.9", "optimizer.betas is '0.9', expected a list of 2"),
    ("optimizer.weight_decay=nan", "optimizer.weight_decay is nan: expected 0 or more"),
    ("optimizer.lr=inf", "optimizer.lr is inf: expected 0 or more"),
    ("optimizer.momentum=1", "optimizer.momentum is 1.0: expected at least 0 and below 1"),
    ("optimizer.lr_end=-1", "optimizer.lr_end is -1.0: expected 0 or more"),
    ("train.timeout_s=-1", "train.timeout_s is -1.0: expected above 0 and at most"),
    ("train.timeout_s=0", "train.timeout_s is 0.0: expected above 0"),
    ("train.timeout_s=nan", "train.timeout_s is nan: expected above 0"),
    ("data.tokenizer=/nonexistent", "data.tokenizer '/nonexistent' does not exist"),
    ("data.tokenizer=", "data.tokenizer '.' is a folder: expected a tokenizer.json file; it has no"),
    ("model.vocabulary=10", "model.vocabulary is 10 and text is read as bytes: set model.vocabulary=256"),
    ("model.norm_epsilon=-1", "model.norm_epsilon is -1.0: expected 0 or more"),
    ("model.rotary_base=0", "model.rotary_base is 0.0: expected a number above 0"),
    # was ignored, or taken for something else
    ("plan.accumulation=3", "it must divide the 8 sequences that a replica has in a step; set plan.accumulation=2"),
    (
        "plan.accumulation=3,plan.microbatch=2",
        "and train.batch is 16: the plan cuts 12 sequences; set train.batch=12",
    ),
    ("plan.microbatch=0", "plan.microbatch is 0: expected a whole number"),
    ("plan.microbatch=3", "it must divide the 8 sequences that a replica has in a step; set plan.microbatch=2"),
    ("data.source=", "data.source is '': expected stdlib, a text, JSONL"),
    ("data.pattern=", "data.pattern is '': expected a pattern of file names"),
    ("data.held_out=nan", "data.held_out is nan: expected at least 0 and below 1"),
    # was a traceback
    ("data.source=~nosuchuser/x", "data.source '~nosuchuser/x' does not exist"),
    (f"train.steps={MANY_DIGITS}", "expected a whole number below 2**63"),
    (f"data.source={'x' * 5000}", "File name too long"),
    ("sample.prompt=\udcff", "expected UTF-8 text"),
    # took minutes
    ("train.batch=100000000000,plan.microbatch=99999999999", "expected a whole number, between 1 and 2,147,483,647"),
    ("train.batch=2147483646,plan.microbatch=1073741822", "set plan.microbatch=357913941"),
    ("model.layers=1000003", "model.layers is 1000003: expected a whole number, between 1 and 10,000"),
    ("model.layers=-3", "model.layers is -3: expected a whole number, between 1 and 10,000"),
]


@pytest.mark.parametrize(("settings", "words"), SETTINGS, ids=[settings[:50] for settings, _ in SETTINGS])
def test_settings(settings: str, words: str, nothing_starts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(["train", "--set", settings], capsys)
    assert words in said
    with pytest.raises(UsageError) as raised:
        tm.train.fit(tm.train.load_config(sets=[settings]))
    assert said == f"tilemesh: {' '.join(str(raised.value).split())}\n".encode(errors="replace").decode()


def test_a_gpu_that_is_not_there(
    nothing_starts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilemesh.train.check.usable_gpus", lambda: ())
    monkeypatch.setattr("tilemesh.measure.machine.usable_gpus", lambda: ())
    said = refusal(["train", "--set", "train.device=cuda"], capsys)
    assert "train.device is cuda and this machine has no GPU: set train.device=cpu" in said


OPTIONS = [
    (["train", "--mesh", "tp=3"], "plan.tp is 3: 4 heads are not divisible by it"),
    (["train", "--mesh", "tp=64"], "plan.tp is 64: 4 heads"),
    (["train", "--mesh", "dp=²"], "--mesh 'dp=²': expected axes and sizes, such as dp=2,tp=2"),
    (["train", "--mesh", f"dp={MANY_DIGITS}"], "expected axes and sizes"),
    (["train", "--mesh", "dp=4294967296"], "expected axes and sizes"),
    (["train", "--mesh", ""], "--mesh is empty"),
    (["train", "--mesh", "dp=-1"], "expected axes and sizes"),
    (["train", "--mesh", "pp=2,pp=2"], "--mesh 'pp=2,pp=2': pp is there twice: say each axis once"),
    (["train", "--mesh", "dp=2,pp=2", "--ranks", "3"], "--ranks is 3 and the mesh has 4 (dp=2,tp=1,pp=2): say with"),
    (["train", ""], "CONFIG.toml|PRESET|FILE.py:FUNCTION is empty"),
    (["train", "--plan", ""], "--plan is empty"),
    (["train", "--resume", ""], "--resume is empty"),
    (["train", "--init", ""], "--init is empty"),
    (["train", "--out", ""], "--out is empty"),
    (["train", "--set", ""], "--set is empty: give a value, or leave it out"),
    (["train", "--ranks", "0"], "--ranks is 0: expected at least 1"),
    (["train", "--ranks", "-4"], "--ranks is -4: expected at least 1"),
    (["train", "--ranks", "100000"], "does not divide among dp=50000"),
    (["train", "--stop-after", "-1"], "--stop-after is -1: expected a step from 1 to 120"),
    (["plan", "llama-3-8b", "--set", "model.layers=1000003"], "model.layers is 1000003: expected"),
    (["plan", "llama-3-8b", "--set", f"model.layers={MANY_DIGITS}"], "expected a whole number below 2**63"),
    (["plan", "llama-3-8b", "--set", "model.dropout=nan"], "model.dropout is nan"),
    (["plan", "", "--cluster", "8xh100"], "is empty: give a value"),
    (["plan", "tiny", "--cluster", "²xh100"], "cluster '²xh100' is not understood"),
    (["plan", "tiny", "--cluster", f"{MANY_DIGITS}xh100"], "is not understood: write 64xh100"),
    (["plan", "tiny", "--cluster", "8xh100", "--batch", "1" + "0" * 18], "--batch is 1000000000000000000: expected"),
    (["plan", "tiny", "--batch-tokens", MANY_DIGITS], "is too large: write one below 2**63"),
    (["plan", "tiny", "--batch-tokens", "²"], "count '²' is not a number with a unit"),
    (["plan", "tiny", "--cluster", "8xh100", "--fix", f"tp={MANY_DIGITS}"], "expected a whole number below 2**63"),
    (
        ["data", "prepare", "stdlib", "out", "--held-out", "-1"],
        "--held-out is -1.0: expected at least 0 and below 1",
    ),
    (["data", "prepare", "stdlib", "out", "--held-out", "1"], "--held-out is 1.0"),
    (["data", "prepare", "stdlib", "out", "--held-out", "2"], "--held-out is 2.0"),
    (["data", "prepare", "stdlib", "out", "--held-out", "nan"], "--held-out is nan"),
    (["data", "prepare", "stdlib", "out", "--pattern", ""], "--pattern is empty"),
    (["data", "prepare", "stdlib", "out", "--pattern", "."], "--pattern is '.'"),
    (["data", "prepare", "", "out"], "SOURCE is empty"),
    (["data", "prepare", "stdlib", ""], "FOLDER is empty"),
    (["export", "run", ""], "FOLDER is empty"),
    (["serve", "run", "--name", ""], "--name is empty"),
    (["bench", "serve", "tiny", "--rates", ""], "--rates is empty"),
    (["bench", "collective", "all_reduce", "--ranks", " "], "--ranks is empty"),
    (["bench", "serve", "tiny", "--step-tokens", "0"], "--step-tokens is 0: expected a whole number, between 1 and"),
    (["bench", "serve", "tiny", "--step-length", "-1"], "--step-length is -1: expected a whole number"),
    (["bench", "train", "tiny", "--profile", "/proc/x"], "--profile '/proc/x' cannot be written"),
    (["plan", "llama-3-8b", "--cluster", "1xh100", "--serve", "--dtype", "fp3"], "unknown dtype 'fp3'"),
    (["plan", "llama-3-8b", "--cluster", "1xh100", "--serve", "--rate", "inf"], "--rate is inf: expected above 0"),
    (["guide", "--answer", "3"], "--answer belongs to a chapter"),
    (["train", "tiny", "--max-time", "1d1d"], "'1d1d' is no duration"),
    (["compress", "run", "--recipe", "awq", "--out", "o"], "names no number format: write such as int4-g128-awq"),
    (["compress", "run", "--recipe", "int8-smooth", "--out", "o"], "no a8: write int8-smooth-a8"),
    (["compress", "run", "--recipe", "heads-100", "--out", "o"], "expected a percentage from 1 to 99"),
    (["bench", "serve", "tiny", "--steps", MANY_DIGITS], "expected whole numbers, such as 1,64"),
    (["serve", "run", "--mesh", f"tp=000000256{MANY_DIGITS}"], "expected a whole number from 1 to 256 after tp="),
    (["serve", "run", "--mesh", "tp=0000002569"], "expected a whole number from 1 to 256 after tp="),
    (["data", "prepare", "~nosuchuser/x", "out"], "does not exist"),
    (
        ["data", "prepare", "stdlib", "out", "--tokenizer", "/nonexistent"],
        "--tokenizer '/nonexistent' does not exist",
    ),
]


@pytest.mark.parametrize(("words", "expected"), OPTIONS, ids=[" ".join(words)[:50] for words, _ in OPTIONS])
def test_options(words: list[str], expected: str, nothing_starts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refusal(words, capsys)


def test_no_command_takes_an_empty_word(nothing_starts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option and argument of every command, found in the tree that typer makes."""
    tried = 0
    for name, command in fuzz_cases.commands().items():
        base = fuzz_cases.BASES.get(name, (fuzz_cases.Base(),))[0]
        for parameter in fuzz_cases.parameters(command):
            if parameter.name in ("command", "prompt"):
                continue  # of the user's own script; a prompt is refused by the tokens that it has
            said = refusal(list(fuzz_cases._with(base, name, parameter, "")), capsys)
            assert "is empty" in said or "invalid value for" in said, (name, parameter.name, said)
            tried += 1
    assert tried > 150


@pytest.mark.parametrize("text", [",", "a=1,,b=2", "a=1,", ",a=1", "a=1, ,b=2"])
def test_no_list_has_an_empty_value(text: str, nothing_starts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option whose metavar has a comma: those are the lists."""
    lists = set()
    for name, command in fuzz_cases.commands().items():
        base = fuzz_cases.BASES.get(name, (fuzz_cases.Base(),))[0]
        for parameter in fuzz_cases.parameters(command):
            if "," not in (parameter.metavar or ""):
                continue
            lists.add(f"{name} {parameter.opts[-1]}")
            if parameter.multiple:  # settings: refused where they are read, after what they are settings of
                with pytest.raises(UsageError, match=r"ends with a comma|sets nothing"):
                    split_sets([text])
            else:
                said = refusal(list(fuzz_cases._with(base, name, parameter, text)), capsys)
                assert "a value beside a comma is empty" in said, (name, parameter.name, said)
    assert len(lists) > 25
    assert {"bench serve --rates", "bench compress --recipes", "plan serve --goal", "train --set"} <= lists


RESUMED = [
    (["--ranks", "4"], "--ranks is 4 and the run has 1 (dp=1,tp=1): say with --mesh how they are laid out"),
    (["--out", "elsewhere"], "leave --out and --init out"),
    (["tiny"], "leave a configuration out"),
    (["--init", "x"], "leave --init out"),
    (["--mesh", "tp=4"], "plan.tp is 4: 2 heads are not divisible by it"),
    (["--mesh", "dp=3"], "train.batch 4 does not divide among dp=3"),
    (["--set", "model.width=32"], "model.width is 16 there and 32 here"),
    (["--set", "optimizer.name=sgd"], "optimizer.name is adamw there and sgd here"),
    (["--set", "plan.accumulation=3"], "it must divide the 4 sequences that a replica has"),
    (["--set", "optimizer.betas=2,2"], "optimizer.betas is 2.0"),
    (["--stop-after", "1"], "--stop-after is 1: expected a step from 3 to 2"),
]


@pytest.mark.parametrize(("words", "expected"), RESUMED, ids=[" ".join(words) for words, _ in RESUMED])
def test_resuming_as_something_else(
    words: list[str], expected: str, run: Path, nothing_starts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert expected in refusal(["train", *words, "--resume", str(run)], capsys)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_what_a_resumed_run_becomes(run: Path, tmp_path: Path) -> None:
    before = of_run(run)
    assert load(resume=run) == before
    assert load(resume=run, ranks=1) == before
    moved = load(resume=run, mesh="dp=2,tp=2", sets=["train.steps=9"])
    assert (moved.plan.dp, moved.plan.tp, moved.plan.microbatch, moved.batch) == (2, 2, 2, before.batch)
    assert (moved.train.steps, moved.model) == (9, before.model)
    assert load(resume=run, sets=["plan.accumulation=2"]).plan.microbatch == 2
    (tmp_path / "plan.toml").write_text('tp = 2\nmicrobatch = 1\nprecision = "bf16"\n')
    planned = load(resume=run, plan=tmp_path / "plan.toml")
    # The plan's layout, and the run's batch.
    assert (planned.plan.tp, planned.plan.precision, planned.plan.accumulation, planned.batch) == (2, "bf16", 4, 4)


GENERATED = [
    (["--prompt", ""], "an empty prompt: give at least one character"),
    (["--prompt", "\udcff"], "prompt"),
    (["--prompt", "x", "--temperature", "-1"], "temperature is -1.0: expected 0 or more"),
    (["--prompt", "x", "--temperature", "nan"], "temperature is nan: expected 0 or more"),
    (["--prompt", "x", "--seed", "18446744073709551616"], "seed is a whole number of 65 bits: expected"),
    (["--prompt", "x", "--seed", "-1"], "seed is -1"),
    (["--prompt", "x", "--tokens", "-1"], "tokens is -1: expected a whole number, between 0 and 1,000,000"),
    (["--prompt", "x", "--tokens", "99999999999"], "tokens is 99999999999"),
    (["--prompt", "x", "--step", "-1"], "step"),
]


@pytest.mark.parametrize(("words", "expected"), GENERATED, ids=[" ".join(words) for words, _ in GENERATED])
def test_generate(words: list[str], expected: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refusal(["generate", str(run), *words], capsys)


def test_the_smallest_temperature_takes_the_likeliest(run: Path) -> None:
    """1e-320 divides into infinities, whose softmax was NaN."""
    assert tm.serve.generate(run, "to be", tokens=8, temperature=1e-320) == tm.serve.generate(
        run, "to be", tokens=8, temperature=0
    )


def test_export(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert "file is a file: expected a new folder" in refusal(["export", str(run), str(tmp_path / "file")], capsys)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("mine")
    assert "mine is there already and not empty" in refusal(["export", str(run), str(tmp_path / "mine")], capsys)
    assert (tmp_path / "mine" / "config.json").read_text() == "mine"
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 50)
    asked = ["data", "prepare", str(tmp_path / "text.txt"), str(tmp_path / "mine")]
    assert "mine is there already and not empty" in refusal(asked, capsys)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.json"]
    asked = ["data", "prepare", str(tmp_path / "file"), str(tmp_path / "out")]
    assert "file is empty: there is no text to prepare" in refusal(asked, capsys)
    assert not (tmp_path / "out").exists()
    (tmp_path / "ends.py").write_text("raise SystemExit(0)")
    for command in ("explain", "breaks"):
        assert main(["graph", command, f"{tmp_path / 'ends.py'}:make"]) == 1
        assert "ends.py fails when it is loaded: SystemExit: 0" in capsys.readouterr().err
    assert "is a file, or lies below one" in refusal(["export", str(run), str(tmp_path / "file" / "x")], capsys)
    assert "is no run" in refusal(["export", str(tmp_path), str(tmp_path / "out")], capsys)
    asked = ["compress", str(tmp_path), "--recipe", "int8", "--out", str(tmp_path / "out")]
    assert "is neither a run, with a config.toml, nor a folder of Hugging Face" in refusal(asked, capsys)


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "half"],
        ["generate", "half", "--prompt", "a"],
        ["export", "half", "out"],
        ["compress", "half", "--recipe", "int8", "--out", "out"],
        ["report", "half"],
        ["train", "--resume", "half"],
        ["train", "--init", "half"],
        ["train", "--set", "distill.teacher=half"],
        ["bench", "serve", "half"],
    ],
    ids=" ".join,
)
def test_what_an_export_left_that_was_killed_is_called_so(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if words[0] == "serve":
        pytest.importorskip("uvicorn")
    with filling(tmp_path / "new"):
        shutil.copytree(tmp_path / "new", tmp_path / "half")  # as a process leaves it that does nothing more
    monkeypatch.chdir(tmp_path)
    said = refusal([*words, "--port", "0"] if words[0] == "serve" else words, capsys)
    assert "half is half-written: the command that wrote it was killed; remove it and write it again" in said


# ---- files -----------------------------------------------------------------------------------------------------

MODEL = "[model]\nlayers = 1\nwidth = 16\nheads = 2\ncontext = 16\n"
FILES = [
    (b"\xff\xfe", "is not UTF-8 text"),
    (b"[model]\nlayers = " + MANY_DIGITS.encode(), "not valid TOML: exceeds the limit"),
    (b"x = " + b"[" * 5000, "not valid TOML: nested too deeply"),
    (b"a" + b".a" * 5000 + b" = 1", ""),
    (b"", "missing key 'model.layers'"),
    (b"model = 3", "model is 3, expected a section"),
    (b"train = 3\n" + MODEL.encode(), "train is 3, expected a section"),
    (b"data = 3\n" + MODEL.encode(), "data is 3, expected a section"),
    (MODEL.encode() + b"[train]\nbatch = 7\n[plan]\ndp = 2", "train.batch 7 does not divide among dp=2"),
    (MODEL.encode() + b"[train]\nbatch = 6\n[plan]\naccumulation = 4", "must divide the 6 sequences"),
]


@pytest.mark.parametrize(("content", "expected"), FILES, ids=[str(content[:40]) for content, _ in FILES])
@pytest.mark.parametrize("command", ["train", "plan"])
def test_toml_files(
    command: str,
    content: bytes,
    expected: str,
    tmp_path: Path,
    nothing_starts: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "run.toml").write_bytes(content)
    if command == "plan" and MODEL.encode() in content:  # a plan of a model reads nothing but its section
        assert main([command, str(tmp_path / "run.toml")]) == 0
        return
    said = refusal([command, str(tmp_path / "run.toml")], capsys)
    if command == "train":
        assert expected in said


def test_a_file_need_not_say_the_vocabulary_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(MODEL)
    assert load(str(tmp_path / "run.toml")).model.vocabulary == 256
    (tmp_path / "run.toml").write_text(MODEL + '[data]\ntokenizer = "tokenizer.json"\n')
    with pytest.raises(UsageError, match=r"missing key 'model\.vocabulary'"):
        load(str(tmp_path / "run.toml"))
    with pytest.raises(UsageError, match=r"run\.toml: missing key 'model\.vocabulary': expected a whole number"):
        load_model(str(tmp_path / "run.toml"), [])


@pytest.mark.parametrize(
    ("text", "expected"), [("", "is empty"), ("# no keys\n", "is empty"), ("dp = '2'", "dp is '2'")]
)
def test_plan_files(
    text: str, expected: str, tmp_path: Path, nothing_starts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.toml").write_text(text)
    assert expected in refusal(["train", "--plan", str(tmp_path / "plan.toml")], capsys)


@pytest.mark.parametrize(
    ("content", "expected"), [(b"\xff\xfe", "is not UTF-8 text"), (b"x = " + b"[" * 5000, "too deeply")]
)
def test_a_runs_own_configuration(
    content: bytes, expected: str, tmp_path: Path, nothing_starts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / CONFIG).write_bytes(content)
    for words in (["train", "--resume", str(tmp_path)], ["generate", str(tmp_path), "--prompt", "x"]):
        assert expected in refusal(words, capsys)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("data.source=a.jsonl", "6 tokens are left for training, a sequence takes 129"),
        ("data.source=folder", "6 tokens are left for training"),
        ("data.source=a.txt", "6 tokens are left for training"),
        ("data.source=empty.txt", "1 tokens are left for training"),
        ("data.source=empty.txt,data.packing=none", "has no document with a token in it"),
        # One sequence, of which a part is held out.
        ("data.source=edge.txt", "128 tokens are left for training, 2 are held out, a sequence takes 129"),
        ("data.mixture=[stdlib=1,a.txt=1]", "the text of data.mixture a.txt is shorter than one sequence"),
        ("data.source=shards", "3 tokens are left for training"),
        ("data.source=tokens.txt,data.tokenizer=words.json", "111 tokens are left for training, 2 are held out"),
        ("data.source=chat.jsonl,data.chat=true", "is shorter than one sequence"),
    ],
)  # fmt: skip
def test_text_without_one_sequence(
    settings: str, expected: str, tmp_path: Path, nothing_starts: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for name, text in {
        "folder/b.txt": "to be", "a.txt": "to be", "empty.txt": "", "edge.txt": "x" * 129, "two.txt": "ab",
        "a.jsonl": '{"text": "to be"}\n', "tokens.txt": "to be " * 56,
        "chat.jsonl": '{"messages": [{"role": "user", "content": "to"}, {"role": "assistant", "content": "be"}]}\n',
    }.items():  # fmt: skip
        Path(name).write_text(text)
    if "words.json" in settings:
        tokenizers = pytest.importorskip("tokenizers")
        words = {"to": 0, "be": 1, "<eos>": 2, "?": 3}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens(["<eos>"])
        tokenizer.save("words.json")
    if "shards" in settings:
        prepare(DataConfig(source="two.txt"), Path("shards"))
    assert expected in refusal(["train", "--set", settings], capsys)
    assert not Path("runs").exists()


def test_lines_of_json_are_never_trained_as_text(
    tmp_path: Path, nothing_starts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.jsonl").write_text('{"body": "to be", "id": 3}\n' * 1000)
    for source in (tmp_path / "text.jsonl", tmp_path):
        said = refusal(["train", "--set", f"data.source={source}"], capsys)
        assert "text.jsonl:1 has no field 'text': it has body, id; set data.field" in said
    (nothing_starts.parent / "none").mkdir()
    said = refusal(["train", "--set", f"data.source={tmp_path},data.pattern=*.md"], capsys)
    assert "has no text file named like '*.md': set data.pattern" in said


META = [
    ({"dtype": 3}, "dtype is 3: expected one of uint8, uint16, uint32"),
    ({"dtype": []}, "dtype is []: expected one of"),
    ({"vocabulary": "x"}, "vocabulary is 'x': expected a whole number"),
    ({"vocabulary": -1}, "vocabulary is -1: expected a whole number"),
    ({"tokenizer": 7}, "tokenizer is 7: expected bytes, or the name of a file in this folder"),
    ({"tokenizer": "../x"}, "tokenizer is '../x': expected bytes, or the name"),
    ({"vocabulary": 1000}, "the tokenizer has 1000 tokens and the model's vocabulary is 256"),
    ([1], "holds a list: expected a JSON object"),
]


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["--set", "data.source=texts", "--out", "texts/run"], "texts/run"),
        (["--set", "data.source=texts", "--out", "link/run"], "link/run"),
        (["--set", "data.source=link", "--fallback-dir", "texts/second"], "texts/second"),
        (["--set", "data.source=."], "runs"),
        (["--set", "data.mixture=texts=0.5", "--out", "texts"], "texts"),
    ],
)
def test_a_run_does_not_train_on_its_own_files(
    words: list[str], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.md").write_text("text " * 2000)
    (tmp_path / "link").symlink_to("texts")
    monkeypatch.chdir(tmp_path)
    train = ["train", "--dry-run", "--set", SMALL, *words]
    said = refusal(train, capsys)
    assert f"{folder} lies in the source " in said
    assert "name a folder outside of it, or leave its files out with data.pattern" in said
    assert main([*train, "--set", "data.pattern=*.md"]) == 0


@pytest.mark.parametrize(("meta", "expected"), META, ids=[str(meta) for meta, _ in META])
def test_what_shards_say_of_themselves(
    meta: Any, expected: str, tmp_path: Path, nothing_starts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train-0.bin").write_bytes(bytes(4000))
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert expected in refusal(["train", "--set", f"data.source={tmp_path}"], capsys)


def test_shards_whose_description_is_too_deep(
    tmp_path: Path, nothing_starts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train-0.bin").write_bytes(bytes(4000))
    (tmp_path / "meta.json").write_text("[" * 100_000)
    assert "nested too deeply" in refusal(["train", "--set", f"data.source={tmp_path}"], capsys)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"collectives": 3, "matmul": [1]}', "choices.json: collectives is no table of names"),
        ('{"collectives": {"a": 3}, "matmul": {"b": []}}', "choices.json: matmul is no table of names"),
        ("[", "choices.json is damaged, or cut short"),
        ("[1]", "choices.json is not a JSON object"),
        (None, "choices.json is not there"),
    ],
)
def test_choices_that_are_damaged_are_made_anew_and_said(
    content: str | None, said: str, run: Path, tmp_path: Path
) -> None:
    """What `auto` picked before is a help for bit-exact resuming, never a reason to fail."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / CHOICES).unlink() if content is None else (copy / CHOICES).write_text(content)
    config, events = of_run(copy), []
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=3))
    assert tm.train.fit(longer, resume=copy, on_event=events.append).step == 3
    assert any(said in event["text"] for event in events if event["kind"] == "say")
    assert isinstance(json.loads((copy / CHOICES).read_text())["collectives"], dict)


# ---- Hugging Face ----------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 16, "intermediate_size": 32,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 16}
FOREIGN = [
    (LLAMA, {"rms_norm_eps": "x"}, "model.norm_epsilon is 'x': expected a number"),
    (LLAMA, {"rms_norm_eps": None}, "model.norm_epsilon is None: expected a number"),
    (LLAMA, {"model_type": ["llama"]}, "unknown model_type ['llama']: did you mean 'llama'?"),
    (LLAMA, {"model_type": None}, "unknown model_type None: there is no table of its keys"),
    (
        LLAMA,
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "linear"}},
        "rope_scaling and rope_parameters say different things: leave one away",  # neither key is passed over
    ),
    (
        LLAMA,
        {"rope_parameters": {"rope_type": "yarn"}, "rope_scaling": {"rope_type": "default"}},
        "say different things",
    ),
    (
        LLAMA,
        {
            "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
        "rope_scaling and rope_parameters say different things",
    ),
    (LLAMA, {"rope_parameters": [1]}, "rope_parameters is [1]: expected an object"),
    (LLAMA, {"rope_theta": "x"}, "model.rotary_base is 'x': expected a number"),
    (LLAMA, {"head_dim": "x"}, "head_dim is 'x': expected a whole number"),
    (LLAMA, {"tie_word_embeddings": "yes"}, "model.tied is 'yes': expected true or false"),
    (LLAMA, {"num_key_value_heads": "2"}, "model.kv_heads is '2': expected a whole number"),
    (
        LLAMA,
        {"num_hidden_layers": 10**9},
        "num_hidden_layers is 1000000000: expected a whole number, between 1 and 10,000",
    ),
    (LLAMA, {"hidden_size": True}, "hidden_size is True: expected a whole number"),
    (GPT2, {"n_layer": 10**9}, "n_layer is 1000000000: expected a whole number, between 1 and 10,000"),
    (GPT2, {"n_layer": "1"}, "n_layer is '1': expected a whole number"),
    (GPT2, {"activation_function": ["relu"]}, "activation_function in"),
    (GPT2, {"resid_pdrop": "x", "embd_pdrop": "x"}, "model.dropout is 'x': expected a number"),
    (GPT2, {"n_inner": -4}, "model.mlp_width is -4"),
]


@pytest.mark.parametrize(("base", "changes", "words"), FOREIGN, ids=[str(changes) for _, changes, _ in FOREIGN])
def test_hugging_face_configurations(
    base: dict[str, Any],
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
    nothing_starts: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from_json(base)
    (tmp_path / "config.json").write_text(json.dumps(base | changes))
    with pytest.raises(UsageError) as raised:
        read_config(tmp_path)
    assert words in str(raised.value)
    assert words in refusal(["train", "--init", str(tmp_path)], capsys)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"\xff", b'{"n_layer": ' + MANY_DIGITS.encode() + b"}", b"[]", b""]
)
def test_hugging_face_files(
    content: bytes, tmp_path: Path, nothing_starts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert "config.json" in refusal(["train", "--init", str(tmp_path)], capsys)


# ---- Python ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: tm.train.fit("tiny"),
            "config is 'tiny': expected a TrainConfig, which tilemesh.train.load_config makes",
        ),  # type: ignore[arg-type]
        (lambda: tm.train.fit({"model": {}}), "expected a TrainConfig"),  # type: ignore[arg-type]
        (lambda: tm.train.fit(), "fit needs a config, or a run to resume"),
        (
            lambda: tm.train.fit(changed(optimizer=OptimizerConfig(lr="fast"))),
            "optimizer.lr is 'fast', expected a number",
        ),  # type: ignore[arg-type]
        (lambda: tm.train.fit(changed(optimizer=OptimizerConfig(betas=(0.9, 1.0)))), "optimizer.betas is 1.0"),
        (lambda: tm.train.fit(changed(data=None)), "data is None, expected a section"),
        (lambda: tm.train.fit(changed(), name="a/b"), "name is 'a/b': expected a part of a folder's name"),
        (lambda: tm.train.fit(changed(), name=""), "name is ''"),
        (lambda: tm.train.fit(changed(), run=""), "run is empty"),
        (lambda: tm.train.fit(changed(), restarts=-1), "restarts is -1: expected 0 or more"),
        (lambda: tm.train.fit(changed(), restarts="x"), "restarts is 'x': expected a whole number"),  # type: ignore[arg-type]
        (lambda: tm.train.fit(changed(), stop_after=2.5), "stop_after is 2.5: expected a whole number"),  # type: ignore[arg-type]
        (lambda: tm.train.fit(changed(), transport="x"), "unknown transport 'x'"),
        (lambda: DataConfig(held_out=2), "data.held_out is 2"),
        (lambda: DataConfig(tokenizer="x"), "data.tokenizer is 'x'"),  # type: ignore[arg-type]
    ],
)
def test_python(call: Callable[[], object], words: str, nothing_starts: Path) -> None:
    with pytest.raises(UsageError) as raised:
        call()
    assert words in str(raised.value)
    assert "--" not in str(raised.value)  # flags are the command line's words


def changed(**sections: Any) -> TrainConfig:
    return dataclasses.replace(load(), **sections)


def test_as_a_process(tmp_path: Path) -> None:
    """The same from a shell: exit code 2, one line, nothing left behind."""
    for words in (
        ["train", "--set", "optimizer.betas=1.5,2"],
        ["train", "--mesh", "tp=64"],
        ["data", "prepare", "", "x"],
    ):
        done = subprocess.run([sys.executable, "-m", "tilemesh", *words], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
