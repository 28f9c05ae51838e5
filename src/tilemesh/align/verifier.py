"""What a user's function says of an answer, `FILE.py:FUNCTION(prompt, answer, case)`, as numbers.

It runs in a process of its own (`launch/function.py`): where it crashes, hangs or returns nonsense, the answer is worth
nothing and the reason is counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tilemesh.launch.function import FunctionProcess

MAIN = "score"
"""The part that a verifier's single number is."""


class Scored(NamedTuple):
    """What an answer was found to be worth."""

    parts: Mapping[str, float]
    """By name; `score` is what is paid."""
    failure: str = ""
    """Why it could not be scored."""
    place: int = 0
    """Among those that were scored together."""


def read_parts(value: Any) -> Scored:
    """A verifier's word as numbers; whatever is none pays nothing."""
    parts = value if isinstance(value, Mapping) else {MAIN: value}
    numbers = {}
    for name, part in parts.items():
        try:
            number = float(part) if isinstance(part, int | float) else math.nan
        except OverflowError:
            return Scored({}, f"{name} is a whole number of hundreds of digits: expected one that a float can be")
        if not math.isfinite(number):
            return Scored({}, f"{name} is {part!r:.60}: expected a number")
        numbers[str(name).encode(errors="replace").decode()] = number  # half a character would be no name of an array
    if MAIN not in numbers:
        return Scored({}, f"has no part '{MAIN}': expected a number, or numbers by name with that one among them")
    return Scored(numbers)


class Verifier:
    """Scores answers by a user's function."""

    def __init__(self, spec: str, deadline_s: float) -> None:
        self._function = FunctionProcess(spec, deadline_s)
        self.close = self._function.close

    def __call__(self, items: Sequence[tuple[str, str, Mapping[str, Any]]]) -> list[Scored]:
        called = self._function(items)
        scored = [Scored({}, each.failure) if each.failure else read_parts(each.value) for each in called]
        return [each._replace(place=call.number) for each, call in zip(scored, called, strict=True)]
