"""The command line as a user meets it: exit codes, one line for an error, and what `--debug` adds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import tilemesh
from tilemesh.cli.main import main, make_app, take_debug


def tilemesh_command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tilemesh", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False, cwd=cwd)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tilemesh {tilemesh.__version__}\n"
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        said = capsys.readouterr().out
        assert all(command in said for command in ("doctor", "calibrate", "launch"))


@pytest.mark.parametrize("arguments", [[], ["bench"], ["graph"], ["data"]])
def test_what_a_command_is_for_fits_its_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*arguments, "--help"]) == 0
    _, _, listed = capsys.readouterr().out.partition("Commands:\n")
    assert listed
    assert [line for line in listed.splitlines() if line.endswith("...")] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lanch"], "unknown command for tilemesh 'lanch': did you mean 'launch'? known are "),
        (["--vesion"], "unknown option for tilemesh '--vesion': did you mean '--version'? known are "),
        (["launch", "--rank", "2"], "unknown option for tilemesh launch '--rank': did you mean '--ranks'? known are "),
        (["launch", "--ranks", "two", "--", "true"], "invalid value for '--ranks'"),
        (["launch", "--ranks", "two", "--", "true"], "(given: two); see tilemesh launch --help"),
        (["launch", "--ranks", "2"], "missing argument"),
        (["launch", "--ranks", "2", "--", "nowhere.py"], "script nowhere.py does not exist"),
        (
            ["launch", "--ranks", "2", "--transport", "mip", "--", "true"],
            "unknown transport 'mip': did you mean 'mpi'?",
        ),
        (["launch", "--", "true"], "how many ranks? give --ranks (inside"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    [line] = said.err.splitlines()
    assert line.startswith("tilemesh: ")
    assert message in line


def test_debug_shows_the_traceback_wherever_it_stands() -> None:
    assert take_debug(["launch", "--debug", "--ranks", "2"]) == (["launch", "--ranks", "2"], True)
    assert take_debug(["launch", "--", "x.py", "--debug"]) == (["launch", "--", "x.py", "--debug"], False)
    done = tilemesh_command("launch", "--ranks", "2", "--debug", "--", "nowhere.py")
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "nowhere.py does not exist" in done.stderr


def test_a_failing_rank_is_exit_code_1_and_the_last_line(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise ValueError('bent')\n")
    done = tilemesh_command("launch", "--ranks", "1", "--transport", "torch", "--", "bad.py", cwd=tmp_path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert "[0] ValueError: bent" in lines
    assert lines[-1].startswith("tilemesh: rank 0 raised ValueError: bent; job of 1 rank ended after")


def test_our_own_errors_in_a_rank_are_one_line_too(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("from tilemesh.core.errors import UsageError\nraise UsageError('no such thing')\n")
    done = tilemesh_command("launch", "--ranks", "1", "--transport", "torch", "--", "bad.py", cwd=tmp_path)
    assert "[0] tilemesh: no such thing" in done.stderr.splitlines()
    assert "Traceback" not in done.stderr


def test_output_that_nobody_reads_any_more_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text("while True: print('more')\n")
    line = [sys.executable, "-m", "tilemesh", "launch", "--ranks", "2", "--transport", "torch", "--", "chatty.py"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().endswith("more\n")
    process.stdout.close()
    assert process.wait(timeout=20) == 1
    errors = process.stderr.read()
    process.stderr.close()
    assert "Traceback" not in errors


def test_the_console_script_is_installed() -> None:
    script = Path(sys.executable).with_name("tilemesh")
    if not script.exists():
        pytest.skip("runs from source: no console script")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert done.stdout == f"tilemesh {tilemesh.__version__}\n"


def test_no_option_is_shown_with_its_own_name_in_capitals() -> None:
    """Some versions of typer (0.27) take such a placeholder for the option's name: `--code CODE` became `--CODE`."""

    def options(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for name, inner in getattr(command, "commands", {}).items():
            yield from options(inner, (*path, name))
        for parameter in command.params:
            metavar = getattr(parameter, "metavar", None) or ""
            if parameter.param_type_name == "option" and metavar.lower() == parameter.name:
                yield (*path, metavar)

    assert list(options(typer.main.get_command(make_app()))) == []


@pytest.mark.parametrize(("typed", "offered"), [("tilemesh tr", "train"), ("tilemesh train --dr", "--dry-run")])
def test_a_shell_completes_commands_and_options(typed: str, offered: str) -> None:
    asked = {"_TILEMESH_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    line = [sys.executable, "-m", "tilemesh"]
    done = subprocess.run(line, env=os.environ | asked, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [offered]
