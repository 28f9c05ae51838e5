"""The guide: predictions, exercises, progress, cells, drawings and the command. Chapters run in tests/mpi."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
import time
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from sampled import sampled
from wrong_answers import WRONG_FUNCTIONS, box_of_floats

from tilemesh.cli.main import main
from tilemesh.comm import run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.step.book import build
from tilemesh.guide import apart, attention, strategies
from tilemesh.guide.book import PARTS, GuidePart, part_of
from tilemesh.guide.data_parallel import exercises as data_parallel_exercises
from tilemesh.guide.draw import every_figure
from tilemesh.guide.exercise import Exercise, choice, function_in, listing, numeric
from tilemesh.guide.lesson import Lesson, how_far_off, reader, show_code, typical_factor
from tilemesh.guide.machine import growth
from tilemesh.guide.progress import Guessed, ReaderProgress
from tilemesh.guide.quantity import parse_quantity
from tilemesh.guide.runner import cells, notebook, run_part
from tilemesh.guide.tensor_parallel import work as tensor_parallel
from tilemesh.measure.row import Row
from tilemesh.measure.table import format_value, render

ROOT = Path(__file__).parents[2]
EXERCISES = [(part, exercise) for part in PARTS for exercise in part.exercises()]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "tilemesh" / "guide.json"


def lesson_with(*answers: str | None) -> tuple[Lesson, io.StringIO]:
    """A lesson whose reader gives these answers, one after the other; and what it prints."""
    out, left = io.StringIO(), list(answers)
    console = Console(file=out, highlight=False, width=200)
    return Lesson("1", ask=lambda prompt: left.pop(0) if left else None, console=console), out


# Numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("3 ms", "s", 3e-3), ("40us", "s", 40e-6), ("40 µs", "s", 40e-6), ("0.5", "s", 0.5), (".5s", "s", 0.5),
        ("2e-3", "s", 2e-3), ("2 seconds", "s", 2.0), ("10 microseconds", "s", 10e-6), ("1,024.5", "count", 1024.5),
        ("64 MiB", "B", 64 << 20), ("64MB", "B", 64e6), ("1,024", "B", 1024),
        ("2.5 GB/s", "B/s", 2.5e9),
        ("80 GFLOP/s", "FLOP/s", 80e9), ("80 G", "FLOP/s", 80e9), ("20 %", "fraction", 0.2), ("0.2", "fraction", 0.2),
        ("50%", "fraction", 0.5), ("50 percent", "fraction", 0.5), ("50 per cent", "fraction", 0.5),
        ("1", "fraction", 1), ("150 %", "fraction", 1.5), ("3/15", "fraction", 0.2), ("3 / 5", "count", 0.6),
        ("12", "count", 12), ("4k", "messages", 4000), ("6 messages", "messages", 6), ("1.5 GiB/s", "B/s", 1.5 * 2**30),
    ],
)  # fmt: skip
def test_a_number_is_read_as_it_is_typed(text: str, unit: str, value: float) -> None:
    assert parse_quantity(text, unit) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("soon", "s"),
        ("", "s"),
        ("3 GB", "s"),
        ("-1", "s"),
        ("4 MiB", "count"),
        ("3 kg", "B"),
        ("1,5 us", "s"),
        ("1,5", "count"),
        ("60 us", "count"),
        ("1/0", "count"),
        ("1/", "count"),
        ("/2", "count"),
        ("1/2/3", "count"),
    ],
)
def test_what_is_no_number_of_the_unit_is_refused(text: str, unit: str) -> None:
    with pytest.raises(
        UsageError,
        match="is no number: " if unit == "count" else f"is no number of {'seconds' if unit == 's' else unit}: ",
    ):
        parse_quantity(text, unit)


@pytest.mark.parametrize(
    ("text", "unit", "said"),
    [
        ("20", "fraction", "'20' as a share would be 20 times the whole: write 20 % or 0.2"),
        ("half", "fraction", "'half' is no share: write it such as 35 % or 0.35"),
        ("50%", "s", "'50%' is a share, and a number of seconds is asked for: write it such as 3 ms"),
        ("50 %", "B", "'50 %' is a share, and a number of B is asked for: write it such as 64 MiB"),
        (
            "50 percent",
            "count",
            "'50 percent' is a share, and a number is asked for: write the number alone, such as 37",
        ),
    ],
)
def test_a_share_says_which_unit_is_asked_for(text: str, unit: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_quantity(text, unit)
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("chapter", "key", "right", "refused"),
    [
        ("2", "token", ("60", "60 us", "60 µs", "0.06 ms", "60 microseconds"), "60 MB"),
        ("3", "ring_bytes", ("1400", "1,400 MB", "1.4 GB", "1400MB"), "1400 us"),
        ("5", "zero_memory", ("16.64", "16.64 GB", "16.6 GB"), "16 ranks"),
    ],
)
def test_the_unit_that_is_asked_for_may_be_typed(chapter: str, key: str, right: tuple[str, ...], refused: str) -> None:
    exercise = next(one for one in part_of(chapter).exercises() if one.key == key)
    assert [exercise.correct(exercise.read(text)) for text in right] == [None] * len(right)
    asked = exercise.hint.removeprefix("a number of ")
    assert asked in ("microseconds", "MB", "GB")
    with pytest.raises(UsageError, match=f"^'{refused}' is no number of {asked}: write it such as 37 or 37 "):
        exercise.read(refused)
    with pytest.raises(UsageError, match="with a point before decimals"):
        exercise.read("1,5")


def test_a_reader_may_answer_in_per_cent() -> None:
    bubble = next(one for one in part_of("7").exercises() if one.key == "bubble")
    assert [bubble.correct(bubble.read(text)) for text in ("20%", "20 %", "0.2", "3/15")] == [None] * 4
    assert "compared with the useful time" in str(bubble.correct(bubble.read("25%")))
    with pytest.raises(UsageError, match=r"write 20 % or 0\.2"):
        bubble.read("20")


@given(st.floats(1e-9, 1e3), st.sampled_from(["s", "B", "B/s", "FLOP/s", "fraction", "count"]))
def test_what_a_table_shows_can_be_typed(value: float, unit: str) -> None:
    value = value * (1e9 if unit.startswith(("B", "FLOP")) else 1)
    shown = format_value(value, unit)
    assert parse_quantity(shown, unit) == pytest.approx(value, rel=0.01, abs=0.006 if unit == "fraction" else 1e-3)


# Predictions -----------------------------------------------------------------------------------------------------


def test_the_guess_is_a_column_of_the_row() -> None:
    lesson, out = lesson_with("soon", "2 ms")
    guess = lesson.predict("time of nothing", unit="s", model=4e-3)
    assert "'soon' is no number of seconds" in out.getvalue()
    assert "4 ms" not in out.getvalue(), "the model's answer was shown before the measurement"
    row = lesson.show(guess, 1e-3, limit=5e-4)
    assert (row.guess, row.predicted, row.guess_error) == (2e-3, 4e-3, 1.0)
    assert Row.from_json(row.to_json()) == row
    assert "your guess" in render([row])
    lesson.close()
    text = out.getvalue()
    assert "time of nothing: off by a factor of 2" in text
    assert "the cost model's is 4" in text


def test_rows_of_another_machine_are_not_said_to_be_measured_here() -> None:
    lesson, out = lesson_with("2 ms")
    row = lesson.show(lesson.predict("time of nothing", unit="s", model=4e-3), 1e-3, limit=5e-4)
    lesson.add(dataclasses.replace(row, name="elsewhere"), stored="an H200")
    lesson.close()
    here, there = (
        out.getvalue().split("What was predicted and measured in this chapter")[1].split("Measured on an H200")
    )
    assert ("time of nothing" in here, "elsewhere" in here) == (True, False)
    assert "elsewhere" in there


def test_a_result_that_was_not_measured_is_not_said_to_be() -> None:
    lesson, out = lesson_with("2 ms", "4", "8")
    lesson.show(lesson.predict("time of nothing", unit="s", model=4e-3), 1e-3, limit=5e-4)
    row = lesson.show(lesson.predict("messages", unit="count", model=3.0), 4.0, limit=3.0, figure="counted")
    lesson.show(lesson.predict("bubble", unit="count", model=3.0), 4.0, limit=3.0, figure="simulated")
    assert json.loads(row.to_json())["case"] == {"figure": "counted"}
    lesson.close()
    said, tables = out.getvalue().split("\nWhat was predicted and measured in this chapter\n")
    assert "messages: your guess 4 · cost model 3 · counted 4 · limit 3" in said
    timed, counted, simulated = re.split(r"\nWhat was predicted and (?:counted|simulated) in this chapter\n", tables)
    assert ("time of nothing" in timed, "messages" in timed) == (True, False)
    for table, column in ((counted, "counted"), (simulated, "simulated")):
        assert f" {column} " in table
        assert "measured" not in table


def test_a_guess_of_nothing_is_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    lesson, out = lesson_with("0", "0 ms", "2 ms")
    lesson.show(lesson.predict("time of nothing", unit="s", model=4e-3), 1e-3, limit=5e-4)
    lesson.close()
    assert out.getvalue().count("write a guess above 0") == 2
    assert "off by a factor of 2" in out.getvalue()
    assert "inf" not in out.getvalue()
    ReaderProgress().finish("2", [Guessed("q", "s", 0.0, 1.0), Guessed("q", "s", 3.0, 1.0)])  # as once was possible
    assert main(["guide", "--progress"]) == 0
    assert "1 prediction, typically off by a factor of 3" in capsys.readouterr().out


def test_without_a_reader_the_cost_model_answers_and_nothing_is_remembered(state: Path) -> None:
    lesson = Lesson("1", console=Console(file=io.StringIO()))  # pytest has no terminal
    guess = lesson.predict("time of nothing", unit="s", model=4e-3)
    assert (guess.value, guess.by_reader) == (4e-3, False)
    lesson.show(guess, 1e-3, limit=5e-4)
    lesson.close()
    assert not state.exists()


def test_a_reader_who_skips_has_no_guess_in_the_table() -> None:
    lesson, out = lesson_with("")
    guess = lesson.predict("x", unit="s", model=4e-3)
    assert "4 ms" not in out.getvalue()
    row = lesson.show(guess, 1e-3, limit=5e-4)
    assert (row.guess, row.predicted) == (None, 4e-3)
    lesson.close()
    assert "your guess" not in out.getvalue()


def test_a_prediction_without_a_cost_model_needs_a_reader() -> None:
    lesson, out = lesson_with("2 ms")
    row = lesson.show(lesson.predict("time of nothing", unit="s"), 1e-3, limit=5e-4)
    assert (row.guess, row.predicted) == (2e-3, None)
    assert row.missing["predicted"] == "no cost model was given"
    lesson.close()
    assert "Typically a factor of 2.\n" in out.getvalue()
    alone = Lesson("1", console=Console(file=io.StringIO()))
    with pytest.raises(
        UsageError, match="nobody can be asked 'time of nothing', and there is no cost model"
    ) as refused:
        alone.predict("time of nothing", unit="s")
    assert "\n" not in str(refused.value)


def test_a_row_without_a_guess_is_as_before() -> None:
    lesson = Lesson("1", console=Console(file=io.StringIO()))
    row = lesson.show(lesson.predict("x", unit="s", model=1.0), 1.0, limit=1.0)
    body = json.loads(row.to_json())
    del body["guess"]
    plain = Row.from_json(json.dumps(body))
    assert plain.guess is None
    assert "guess" not in json.loads(plain.to_json())
    assert "your guess" not in render([plain])


def test_a_factor_weighs_too_much_and_too_little_alike() -> None:
    assert Guessed("", "s", 2.0, 1.0).factor == Guessed("", "s", 1.0, 2.0).factor == 2
    assert Guessed("", "s", 0.0, 1.0).factor == float("inf")
    assert Guessed("", "s", 0.0, 0.0).factor == 1
    assert typical_factor([2.0, 8.0]) == pytest.approx(4)
    assert how_far_off([]) == []


# Exercises -------------------------------------------------------------------------------------------------------


def exercise_id(value: Any) -> str:
    return value.key if isinstance(value, (GuidePart, Exercise)) else ""


@pytest.mark.parametrize(("part", "exercise"), EXERCISES, ids=exercise_id)
def test_every_planted_wrong_answer_gets_its_own_correction(part: GuidePart, exercise: Exercise) -> None:
    assert exercise.correct(exercise.solution) is None
    wrong = (*exercise.planted, *WRONG_FUNCTIONS.get(exercise.key, ()))
    corrections = [exercise.correct(answer) for answer in wrong]
    assert len(corrections) >= 3, "an exercise knows three wrong answers at least"
    assert all(correction is not None and len(correction) > 20 for correction in corrections)
    assert len(set(corrections)) == len(corrections), "two wrong answers get the same words"


@pytest.mark.parametrize(("part", "exercise"), EXERCISES, ids=exercise_id)
def test_an_exercise_is_asked_in_its_chapter_and_named_once(part: GuidePart, exercise: Exercise) -> None:
    assert "lesson.exercises()" in part.script.read_text()
    assert f"`{exercise.key}`" in (ROOT / part.page).read_text()
    assert [one.key for one in part.exercises()].count(exercise.key) == 1


@pytest.mark.parametrize(("part", "exercise"), EXERCISES, ids=exercise_id)
def test_neither_a_hint_nor_a_refusal_tells_the_answer(part: GuidePart, exercise: Exercise) -> None:
    if exercise.is_code:
        return
    said = exercise.hint
    with pytest.raises(UsageError) as refused:
        exercise.read("nonsense")
    for number in re.findall(r"[0-9][0-9.]*(?: [%\w/]+)?", f"{said}; {refused.value}"):
        try:
            answer = exercise.read(number)
        except UsageError:
            continue
        assert exercise.correct(answer) is not None, f"'{number}' is the answer"


CODE = [pair for pair in EXERCISES if pair[1].is_code]


@pytest.mark.parametrize(("part", "exercise"), EXERCISES, ids=exercise_id)
def test_no_answer_is_told_so(part: GuidePart, exercise: Exercise) -> None:
    for nothing in (None, object()):
        correction = exercise.correct(nothing)
        assert correction is not None
        assert "There is no answer yet: expected" in correction or "is no answer: expected" in correction
    if exercise.is_code:
        assert "Your function returned None: it is not written yet" in str(exercise.correct(lambda *given: None))


@pytest.mark.parametrize(("part", "exercise"), CODE, ids=exercise_id)
def test_a_template_that_is_not_filled_in_returns_none(
    part: GuidePart, exercise: Exercise, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(exercise.template)
    assert main(["guide", part.key, "--exercise", exercise.key, "--answer", str(path)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("  Not yet. Your function returned None: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(("part", "exercise"), sampled(CODE, CODE[::3]), ids=exercise_id)
def test_an_answer_that_never_ends_is_stopped(
    part: GuidePart, exercise: Exercise, monkeypatch: pytest.MonkeyPatch
) -> None:
    def for_ever(*given: Any) -> Any:
        while True:
            pass

    monkeypatch.setattr(apart, "LIMIT_S", 0.5)
    began = time.monotonic()
    assert "did not end within 0.5 s and was stopped" in str(exercise.correct(for_ever))
    assert time.monotonic() - began < 30, "bounded, however busy the machine is"
    monkeypatch.undo()
    assert "goes on after 10,000 items" in str(exercise.correct(lambda *given: itertools.count()))
    assert "goes on after 10,000 items" in str(exercise.correct(lambda *given: (itertools.count(), [1])))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    return sum(range(10**18))", "did not end within"),  # no Python code runs meanwhile: a thread would hang
        ("    import time; time.sleep(1e6)", "did not end within"),
        ("    import os; os._exit(3)", "ended the whole Python process (with exit code 3)"),
        ("    import os; os.kill(os.getpid(), 9)", "ended the whole Python process (by signal 9)"),
        ("    raise SystemExit('enough')", "raised SystemExit: enough"),
        ("    return input('how many? ')", "raised EOFError in line 2 of mine.py"),
        ("    return list(range(10**12))", "raised MemoryError in line 2 of mine.py"),
        ("    yield 1.0", "did not return a number"),
    ],
)
def test_what_a_function_does_to_its_process_is_not_done_to_ours(
    body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"def bound_time(flops, nbytes, peak, bandwidth):\n{body}\n")
    exercise = next(one for one in part_of("4").exercises() if one.key == "bound_time")
    monkeypatch.setattr(apart, "LIMIT_S", 1.0 if "did not end" in said else 20.0)
    assert said in str(exercise.correct(exercise.read(str(path))))


def test_a_file_is_run_once_and_only_where_it_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, notes = tmp_path / "mine.py", tmp_path / "notes"
    path.write_text(f"open({str(notes)!r}, 'a').write('run ')\ndef bound_time(*given):\n    return 0.0\n")
    words = ["guide", "4", "--exercise", "bound_time", "--answer", str(path)]
    assert main(words) == 1
    assert notes.read_text() == "run "
    monkeypatch.setattr(apart, "LIMIT_S", 0.5)
    path.write_text("while True:\n    pass\n")
    assert main(words) == 1
    assert "did not end within 0.5 s" in capsys.readouterr().out
    path.write_text("raise ValueError('no')\n")
    assert main(words) == 2
    assert capsys.readouterr().err == f"tilemesh: '{path}' cannot be run: ValueError: no\n"


def test_a_number_nobody_thought_of_is_told_how_to_count() -> None:
    exercise = numeric("k", "q", 8, wrong={4: "a", 2: "b", 1: "c"}, otherwise="Count them.", explanation="")
    assert exercise.correct(100) == "That is too much. Count them."
    assert exercise.correct(7) == "That is too little. Count them."
    assert exercise.correct(4) == "a"
    assert exercise.correct(exercise.read("8")) is None


def test_ranks_are_read_in_any_order_and_options_by_their_letter() -> None:
    ranks = listing("k", "q", (1, 3), wrong={(1,): "a"}, otherwise="b", explanation="")
    assert ranks.correct(ranks.read("[3, 1]")) is None
    assert ranks.correct((2,)) == "b"
    with pytest.raises(UsageError, match="ranks"):
        ranks.read("all")
    which = choice("k", "q", {"yes": None, "no": "because", "maybe": "never"}, explanation="")
    assert [which.correct(which.read(letter)) for letter in "abc"] == ["never", "because", None]
    assert which.correct(which.read("Yes")) is None, "the answer itself instead of its letter"
    with pytest.raises(UsageError, match="one letter"):
        which.read("d")


def test_a_function_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    with pytest.raises(UsageError, match="no file"):
        function_in(path, "f")
    with pytest.raises(UsageError, match="'' is no file"):
        part_of("2").exercises()[-1].read(" ")
    path.write_text("def g(): pass")
    with pytest.raises(UsageError, match="no function `f`"):
        function_in(path, "f")
    path.write_text("def f(: pass")
    with pytest.raises(UsageError, match="SyntaxError"):
        function_in(path, "f")
    path.write_text("def f(): return 3")
    assert function_in(path, "f")() == 3


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def swap(comm, mine, other):\n    return np.empty_like(mine)\n", "NameError in line 2 of mine.py"),
        ("def swap(comm, mine):\n    return mine\n", "takes 2 positional arguments but 3 were given"),
        ("def swap(comm, mine, other):\n    comm.send(3, to=other)\n", "line 2 of mine.py: input is a int"),
        (
            "import numpy as np\ndef swap(comm, mine, other):\n    box = np.empty(2, np.int64)\n"
            "    handles = [comm.irecv(box, other), comm.isend(mine, other)]\n"
            "    return [handle.wait() for handle in handles][0]\n",
            "A message did not arrive as it was expected",
        ),
        (
            "import numpy as np\ndef swap(comm, mine, other):\n    box = np.empty(3)\n"
            "    handles = [comm.irecv(box, other), comm.isend(mine, other)]\n"
            "    return [handle.wait() for handle in handles][0]\n",
            "a box of another dtype",
        ),
        (
            "import numpy as np\ndef swap(comm, mine, other):\n    box = np.empty_like(mine)\n"
            "    receiving = comm.irecv(box, other)\n    comm.isend(mine, other)\n    return receiving.wait()\n",
            "a send was begun and never waited for",
        ),
        (
            "import numpy as np\ndef swap(comm, mine, other):\n    box = np.empty_like(mine)\n"
            "    comm.irecv(box, other)\n    comm.send(mine, other)\n    return np.full_like(mine, other)\n",
            "a receive was never waited for",
        ),
        (
            "import numpy as np\ndef swap(comm, mine, other):\n    box = np.empty_like(mine)\n"
            "    handles = [comm.irecv(box, other), comm.isend(mine, other)]\n"
            "    while not all([handle.test() for handle in handles]):\n        pass\n    return box\n",
            "None",
        ),
    ],
)
def test_a_function_that_fails_is_told_how_and_where(body: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(body)
    exercise = next(one for one in part_of("2").exercises() if one.key == "swap")
    assert said in str(exercise.correct(exercise.read(str(path))))


@pytest.mark.parametrize(
    ("chapter", "key", "function", "said"),
    [
        ("7", "one_f_one_b", lambda *given: 5, "`one_f_one_b` did not return a list of passes, such as ['F0', 'B0']: "),
        ("locality", "strides_of", lambda shape: 5, "`strides_of` did not return the strides, a tuple of whole "),
        ("6", "row_linear", lambda *given: 3, "Rank 0 returned 3: expected an array of the shape (3, 2)."),
        ("6", "row_linear", lambda *given: "z", "Rank 0 returned 'z': expected an array of the shape (3, 2)."),
        ("3", "ring_gather", lambda comm, value: np.arange(comm.size), "Rank 0 returned [0 1 2 3 4] without any messa"),
        ("3", "ring_gather", lambda comm, value: [0, 10, 20, 30, 40], "without any message"),
        (
            "7",
            "one_f_one_b",
            lambda rank, stages, count: [*(f"{kind}{one}" for kind in "FB" for one in range(count)), "F0"],
            "Rank 0 does F0 2 times: every pass is done once.",
        ),
        (
            "7",
            "one_f_one_b",
            lambda rank, stages, count: [f"{kind}{one}" for kind in "FB" for one in range(count + 1)],
            "Rank 0 does F8: there are 8 microbatches, 0 to 7.",
        ),
    ],
)
def test_what_was_returned_is_told_and_nothing_else(chapter: str, key: str, function: Any, said: str) -> None:
    exercise = next(one for one in part_of(chapter).exercises() if one.key == key)
    correction = str(exercise.correct(function))
    assert said in correction
    assert "raised" not in correction


def test_ranks_that_wait_are_not_told_how_patient_the_check_is() -> None:
    swap = next(one for one in part_of("2").exercises() if one.key == "swap")
    said = [str(swap.correct(answer)) for answer in WRONG_FUNCTIONS["swap"]]
    assert any("has waited" in words for words in said)
    assert not any("ending the job" in words for words in said)


def test_numbers_that_were_never_sent_are_told_from_numbers_that_did_not_come() -> None:
    ring = next(one for one in part_of("3").exercises() if one.key == "ring_gather")
    assert "Messages are bytes" in str(ring.correct(box_of_floats))


def test_ranks_that_wait_in_a_collective_are_not_told_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel_exercises, "PATIENCE_S", 0.2)
    mean = next(one for one in part_of("5").exercises() if one.key == "mean_gradient")
    said = str(mean.correct(lambda comm, total, samples: comm.all_reduce(total) if comm.rank == 0 else total))
    assert "waited for one another" in said
    assert "ending the job" not in said


def test_growth_on_the_page_is_that_of_the_figures() -> None:
    page = (ROOT / part_of("4").page).read_text()
    model, memory = growth.times_larger(2018, 2022)
    assert f"grew about {round(model, -2):,.0f}-fold (GPT to PaLM), the memory of a GPU {memory:g}-fold" in page


def test_strides_of_the_ladder_are_predicted_on_the_page_as_in_the_rows() -> None:
    page = (ROOT / part_of("ladder").page).read_text()
    rows = [json.loads(line) for line in (ROOT / "benchmarks/results/ladder_studies_h200.jsonl").open()]
    predicted = [row["predicted"] for row in rows if row["case"]["study"] == "coalescing"]
    words = [f"{value * 1e6:.0f}" for value in predicted if value is not None]
    assert f"was {', '.join(words[:-1])} and {words[-1]} from stride 2 on" in page


def test_words_that_a_page_would_stress_have_no_stars_on_a_terminal() -> None:
    lesson, out = lesson_with("d")
    lesson.exercise("memory")
    assert "That is how threads of one process behave" in " ".join(out.getvalue().split())
    assert "(a *barrier*)" not in out.getvalue()


def test_what_cannot_be_read_is_no_try(state: Path) -> None:
    lesson, out = lesson_with("many", "28 ranks", "36", "28")
    lesson.exercise("world_sum")
    assert out.getvalue().count("write the number alone") == 2
    assert ReaderProgress().of("1").solved == {"world_sum": 2}
    assert main(["guide", "1", "--exercise", "world_sum", "--answer", "many"]) == 2
    lesson, out = lesson_with("1", "2", "4", "28")
    lesson.exercise("world_sum")
    assert "come back to it with: tilemesh guide 1 --exercise world_sum" in out.getvalue()
    assert "Right." not in out.getvalue()


def test_a_wrong_answer_is_corrected_and_asked_again(state: Path) -> None:
    lesson, out = lesson_with("36", "28")
    lesson.exercise("world_sum")
    assert "counted from 0" in out.getvalue()
    assert "Right." in out.getvalue()
    assert ReaderProgress().of("1").solved == {"world_sum": 2}
    assert json.loads(state.read_text())["chapters"]["1"]["tries"] == {}
    with pytest.raises(UsageError, match="world_sum"):
        lesson.exercise("world_sun")


# Progress --------------------------------------------------------------------------------------------------------


def test_progress_outlives_the_process_and_a_damaged_file_is_named(state: Path) -> None:
    progress = ReaderProgress()
    progress.answered("1", "a", right=False)
    progress.answered("1", "a", right=True)
    progress.answered("1", "a", right=False)
    progress.finish("1", [Guessed("q", "s", 2.0, 1.0)])
    again = ReaderProgress()
    assert again.chapters == progress.chapters
    assert again.of("1").solved == {"a": 2}
    assert again.of("1").guesses[0].factor == 2
    again.finish("1", [])
    assert len(ReaderProgress().of("1").guesses) == 1, "a second run without guesses took the first one's away"
    for text in ("[]", "{", '{"schema": 9}', '{"schema": 1, "chapters": {"1": {}}}'):
        state.write_text(text)
        with pytest.raises(UsageError, match=r"guide\.json"):
            ReaderProgress()


# Cells and notebooks ---------------------------------------------------------------------------------------------


def test_code_that_holds_an_answer_is_shown_after_the_question() -> None:
    for part in PARTS:
        for cell in cells(part.script.read_text()):
            assert cell.asks == ("predict(" in cell.source and cell.is_code)
    made = json.loads(notebook(part_of("1")))
    hidden = [cell for cell in made["cells"] if cell["metadata"]]
    assert len(hidden) == 2
    assert all("predict(" in "".join(cell["source"]) for cell in hidden)


def test_cells_of_a_script() -> None:
    script = '"""doc"""\n\n# %% [markdown]\n# # Title\n#\n# words\n\n# %%\n\nx = 1\n\ny = 2\n\n# %%\n# %%\nz = 3\n'
    found = list(cells(script))
    assert [(cell.is_code, cell.source, cell.line) for cell in found] == [
        (False, "# Title\n\nwords", 4),
        (True, "x = 1\n\ny = 2", 10),
        (True, "z = 3", 16),
    ]
    with pytest.raises(UsageError, match="no comment"):
        list(cells("# %% [markdown]\nx = 1\n"))


def test_a_terminal_of_80_columns_breaks_between_words(tmp_path: Path) -> None:
    words = "a number of words that are together longer than a terminal is wide"
    script = tmp_path / "chapter.py"
    script.write_text(f'# %%\nif True:\n    print("  1. {words}", "and {words}")\n    1 + 1  # {words} {words}\n')
    out = io.StringIO()
    part: Any = SimpleNamespace(script=script)
    run_part(part, Console(file=out, width=80, force_terminal=True, color_system=None))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-2].startswith("  1. a number")
    assert lines[-1].startswith("  number of words")
    assert {word for line in lines[-2:] for word in line.split()} == {"1.", "and", *words.split()}
    assert [line for line in lines if line.startswith(" " * 12)], "code goes on further to the right"


@pytest.mark.parametrize("width", range(24, 60))
def test_a_number_stays_with_its_unit_where_a_line_ends(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    lesson = Lesson("1", ask=lambda prompt: "64 KiB", console=console)
    lesson.show(lesson.predict("bytes", unit="B", model=589824.0), 589824.0, limit=294912.0)
    said = out.getvalue()
    assert (said.count("576 KiB"), said.count("288 KiB"), said.count("64 KiB")) == (2, 1, 1)


@pytest.mark.parametrize(("part", "exercise"), CODE, ids=exercise_id)
def test_a_template_fits_80_columns(part: GuidePart, exercise: Exercise) -> None:
    assert max(map(len, exercise.template.splitlines())) <= 80


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.folder)
def test_a_chapter_is_a_notebook_too(part: GuidePart) -> None:
    made = json.loads(notebook(part))
    assert made["nbformat"] == 4
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
    code = ["".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "code"]
    assert "Lesson(" in code[0]
    assert code[-1].endswith("lesson.close()")
    for source in code:
        compile(source, "cell", "exec")


# Pages and drawings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.folder)
def test_a_page_shows_its_drawings_as_the_code_draws_them(part: GuidePart) -> None:
    page = (ROOT / part.page).read_text()
    drawn = part.figures()
    assert drawn, "a chapter has drawings"
    for name, text in drawn.items():
        ET.fromstring(text)
        assert "prefers-color-scheme:dark" in text
        committed = (ROOT / part.page).parent / name
        assert committed.read_text() == text, "run `python -m tilemesh.guide.draw docs/guide`"
        assert f"({name})" in page, f"{part.page} does not show {name}"


def test_drawings_of_no_chapter_are_as_the_code_draws_them() -> None:
    page = (ROOT / "docs" / "guide" / "figures.md").read_text()
    assert len(re.findall(r"^\| \d+ \|", page, re.MULTILINE)) == 69
    others = {name: text for name, text in every_figure().items() if name.startswith("figures/")}
    assert len(others) == 16
    for name, text in others.items():
        ET.fromstring(text)
        committed = ROOT / "docs" / "guide" / name
        assert committed.read_text() == text, "run `python -m tilemesh.guide.draw docs/guide`"
        assert f"({name})" in page


def test_the_cheapest_cut_of_two_products_is_megatrons_until_tokens_outweigh_the_matrices() -> None:
    for tokens in (1, 1024, 4095):
        _, (first, second) = strategies.paths(tokens)[0]
        assert (first.matrix, second.matrix) == ("columns", "rows")
    sent, (first, second) = strategies.paths(4097)[0]
    assert (first.matrix, second.matrix) == ("whole", "whole")  # data parallelism
    assert sent == 2 * strategies.ITEM_BYTES * strategies.WIDTH * strategies.HIDDEN  # both gradients, 2 (n-1)/n of each
    drawn_by = strategies.paths()[0]
    step = run_threads(2, partial(tensor_parallel.columns_then_rows, p=tensor_parallel.make(16, 12, 32)))[0]
    scale = strategies.TOKENS * strategies.WIDTH * strategies.ITEM_BYTES / (16 * 12 * 8)
    assert drawn_by[0] == (step.forward_bytes + step.backward_bytes) * scale, "what chapter 6 counts"


def test_double_buffered_weights_are_first_read_by_microbatch_8() -> None:
    program = build("pipedream-2bw", 4, 12)
    read = {action.microbatch: action.version for action in program.actions[0] if action.kind == "F"}
    assert [read[microbatch] for microbatch in range(12)] == [0] * 8 + [1] * 4


def test_the_attention_that_is_drawn_is_attention() -> None:
    weights = attention.computed()["weights"]
    assert np.allclose(weights.sum(axis=1), 1)
    assert np.array_equal(weights > 0, np.tri(attention.TOKENS, dtype=bool))


@pytest.mark.parametrize("part", [part for part in PARTS if part.key.isdecimal()], ids=lambda part: part.folder)
def test_a_page_has_every_section(part: GuidePart) -> None:
    page = (ROOT / part.page).read_text()
    assert page.startswith(f"# {part.words}")
    for section in (
        "## The idea",
        "## Walk through the code",
        "## Try it yourself",
        "## Takeaways",
        "## Further reading",
    ):
        assert f"\n{section}\n" in page, f"{part.page} has no {section}"
    assert "**You will be able to**" in page
    assert "**You need**" in page
    assert f"tilemesh guide {part.key}" in page
    assert part.page.removeprefix("docs/guide/") in (ROOT / "docs" / "guide" / "README.md").read_text()


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.folder)
def test_a_page_leads_on(part: GuidePart) -> None:
    """To the chapters before and after it, to all of them, to its script and to the rows that it quotes."""
    page = (ROOT / part.page).read_text()
    links = re.findall(r"\]\(([^)\s#]+)", page)
    place = PARTS.index(part)
    for neighbour in (*PARTS[max(0, place - 1) : place], *PARTS[place + 1 : place + 2]):
        assert f"../{neighbour.folder}/README.md" in links, f"{part.page} does not lead to {neighbour.title}"
    assert "../README.md" in links
    assert f"../../../src/tilemesh/guide/{part.folder}/chapter.py" in links
    for rows in re.findall(r"benchmarks/results/[\w.\-]+", page):
        assert f"../../../{rows}" in links, f"{part.page} names {rows} and does not link it"


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.folder)
def test_what_a_chapter_shows_has_no_link_that_needs_its_folder(part: GuidePart) -> None:
    """A terminal follows none, and a notebook lies wherever the reader wrote it. Files that it names are there."""
    texts = [cell.source for cell in cells(part.script.read_text()) if not cell.is_code]
    texts += [text for exercise in part.exercises() for text in (exercise.question, exercise.explanation)]
    for text in texts:
        assert not re.findall(r"\]\((?!https?:)[^)]*\)", text)
        for name in re.findall(r"`([\w./-]+\.(?:py|md|jsonl|cu|c))`", text):
            assert any((ROOT / start / name).exists() for start in ("", "src/tilemesh")), f"{name}: no such file"


# The command -----------------------------------------------------------------------------------------------------


def test_the_chapters_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["guide"]) == 0
    out = capsys.readouterr().out
    assert all(part.title in out for part in PARTS)
    assert len({line.index(part.about) for part in PARTS for line in out.splitlines() if part.about in line}) == 1


def test_an_answer_is_checked_and_counts_as_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answer.py"
    path.write_text("def groups_of(rank, dp, tp):\n    return list(range(tp)), list(range(dp))\n")
    assert main(["guide", "1", "--exercise", "groups_of", "--answer", str(path)]) == 1
    assert "ranks of the world" in " ".join(capsys.readouterr().out.split())
    assert main(["guide", "1", "--exercise", "world_sum", "--answer", "28"]) == 0
    capsys.readouterr()
    assert main(["guide", "--progress"]) == 0
    out = capsys.readouterr().out
    assert f"1 of {len(part_of('1').exercises())} exercises" in out
    assert "exercises left: memory" in out
    assert max(map(len, out.splitlines()[:-1])) <= 100  # the last one is the path of the file


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["99"], "unknown chapter '99'"),
        (["1", "--exercise", "colum"], "did you mean 'column'"),
        (["1", "--answer", "3"], "--exercise"),
        (["--exercise", "column"], "belongs to a chapter"),
        (["1", "--json", "/proc/x"], "--json"),
        (["1", "--exercise", "column", "--json", "rows.jsonl"], "--json is of a whole chapter"),
    ],
)
def test_wrong_use_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["guide", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_chapter_is_written_as_a_notebook(tmp_path: Path) -> None:
    assert main(["guide", "1", "--notebook", str(tmp_path / "one.ipynb")]) == 0
    assert json.loads((tmp_path / "one.ipynb").read_text())["cells"]


def test_code_can_be_read_on_a_light_terminal_and_on_a_dark_one() -> None:
    out = io.StringIO()
    show_code("answer = first + 2\n", Console(file=out, width=80, force_terminal=True, color_system="truecolor"))
    shown = out.getvalue()
    assert not re.search(r"\x1b\[[^m]*(38;2;|9[0-7])", shown), shown  # no colour of its own, none of the bright ones
    assert "\x1b[49m" in shown


def test_q_leaves_a_chapter_wherever_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}", SimpleNamespace(isatty=lambda: True, write=len, flush=int))
    answers = iter(("12", " Q "))
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    ask = reader()
    assert ask is not None
    assert ask("your answer: ") == "12"
    with pytest.raises(SystemExit) as left:
        ask("your answer: ")
    assert left.value.code == 0
