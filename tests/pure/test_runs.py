"""The contract of a run's folder: kinds, small files, metrics with torn lines, and what a reader makes of any of it."""

from __future__ import annotations

import ast
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilemesh
from tilemesh.core.errors import RunError, UsageError
from tilemesh.report import run, run_page
from tilemesh.runs import names
from tilemesh.runs.contents import read_contents, version
from tilemesh.runs.files import Unread, read_lines, read_object, write_object
from tilemesh.runs.folder import (
    change_config,
    kind_of,
    new_run,
    read_config,
    read_small,
    read_summary,
    write_environment,
    write_prediction,
)
from tilemesh.runs.journal import Journal
from tilemesh.runs.kind import TRAIN, Kind
from tilemesh.runs.metrics import (
    CHECKPOINT,
    RESUMED,
    STARTED,
    STEP,
    STOPPED,
    WARNING,
    last_line,
    last_step,
    latest,
    read_metrics,
)

DICE = Kind("dice", summary=("throws", "mean"))  # a kind that nothing in the package knows of


def test_a_kind_of_ones_own_needs_no_registration(tmp_path: Path) -> None:
    folder = new_run(DICE, "sides = 6\n", tmp_path / "run")
    write_environment(folder)
    write_prediction(folder, {"mean": 3.5})
    journal = Journal(folder)
    journal.add(STARTED, 0)
    for step, eyes in enumerate([4, 2, 6], 1):
        journal.add(STEP, step, eyes=eyes)
    journal.add("rerolled", 3, text="a die fell off the table")
    journal.summarize(DICE, {"throws": 3, "mean": 4.0})
    assert kind_of(folder) == "dice"
    found = read_contents(folder)
    assert (found.kind, found.config, found.predicted) == ("dice", {"sides": 6}, {"mean": 3.5})
    assert [line["eyes"] for line in found.told.steps.values()] == [4, 2, 6]
    assert [(event.step, event.words) for event in found.told.events] == [(3, "a die fell off the table")]
    assert read_summary(folder, DICE)["mean"] == 4.0
    # The report shows what there is of it; training and grading refuse it by name.
    shown = run_page.render(run.read(folder), run_page.Beside())
    assert all(words in shown for words in ("A run of kind 'dice'".replace("'", "&#x27;"), "a die fell off", "throws"))
    with pytest.raises(UsageError, match="is a run of kind 'dice': expected one of kind 'train'"):
        read_config(folder, TRAIN)
    with pytest.raises(RunError, match="of a run of kind 'dice': expected 'train'"):
        read_summary(folder, TRAIN)


def test_the_kind_of_the_documents_runs_as_it_stands_there(tmp_path: Path) -> None:
    """docs/extending.md, "Add a kind of run": the code block, run, and the page of what it wrote."""
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    code = text.partition("## Add a kind of run")[2].partition("```python\n")[2].partition("```")[0]
    given: dict[str, Any] = {}
    exec(compile(code, "extending.md", "exec"), given)
    folder = given["throw"](20, str(tmp_path / "run"))
    assert read_summary(folder, given["DICE"])["throws"] == 20
    found = run.read(folder, now=time.time() + 1e6)
    assert (found.kind, found.state, found.last_step, found.predicted) == ("dice", "done", 20, {"mean": 3.5})


@pytest.mark.parametrize("name", ["", "Dice", "two words", "1st", "a/b"])
def test_a_kind_has_a_plain_name(name: str) -> None:
    with pytest.raises(UsageError, match="expected lower-case letters"):
        Kind(name)


def test_a_summary_without_a_key_of_its_kind_is_refused(tmp_path: Path) -> None:
    folder = new_run(DICE, "", tmp_path / "run")
    with pytest.raises(RunError, match="has no 'mean': the summary of a dice run needs throws, mean"):
        Journal(folder).summarize(DICE, {"throws": 3})
    assert not (folder / names.SUMMARY).exists()


def test_a_folder_from_before_kinds_is_a_training_run_and_a_later_version_is_refused(
    tmp_path: Path,
) -> None:
    folder = new_run(TRAIN, "", tmp_path / "run")
    assert kind_of(folder) == "train"
    (folder / names.ABOUT).unlink()
    assert kind_of(folder) == "train"
    write_object(folder / names.ABOUT, {"schema": names.SCHEMA + 1, "kind": "train"})
    with pytest.raises(RunError, match=rf"has schema 2, this version reads {names.SCHEMA}"):
        kind_of(folder)
    (folder / names.ABOUT).write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        kind_of(folder)
    assert any(names.ABOUT in what for what in read_contents(folder).missing)  # a page is made all the same


def test_a_folder_is_made_once_and_its_configuration_kept_when_it_changes(tmp_path: Path) -> None:
    folder = new_run(TRAIN, "a = 1\n", tmp_path / "run")
    with pytest.raises(UsageError, match="has a run already"):
        new_run(TRAIN, "a = 2\n", folder)
    (folder / names.CHECKPOINTS / "step-00000007").mkdir(parents=True)
    change_config(folder, "a = 2\n")
    assert read_config(folder, TRAIN)[0] == "a = 2\n"
    assert (folder / names.earlier_config(7)).read_text() == "a = 1\n"


def test_every_command_that_made_a_run_is_kept(tmp_path: Path) -> None:
    write_environment(tmp_path, "first")
    write_environment(tmp_path, "second")
    assert read_small(tmp_path, names.ENVIRONMENT)["commands"] == ["first", "second"]
    assert read_small(tmp_path, names.SUMMARY) == {}


# ---- metrics ---------------------------------------------------------------------------------------------------


@given(steps=st.lists(st.integers(1, 9), min_size=1, max_size=12), cut=st.integers(0, 30))
def test_a_torn_last_line_costs_that_line_alone(
    steps: list[int], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    journal = Journal(folder)
    for place, step in enumerate(steps):
        journal.add(STEP, step, place=place)
    path = folder / names.METRICS
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rpartition(b"\n")[2]
    torn = min(cut, len(last))  # at least the line's end is gone
    path.write_bytes(whole[: len(whole) - 1 - torn])
    kept = len(steps) - (torn > 0)
    lines, damaged = read_lines(path)
    assert ([line["place"] for line in lines], damaged) == (list(range(kept)), 0)
    # A run that goes on begins a new line: nothing of the torn one is joined to it.
    Journal(folder).add(STEP, 77, place=-1)
    lines, damaged = read_lines(path)
    assert [line["place"] for line in lines] == [*range(kept), -1]
    assert damaged == (0 < torn < len(last))
    assert (last_step(folder), last_line(folder)["place"]) == (77, -1)


def test_going_back_undoes_steps_and_the_later_line_of_a_step_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in (1, 2, 3):
        journal.add(STEP, step, loss=float(step))
    journal.add(CHECKPOINT, 2, ok=True)
    journal.add(RESUMED, 2)
    journal.add(STEP, 3, loss=30.0)
    journal.add(WARNING, 3, text="LOW")
    journal.add(WARNING, 3, text="HIGH")
    journal.add(STOPPED, 3, why="asked to stop")
    assert [line["loss"] for line in latest(tmp_path) if line["kind"] == STEP] == [1.0, 2.0, 30.0]
    assert [line["text"] for line in latest(tmp_path) if line["kind"] == WARNING] == ["LOW", "HIGH"]
    told = read_metrics(read_lines(tmp_path / names.METRICS)[0])
    assert (told.is_over, sorted(told.steps)) == (True, [1, 2, 3])
    assert [event.kind for event in told.events] == ["checkpoint", "restart", "warning", "warning", "stopped"]


def test_only_the_rank_that_is_on_writes_and_a_full_disk_is_reported_once(tmp_path: Path) -> None:
    Journal(tmp_path, on=False).add(STEP, 1)
    assert not (tmp_path / names.METRICS).exists()
    said: list[str] = []
    journal = Journal(tmp_path / "no such folder", say=said.append)
    journal.add(STEP, 1)
    journal.add(STEP, 2)
    assert len(said) == 1
    assert "CANNOT BE WRITTEN" in said[0]
    assert list(latest(tmp_path / "no such folder")) == []


def test_an_object_is_replaced_whole(tmp_path: Path) -> None:
    write_object(tmp_path / names.SUMMARY, {"a": 1})
    before = version(tmp_path)
    write_object(tmp_path / names.SUMMARY, {"a": [1, 2]})
    assert read_object(tmp_path / names.SUMMARY) == {"a": [1, 2]}
    assert version(tmp_path) != before
    assert [path.name for path in tmp_path.iterdir()] == [names.SUMMARY]
    (tmp_path / "link").symlink_to(tmp_path / names.SUMMARY)
    with pytest.raises(Unread, match="a link"):
        read_object(tmp_path / "link")


def test_nobody_else_spells_the_names() -> None:
    """A file name as a string of its own, anywhere in the package but in runs/names.py."""
    files = {
        value
        for name, value in vars(names).items()
        if name.isupper() and isinstance(value, str) and name not in ("RUNS", "CHECKPOINTS", "TRACE_PARTS", "PAGE")
    }
    root = Path(tilemesh.__file__).parent
    found = {}
    for path in sorted(root.rglob("*.py")):
        if path == Path(names.__file__):
            continue
        words = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        spelled = {word for word in words if isinstance(word, str) and word in files}
        if spelled:
            found[str(path.relative_to(root))] = spelled
    # A trace is also what `measure` alone writes.
    assert found == {
        "measure/trace.py": {names.TRACE},
        "train/config.py": {names.CONFIG},
    }


def test_the_folder_is_json_that_anything_reads(tmp_path: Path) -> None:
    folder = new_run(TRAIN, "", tmp_path / "run")
    assert json.loads((folder / names.ABOUT).read_text()) == {"schema": names.SCHEMA, "kind": "train"}
