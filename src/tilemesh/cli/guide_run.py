"""What `tilemesh guide` does: list the chapters, run one, check an answer, or show what the reader has done."""

from __future__ import annotations

import math

from rich.console import Console

from tilemesh.cli.targets import check_targets
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.files import write_output
from tilemesh.guide.book import PARTS, GuidePart, part_of
from tilemesh.guide.lesson import Lesson, reader, typical_factor
from tilemesh.guide.progress import ReaderProgress
from tilemesh.guide.runner import notebook as notebook_of
from tilemesh.guide.runner import run_part
from tilemesh.measure.row import write_rows


def open_guide(
    chapter: str | None,
    progress: bool,
    exercise: str | None,
    answer: str | None,
    notebook: str | None,
    pause: bool,
    json: str | None,
) -> int:
    """Do what was asked for; the exit code. A wrong answer to an exercise is 1."""
    console = Console(highlight=False, stderr=json == "-")
    if progress:
        _show_progress(console)
        return 0
    if chapter is None:
        for name, given in (
            ("--exercise", exercise), ("--answer", answer), ("--notebook", notebook), ("--json", json)
        ):  # fmt: skip
            if given is not None:
                raise UsageError(f"{name} belongs to a chapter: write tilemesh guide CHAPTER {name} {given}")
        _list(console)
        return 0
    part = part_of(chapter)
    if answer is not None and exercise is None:
        raise UsageError("--answer without --exercise: name the exercise it answers")
    if exercise is not None:
        for name, given in (("--notebook", notebook), ("--json", json)):
            if given is not None:
                raise UsageError(f"{name} is of a whole chapter, and --exercise asks for one exercise: leave one out")
        return _check(part, exercise, answer, console)
    check_targets(json=json)
    if notebook is not None:
        write_output(notebook_of(part), notebook)
        return 0
    rows = run_part(part, console, reader() if pause and console.is_terminal else None)
    if json is not None:
        write_rows(rows, json)
    return 0


def _list(console: Console) -> None:
    console.print(
        "[bold]The guide[/]: run a chapter with [bold]tilemesh guide 1[/]; read along in docs/guide/README.md of the "
        "repository"
    )
    for part in PARTS:
        console.print(f"  {part.key:<9} {part.title:<24} {part.about}", markup=False, soft_wrap=True)
    console.print(
        "tilemesh guide --progress shows what you have done; tilemesh doctor says what works on this machine."
    )


def _check(part: GuidePart, key: str, answer: str | None, console: Console) -> int:
    known = {exercise.key: exercise for exercise in part.exercises()}
    if key not in known:
        raise unknown(f"exercise of chapter {part.key}", key, known)
    lesson = Lesson(part.key, console=console)
    if answer is None:
        lesson.exercise(key)
        return 0
    # An answer on the command line counts, whether or not the output is a terminal.
    lesson = Lesson(part.key, console=console, ask=lambda prompt: None)
    # What is no answer at all is refused as any other bad option is.
    return 0 if lesson.judge(known[key], known[key].read(answer)) else 1


def _show_progress(console: Console) -> None:
    progress = ReaderProgress()
    for part in PARTS:
        done = progress.of(part.key)
        exercises = part.exercises()
        solved = [exercise.key for exercise in exercises if exercise.key in done.solved]
        state = f"run to its end {done.finished[:10]}" if done.finished else "not yet run to its end"
        lines = [f"{part.title:<24} {state}; {len(solved)} of {len(exercises)} exercises"]
        factors = [guess.factor for guess in done.guesses if math.isfinite(guess.factor)]
        if factors:
            factor = typical_factor(factors)
            lines.append(
                f"{len(factors)} prediction{'s' if len(factors) > 1 else ''}, typically off by a factor of {factor:.3g}"
            )
        todo = [exercise.key for exercise in exercises if exercise.key not in done.solved]
        if todo:
            lines.append(f"exercises left: {', '.join(todo)}")
        for name, line in zip([part.key, "", ""], lines, strict=False):
            console.print(f"  {name:<9} {line}", markup=False, soft_wrap=True)
    console.print(f"[dim]{progress.path}[/]", soft_wrap=True)
