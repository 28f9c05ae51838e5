"""`docs/coverage.md` is true: 271 rows, each with a command that is understood, a link that leads somewhere or a name
that can be imported; what is computed on paper also runs."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tilemesh.cli import typed
from tilemesh.cli.main import main
from tilemesh.core.options import check_options
from tilemesh.guide.book import part_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coverage.md"
_ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+) \|$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")
ROWS = [(int(number), what, where) for number, what, where in _ROW.findall(PAGE.read_text())]
COMMANDS = sorted({command for _, _, where in ROWS for command in re.findall(r"`tilemesh ([^`]+)`", where)})
QUICK = ("bench collective --simulate", "bench collective all_reduce --draw", "plan draw")
ON_PAPER = (*QUICK, "bench kernel", "plan", "tune")
"""What times nothing; the quick of them take a twentieth of a second."""


def test_every_topic_has_a_row_and_every_row_a_place() -> None:
    assert [number for number, _, _ in ROWS] == list(range(1, 272))
    for number, what, where in ROWS:
        links, names = _LINK.findall(where), re.findall(r"`(tm\.[^`]+|tilemesh [^`]+)`", where)
        assert links or names, f"row {number}, {what}: names neither a command nor a page"
        for link in links:
            assert (PAGE.parent / link).exists(), f"row {number}: {link} is not there"


def test_names_of_python_can_be_imported() -> None:
    names = {name for _, _, where in ROWS for name in re.findall(r"`(tm\.[^`]+)`", where)}
    assert len(names) >= 5
    for name in names:
        found: Any = importlib.import_module("tilemesh")
        for part in name.split(".")[1:]:
            found = getattr(found, part)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to where it would begin its work: options and their values are checked, a training run's settings are read."""
    understood: list[Any] = []

    def check(_: object, options: Any) -> int:
        check_options(options)
        understood.append(options)
        return 0

    monkeypatch.setattr(typed, "run", check)
    assert main(shlex.split(command)) == 0
    (options,) = understood
    if command.startswith("guide "):
        part_of(options.chapter)
    if command.startswith("bench graph"):
        from tilemesh.bench.graph.models import MODELS
        from tilemesh.bench.graph.studies import STUDIES

        assert set(options.study) <= set(STUDIES)
        assert set(options.models) <= set(MODELS)
    if command.startswith("train"):
        from tilemesh.train.load import load

        load(sets=options.sets, mesh=options.mesh, recipe=options.recipe)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith(QUICK)])
def test_what_is_quick_runs(command: str) -> None:
    assert main(shlex.split(command)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith(ON_PAPER)])
def test_what_is_computed_on_paper_runs(command: str) -> None:
    assert main(shlex.split(command)) == 0
