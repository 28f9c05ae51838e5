"""Exercises whose checks say why an answer is wrong.

An exercise knows its solution, and it knows wrong answers: those that people give for a reason, each with a correction
of its own. `correct(answer)` returns None for a right answer and the correction otherwise; an answer nobody thought of
gets a general one. Four makers: `numeric`, `listing` (some ranks), `choice`, and `code` (a function, judged by what it
does, never by what it looks like).
"""

from __future__ import annotations

import math
import re
import runpy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilemesh.core.errors import RunError, UsageError
from tilemesh.guide.quantity import hint_of, parse_quantity

Correction = Callable[[Any], str | None]
"""Why an answer is wrong; None for one that is right."""


@dataclass(frozen=True)
class Exercise:
    """A question, how its answer is read and judged, and the wrong answers it knows."""

    key: str
    question: str
    hint: str
    """How an answer is written."""
    solution: Any
    planted: tuple[Any, ...]
    """Wrong answers, each of which gets a correction of its own."""
    correct: Correction
    read: Callable[[str], Any]
    """The answer in what a reader typed; UsageError for what cannot be one."""
    explanation: str
    """Said once the answer is right."""
    template: str = ""
    """The code to begin with, where a function is asked for."""

    @property
    def is_code(self) -> bool:
        return bool(self.template)


def numeric(
    key: str,
    question: str,
    answer: float,
    *,
    wrong: Mapping[float, str],
    otherwise: str,
    explanation: str,
    unit: str = "count",
    tolerance: float | None = None,
) -> Exercise:
    """A number, right within a tolerance: a whole count exactly, anything else within 1 % unless said otherwise.

    `otherwise` says how it is computed, without saying what comes out.
    """
    near = tolerance if tolerance is not None else 1e-9 if unit == "count" and answer == int(answer) else 0.01

    def correct(given: float) -> str | None:
        if math.isclose(given, answer, rel_tol=near):
            return None
        for value, why in wrong.items():
            if math.isclose(given, value, rel_tol=near):
                return why
        return f"That is too {'much' if given > answer else 'little'}. {otherwise}"

    hint = hint_of(unit)
    return Exercise(
        key, question, hint, answer, tuple(wrong), correct, lambda text: parse_quantity(text, unit), explanation
    )


def listing(
    key: str,
    question: str,
    answer: Sequence[int],
    *,
    wrong: Mapping[tuple[int, ...], str],
    otherwise: str,
    explanation: str,
) -> Exercise:
    """Some ranks, in any order."""

    def read(text: str) -> tuple[int, ...]:
        words = re.findall(r"[^\s,;\[\]()]+", text)
        if not words or not all(word.isdecimal() for word in words):
            raise UsageError(
                f"'{text[:40]}' is no list of ranks: write numbers with spaces between them, such as 0 4 8"
            )
        return tuple(int(word) for word in words)

    def correct(given: Sequence[int]) -> str | None:
        if sorted(given) == sorted(answer):
            return None
        for value, why in wrong.items():
            if sorted(given) == sorted(value):
                return why
        return otherwise

    hint = "ranks, with spaces between them"
    return Exercise(key, question, hint, tuple(answer), tuple(wrong), correct, read, explanation)


def choice(key: str, question: str, options: Mapping[str, str | None], *, explanation: str) -> Exercise:
    """One of several sentences: `options` maps each to why it is wrong, and the right one to None."""
    sentences = sorted(options)  # in no order that tells the right one
    letters = "abcdefgh"[: len(sentences)]
    right = [sentence for sentence, why in options.items() if why is None]
    if len(right) != 1:
        raise UsageError(f"exercise '{key}' has {len(right)} right options: expected one")

    def read(text: str) -> str:
        letter = text.strip().lower().rstrip(".)")
        if letter not in list(letters):
            raise UsageError(f"'{text.strip()[:40]}' is none of {', '.join(letters)}: type one letter")
        return sentences[letters.index(letter)]

    listed = "\n".join(f"  {letter}) {sentence}" for letter, sentence in zip(letters, sentences, strict=True))
    planted = tuple(sentence for sentence in sentences if options[sentence] is not None)
    hint = f"one of {', '.join(letters)}"
    return Exercise(key, f"{question}\n{listed}", hint, right[0], planted, options.__getitem__, read, explanation)


def code(
    key: str,
    question: str,
    template: str,
    *,
    solution: Callable[..., Any],
    planted: Sequence[Callable[..., Any]],
    correct: Correction,
    explanation: str,
) -> Exercise:
    """A function named like the exercise, in a file of the reader's or handed over in a notebook.

    One that raises gets what it raised, and where, as its correction.
    """

    def judged(function: Callable[..., Any]) -> str | None:
        try:
            return correct(function)
        except Exception as error:
            return f"The function raised {type(error).__name__}{_line_of(function, error)}: {error}"

    def read(text: str) -> Callable[..., Any]:
        return function_in(Path(text.strip()).expanduser(), key)

    hint = f"a Python file with a function `{key}`"
    return Exercise(key, question, hint, solution, tuple(planted), judged, read, explanation, template)


def _line_of(function: Callable[..., Any], error: BaseException) -> str:
    """In which line of the function's own file it was raised; empty where it never got there."""
    code_of = getattr(function, "__code__", None)
    if code_of is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == code_of.co_filename]
    return f" in line {lines[-1]} of {Path(code_of.co_filename).name}" if lines else ""


def why_stuck(error: RunError) -> str:
    """What a failed exchange of messages means: ranks that wait for one another, or messages that do not fit."""
    if "has waited" in str(error):
        return f"The ranks waited for one another: {error}. Begin the receive before you wait for the send (chapter 2)."
    return f"A message did not arrive as it was expected: {error}. A box has the shape and dtype of what will come."


def function_in(path: Path, name: str) -> Callable[..., Any]:
    """The function of that name in a reader's file; the file is run."""
    if not path.is_file():
        raise UsageError(f"'{path}' is no file: write the function `{name}` into one and give its name")
    try:
        found = runpy.run_path(str(path)).get(name)
    except Exception as error:
        raise UsageError(f"'{path}' cannot be run: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise UsageError(f"'{path}' defines no function `{name}`")
    result: Callable[..., Any] = found
    return result
