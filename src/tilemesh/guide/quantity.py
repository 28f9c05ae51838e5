"""Numbers as a reader types them: `3 ms`, `40us`, `2 seconds`, `2.5 GB/s`, `64 MiB`, `20 %`, `1,024`, `12`.

A comma separates thousands and nothing else: `1,5` could mean 1.5 or 15, so it is refused.
"""

from __future__ import annotations

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
_EXAMPLES = {"s": "3 ms", "B": "64 MiB", "B/s": "2.5 GB/s", "FLOP/s": "80 GFLOP/s", "fraction": "20 %"}


def hint_of(unit: str) -> str:
    """How a reader may write a number of this unit."""
    if unit in _EXAMPLES:
        return f"such as {_EXAMPLES[unit]}"
    return "a number" if unit == "count" else f"a number of {unit}"


def parse_quantity(text: str, unit: str) -> float:
    """The number in the unit's own scale (seconds, bytes, FLOP/s); a bare number is taken to be in it already."""
    higher_is_better(unit)  # refuses a unit that no row has
    found = _NUMBER.fullmatch(text.strip())
    kind = "number" if unit == "count" else f"number of {'seconds' if unit == 's' else unit}"
    how = "write the number alone, such as 12" if unit == "count" else f"write it such as {_EXAMPLES.get(unit, '12')}"
    if re.match(r"[0-9]+,[0-9]", text.strip()):
        how += ", with a point before decimals"
    wrong = UsageError(f"'{text.strip()[:40]}' is no {kind}: {how}")
    if found is None:
        raise wrong
    value = float(found[1].replace("_", "").replace(",", ""))
    scale = _scale(found[2].strip(), unit)
    if scale is None or not math.isfinite(value * scale):
        raise wrong
    return value * scale


def _scale(word: str, unit: str) -> float | None:
    """What a 1 before this word stands for; None for a word that does not belong to the unit."""
    if unit == "s":
        return _SECONDS.get(word.lower())
    if unit == "fraction":
        return {"%": 0.01, "": 1.0}.get(word)
    letters = word.lower().removesuffix(unit.lower()).strip()
    return _DECIMAL.get(letters, _BINARY.get(letters if unit in ("B", "B/s") else "-"))
