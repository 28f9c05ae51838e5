"""Ctrl-C: one line that says what is left, exit code 130, no traceback, and nothing half-written."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tilemesh as tm
from tilemesh.cli.main import main
from tilemesh.model import huggingface

SETS = (
    "model.layers=1,model.width=16,model.heads=2,model.kv_heads=2,model.mlp_width=32,model.context=16,train.steps=1,"
    "train.batch=4,evaluate.every=0,evaluate.sequences=2,sample.tokens=0,train.trace_steps=0,train.device=cpu"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run")
    (place / "text.txt").write_text("bottles on the wall\n" * 300)
    config = tm.train.load_config(sets=[SETS, f"data.source={place / 'text.txt'}"], mesh="dp=1")
    return tm.train.fit(config, run=place / "run").folder


def interrupting(real: Any) -> Any:
    """The function, with Ctrl-C after it."""

    def call(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options)
        signal.raise_signal(signal.SIGINT)
        return result

    return call


@pytest.fixture(autouse=True)
def plain_handler() -> Any:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins without one
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "where", ["compress.shrink:shrink", "bench.compress.measure:judge", "bench.compress.run:point_of"]
)
def test_compress_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    home, _, name = where.partition(":")
    module = importlib.import_module(f"tilemesh.{home}")
    monkeypatch.setattr(module, name, interrupting(getattr(module, name)))
    out = tmp_path / "small"
    command = ["compress", str(run), "--recipe", "int8", "--out", str(out), "--calibrate", "32", "--sequences", "1"]
    assert main(command) == 130
    assert capsys.readouterr().err.splitlines()[-1] == f"tilemesh: interrupted: {out} was not written"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("was_there", [False, True])
def test_export_leaves_nothing_and_a_folder_that_was_there(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], was_there: bool
) -> None:
    out = tmp_path / "model"
    if was_there:
        out.mkdir()
    monkeypatch.setattr(huggingface, "save_parameters", interrupting(huggingface.save_parameters))
    assert main(["export", str(run), str(out)]) == 130
    assert capsys.readouterr().err == f"tilemesh: interrupted: {out} was not written\n"
    assert list(tmp_path.rglob("*")) == ([out] if was_there else [])


def test_a_folder_is_no_model_before_it_is_complete(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody can clean up: config.json is the last file of a folder that gets its name."""
    seen: list[set[str]] = []
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        seen.append({path.name for path in (tmp_path / "model").iterdir() if path.suffix != ".part"})
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    assert files - seen[-1] == {"config.json"}


def test_every_command_has_the_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """typer's own way of calling a command makes an exit code of an interrupt, without a word."""
    monkeypatch.setattr("tilemesh.cli.commands.doctor.inventory", interrupting(dict))
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "tilemesh: interrupted\n"


LONG = {
    "compress": ["compress", "RUN", "--recipe", "int4-g16-gptq", "--out", "out", "--calibrate", "9999"],
    "export": ["export", "RUN", "out"],
    "data prepare": ["data", "prepare", "stdlib", "out"],
    "calibrate": ["calibrate"],
    "verify": ["verify", "--ranks", "4", "--json", "rows.jsonl"],
    "verify, threads": ["verify", "--ranks", "4", "--transport", "threads"],
    "plan": ["plan", "llama-3-8b", "--cluster", "1024xh100", "--html", "plan.html", "--json", "plan.jsonl"],
    "generate": ["generate", "RUN", "--prompt", "a", "--tokens", "100000"],
    "bench collective": ["bench", "collective", "all_reduce", "--ranks", "2", "--json", "rows.jsonl"],
    "bench exchange": ["bench", "exchange", "--json", "rows.jsonl"],
    "bench train": ["bench", "train", "--json", "rows.jsonl"],
    "bench serve": ["bench", "serve", "--json", "rows.jsonl"],
    "bench methods": ["bench", "methods", "--json", "rows.jsonl"],
    "bench compress": ["bench", "compress", "RUN", "--json", "rows.jsonl"],
    "bench graph": ["bench", "graph", "gpt2", "--json", "rows.jsonl"],
    "report": ["report", "RUN", "--html", "page.html"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_long_commands_end_at_once_wherever_they_are(run: Path, tmp_path: Path, name: str) -> None:
    for delay_s in (0.5, 1.5, 3.0, 6.0):
        here = tmp_path / str(delay_s)
        here.mkdir()
        command = [str(run) if word == "RUN" else word for word in LONG[name]]
        environ = os.environ | {"XDG_CACHE_HOME": str(here / "cache")}
        process = subprocess.Popen(
            [sys.executable, "-m", "tilemesh", *command],
            cwd=here, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        time.sleep(delay_s)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the group
        _, errors = process.communicate(timeout=60)
        # What a callback of Python's own imports raises is ignored by Python, which says so.
        assert "Traceback" not in errors or "Exception ignored in" in errors
        assert not [path for path in here.rglob("*") if path.suffix == ".part"]
        out = here / "out"
        assert name == "data prepare" or not out.exists() or (out / "config.json").exists()
        # Where an interrupt passes through exec(), Python ends itself by the signal: a shell says 130 of that as well.
        assert process.returncode in (130, -signal.SIGINT, 0, 2)  # the last two: it had ended
        if process.returncode == 130 or (process.returncode < 0 and errors):
            assert errors.splitlines()[-1].startswith("tilemesh: interrupted"), errors
