"""Answers of a class, graded by the checks that the chapters have.

A student hands in a folder with one file per exercise: `1/world_sum.txt` holds an answer as it would be typed,
`1/groups_of.py` a function. Functions run in a process of their own, with a deadline and bounded memory (`apart.py`),
yet with the rights of whoever grades: strangers' code belongs into a container.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from tilemesh.core.errors import UsageError, unknown
from tilemesh.guide.book import PARTS, GuidePart, part_of
from tilemesh.guide.exercise import Exercise

RIGHT, WRONG, UNREADABLE, MISSING = "right", "wrong", "unreadable", "missing"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class AnswerGrade:
    """One answer of one student. `why`: what the chapter says to it; for a right one its explanation is left out."""

    student: str
    chapter: str
    exercise: str
    points: int
    state: str
    why: str


def grade_folder(folder: Path, chapter: str | None = None) -> list[AnswerGrade]:
    """Every student's grade in every exercise of a chapter, or of all chapters that somebody handed something in of."""
    if not folder.is_dir():
        raise UsageError(f"'{folder}' is no folder: give one with a folder per student")
    students = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if not students:
        raise UsageError(f"'{folder}' has no folders: expected one per student, with files such as 1/world_sum.txt")
    handed = {path.name for student in students for path in student.iterdir() if path.is_dir()}
    parts = [part_of(chapter)] if chapter else [part for part in PARTS if handed & {part.key, part.folder}]
    if not parts:
        shown = ", ".join(sorted(handed)[:5]) or "no folders at all"
        raise UsageError(
            f"no chapter was handed in: students' folders have {shown}; expected 1, 2, ... or {PARTS[0].folder}"
        )
    grades = [grade for student in students for part in parts for grade in _grades(student, part)]
    if not chapter:
        grades += [grade for student in students for grade in _strays(student)]
    return grades


def _grades(student: Path, part: GuidePart) -> Iterator[AnswerGrade]:
    exercises = {exercise.key: exercise for exercise in part.exercises()}
    folders = [student / name for name in (part.key, part.folder) if (student / name).is_dir()]
    files = {
        file.stem: file for folder in folders for file in sorted(folder.iterdir()) if file.suffix in (".txt", ".py")
    }
    for key, exercise in exercises.items():
        state, why = (MISSING, "") if key not in files else _judged(exercise, files[key])
        yield AnswerGrade(student.name, part.key, key, int(state == RIGHT), state, why)
    for key in sorted(files.keys() - exercises):
        error = unknown(f"exercise of chapter {part.key}", key, exercises)
        yield AnswerGrade(student.name, part.key, key, 0, UNREADABLE, str(error))


def _strays(student: Path) -> Iterator[AnswerGrade]:
    """Folders that are not chapters: a typing error should not cost a chapter without a word."""
    known = [name for part in PARTS for name in (part.key, part.folder)]
    for path in sorted(student.iterdir()):
        if path.is_dir() and path.name not in known and not path.name.startswith((".", "__")):
            yield AnswerGrade(student.name, path.name, "", 0, UNREADABLE, str(unknown("chapter", path.name, known)))


def _judged(exercise: Exercise, file: Path) -> tuple[str, str]:
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise UsageError(f"the file has more than {_MOST_BYTES >> 20} MiB")
        if exercise.is_code != (file.suffix == ".py"):
            raise UsageError(f"expected {exercise.key}{'.py' if exercise.is_code else '.txt'}: {exercise.hint}")
        answer = exercise.read(str(file) if exercise.is_code else file.read_text(encoding="utf-8").strip())
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            why = exercise.correct(answer)
    except (UsageError, OSError, UnicodeDecodeError) as error:
        return UNREADABLE, " ".join(str(error).split())
    return (RIGHT, "") if why is None else (WRONG, " ".join(why.split()))


def as_csv(grades: Sequence[AnswerGrade]) -> str:
    """One line per grade. A name that a spreadsheet would take for a formula begins with an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([field.name for field in fields(AnswerGrade)])
    for grade in grades:
        writer.writerow([f"'{cell}" if str(cell).startswith(("=", "+", "-", "@")) else cell for cell in astuple(grade)])
    return out.getvalue()


def as_lines(grades: Sequence[AnswerGrade]) -> list[str]:
    """Points of each student, and who has what wrong."""
    lines = []
    for student in dict.fromkeys(grade.student for grade in grades):
        own = [grade for grade in grades if grade.student == student]
        answered = [grade for grade in own if grade.exercise]
        lines.append(f"{student}: {sum(grade.points for grade in own)} of {len(answered)}")
        for state in (WRONG, UNREADABLE, MISSING):
            named = [f"{grade.chapter}/{grade.exercise}".rstrip("/") for grade in own if grade.state == state]
            if named:
                lines.append(f"  {state}: {' '.join(named)}")
    return lines
