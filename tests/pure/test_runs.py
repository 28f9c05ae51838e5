"""The contract of a run's folder: kinds, small files, metrics with torn lines, and what a reader makes of any of it."""

from __future__ import annotations

import ast
import html
import json
import math
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilemesh
from tilemesh.core.busy import Busyness
from tilemesh.core.errors import RunError, UsageError
from tilemesh.report import compare_page, run, run_page
from tilemesh.report.kind_page import Beside
from tilemesh.runs import names
from tilemesh.runs.contents import QUIET_S, read_contents, version
from tilemesh.runs.files import Unread, read_lines, read_object, write_object
from tilemesh.runs.folder import (
    change_config,
    copy_run,
    kind_of,
    new_run,
    read_busyness,
    read_config,
    read_small,
    read_summary,
    require_kind,
    write_busyness,
    write_environment,
    write_prediction,
)
from tilemesh.runs.journal import Journal
from tilemesh.runs.jsontext import from_text, to_text
from tilemesh.runs.kind import ALIGN, TRAIN, Kind
from tilemesh.runs.metrics import (
    CHECKPOINT,
    FAILED,
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
    shown = run_page.render(run.read(folder), Beside())
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
    random.seed(1)  # neither three ones nor three sixes in a row
    folder = given["throw"](20, str(tmp_path / "run"))
    assert read_summary(folder, given["DICE"])["throws"] == 20
    found = run.read(folder, now=time.time() + 1e6)
    assert (found.kind, found.state, found.last_step, found.predicted) == ("dice", "done", 20, {"mean": 3.5})
    # No throw at all is a division by zero: the run says so and is not taken for one that goes on.
    with pytest.raises(ZeroDivisionError):
        given["throw"](0, str(tmp_path / "none"))
    found = run.read(tmp_path / "none")
    assert (found.state, found.ending and found.ending.kind) == (run.DIED, FAILED)
    assert "Failed at step 0: ZeroDivisionError: division by zero." in text_of(run_page.render(found, Beside()))


def test_values_that_json_cannot_hold_are_converted_or_refused_by_name(tmp_path: Path) -> None:
    folder = new_run(DICE, "", tmp_path / "run")
    journal = Journal(folder)
    journal.add(STEP, np.int64(1), eyes=np.float32(1.5), odd=np.bool_(True), both=(np.uint8(7), np.array(2.0)))
    journal.add(STEP, 2, eyes=math.nan, high=np.float64("inf"), low={"a": [-math.inf]}, text="nan")
    lines = (folder / names.METRICS).read_text().splitlines()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    assert [json.loads(line, parse_constant=refuse)["step"] for line in lines] == [1, 2]
    first, second = latest(folder)
    assert (first["eyes"], first["odd"], first["both"]) == (1.5, True, [7, 2.0])
    assert math.isnan(second["eyes"])
    assert (second["high"], second["low"], second["text"]) == (math.inf, {"a": [-math.inf]}, "nan")
    with pytest.raises(UsageError, match=r"^metrics.jsonl: 'eyes' is a ndarray of shape \(2,\): .*give .tolist\(\)"):
        journal.add(STEP, 3, eyes=np.zeros(2))
    with pytest.raises(UsageError, match=r"^metrics.jsonl: 'a\[1\].b' is a set: expected a number"):
        journal.add(STEP, 3, a=[0, {"b": {1}}])
    with pytest.raises(UsageError, match=r"^summary.json: 'by.sides' is a complex: expected a number"):
        journal.summarize(DICE, {"throws": 1, "mean": 1.0, "by": {"sides": 1j}})
    with pytest.raises(UsageError, match=r"^summary.json: a key of 'mean' is \(1, 2\): expected text"):
        journal.summarize(DICE, {"throws": 1, "mean": {(1, 2): 1}})
    assert len(list(latest(folder))) == 2
    journal.summarize(DICE, {"throws": np.int64(2), "mean": math.nan})
    assert math.isnan(read_summary(str(folder), DICE)["mean"])
    write_prediction(folder, {"mean": math.inf})
    assert read_contents(folder).predicted == {"mean": math.inf}


_PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text().filter(lambda text: text not in ("NaN", "Infinity", "-Infinity")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(value=st.dictionaries(st.text(), _PLAIN))
def test_what_is_written_comes_back(value: dict[str, Any]) -> None:
    assert repr(from_text(to_text(value, "file"))) == repr(value)  # repr: NaN is not equal to itself


def test_what_is_no_run_is_refused_whoever_asks(tmp_path: Path) -> None:
    for ask in (kind_of, read_contents, lambda folder: require_kind(folder, DICE)):
        with pytest.raises(UsageError, match="is no folder: expected a run's"):
            ask(tmp_path / "nowhere")
        with pytest.raises(UsageError, match="is no run: it has neither"):
            ask(tmp_path)
    with pytest.raises(RunError, match=r"has no summary.json: give the folder of a run that has ended"):
        read_summary(str(tmp_path / "nowhere"), DICE)


def thrown(folder: Path, eyes: list[float], ending: str = "") -> Path:
    """A run of dice: with a summary, or stopped or failed without one."""
    new_run(DICE, f"throws = {len(eyes)}\n", folder)
    write_prediction(folder, {"mean": 3.5, "sixes": 2})
    journal = Journal(folder)
    journal.add(STARTED, 0)
    for step, value in enumerate(eyes, 1):
        journal.add(STEP, step, eyes=value)
    journal.add("rolled-off", 2, text="a die fell off the table")
    if ending:
        journal.add(ending, len(eyes), why="somebody took the dice")
    else:
        journal.summarize(DICE, {"throws": len(eyes), "mean": sum(eyes) / len(eyes)})
    return folder


def text_of(page: str) -> str:
    """A page's words without its markup."""
    body = re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", " ", body)).replace("\u00a0", " ")


def test_a_kind_without_a_page_of_its_own_gets_the_general_one(tmp_path: Path) -> None:
    words = text_of(run_page.render(run.read(thrown(tmp_path / "a", [1, 2, 6])), Beside()))
    assert "Done after step 3." in words
    assert re.search(r"mean\s+3\s+3.5\s+-14.3 %", words)
    assert re.search(r"sixes\s+–\s+2", words), "a prediction that the summary has no figure for"
    assert re.search(r"2\s+rolled-off\s+a die fell off the table", words), "an event under its own name"
    for other in ("cannot show", "trace.json", "sample.txt", "training loss", "tilemesh train", "warning"):
        assert other not in words


@pytest.mark.parametrize("ending", [STOPPED, FAILED])
def test_a_run_that_stopped_or_failed_says_so_and_why(tmp_path: Path, ending: str) -> None:
    found = run.read(thrown(tmp_path / "a", [1, 2, 6], ending))
    assert found.state == {STOPPED: run.STOPPED, FAILED: run.DIED}[ending]
    page = run_page.render(found, Beside())
    words = text_of(page)
    assert f"{ending.capitalize()} at step 3: somebody took the dice." in words
    assert re.search(rf"3\s+{ending}\s+{ending} at step 3: somebody took the dice", words)
    assert 'class="verdict bad"' in page
    assert re.search(r"mean\s+–\s+3.5", words), "the prediction is shown without a summary, too"


def test_a_run_that_is_silent_counts_as_ended_after_a_minute(tmp_path: Path) -> None:
    folder = thrown(tmp_path / "a", [1, 2, 6])
    (folder / names.SUMMARY).unlink()
    assert run.read(folder, now=time.time() + QUIET_S / 2).state == run.RUNNING
    found = run.read(folder, now=time.time() + QUIET_S + 5)
    assert "Ended at step 3 without a summary" in text_of(run_page.render(found, Beside()))
    (folder / names.METRICS).write_text('{"kind": "started", "step": 0}\n')
    found = run.read(folder, now=time.time() + 7200)
    assert "No step is done yet, and nothing was written for 2 h" in text_of(run_page.render(found, Beside()))


def test_two_runs_of_any_kind_are_compared_and_of_two_kinds_refused(tmp_path: Path) -> None:
    first, second = (
        run.read(thrown(tmp_path / name, eyes)) for name, eyes in (("a", [1, 2, 6]), ("b", [2, 4, 12, 12]))
    )
    words = text_of(compare_page.render(first, Beside(), second, Beside()))
    assert "throws changed; 2 of 3 figures differ, each measured once, most of all mean: 150 % more in b." in words
    assert re.search(r"eyes, last steps\s+within noise", words)
    alike = text_of(compare_page.render(first, Beside(), first, Beside()))
    assert "no figure differs by more than noise" in alike
    training = new_run(TRAIN, "", tmp_path / "c")
    with pytest.raises(UsageError, match=r"a is of kind 'dice', .*c is of kind 'train': only runs of one kind"):
        compare_page.render(first, Beside(), run.read(training), Beside())
    bare = new_run(DICE, "", tmp_path / "d")
    assert "the runs have no figure in common" in compare_page.render(first, Beside(), run.read(bare), Beside())


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
    with pytest.raises(RunError, match=rf"has schema 2, this version of tilemesh reads {names.SCHEMA}: use"):
        kind_of(folder)
    (folder / names.ABOUT).write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        kind_of(folder)
    for wrong in ("[]", '{"schema": 1}', '{"schema": "one", "kind": "train"}', '{"schema": 0, "kind": "train"}'):
        (folder / names.ABOUT).write_text(wrong)
        with pytest.raises(RunError, match=r'it should hold \{"schema": 1, "kind": "train"\}'):
            read_contents(folder)  # what the other files mean is not known


def test_a_folder_is_made_once_and_its_configuration_kept_when_it_changes(tmp_path: Path) -> None:
    folder = new_run(TRAIN, "a = 1\n", tmp_path / "run")
    with pytest.raises(UsageError, match="has a run already"):
        new_run(TRAIN, "a = 2\n", folder)
    (folder / names.CHECKPOINTS / "step-00000007").mkdir(parents=True)
    change_config(folder, "a = 2\n")
    assert read_config(folder, TRAIN)[0] == "a = 2\n"
    assert (folder / names.earlier_config(7)).read_text() == "a = 1\n"
    change_config(folder, "a = 3\n")  # no checkpoint came of the second one
    assert read_config(folder, TRAIN)[0] == "a = 3\n"
    assert (folder / names.earlier_config(7)).read_text() == "a = 1\n"


@pytest.mark.parametrize("name", sorted(names.WRITTEN - {names.CONFIG}))
def test_a_run_writes_over_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("somebody's own")
    with pytest.raises(UsageError, match=f"has {name}, which a run would write over: move it away, or name another"):
        new_run(TRAIN, "", tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["somebody's own"]


def test_a_folder_that_is_named_by_a_link_is_that_folder(tmp_path: Path) -> None:
    """A link such as runs/latest; links inside of a run are not followed."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / names.SUMMARY).write_text("somebody's own")
    (tmp_path / "link").symlink_to("mine")
    with pytest.raises(UsageError, match=f"link has {names.SUMMARY}, which a run would write over"):
        new_run(TRAIN, "", tmp_path / "link")
    new_run(TRAIN, "a = 1\n", tmp_path / "run")
    (tmp_path / "latest").symlink_to("run")
    assert read_config(tmp_path / "latest", TRAIN)[0] == "a = 1\n"
    assert read_contents(tmp_path / "latest").config == {"a": 1}


def test_a_file_in_place_of_a_runs_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("once")
    with pytest.raises(UsageError, match=r"story\.txt is no folder: expected a run's, such as one under runs/"):
        read_config(tmp_path / "story.txt", TRAIN)


def test_a_run_may_lie_beside_other_files_and_begin_where_one_was_killed(tmp_path: Path) -> None:
    (tmp_path / "slurm-7.out").write_text("a log")
    write_object(tmp_path / names.ABOUT, {"schema": names.SCHEMA, "kind": "train"})  # killed before it had config.toml
    new_run(TRAIN, "a = 1\n", tmp_path)
    assert (tmp_path / "slurm-7.out").read_text() == "a log"


def test_every_command_that_made_a_run_is_kept(tmp_path: Path) -> None:
    write_environment(tmp_path, "first")
    write_environment(tmp_path, "second")
    assert read_small(tmp_path, names.ENVIRONMENT)["commands"] == ["first", "second"]
    assert read_small(tmp_path, names.SUMMARY) == {}


def test_how_busy_the_machine_was_is_kept_and_the_worst_attempt_counts(tmp_path: Path) -> None:
    quiet, busy = Busyness(0.01, 0.0), Busyness(0.4, 0.0)
    write_environment(tmp_path, "first")
    assert read_busyness(read_small(tmp_path, names.ENVIRONMENT)) is None
    for found, worst in ((quiet, quiet), (busy, busy), (quiet, busy)):
        write_busyness(tmp_path, found)
        write_environment(tmp_path, "again")
        assert read_busyness(read_small(tmp_path, names.ENVIRONMENT)) == worst
    assert read_small(tmp_path, names.ENVIRONMENT)["commands"] == ["first", "again", "again", "again"]


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
    assert told.ending is not None
    assert (told.ending.words, sorted(told.steps)) == ("stopped at step 3: asked to stop", [1, 2, 3])
    assert [event.kind for event in told.events] == ["checkpoint", "restart", "warning", "warning", "stopped"]
    journal.add(RESUMED, 2)  # and ends there: no step 3 is left
    assert [line["loss"] for line in latest(tmp_path) if line["kind"] == STEP] == [1.0, 2.0]


def test_a_copy_of_a_run_that_learns_from_feedback_can_be_resumed(tmp_path: Path) -> None:
    run = new_run(ALIGN, "a = 1\n", tmp_path / "run")
    (run / names.ROLLOUTS).mkdir()
    kept = (names.FEEDBACK, names.SAMPLES, f"{names.ROLLOUTS}/batch-00000001.safetensors")
    for name in kept:
        (run / name).write_text(name)
    copied = copy_run(run, tmp_path / "second")
    assert [(copied / name).read_text() for name in kept] == list(kept)
    assert not (copy_run(new_run(TRAIN, "", tmp_path / "other"), tmp_path / "second") / names.FEEDBACK).exists()


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
    """No text of the package's code but runs/names.py has a file's name in it, and no path one of a folder's."""
    values = {name: value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    folders = {values.pop(name) for name in ("RUNS", "CHECKPOINTS", "TRACE_PARTS")}
    files = re.compile(r"(?<![\w-])(" + "|".join(map(re.escape, values.values())) + r")(?![\w-])")
    root = Path(tilemesh.__file__).parent
    found: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        source = path.read_text()
        if not files.search(source) and not any(f'"{folder}"' in source for folder in folders):
            continue  # most files: parsing all of them takes seconds
        nodes = list(ast.walk(ast.parse(source)))
        told = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # documentation may name them
        texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        spelled = {match for text in texts if id(text) not in told for match in files.findall(str(text.value))}
        joined = [node.right for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)]
        spelled |= {str(right.value) for right in joined if isinstance(right, ast.Constant) and right.value in folders}
        if spelled and path != Path(names.__file__):
            found[str(path.relative_to(root))] = spelled
    assert found == {"measure/trace.py": {names.TRACE}}  # a trace is also what `measure` alone writes


def test_the_folder_is_json_that_anything_reads(tmp_path: Path) -> None:
    folder = new_run(TRAIN, "", tmp_path / "run")
    assert json.loads((folder / names.ABOUT).read_text()) == {"schema": names.SCHEMA, "kind": "train"}
