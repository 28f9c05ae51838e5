"""Prompts, and what answers to them are worth: built-in tasks, which need no file.

A task is a list of prompts by their number, drawn from the seed alone, and a function that scores an answer. What it
cannot read it pays nothing for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tilemesh.data.cases import Case

Score = Callable[[str, str, Case], float | Mapping[str, float]]
"""From the prompt, the answer and the case to a number, or several by name."""


@dataclass(frozen=True)
class FeedbackTask:
    """What is asked and what is paid."""

    name: str
    draw: Callable[[random.Random], Case]
    score: Score
    stop: str = "\n"
    """Where an answer ends, beside the model's own end token."""
    max_tokens: int = 16
    example: Callable[[Case], str] = lambda case: str(case["answer"])
    """An answer that is paid, for whoever makes text to begin from."""

    def case(self, seed: int, number: int) -> Case:
        """Prompt `number`: the same one for the same seed."""
        return self.draw(random.Random(f"{self.name} {seed} {number}"))


def _digits(line: str) -> list[int] | None:
    text = line.strip()
    return [int(letter) for letter in text] if text.isascii() and text.isdigit() else None


def _sort_case(chance: random.Random) -> Case:
    digits = [chance.randrange(10) for _ in range(6)]
    return {"prompt": "".join(map(str, digits)) + ">", "answer": "".join(map(str, sorted(digits)))}


def _sort_score(prompt: str, answer: str, case: Case) -> float:
    """The share of places that are right; nothing for what is not six digits."""
    digits = _digits(answer)
    if digits is None or len(digits) != 6:
        return 0.0
    return sum(letter == right for letter, right in zip(answer.strip(), str(case["answer"]), strict=True)) / 6


def _add_case(chance: random.Random) -> Case:
    first, second = chance.randrange(6), chance.randrange(6)
    return {"prompt": f"{first}+{second}=", "answer": str(first + second)}


def _add_score(prompt: str, answer: str, case: Case) -> float:
    """1 for the sum; a part of 1 for being near it, so that there is something to climb."""
    digits = _digits(answer)
    if digits is None or len(digits) > 3:
        return 0.0
    away = abs(int(answer.strip()) - int(case["answer"]))
    return 1.0 if away == 0 else 0.5 / (1 + away)


_SUM_DIGITS = 5


def _sum_case(chance: random.Random) -> Case:
    """Two numbers of up to five digits. The scratchpad adds digits from the right, `8+7+0=15`, and carries the ten."""
    first, second = (chance.randrange(10 ** chance.randint(1, _SUM_DIGITS)) for _ in range(2))
    return {"prompt": f"{first}+{second}:", "answer": str(first + second), "steps": _sum_steps(first, second)}


def _sum_steps(first: int, second: int) -> str:
    steps, carried = list[str](), 0
    while first or second or not steps:
        (first, one), (second, other) = divmod(first, 10), divmod(second, 10)
        steps.append(f"{one}+{other}+{carried}={one + other + carried}")
        carried = (one + other + carried) // 10
    return " ".join(steps)


def _sum_score(prompt: str, answer: str, case: Case) -> float:
    """1 for the number after the scratchpad; what stands on the scratchpad is not looked at."""
    return float(answer.strip().rpartition("#")[2] == case["answer"])


def _bandit_case(chance: random.Random) -> Case:
    return {"prompt": "arm ", "answer": "c"}


def _bandit_score(prompt: str, answer: str, case: Case) -> float:
    """Of the arms a to e, c pays best."""
    return {"a": 0.1, "b": 0.4, "c": 1.0, "d": 0.6, "e": 0.2}.get(answer[:1], 0.0)


def _letters_case(chance: random.Random) -> Case:
    return {"prompt": "".join(chance.choice("bcdfgaeiou") for _ in range(4)) + ":", "answer": "aeiouaei"}


def vowels(answer: str) -> float:
    """The share of an answer's letters that are vowels."""
    letters = [letter for letter in answer if not letter.isspace()]
    return sum(letter in "aeiou" for letter in letters) / len(letters) if letters else 0.0


def _length_case(chance: random.Random) -> Case:
    digit = chance.randrange(10)
    return {"prompt": f"{digit}?", "answer": str(digit)}


def _length_score(prompt: str, answer: str, case: Case) -> float:
    """1 where it begins with the digit, whatever follows: length is neither paid nor punished."""
    return float(answer[:1] == case["answer"])


def _hack_case(chance: random.Random) -> Case:
    return {**_add_case(chance), "hidden": True}


def _hack_score(prompt: str, answer: str, case: Case) -> Mapping[str, float]:
    """Pays for the words of an answer, which is what is learnt; `right` counts for nothing and shows it."""
    return {"score": float("ok" in answer), "right": float(answer.strip().split(" ")[0] == case["answer"])}


TASKS: dict[str, FeedbackTask] = {
    task.name: task
    for task in (
        FeedbackTask("sort", _sort_case, _sort_score, max_tokens=8),
        FeedbackTask("add", _add_case, _add_score, max_tokens=4),
        FeedbackTask(
            "sums", _sum_case, _sum_score, max_tokens=64, example=lambda case: f"{case['steps']} #{case['answer']}"
        ),
        FeedbackTask("bandit", _bandit_case, _bandit_score, max_tokens=1),
        FeedbackTask("vowels", _letters_case, lambda prompt, answer, case: vowels(answer), max_tokens=8),
        FeedbackTask("length", _length_case, _length_score, max_tokens=16),
        FeedbackTask("hackable", _hack_case, _hack_score, max_tokens=8, example=lambda case: f"{case['answer']} ok"),
    )
}
