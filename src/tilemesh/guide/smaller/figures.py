"""Drawings of chapter 17."""

from __future__ import annotations

from collections.abc import Callable

from tilemesh.core.scene import Scene, files_of
from tilemesh.guide.smaller.work import rounding_error
from tilemesh.report.draw import Line, PlotAxis
from tilemesh.report.picture import curves


def figures() -> dict[str, str]:
    return files_of(levels, error, structures)


def levels() -> str:
    """What two groups of weights become with three bits."""
    scene = Scene(860, 190, "Three bits: seven levels, spread as far as the group's largest weight")
    for row, (words, weights) in enumerate((("a group of large weights", (-0.9, -0.35, 0.1, 0.42, 0.75)),
                                            ("a group of small ones", (-0.28, -0.12, 0.05, 0.17, 0.3)))):  # fmt: skip
        y, scale = 80 + row * 68, max(map(abs, weights)) / 3
        scene.text(24, y - 28, words, size=11)
        scene.line(60, y, 800, y)
        for level in range(-3, 4):
            x = 430 + level * scale * 400
            scene.line(x, y - 8, x, y + 8)
        for weight in weights:
            x, near = 430 + weight * 400, 430 + round(weight / scale) * scale * 400
            scene.box(x - 4, y - 20, 8, 8, "", colour=0)
            scene.box(near - 4, y + 12, 8, 8, "", colour=1)
    scene.text(24, 180, "blue: weights; orange: what is kept. One scale for both groups would leave the small ones "
               "three levels", quiet=True, size=11)  # fmt: skip
    return scene.svg()


def error() -> str:
    """The rounding error over bits, for groups of several sizes."""
    lines = [
        Line(
            f"groups of {group}",
            [(bits, rounding_error(bits, group)) for bits in (2, 3, 4, 5, 6, 7, 8)],
            colour,
            dots=True,
        )
        for colour, group in enumerate((16, 128, 4096))
    ]
    x, y = PlotAxis(1.8, 8.2, "bits"), PlotAxis(0, 1.05, "error", lambda value: f"{value:.0%}")
    return curves("Rounding error of normal weights, as a share of their size", x, y, *lines)


def structures() -> str:
    """Which weights go."""
    scene = Scene(860, 220, "Half of the weights gone, in three ways")
    gone: dict[str, Callable[[int, int], bool]] = {
        "unstructured": lambda row, column: (row * 12 + column) * 2654435761 >> 16 & 1 == 1,
        "2 of every 4": lambda row, column: (column + row) % 4 in (0, 1),
        "whole rows": lambda row, column: row % 2 == 1,
    }
    for place, (words, is_gone) in enumerate(gone.items()):
        left = 60 + place * 270
        for row in range(8):
            for column in range(12):
                hole = is_gone(row, column)
                scene.box(left + column * 17, 44 + row * 17, 15, 15, "", colour=6 if hole else place, pale=hole)
        scene.text(left + 100, 204, words, align="mid")
    return scene.svg()
