"""Drawings of locality: strides, loop orders, tiles, and what two Neoverse N1 cores measured."""

from __future__ import annotations

import math

from tilemesh.core.scene import Scene, files_of
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.guide.ladder.measured import stored_rows
from tilemesh.guide.locality.strides import StridedView
from tilemesh.guide.locality.traffic import NESTS, convolution_formula, intensity
from tilemesh.measure.row import Row

# Of one core that measured the committed rows (as `cache_sizes` read them there).
MEASURED_CACHES = {"L1d": 64 * 1024, "L2": 1024 * 1024}


def figures() -> dict[str, str]:
    rows = stored_rows("locality", "neoverse_n1.jsonl")
    measured = {"nests.svg": nests(rows), "tile_map.svg": heat_map(tile_times(rows), MEASURED_CACHES, 512)}
    return files_of(strides, orders, tiles, convolution, fused, sharing) | measured


def tile_times(rows: list[Row]) -> dict[tuple[int, int], float]:
    seconds = {}
    for row in rows:
        if row.case["study"] == "tile map" and row.measured is not None:
            down, across = str(row.case["variant"]).split("x")
            seconds[int(down), int(across)] = row.measured.median
    return seconds


def strides() -> str:
    """A 4 x 5 matrix in memory, its 3 x 2 slice, its transpose and a broadcast vector: one buffer, other numbers."""
    matrix = StridedView.of(range(20), (4, 5))
    part = matrix.slice(range(1, 4), range(2, 4))
    inside = set(part)
    scene = Scene(860, 330, "One buffer, several views: only offset, shape and strides differ")
    for place in range(20):
        scene.box(
            24 + place * 40.5, 44, 38, 28, str(place), colour=2 if place in inside else 6, pale=place not in inside
        )
    scene.note(24, 90, "the buffer; green: what the slice reaches")
    views = (
        ("4 x 5", matrix),
        ("[1:4, 2:4]", part),
        ("transposed", matrix.permute(1, 0)),
        ("row 0, 4 times", matrix.slice(range(1), range(5)).broadcast(4, 5)),
    )
    left = 24
    for title, view in views:
        scene.text(left, 122, title, bold=True)
        rows, columns = view.shape
        places = [[view.place(row, column) for column in range(columns)] for row in range(rows)]
        cells = [[(str(at), 2 if at in inside else 6, at not in inside) for at in row] for row in places]
        scene.cells(left, 132, (30, 24), cells)
        scene.text(left, 284, f"offset {view.offset}", size=11)
        scene.text(left, 300, f"strides {view.strides}", size=11)
        scene.note(left, 316, "contiguous" if view.contiguous else "not contiguous")
        left += max(4, view.shape[1]) * 30 + 76
    return scene.svg()


def orders() -> str:
    """Which way the innermost loop walks."""
    scene = Scene(860, 250, "The innermost loop: ijk walks down B, ikj walks along B and C")
    for place, (title, words) in enumerate(
        (("ijk", ("along", "down", "stays")), ("ikj", ("stays", "along", "along")))
    ):  # fmt: skip
        left = 24 + place * 430
        scene.text(left, 52, title, bold=True)
        for index, (name, way) in enumerate(zip("ABC", words, strict=True)):
            x = left + index * 130
            scene.box(x, 66, 104, 104, pale=True, colour=6)
            scene.text(x + 6, 82, name, bold=True)
            if way == "along":
                scene.arrow(x + 10, 118, x + 96, 118, colour=2)
            elif way == "down":
                scene.arrow(x + 52, 86, x + 52, 164, colour=1)
            else:
                scene.box(x + 47, 113, 10, 10, colour=0)
            scene.text(x + 52, 188, way, align="mid", size=11)
        note = "a new line of B at each step" if place == 0 else "every element of a line is used"
        scene.note(left, 214, note)
    return scene.svg()


def tiles() -> str:
    """The formulas of the loop nests, for n = 512 and the tiles that are measured."""
    sizes = {"N": 512, "B1": 8, "B2": 8, "V1": 4, "V2": 8}
    scene = Scene(860, 60 + 46 * len(NESTS), "Elements read, n = 512, b1 = b2 = 8, v1 = 4, v2 = 8 (logarithmic)")
    smallest, largest = 512**2, 2 * 512**3 + 512**2
    for place, nest in enumerate(NESTS):
        y = 40 + place * 46
        scene.text(130, y + 20, nest.key, align="end")
        for row, (count, colour) in enumerate(((nest.memory_reads(sizes), 0), (nest.buffer_reads(sizes), 2))):
            if count:
                length = 40 + 420 * math.log(count / smallest) / math.log(largest / smallest)
                scene.box(140, y + row * 17, length, 15, colour=colour)
                words = f"{count:,} from {'the L1 to registers' if row else 'memory'}"
                scene.note(148 + length, y + row * 17 + 12, words)
    return scene.svg()


def nests(rows: list[Row]) -> str:
    """What the loop nests took on one core."""
    chosen = [row for row in rows if row.case["study"] == "loop nests" and row.measured is not None]
    scene = Scene(860, 60 + 28 * len(chosen), "512 x 512 x 512 in float32 on one Neoverse N1 core, measured")
    longest = max(row.measured.median for row in chosen if row.measured)
    for place, row in enumerate(chosen):
        assert row.measured is not None
        length = max(2.0, 520 * row.measured.median / longest)
        rate = 2 * 512**3 / row.measured.median / 1e9
        words = f"{format_seconds(row.measured.median)}, {rate:.3g} GFLOP/s"
        scene.bar(140, 40 + place * 28, length, 22, str(row.case["variant"]), words)
    return scene.svg()


def heat_map(times: dict[tuple[int, int], float], caches: dict[str, int], n: int) -> str:
    """Seconds by tile of B; lines where a tile fills a cache."""
    sides = sorted({down for down, _ in times})
    best, worst = min(times.values()), max(times.values())
    cell, left, top = 74, 96, 62
    scene = Scene(860, top + cell * len(sides) + 60, f"Time by the size of the tile of B that is kept, n = {n}")
    for y, down in enumerate(sides):
        scene.text(left - 10, top + y * cell * 0.8 + cell * 0.45, f"{down} rows", align="end", size=11)
        for x, across in enumerate(sides):
            share = math.log(times[down, across] / best) / max(1e-9, math.log(worst / best))
            level = min(2, int(share * 3))
            words = f"{format_seconds(times[down, across])}\n{format_bytes(4 * down * across)}"
            place = (left + x * cell, top + y * cell * 0.8)
            scene.box(*place, cell - 4, cell * 0.8 - 4, words, colour=(2, 3, 1)[level], size=10)
            for name, size in caches.items():
                fits, next_fits = 4 * down * across <= size, 4 * down * across * 2 <= size
                if fits and not next_fits:
                    scene.text(place[0] + cell - 8, place[1] + 11, name, size=9, align="end", bold=True)
                    right, below = place[0] + cell - 2, place[1] + cell * 0.8 - 2
                    scene.line(right, place[1] - 2, right, below, thick=True)
                    scene.line(place[0] - 2, below, right, below, thick=True)
    for x, across in enumerate(sides):
        scene.text(left + x * cell + cell / 2, top - 8, f"{across} columns", align="mid", size=11)
    known = ", ".join(f"{name} {format_bytes(size)}" for name, size in caches.items())
    words = f"the lines are where a tile fills a cache: {known or 'sizes unknown'}. Green is fast, orange is slow."
    scene.note(left, top + cell * 0.8 * len(sides) + 18, words)
    return scene.svg()


def convolution() -> str:
    """A tile with its border."""
    tile = 4
    scene = Scene(860, 260, f"A 3 x 3 convolution by tiles of {tile} x {tile}: the border is read by two tiles")
    inner = range(1, tile + 1)
    rows = [[("", 2, False) if {row, column} <= {*inner} else ("", 3, True) for column in range(tile + 2)]
            for row in range(tile + 2)]  # fmt: skip
    scene.cells(24, 44, (32, 32), rows)
    for place, size in enumerate((4, 16, 64)):
        plain, tiled = (convolution_formula(name, size, size, size) for name in ("plain", "tiled"))
        words = f"tile of {size} x {size}: {tiled / size**2:.2f} reads for each output, instead of {plain // size**2}"
        scene.text(260, 80 + place * 26, words)
    return scene.svg()


def fused() -> str:
    """E = D + (A + B) C."""
    scene = Scene(860, 190, "E = D + (A + B) C: operations over elements moved, counted")
    for place, name in enumerate(("three_loops", "fused")):
        operations, moved = intensity(name, 4)
        y = 50 + place * 64
        scene.text(140, y + 20, name, align="end")
        for index in range(moved // 4):
            scene.box(150 + index * 44, y, 40, 30, "move", colour=1, size=10)
        for index in range(operations // 4):
            scene.box(150 + (moved // 4 + index) * 44 + 10, y, 40, 30, "op", colour=2, size=10)
        scene.text(150 + (moved + operations) // 4 * 44 + 22, y + 20, f"{operations // 4}/{moved // 4}", bold=True)
    return scene.svg()


def sharing() -> str:
    """Two counters in one line, and in two."""
    scene = Scene(860, 210, "False sharing: a cache line belongs to one core at a time while it is written")
    for place, (words, apart) in enumerate((("counters in one line", 1), ("counters in lines of their own", 8))):
        left = 24 + place * 430
        scene.text(left, 54, words, bold=True)
        for word in range(16):
            mine = {0: 0, apart: 2}.get(word)
            colour = 6 if mine is None else mine
            scene.box(left + word * 24 + (word // 8) * 8, 66, 22, 26, colour=colour, pale=mine is None)
        scene.box(left, 140, 120, 34, "core 0", colour=0)
        scene.box(left + 200, 140, 120, 34, "core 1", colour=2)
        scene.arrow(left + 60, 138, left + 12, 96, colour=0)
        scene.arrow(left + 260, 138, left + apart * 24 + 12 + apart // 8 * 8, 96, colour=2)
        note = "every write takes the line away from the other core" if apart == 1 else "each core keeps its line"
        scene.note(left, 198, note)
    return scene.svg()
