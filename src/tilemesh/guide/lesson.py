"""A chapter while it runs: it asks for predictions before it measures, keeps the rows, and asks the exercises.

    lesson = Lesson("3")
    guess = lesson.predict("time of a 64 MiB all-reduce on 4 ranks", unit="s", model=0.04)
    lesson.show(guess, measured, limit=0.01)
    lesson.exercises()
    lesson.close()

The reader's guess becomes a column of the row, next to the cost model's prediction, the measurement and the limit.
Where nobody can be asked (tests, CI, a pipe) the cost model answers and nothing is remembered.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from rich.console import Console
from rich.syntax import Syntax

from tilemesh.bench.harness import Estimate, exactly, make_row
from tilemesh.core.errors import UsageError, unknown
from tilemesh.guide.book import next_part, part_of
from tilemesh.guide.exercise import Exercise
from tilemesh.guide.progress import Guessed, ReaderProgress
from tilemesh.guide.quantity import hint_of, parse_quantity
from tilemesh.measure.row import CaseValue, Row
from tilemesh.measure.sample import Sample
from tilemesh.measure.table import format_value, print_rows, print_words, wrapped

Figure = Literal["measured", "counted", "simulated", "planned"]
"""A result was timed here, counted by a program that ran, read from a simulated clock, or computed for a plan."""

Ask = Callable[[str], str | None]
"""Puts a question to the reader; None: there is nobody (any more) to answer."""

MOST_TRIES = 3
"""Wrong answers to an exercise before the chapter goes on."""


@dataclass(frozen=True)
class Guess:
    """What was predicted before anything was measured: by the reader, and by the cost model."""

    question: str
    unit: str
    value: float | None
    """The reader's, or the cost model's where nobody can be asked; None: skipped."""
    model: float | None
    by_reader: bool
    name: str
    """The question in a few words, for tables."""


def reader() -> Ask | None:
    """How to ask whoever sits before this process; None for a process nobody can answer."""
    in_notebook = "ipykernel" in sys.modules
    if not in_notebook and not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None

    def ask(prompt: str) -> str | None:
        try:
            text = input(prompt)
            if text.strip().lower() in ("q", "quit") and not in_notebook:
                raise SystemExit(0)
            return text
        except EOFError:
            print()  # Ctrl-D leaves the cursor behind the question
            return None
        except NotImplementedError:  # a notebook that is run by a program has no input line
            return None

    return ask


class Lesson:
    """One run of one chapter."""

    def __init__(
        self,
        key: str,
        *,
        ask: Ask | None = None,
        progress: ReaderProgress | None = None,
        console: Console | None = None,
    ) -> None:
        """`ask`: who answers; found from the terminal if not given. `progress`: where answers are remembered."""
        self.part = part_of(key)
        self.console = console or Console(highlight=False)
        self.rows: list[Row] = []
        self._stored: dict[str, list[Row]] = {}
        self.guesses: list[tuple[Guess, float]] = []
        self._in_pipe = not self.console.is_terminal  # there lines stay whole; a terminal gets them broken at words
        self._ask = ask or reader()
        self._progress = (progress or ReaderProgress()) if self._ask is not None else None

    def _say(self, words: str) -> None:
        """Whole lines in a pipe; broken between words, and never before a unit, in a terminal."""
        if self._in_pipe:
            self.console.print(words, markup=False, soft_wrap=True)
        else:
            print_words(words, self.console)

    # Predictions ------------------------------------------------------------------------------------------------

    def predict(self, question: str, *, unit: str, model: float | None = None, name: str = "") -> Guess:
        """Ask for a prediction before it is measured. `model`: what the cost model says, not shown until `show`.

        Without a model only a reader can answer. `name`: the question in a few words, for tables.
        """
        if model is None and self._ask is None:
            raise UsageError(
                f"nobody can be asked '{question}', and there is no cost model to answer: give model=, or run it in a "
                "terminal or a notebook"
            )
        self.console.print(f"[bold]Predict:[/] {question}", soft_wrap=self._in_pipe)
        while self._ask is not None:
            text = self._ask(f"  your guess, {hint_of(unit)} (Enter to skip, q to leave): ")
            if text is None or not text.strip():
                break
            try:
                guessed = _positive(text, unit)
                return Guess(question, unit, guessed, model, by_reader=True, name=name or question)
            except UsageError as error:
                self._say(f"  {error}")
        # A reader who skips has no guess; where nobody can be asked the cost model's is the guess.
        skipped = "no guess: the result follows" if self._ask else "nobody can be asked: the cost model answers"
        self.console.print(f"  {skipped}", soft_wrap=self._in_pipe)
        value = model if self._ask is None else None
        return Guess(question, unit, value, model, by_reader=False, name=name or question)

    def show(
        self,
        guess: Guess,
        measured: Sample | float,
        *,
        limit: float | None = None,
        missing: Mapping[str, str] | None = None,
        case: Mapping[str, CaseValue] | None = None,
        peers: Mapping[str, Sample] | None = None,
        figure: Figure = "measured",
    ) -> Row:
        """Put the result beside the guess, and keep the row. A missing limit says why. `figure`: how it was had."""
        sample = measured if isinstance(measured, Sample) else exactly(float(measured))
        row = make_row(
            guess.name, {**(case or {}), **({} if figure == "measured" else {"figure": figure})}, sample,
            unit=guess.unit, predicted=Estimate(guess.model, "no cost model was given"),
            limit=Estimate(limit, (missing or {}).get("limit", "")), peers=peers, missing=missing,
            no_peers="nothing else was run here",
        )  # fmt: skip
        row = replace(row, guess=guess.value)
        self.guesses.append((guess, sample.median))
        self.add(row)
        values = {"your guess": guess.value if guess.by_reader else None, "cost model": guess.model}
        values |= {figure: sample.median, "limit": limit}
        words = [f"{what} {format_value(value, guess.unit)}" for what, value in values.items() if value is not None]
        self._say(f"  {guess.name}: {' · '.join(words)}")
        return row

    def add(self, row: Row, stored: str = "") -> None:
        """Keep a row that was made elsewhere, for the table at the end. `stored`: the machine that it was measured on
        before, where this one cannot."""
        self.rows.append(row)
        if stored:
            self._stored.setdefault(stored, []).append(row)

    # Code and exercises -----------------------------------------------------------------------------------------

    def source(self, *functions: Callable[..., Any]) -> None:
        """Show the code of functions that ranks run from other files."""
        for function in functions:
            text = textwrap.dedent(inspect.getsource(function)).rstrip()
            show_code(f"# {function.__module__}\n{text}", self.console)

    def exercises(self) -> None:
        """Ask all exercises of the chapter, one after the other."""
        for exercise in self.part.exercises():
            self.exercise(exercise.key)

    def exercise(self, key: str) -> None:
        """Ask an exercise until it is right or given up; without a reader, only show it."""
        known = {exercise.key: exercise for exercise in self.part.exercises()}
        if key not in known:
            raise unknown("exercise", key, known)
        exercise = known[key]
        self.console.print(f"[bold]Exercise {key}:[/]", soft_wrap=self._in_pipe)
        self._say(_without_stars(exercise.question))
        if exercise.is_code or self._ask is None:
            if exercise.is_code:
                self.console.print(exercise.template, markup=False, soft_wrap=True)  # to be copied
            placeholder = "FILE.py" if exercise.is_code else "ANSWER"
            line = f"tilemesh guide {self.part.key} --exercise {key} --answer {placeholder}"
            self._say(f"  Answer it with: {line} ({exercise.hint})")
            return
        wrong = 0
        while wrong < MOST_TRIES:
            text = self._ask(f"  your answer, {exercise.hint} (Enter to skip, q to leave): ")
            if text is None or not text.strip():
                return
            is_right = self.answer(exercise, text)
            if is_right:
                return
            wrong += is_right is not None  # what cannot be read as an answer is no try
            if is_right is not None and wrong < MOST_TRIES:
                self.console.print("  Try again.")
        line = f"tilemesh guide {self.part.key} --exercise {key} --answer ANSWER"
        self._say(f"  Go on for now, and come back to it with: {line}")

    def answer(self, exercise: Exercise, text: str) -> bool | None:
        """Judge what a reader typed, say why it is wrong if it is, and remember the try. None: it is not an answer."""
        try:
            return self.judge(exercise, exercise.read(text))
        except UsageError as error:
            self._say(f"  {error}")
            return None

    def judge(self, exercise: Exercise, answer: Any) -> bool:
        """Judge an answer that was read; UsageError for a file that cannot be run."""
        why = exercise.correct(answer)
        if self._progress is not None:
            self._progress.answered(self.part.key, exercise.key, why is None)
        verdict = f"  Right. {exercise.explanation}" if why is None else f"  Not yet. {why}"
        self._say(_without_stars(verdict))
        return why is None

    # The end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The chapter's rows, how far off the guesses were, and a note in the reader's progress."""
        stored = [row for rows in self._stored.values() for row in rows]
        here: dict[str, list[Row]] = {figure: [] for figure in get_args(Figure)}
        for row in self.rows:
            if row not in stored:
                case = dict(row.case)
                here[str(case.pop("figure", "measured"))].append(replace(row, case=case))
        for title, figure, rows in (
            *((f"What was predicted and {figure} in this chapter", figure, rows) for figure, rows in here.items()),
            *(
                (f"Measured on {machine} before, and kept with this chapter", "measured", kept)
                for machine, kept in self._stored.items()
            ),
        ):
            if rows:
                self.console.print(f"\n[bold]{title}[/]")
                print_rows(rows, self.console, figure)
        for line in how_far_off(self.guesses):
            self._say(line)
        if self._progress is not None:
            self._progress.finish(self.part.key, [guessed for _, guessed in guesses_of_reader(self.guesses)])
        following = next_part(self.part)
        if following is not None:
            self._say(f"Next: {following.words}, tilemesh guide {following.key}")


def show_code(code: str, console: Console, indent: str = "") -> None:
    """Code in colour, with what is wider than a terminal broken between words; plain and whole in a pipe."""
    if not console.is_terminal:
        lines = [f"{indent}{line}".rstrip() for line in code.splitlines()]
        console.print("\n".join(lines), markup=False, soft_wrap=True)
        return
    broken = [
        wrapped(line, console.width, further=" " * (len(line) - len(line.lstrip()) + 8)) for line in code.splitlines()
    ]
    # The theme's plain text has the terminal's own colour: on the terminal's background any other may be unreadable.
    code = "\n".join(broken)
    console.print(Syntax(code, "python", theme="ansi_light", word_wrap=True, background_color="default"))


def _positive(text: str, unit: str) -> float:
    """A guess that can be judged by its factor; UsageError for any other."""
    value = parse_quantity(text, unit)
    if not value:
        raise UsageError(
            f"'{text.strip()[:40]}' cannot be judged by how many times too much or too little it is: write a guess "
            "above 0"
        )
    return value


def _without_stars(text: str) -> str:
    """Markdown's *emphasis* as plain words, for a terminal."""
    return re.sub(r"(?<![\w*])\*([^*\s][^*\n]*)\*", r"\1", text)


def guesses_of_reader(guesses: list[tuple[Guess, float]]) -> list[tuple[Guess, Guessed]]:
    """Those that a reader made, beside what was measured."""
    return [
        (guess, Guessed(guess.question, guess.unit, guess.value, measured))
        for guess, measured in guesses
        if guess.by_reader and guess.value is not None
    ]


def how_far_off(guesses: list[tuple[Guess, float]]) -> list[str]:
    """Sentences on the reader's guesses: each one's factor, and the typical one beside the cost model's."""
    mine = guesses_of_reader(guesses)
    if not mine:
        return []
    lines = [f"  {guessed.question}: off by a factor of {guessed.factor:.3g}" for _, guessed in mine]
    typical = f"  Typically a factor of {typical_factor([guessed.factor for _, guessed in mine]):.3g}"
    models = [
        Guessed(guess.question, guess.unit, guess.model, guessed.measured).factor
        for guess, guessed in mine
        if guess.model is not None
    ]
    return [*lines, f"{typical}; the cost model's is {typical_factor(models):.3g}." if models else f"{typical}."]


def typical_factor(factors: list[float]) -> float:
    """The geometric mean, which weighs twice too much and twice too little alike."""
    if any(math.isinf(factor) for factor in factors):
        return math.inf
    return math.exp(sum(math.log(factor) for factor in factors) / len(factors))
