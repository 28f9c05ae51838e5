"""Numbers as a reader types them: `3 ms`, `40us`, `2 seconds`, `2.5 GB/s`, `64 MiB`, `20 %`, `3/5`, `1,024`, `12`.

A comma separates thousands and nothing else: `1,5` could mean 1.5 or 15, so it is refused. So is a share of 20: it
could be 20 % or 20 times the whole.
"""

from __future__ import annotations

import contextlib
import math
import re

from tilemesh.core.errors import UsageError
from tilemesh.measure.row import higher_is_better

_NUMBER = re.compile(
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*(.*)", re.IGNORECASE
)
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_SECONDS |= {
    f"{word}{ending}": scale
    for word, scale in (("sec", 1.0), ("second", 1.0), ("millisecond", 1e-3), ("microsecond", 1e-6), ("minute", 60.0))
    for ending in ("", "s")
}
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {f"{letter}i": 1024.0**power for power, letter in enumerate("kmgtp", start=1)}
_PERCENT = {"%", "percent", "per cent", "pct"}
# No example is the answer of an exercise.
_EXAMPLES = {"s": "3 ms", "B": "64 MiB", "B/s": "2.5 GB/s", "FLOP/s": "80 GFLOP/s", "fraction": "35 % or 0.35"}
_EXAMPLE = "37"


def hint_of(unit: str) -> str:
    """How a reader may write a number of this unit."""
    if unit in _EXAMPLES:
        return f"such as {_EXAMPLES[unit]}"
    return "a number" if unit == "count" else f"a number of {unit}"


def parse_quantity(text: str, unit: str) -> float:
    """The number in the unit's own scale (seconds, bytes, FLOP/s); a bare number is taken to be in it already."""
    higher_is_better(unit)  # refuses a unit that no row has
    typed = text.strip()
    shown = typed if len(typed) <= 40 else f"{typed[:40]}…"
    kind = {"count": "number", "s": "number of seconds", "fraction": "share"}.get(unit, f"number of {unit}")
    how = f"write the number alone, such as {_EXAMPLE}"
    if unit != "count":
        how = f"write it such as {_EXAMPLES.get(unit, _EXAMPLE)}"
    if re.match(r"[0-9]+,[0-9]", typed):
        how += ", with a point before decimals"
    top, slash, bottom = typed.partition("/") if unit in ("count", "fraction") else (typed, "", "")
    value = _value(top, unit)
    below = _value(bottom, "count") if slash else 1.0
    if value is None or not below or not math.isfinite(value / below):
        word = _NUMBER.fullmatch(typed)
        if word is not None and word[2].strip().lower() in _PERCENT:
            raise UsageError(f"'{shown}' is a share, and a {kind} is asked for: {how}")
        raise UsageError(f"'{shown}' is no {kind}: {how}")
    if unit == "fraction" and value / below > 1 and not slash and typed[-1:].isdecimal():
        raise UsageError(
            f"'{shown}' as a share would be {value:g} times the whole: write {value:g} % or {value / 100:g}"
        )
    return value / below


ASKED = {"µs": ("microseconds", "s", 1e-6), "MB": ("MB", "B", 1e6), "GB": ("GB", "B", 1e9)}
"""What a question may ask for a number of: its words, the unit it belongs to, and how much of that it is."""


def hint_of_asked(unit: str) -> str:
    """How a reader may write a number of what is asked for."""
    return f"a number of {ASKED[unit][0]}"


def parse_asked(text: str, counted_in: str) -> float:
    """The number of what was asked for: bare (`60`), or with a word of its unit (`60 us`, `0.06 ms`)."""
    words, unit, scale = ASKED[counted_in]
    typed = text.strip()
    with contextlib.suppress(UsageError):
        return parse_quantity(typed, "count")
    value = _value(typed, unit)
    if value is None or not math.isfinite(value):
        shown = typed if len(typed) <= 40 else f"{typed[:40]}…"
        point = ", with a point before decimals" if re.match(r"[0-9]+,[0-9]", typed) else ""
        raise UsageError(
            f"'{shown}' is no number of {words}: write it such as {_EXAMPLE} or {_EXAMPLE} {counted_in}{point}"
        )
    return value / scale


def _value(text: str, unit: str) -> float | None:
    """A single number with a word of the unit behind it; None for anything else."""
    number = _NUMBER.fullmatch(text.strip())
    if number is None:
        return None
    scale = _scale(number[2].strip(), unit)
    return None if scale is None else float(number[1].replace("_", "").replace(",", "")) * scale


def _scale(word: str, unit: str) -> float | None:
    """What a 1 before this word stands for; None for a word that does not belong to the unit."""
    if unit == "s":
        return _SECONDS.get(word.lower())
    if unit == "fraction":
        return 0.01 if word.lower() in _PERCENT else {"": 1.0}.get(word)
    letters = word.lower().removesuffix(unit.lower()).strip()
    return _DECIMAL.get(letters, _BINARY.get(letters if unit in ("B", "B/s") else "-"))
