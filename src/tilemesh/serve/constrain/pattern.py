"""Which texts are allowed, as plain values: characters, one after the other, one of several, repeated, or a named rule.

The one idea: a regular expression and a JSON schema both become such a pattern, and `machine.py` follows it without
knowing where it came from. A rule may use itself, which is how values nest; everything else is regular.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
Ranges = tuple[tuple[int, int], ...]
"""Code points from the first to the last of each pair, in order, none twice."""


@dataclass(frozen=True)
class Chars:
    """One character of these."""

    ranges: Ranges


@dataclass(frozen=True)
class Sequel:
    """All of these, one after the other."""

    parts: tuple[Pattern, ...]


@dataclass(frozen=True)
class OneOf:
    """One of these; of none there is nothing that matches."""

    parts: tuple[Pattern, ...]


@dataclass(frozen=True)
class Repeat:
    """At least and at most so many times; None: any number of times."""

    part: Pattern
    least: int
    most: int | None


@dataclass(frozen=True)
class RuleName:
    """What the grammar says under this name."""

    name: str


Pattern = Chars | Sequel | OneOf | Repeat | RuleName
EMPTY, NOTHING = Sequel(()), OneOf(())


@dataclass(frozen=True)
class Grammar:
    start: Pattern
    rules: Mapping[str, Pattern]


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same code points, in order and none twice; never a surrogate, which no text has."""
    made: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if made and first <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(made[-1][1], last))
        else:
            made.append((first, last))
    low, high = _SURROGATES
    without = [(max(a, begin), min(b, end)) for a, b in made for begin, end in ((0, low - 1), (high + 1, LAST))]
    return tuple((first, last) for first, last in without if first <= last)


def others(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All code points but these."""
    made, begin = [], 0
    for first, last in merged(ranges):
        made.append((begin, first - 1))
        begin = last + 1
    return merged((first, last) for first, last in [*made, (begin, LAST)] if first <= last)


@functools.lru_cache(4096)
def chars(text: str) -> Chars:
    """One of these characters."""
    return Chars(merged((ord(char), ord(char)) for char in text))


def text(content: str) -> Sequel:
    """Exactly this."""
    return Sequel(tuple(chars(char) for char in content))


def row(*parts: Pattern | str) -> Sequel:
    return Sequel(tuple(text(part) if isinstance(part, str) else part for part in parts))


def choice(*parts: Pattern | str) -> OneOf:
    return OneOf(tuple(text(part) if isinstance(part, str) else part for part in parts))


def maybe(part: Pattern | str) -> Repeat:
    return Repeat(text(part) if isinstance(part, str) else part, 0, 1)


def count_nodes(pattern: Pattern, known: dict[int, int]) -> int:
    """How many nodes `machine.py` needs for a pattern, counted without making them: a short one can ask for any number.

    What is empty counts as one, so that repeating it has a cost too. `known`: counts by id, of parts that stand in
    several places.
    """
    if id(pattern) not in known:
        if isinstance(pattern, Chars):
            nodes = 1 + len({row[at:] for row in utf8_ranges(pattern.ranges) for at in range(1, len(row))})
        elif isinstance(pattern, RuleName):
            nodes = 2
        elif isinstance(pattern, Repeat):
            once = count_nodes(pattern.part, known)
            more = 1 if pattern.most is None else pattern.most - pattern.least
            nodes = 1 + pattern.least * once + more * (1 + once)
        else:
            each = [count_nodes(part, known) for part in pattern.parts]
            nodes = max(1, sum(each)) if isinstance(pattern, Sequel) else 1 + len(each) + sum(each)
        known[id(pattern)] = nodes
    return known[id(pattern)]


def utf8_ranges(ranges: Ranges) -> list[tuple[tuple[int, int], ...]]:
    """The bytes of these characters: rows of ranges, each of which may be any of its bytes whatever the others are."""
    by_bytes: list[tuple[tuple[int, int], ...]] = []
    for first, last in ranges:
        for length, end in enumerate((0x7F, 0x7FF, 0xFFFF, LAST), 1):
            if first <= end:
                by_bytes += _same_length(first, min(last, end), length)
                first = end + 1
            if first > last:
                break
    return by_bytes


def _same_length(first: int, last: int, length: int) -> list[tuple[tuple[int, int], ...]]:
    for tail in range(1, length):
        # The last `tail` bytes hold so many bits: a range is cut where these do not begin with 0 or end with all ones.
        step = 1 << 6 * tail
        if first // step != last // step:
            if first % step:
                middle = (first // step + 1) * step
                return _same_length(first, middle - 1, length) + _same_length(middle, last, length)
            if last % step != step - 1:
                middle = last // step * step
                return _same_length(first, middle - 1, length) + _same_length(middle, last, length)
    return [tuple(zip(chr(first).encode(), chr(last).encode(), strict=True))]
