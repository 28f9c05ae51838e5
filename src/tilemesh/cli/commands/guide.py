"""Learn ML systems by running them. Chapters ask you to predict, then measure on this machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tilemesh.cli.output import Output
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.options import ROWS, OutFile, argument, changed_flags, option, refuse
from tilemesh.guide.book import PARTS, GuidePart, part_of
from tilemesh.guide.grade import as_csv, as_lines, grade_folder
from tilemesh.guide.lesson import Lesson, reader, typical_factor
from tilemesh.guide.progress import ReaderProgress
from tilemesh.guide.runner import notebook as notebook_of
from tilemesh.guide.runner import run_part


@dataclass(frozen=True, kw_only=True)
class GuideOptions:
    chapter: str | None = argument(None, "A number or name; without one, the chapters are listed.", "[CHAPTER]")
    progress: bool = option(False, "Show what you have done so far.")
    exercise: str | None = option(None, "Only this exercise of the chapter.", "NAME")
    answer: str | None = option(None, "Check this answer to the exercise: as typed, or a Python file.", "TEXT")
    grade: str | None = option(None, "Grade a class, a folder per student: all chapters, or one.", "FOLDER")
    csv: OutFile | None = option(None, "Of --grade: every grade with its reason.", "FILE")
    notebook: OutFile | None = option(None, "Write the chapter as a Jupyter notebook instead.", "FILE")
    pause: bool = option(True, "On a terminal, wait for Enter before each section.")
    json: OutFile | None = option(None, ROWS, "FILE")


def guide(options: GuideOptions) -> Output | int:
    """Do what the options say. A wrong answer to an exercise is exit code 1."""
    console = Console(highlight=False, stderr=options.json == "-")
    if options.progress:
        _show_progress(console)
        return 0
    if options.grade is not None:
        why_not = "{} is of one reader, and --grade of a class: leave one out"
        refuse(options, why_not, "exercise", "answer", "notebook", "json")
        grades = grade_folder(Path(options.grade), options.chapter)
        return Output([as_lines(grades)], files={"csv": lambda: as_csv(grades)})
    refuse(options, "{} belongs to --grade FOLDER: name the folder of a class", "csv")
    if options.chapter is None:
        for flag in changed_flags(options, "exercise", "answer", "notebook", "json"):
            value = getattr(options, flag[2:])
            raise UsageError(f"{flag} belongs to a chapter: write tilemesh guide CHAPTER {flag} {value}")
        _list(console)
        return 0
    part = part_of(options.chapter)
    if options.answer is not None and options.exercise is None:
        raise UsageError("--answer without --exercise: name the exercise it answers")
    if options.exercise is not None:
        refuse(
            options, "{} is of a whole chapter, and --exercise asks for one exercise: leave one out", "notebook", "json"
        )
        return _check(part, options.exercise, options.answer, console)
    if options.notebook is not None:
        return Output(files={"notebook": lambda: notebook_of(part)})
    return Output(json=run_part(part, console, reader() if options.pause and console.is_terminal else None))


_TITLE_WIDTH = max(len(part.title) for part in PARTS)


def _list(console: Console) -> None:
    console.print(
        "[bold]The guide[/]: run a chapter with [bold]tilemesh guide 1[/]; read along in docs/guide/README.md of the "
        "repository"
    )
    for part in PARTS:
        console.print(f"  {part.key:<9} {part.title:<{_TITLE_WIDTH}} {part.about}", markup=False, soft_wrap=True)
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
    # What is not an answer at all is refused as any other bad option is.
    return 0 if lesson.judge(known[key], known[key].read(answer)) else 1


def _show_progress(console: Console) -> None:
    progress = ReaderProgress()
    for part in PARTS:
        done = progress.of(part.key)
        exercises = part.exercises()
        solved = [exercise.key for exercise in exercises if exercise.key in done.solved]
        state = f"run to its end {done.finished[:10]}" if done.finished else "not yet run to its end"
        lines = [f"{part.title:<{_TITLE_WIDTH}} {state}; {len(solved)} of {len(exercises)} exercises"]
        factors = [guess.factor for guess in done.guesses if math.isfinite(guess.factor)]
        if factors:
            factor = typical_factor(factors)
            plural = "s" * (len(factors) > 1)
            lines.append(f"{len(factors)} prediction{plural}, typically off by a factor of {factor:.3g}")
        todo = [exercise.key for exercise in exercises if exercise.key not in done.solved]
        if todo:
            lines.append(f"exercises left: {', '.join(todo)}")
        for name, line in zip([part.key, "", ""], lines, strict=False):
            console.print(f"  {name:<9} {line}", markup=False, soft_wrap=True)
    console.print(f"[dim]{progress.path}[/]", soft_wrap=True)
