"""A class's answers are graded by the chapters' own checks, and nothing that a student hands in ends the grading."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import numpy as np
import pytest

from tilemesh.cli.main import main
from tilemesh.core.errors import UsageError
from tilemesh.guide import apart
from tilemesh.guide.book import PARTS, part_of
from tilemesh.guide.grade import AnswerGrade, as_csv, grade_folder

RIGHT_GROUPS = """
def groups_of(rank, dp, tp):
    row, column = divmod(rank, tp)
    return [row * tp + place for place in range(tp)], [place * tp + column for place in range(dp)]
"""
ORPHAN = """
import os, pathlib, time
def groups_of(rank, dp, tp):
    if os.fork() == 0:
        pathlib.Path(__file__).with_suffix(".pid").write_text(str(os.getpid()))
        time.sleep(77)
    time.sleep(0.3)
    os._exit(0)
"""
ANSWERS = {"world_sum.txt": "28", "memory.txt": "", "column.txt": "2 6 10 14", "groups_of.py": RIGHT_GROUPS}


def hand_in(folder: Path, student: str, answers: dict[str, str], chapter: str = "1") -> None:
    (folder / student / chapter).mkdir(parents=True)
    for name, text in answers.items():
        (folder / student / chapter / name).write_text(text)


def by_exercise(grades: list[AnswerGrade], student: str) -> dict[str, AnswerGrade]:
    return {grade.exercise: grade for grade in grades if grade.student == student}


def test_right_wrong_unreadable_and_missing_answers(tmp_path: Path) -> None:
    hand_in(tmp_path, "ada", {name: text for name, text in ANSWERS.items() if text})
    hand_in(tmp_path, "bob", {"world_sum.txt": "36", "column.txt": "some", "groups_off.py": "x = 1"}, "ranks")
    grades = grade_folder(tmp_path)
    ada, bob = by_exercise(grades, "ada"), by_exercise(grades, "bob")
    assert {key: grade.state for key, grade in ada.items()} == {
        "world_sum": "right", "memory": "missing", "column": "right", "groups_of": "right",
    }  # fmt: skip
    assert sum(grade.points for grade in ada.values()) == 3
    assert (bob["world_sum"].state, bob["world_sum"].points) == ("wrong", 0)
    assert "counted from 0" in bob["world_sum"].why
    assert (bob["column"].state, bob["groups_of"].state) == ("unreadable", "missing")
    assert "did you mean 'groups_of'" in bob["groups_off"].why
    assert [grade.chapter for grade in grades if grade.student == "bob"] == ["1"] * 5


def test_code_that_loops_exits_writes_or_raises_costs_its_own_point_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(apart, "LIMIT_S", 1.0)
    bodies = {
        "forks": "import os\ndef groups_of(rank, dp, tp):\n    os.fork()\n    return [], []\n",
        "orphan": ORPHAN,
        "exits": "import os\ndef groups_of(rank, dp, tp):\n    os._exit(0)\n",
        "loops": "def groups_of(rank, dp, tp):\n    while True: pass\n",
        "prints": "print('1,000 points')" + RIGHT_GROUPS,
        "raises": "def groups_of(rank, dp, tp):\n    return 1 / 0\n",
        "syntax": "def groups_of(:\n",
    }
    for student, body in bodies.items():
        hand_in(tmp_path, student, {"groups_of.py": body})
    grades = {grade.student: grade for grade in grade_folder(tmp_path, "1") if grade.exercise == "groups_of"}
    assert {student: grade.state for student, grade in grades.items()} == {
        **dict.fromkeys(("exits", "forks", "loops", "orphan", "raises"), "wrong"), "prints": "right",
        "syntax": "unreadable",
    }  # fmt: skip
    assert "did not end within 1 s" in grades["loops"].why
    assert "ended the whole Python process" in grades["exits"].why
    assert "began another process" in grades["forks"].why
    assert "ZeroDivisionError" in grades["raises"].why
    child = int((tmp_path / "orphan" / "1" / "groups_of.pid").read_text())
    stat = Path(f"/proc/{child}/stat")  # what an answer began has ended with it; init may not have taken note of it
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
    assert capfd.readouterr().out == ""


def test_numbers_of_numpy_are_numbers() -> None:
    """Whoever writes the dynamic program with arrays returns numpy's integers."""
    (cheapest,) = [exercise for exercise in part_of("16").exercises() if exercise.key == "cheapest"]
    assert cheapest.correct(lambda own, between: np.array(cheapest.solution(own, between))) is None


def test_the_command_prints_points_and_writes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hand_in(tmp_path / "class", "=ada", {"world_sum.txt": "28\n", "column.txt": "4 5 6 7"})
    hand_in(tmp_path / "class", "=ada", {"token.txt": "60 us"}, "3rd")
    assert main(["guide", "--grade", str(tmp_path / "class"), "--csv", str(tmp_path / "grades.csv")]) == 0
    said = capsys.readouterr().out
    assert "=ada: 1 of 4" in said
    assert "unreadable: 3rd" in said
    rows = list(csv.DictReader(io.StringIO((tmp_path / "grades.csv").read_text())))
    assert sorted(row["state"] for row in rows) == ["missing", "missing", "right", "unreadable", "wrong"]
    assert {row["student"] for row in rows} == {"'=ada"}
    assert next(row for row in rows if row["exercise"] == "column")["why"].startswith("That is rank 6's row")


def test_what_is_no_class_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder"):
        grade_folder(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="has no folders"):
        grade_folder(tmp_path)
    (tmp_path / "ada" / "week one").mkdir(parents=True)
    with pytest.raises(UsageError, match="no chapter was handed in: students' folders have week one"):
        grade_folder(tmp_path)
    assert as_csv([]) == "student,chapter,exercise,points,state,why\n"
    assert main(["guide", "--csv", "x.csv"]) == 2
    assert main(["guide", "--grade", str(tmp_path), "--exercise", "token"]) == 2


def test_the_courses_exercises_are_those_of_its_chapters() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "course.md").read_text()
    named = re.findall(r"`(\w+)/(\w+)`", page)
    assert len(re.findall(r"^\| \d+ \|", page, re.MULTILINE)) == 12
    assert len(named) == len(set(named))
    chapters = {chapter for chapter, _ in named}
    assert set(named) == {(key, exercise.key) for key in chapters for exercise in part_of(key).exercises()}
    assert chapters == {part.key for part in PARTS}
