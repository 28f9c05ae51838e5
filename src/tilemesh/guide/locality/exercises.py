"""Exercises of the locality studies, with the wrong answers that have a reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tilemesh.guide.exercise import choice, code, numeric
from tilemesh.guide.locality.strides import row_major

OFFSET = numeric(
    "offset",
    "A row-major matrix of 6 x 8 elements. What is the offset of the view [2:5, 3:7]?",
    19,
    wrong={
        5: "5 is 2 + 3: a step down a row skips a whole row of 8 elements, not one.",
        15: "15 is 2 * 6 + 3: the stride of a row is the number of *columns*, 8.",
        26: "26 is 2 + 3 * 8: rows and columns are swapped.",
        20: "One too many: offsets begin at 0, so the element [2, 3] lies at 2 * 8 + 3.",
    },
    otherwise="offset = first row * stride of rows + first column * stride of columns, with strides (8, 1).",
    explanation="2 * 8 + 3 = 19; the strides stay (8, 1), so the view is not contiguous.",
)

CACHE_READS = numeric(
    "cache_reads",
    "n = 512, tiles of b1 = 16 rows of A and b2 = 32 columns of B in the L1. How many elements come from memory?",
    512**2 + 512**3 // 16,
    wrong={
        512**2 + 512**2 // 16: "n²/b1 for B is an error that is often printed: all of B (n² elements) is read again "
        "for each of the n/b1 tiles of A, which makes n³/b1.",
        512**2 + 512**3 // 32: "b2 does not count here: each tile of A reads all of B, however it is cut. b1 says how "
        "many tiles of A there are.",
        2 * 512**3: "2n³ is without tiles: every product reads both of its factors.",
        2 * 512**2: "2n² would be every element once: B would have to stay in the L1 whole.",
    },
    otherwise="A comes once: n². B comes whole (n²) for each of the n/b1 tiles of A.",
    explanation="n² + n³/b1: 262,144 + 8,388,608.",
)

INTENSITY = numeric(
    "intensity",
    "y = (a + b) * (c - d), element by element, in one fused loop. Operations over elements moved?",
    0.6,
    wrong={
        1 / 3: "1/3 is each operation in a loop of its own: 3 operations, 9 elements moved.",
        0.75: "3/4 forgets that y is written: writing moves data, too.",
        3.0: "3 operations, but over how many elements that are read or written?",
    },
    otherwise="Count operations (+, -, *) and elements that are read or written once each.",
    explanation="3 operations; a, b, c, d are read and y is written: 3/5.",
    unit="count",
)

SHARING = choice(
    "sharing",
    "Two threads count up, each its own counter; the counters are neighbours in an array. Why is that slow?",
    {
        "They lie in one cache line, which each write takes away from the other core.": None,
        "Both need the same lock.": "There is no lock: nobody asked for one, and no thread touches another's counter.",
        "The array does not fit into the L1.": "Two counters are 16 bytes.",
        "Threads of one process share a core.": "The scheduler puts them on different cores, and that is what makes "
        "the line travel between their caches.",
    },
    explanation="Coherence works on lines of 64 (or 128) bytes. Put counters a line apart, or count in a register.",
)

Strides = tuple[int, ...]


WRONG_STRIDES: Mapping[str, Callable[[tuple[int, ...]], Strides]] = {
    "are bytes of 8-byte elements, as numpy's `.strides` has them. Count elements.":
        lambda shape: tuple(8 * stride for stride in row_major(shape)),
    "is column-major: the *first* dim has stride 1 there. Row-major: the last.":
        lambda shape: tuple(math.prod(shape[:dim]) for dim in range(len(shape))),
    "is right for two dims only: a stride is the product of *all* lengths behind its dim.":
        lambda shape: (*shape[1:], 1),
}  # fmt: skip
"""What people answer instead, by what to say to it."""


def _why_not_strides(function: Callable[[tuple[int, ...]], Any]) -> str | None:
    for shape in ((4, 5), (2, 3, 4), (7,), (2, 1, 5, 3)):
        answer = tuple(function(shape))
        if answer == row_major(shape):
            continue
        for why, wrong in WRONG_STRIDES.items():
            if answer == wrong(shape):
                return f"{answer} for {shape} {why}"
        return f"{shape} gives {answer}, expected {row_major(shape)}: the product of the lengths behind each dim."
    return None


STRIDES_OF = code(
    "strides_of",
    "Write a function that returns the row-major strides of a shape, in elements.",
    "def strides_of(shape):\n    # strides_of((4, 5)) is (5, 1)\n    ...\n",
    returns="the strides, a tuple of whole numbers",
    solution=row_major,
    correct=_why_not_strides,
    explanation="The last dim has stride 1, each one before it the product of the lengths behind.",
)

EXERCISES = (OFFSET, CACHE_READS, INTENSITY, SHARING, STRIDES_OF)
