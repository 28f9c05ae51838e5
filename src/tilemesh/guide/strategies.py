"""Drawings of an element-wise operator that is cut, and of choosing cuts of two products so that least is sent.

The choice is a shortest path. A tensor between two products is whole, cut by rows, cut by columns, or a sum whose parts
lie on different ranks; a product leads from one of these to another, and every step sends a number of bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from tilemesh.core.scene import Scene, files_of
from tilemesh.core.units import format_bytes

RANKS = 2
TOKENS, WIDTH, HIDDEN = 1024, 1024, 4096
ITEM_BYTES = 2
LAYOUTS = ("whole", "rows", "columns")


@dataclass(frozen=True)
class CutStep:
    """A product with its matrix cut in some way: the layouts it leads from and to, and what one rank sends for it."""

    source: str
    matrix: str
    target: str
    sent_bytes: int


def figures() -> dict[str, str]:
    """By file name, for `docs/guide/figures/`."""
    return files_of(element_wise, strategies)


def _ring(nbytes: int) -> int:
    """What each rank sends in an all_gather or a reduce_scatter; an all_reduce sends twice that."""
    return nbytes * (RANKS - 1) // RANKS


def steps(in_bytes: int, matrix_bytes: int, out_bytes: int) -> list[CutStep]:
    """Every way to divide one product y = x·M over the ranks, forward and backward together.

    By rows of x: the gradient of M is summed. By columns of M: the gradient of x is summed. Along the inner dim (x by
    columns, M by rows): y is a sum, which is made whole, or whole in rows, by the collective behind it.
    """
    return [
        CutStep("rows", "whole", "rows", 2 * _ring(matrix_bytes)),
        CutStep("whole", "columns", "columns", 2 * _ring(in_bytes)),
        CutStep("columns", "rows", "whole", 2 * _ring(out_bytes)),
        CutStep("columns", "rows", "rows", 2 * _ring(out_bytes)),  # reduce_scatter; backward all_gather
    ]


def paths(tokens: int = TOKENS) -> list[tuple[int, tuple[CutStep, CutStep]]]:
    """Ways to cut z = relu(x·A)·B, cheapest first, with the bytes that each rank sends."""
    x, h = ITEM_BYTES * tokens * WIDTH, ITEM_BYTES * tokens * HIDDEN
    matrix = ITEM_BYTES * WIDTH * HIDDEN
    pairs = product(steps(x, matrix, h), steps(h, matrix, x))
    ways = [(a.sent_bytes + b.sent_bytes, (a, b)) for a, b in pairs if a.target == b.source]
    return sorted(ways, key=lambda pair: pair[0])


def strategies() -> str:
    """Layouts of x, h and z with the steps between them, and the cheapest way."""
    ranked = paths()
    least, cheapest = ranked[0]
    scene = Scene(860, 330, f"How to cut z = relu(x·A)·B on {RANKS} ranks: bytes each rank sends; solid: the least")
    places = {layout: 84 + 66 * row for row, layout in enumerate(LAYOUTS)}
    lefts = (60, 370, 680)
    for column, name in enumerate(("x", "h = relu(x·A)", "z = h·B")):
        scene.text(lefts[column] + 55, 62, name, align="mid", bold=True)
        for layout, y in places.items():
            scene.box(lefts[column], y, 110, 36, layout, colour=3 if column != 1 else 0)
    drawn: set[tuple[int, str, str]] = set()
    for _, path in ranked:
        for column, step in enumerate(path):
            key = column, step.source, step.target
            if key in drawn:
                continue
            drawn.add(key)
            y1, y2 = places[step.source] + 18, places[step.target] + 18
            is_best = step == cheapest[column]
            scene.arrow(
                lefts[column] + 111, y1, lefts[column + 1] - 1, y2, colour=2 if is_best else 6, dashed=not is_best
            )
            _label(scene, lefts[column] + 111, (y1, y2), step)
    note = (
        f"{TOKENS} tokens, {WIDTH} × {HIDDEN}, 16 bits. Cheapest: A by columns, B by rows, {format_bytes(least)}; "
        f"by rows of x {format_bytes(_rows_only(ranked))}, whatever the number of tokens"
    )
    how = "rows: the matrix is whole on every rank · whole to columns: it is cut by columns · from columns: by rows"
    scene.note(60, 292, how)
    scene.note(60, 312, note)
    return scene.svg()


def _label(scene: Scene, x: float, heights: tuple[float, float], step: CutStep) -> None:
    """The bytes of a step beside its arrow, where no other arrow runs."""
    words = format_bytes(step.sent_bytes)
    if (step.source, step.target) == ("columns", "whole"):
        scene.text(x + 176, heights[1] + 1, words, size=11, align="end")
    elif (step.source, step.target) == ("columns", "rows"):
        scene.text(x + 14, heights[0] + 15, words, size=11)
    else:
        scene.text(x + 14, heights[0] - 7, words, size=11)


def _rows_only(ranked: list[tuple[int, tuple[CutStep, CutStep]]]) -> int:
    return next(sent for sent, path in ranked if all(step.source == "rows" for step in path))


def element_wise() -> str:
    """Z = X + Y of 4 × 6 numbers on two devices, cut by rows, by columns and without a pattern."""
    rows, columns, cell = 4, 6, 34
    cuts: dict[str, Callable[[int, int], int]] = {
        "by rows": lambda row, column: row * RANKS // rows,
        "by columns": lambda row, column: column * RANKS // columns,
        "any other way": lambda row, column: (row + column) % RANKS,
    }
    scene = Scene(860, 282, "An element-wise operator, Z = X + Y, on two devices: any cut of the elements works")
    for place, (name, device_of) in enumerate(cuts.items()):
        left = 70 + place * 260
        owners = {(row, column): device_of(row, column) for row, column in product(range(rows), range(columns))}
        # Element (row, column) of Z needs the same elements of X and Y alone, and those lie where it does.
        shares = [sum(owner == device for owner in owners.values()) for device in range(RANKS)]
        scene.text(left + columns * cell / 2, 58, name, align="mid", bold=True)
        places = [[owners[row, column] for column in range(columns)] for row in range(rows)]
        scene.cells(left, 70, (cell, cell), [[(str(own), own, False) for own in row] for row in places], gap=3, size=11)
        words = f"{shares[0]} and {shares[1]} additions, nothing sent"
        scene.text(left + columns * cell / 2, 70 + rows * cell + 18, words, align="mid", size=11)
    note = "a number: the device that holds this element of X, of Y and of Z; backward needs no message either"
    scene.note(70, 256, note)
    return scene.svg()
