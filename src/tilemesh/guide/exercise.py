"""Exercises whose checks say why an answer is wrong.

An exercise knows its solution, and wrong answers that people give for a reason, each with a correction of its own.
`correct(answer)` returns None for a right answer and the correction otherwise; an answer nobody thought of gets a
general one. Four makers: `numeric`, `listing` (some ranks), `choice`, and `code` (a function, judged by what it does,
never by what it looks like, in a process of its own: `apart.py`).
"""

from __future__ import annotations

import itertools
import math
import re
import runpy
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from tilemesh.core.errors import RunError, UsageError
from tilemesh.guide.apart import judged_apart
from tilemesh.guide.quantity import hint_of, hint_of_asked, parse_asked, parse_quantity

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
    """Wrong answers, each of which gets a correction of its own; none for `code`."""
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
    counted_in: str = "",
    tolerance: float | None = None,
) -> Exercise:
    """A number, right within a tolerance: a whole count exactly, anything else within 1 % unless said otherwise.

    `otherwise` says how it is computed, without saying what comes out. `counted_in`: the question asks for a number of
    these (`ASKED`), which may be typed behind it.
    """
    hint = hint_of_asked(counted_in) if counted_in else hint_of(unit)
    near = tolerance if tolerance is not None else 1e-9 if unit == "count" and answer == int(answer) else 0.01

    def correct(number: float) -> str | None:
        if not isinstance(number, Real):
            return _no_answer(number, f"a number, {hint}")
        if math.isclose(number, answer, rel_tol=near):
            return None
        for value, why in wrong.items():
            if math.isclose(number, value, rel_tol=near):
                return why
        return f"That is too {'much' if number > answer else 'little'}. {otherwise}"

    def read(text: str) -> float:
        return parse_asked(text, counted_in) if counted_in else parse_quantity(text, unit)

    return Exercise(key, question, hint, answer, tuple(wrong), correct, read, explanation)


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

    def correct(ranks: Sequence[int]) -> str | None:
        if not isinstance(ranks, Sequence) or not all(isinstance(rank, Integral) for rank in ranks):
            return _no_answer(ranks, "a list of ranks")
        if sorted(ranks) == sorted(answer):
            return None
        for value, why in wrong.items():
            if sorted(ranks) == sorted(value):
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
        written = [sentence for sentence in sentences if sentence.lower().rstrip(".") == letter]
        if written:
            return written[0]
        if letter not in list(letters):
            raise UsageError(f"'{text.strip()[:40]}' is none of {', '.join(letters)}: type one letter")
        return sentences[letters.index(letter)]

    listed = "\n".join(f"  {letter}) {sentence}" for letter, sentence in zip(letters, sentences, strict=True))
    planted = tuple(sentence for sentence in sentences if options[sentence] is not None)
    hint = f"one of {', '.join(letters)}"

    def correct(answer: str) -> str | None:
        return options[answer] if answer in sentences else _no_answer(answer, "one of the sentences")

    return Exercise(key, f"{question}\n{listed}", hint, right[0], planted, correct, read, explanation)


def _no_answer(answer: object, expected: str) -> str:
    """Of what a notebook's `correct` may be given and nobody can type."""
    return f"{'There is no answer yet' if answer is None else f'{answer!r:.60} is no answer'}: expected {expected}."


def code(
    key: str,
    question: str,
    template: str,
    *,
    returns: str,
    solution: Callable[..., Any],
    correct: Correction,
    explanation: str,
) -> Exercise:
    """A function named like the exercise, in a file of the reader's or handed over in a notebook.

    `returns`: what it returns, in a few words. One that raises gets what it raised, and where, as its correction.
    """

    def judged(answer: Callable[..., Any] | AnswerFile) -> str | None:
        if not callable(answer) and not isinstance(answer, AnswerFile):
            return _no_answer(answer, f"a function `{key}`")
        return judged_apart(lambda: judge(answer))

    def judge(answer: Callable[..., Any] | AnswerFile) -> str | None:
        function = function_in(answer.path, key) if isinstance(answer, AnswerFile) else answer
        calls = _Calls(function, returns)
        try:
            return correct(calls)
        except _NoResultError as error:
            return str(error)
        except RunError as error:
            return why_stuck(error)
        except Exception as error:
            if not calls.raised and calls.results:  # it was the check that could do nothing with what came
                return f"`{key}` did not return {returns}: it returned {calls.results[-1]!r:.60}."
            return f"The function raised {type(error).__name__}{_line_of(function, error)}: {error}"

    def read(text: str) -> AnswerFile:
        path = Path(text.strip()).expanduser()
        _source(path, key)
        return AnswerFile(path)

    hint = f"a Python file with a function `{key}`"
    return Exercise(key, question, hint, solution, (), judged, read, explanation, template)


@dataclass(frozen=True)
class AnswerFile:
    """A reader's file, which is run only where it is judged."""

    path: Path


class _NoResultError(BaseException):
    """A function returned nothing that could be judged. No Exception, which a check may take for the answer's own."""


MOST_ITEMS = 10_000
"""More than any answer has; what yields more is taken to have no end."""


class _Calls:
    """The function, refused where it returns None or something without an end, and what its calls came to."""

    def __init__(self, function: Callable[..., Any], returns: str) -> None:
        self.function, self.returns = function, returns
        self.results: list[Any] = []
        self.raised = False

    def __call__(self, *args: Any) -> Any:
        returns = self.returns
        try:
            result = self.function(*args)
        except BaseException:
            self.raised = True
            raise
        self.results.append(result)
        if result is None:
            raise _NoResultError(
                f"Your function returned None: it is not written yet, or a `return` is missing. It returns {returns}."
            )
        return _listed(result, returns)


def _listed(result: Any, returns: str) -> Any:
    """Generators and other iterators as lists, also inside a list or a tuple."""
    if isinstance(result, Iterator):
        items = list(itertools.islice(result, MOST_ITEMS + 1))
        if len(items) > MOST_ITEMS:
            raise _NoResultError(
                f"Your function returned something that goes on after {MOST_ITEMS:,} items. It returns {returns}."
            )
        return items
    if type(result) in (list, tuple):
        return type(result)(_listed(item, returns) for item in result)
    return result


def _line_of(function: Callable[..., Any], error: BaseException) -> str:
    """In which line of the function's own file it was raised; empty where it never got there."""
    code_of = getattr(function, "__code__", None)
    if code_of is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == code_of.co_filename]
    return f" in line {lines[-1]} of {Path(code_of.co_filename).name}" if lines else ""


def why_stuck(error: RunError) -> str:
    """What it means that ranks did not come to their end: they wait for one another, or messages do not fit. How
    patient the check was is nothing of the reader's."""
    who = str(error).partition("; ending the job")[0]
    if "has waited" not in who:
        return f"A message did not arrive as it was expected: {who}. A box has the shape and dtype of what will come."
    is_collective = re.search(r"in \w+ #\d", who)  # which are numbered
    rule = "All ranks must make the same collective calls."
    rule = rule if is_collective else "Begin the receive before you wait for the send (chapter 2)."
    return f"The ranks waited for one another: {who}. {rule}"


def function_in(path: Path, name: str) -> Callable[..., Any]:
    """The function of that name in a reader's file; the file is run."""
    _source(path, name)
    try:
        defined = runpy.run_path(str(path)).get(name)
    except Exception as error:
        raise UsageError(f"'{path}' cannot be run: {type(error).__name__}: {error}") from error
    if not callable(defined):
        raise UsageError(f"'{path}' defines no function `{name}`")
    result: Callable[..., Any] = defined
    return result


def _source(path: Path, name: str) -> None:
    """Refuse what is not a file, or not Python, before any of it is run."""
    if not path.is_file():
        shown = "" if path == Path() else path
        raise UsageError(f"'{shown}' is no file: write the function `{name}` into one and give its name")
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError, OSError) as error:
        raise UsageError(f"'{path}' cannot be run: {type(error).__name__}: {error}") from error
