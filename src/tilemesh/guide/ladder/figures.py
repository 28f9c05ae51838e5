"""Drawings of the ladder: grids, tiles, sectors, banks, divergence, and the rungs as an H200 measured them.

Every number in them is computed or counted when they are drawn: by the rungs, by the interpreter, or from measurements.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from tilemesh.core.hardware import find_device
from tilemesh.core.scene import LaneBlock, Scene, files_of, lanes
from tilemesh.core.units import format_rate, format_seconds
from tilemesh.guide.ladder import rungs, studies, times
from tilemesh.guide.ladder.measured import h200_rows, median_s, reads_of
from tilemesh.guide.ladder.memory import BANKS, WARP
from tilemesh.guide.ladder.ours import our_rungs
from tilemesh.report.draw import Dots, Line, PlotAxis, PlotLayer
from tilemesh.report.kernel_charts import names_beside
from tilemesh.report.picture import curves

N = 4096


def figures() -> dict[str, str]:
    drawn = files_of(grid, scheduling, tiles, sectors, banks, divergence, convolution, buffers, reads, roofline)
    return drawn | {"times.svg": measured_times()}


def grid() -> str:
    """The first kernel: 72 threads in 6 blocks of 4 x 3, and how a block fills its warp."""
    width, height, (across, down) = studies.WIDTH, studies.HEIGHT, studies.FIRST_BLOCK
    scene = Scene(860, 320, f"matrixAddDoubleB: {width}x{height} elements, blocks of {across}x{down} threads")
    side, left, top = 34, 40, 44
    for row, column in itertools.product(range(height // down), range(width // across)):
        x, y, block = left + column * across * side, top + row * down * side, row * (width // across) + column
        threads = [[(f"{i},{j}", block % 6, False) for i in range(across)] for j in range(down)]
        scene.cells(x, y, (side, side), threads, size=9)
        scene.line(x - 1, y - 1, x + across * side - 1, y - 1)
        scene.line(x - 1, y - 1, x - 1, y + down * side - 1)
    lines = (
        "grid: 3 x 2 blocks", "block: 4 x 3 threads (colour)", "in a cell: threadIdx.x, threadIdx.y",
        "i = blockIdx.x * blockDim.x + threadIdx.x", "j = blockIdx.y * blockDim.y + threadIdx.y",
    )  # fmt: skip
    for place, line in enumerate(lines):
        scene.text(480, 66 + place * 22, line)
    used = studies.first_kernel().lanes_used
    scene.text(left, 280, f"the warp of each block: {round(used * WARP)} of {WARP} lanes have a thread")
    for lane in range(WARP):
        scene.box(left + lane * 24, 290, 22, 18, colour=0 if lane < used * WARP else 6, pale=lane >= used * WARP)
    return scene.svg()


def scheduling() -> str:
    """Blocks of different length on four multiprocessors: the next goes where there is room first."""
    durations = [3, 2, 4, 2, 3, 2, 2, 3, 2, 4]
    placed = studies.scheduled(durations, 4)
    stretches = [
        LaneBlock(slot, begin, end, f"block {number}", colour=number % 6)
        for number, (slot, begin, end) in enumerate(placed)
    ]
    end = max(end for _, _, end in placed)
    idle = 4 * end - sum(durations)
    note = (
        f"more blocks than multiprocessors keep all of them busy; {idle:g} of {4 * end:g} slots are idle, all "
        "at the end"
    )
    return lanes("Dynamic scheduling of 10 blocks", [f"SM {sm}" for sm in range(4)], stretches, note=note)


def tiles() -> str:
    """What one thread (v1, v2) and one block (v3) read for their part of C."""
    scene = Scene(860, 330, "What is read for the coloured part of C: a row and a column, V of each, L of each")
    v, tile = rungs.v2().constants["V"], rungs.v3().constants["L"]
    area = tile * tile
    cases = (
        ("v1: one thread", "1 x 1", 6, f"2N = {2 * N:,} reads for 1 element"),
        (f"v2: one thread, V = {v}", f"{v} x {v}", 18, f"2NV = {2 * N * v:,} reads for {v * v} elements"),
        (f"v3: one block, L = {tile}", f"{tile} x {tile}", 44, f"2NL = {2 * N * tile:,} reads for {area:,} elements"),
    )
    for place, (title, part, thick, words) in enumerate(cases):
        left, size = 24 + place * 280, 104
        scene.text(left, 52, title, bold=True)
        scene.box(left + size + 12, 62, size, size, pale=True, colour=6)  # B above C
        scene.box(left, 62 + size + 12, size, size, pale=True, colour=6)  # A left of C
        scene.box(left + size + 12, 62 + size + 12, size, size, pale=True, colour=6)
        at = 40
        scene.box(left + size + 12 + at, 62, thick, size, colour=2)
        scene.box(left, 62 + size + 12 + at, size, thick, colour=0)
        scene.box(left + size + 12 + at, 62 + size + 12 + at, thick, thick, colour=3)
        for name, x, y in (("B", size + 18, 78), ("A", 6, size + 90), ("C", size + 18, size + 90)):
            scene.text(left + x, y, name, bold=True)
        scene.text(left, 62 + 2 * size + 36, f"part of C: {part}", size=11)
        scene.note(left, 62 + 2 * size + 54, words)
    return scene.svg()


def sectors() -> str:
    """How many sectors a warp's reads of A touch, counted, before and after coalescing."""
    scene = Scene(860, 250, "A warp's 32 reads of A: sectors of 32 bytes, counted by the interpreter")
    for place, rung in enumerate((rungs.v3(4, 64), rungs.coalescing(4, 64))):
        read = rungs.count(rung, 64)[0].reads["A"]
        touched = read.passes // read.requests
        top = 44 + place * 100
        used = 128 / (touched * 32)
        scene.text(
            24, top + 12, f"{rung.key}: {touched} sectors for 128 bytes; {used:.1%} of what is moved is used", bold=True
        )
        for sector in range(touched):
            x, y = 24 + sector % 32 * 25.5, top + 24
            scene.box(x, y, 23, 26, pale=True, colour=6)
            scene.box(x, y, 23 * used, 26, colour=2 if touched == 4 else 1)
        words = "lanes walk down a column: each in a row of its own" if touched > 4 else "lanes walk along rows"
        scene.note(24, top + 68, words)
    return scene.svg()


def banks() -> str:
    """How many words each bank is asked for when a warp stores its part of A, turned, with and without padding."""
    padded = rungs.padding()
    s, tile, pad = (padded.constants[name] for name in ("S", "L", "PAD"))
    lane = np.arange(WARP)
    scene = Scene(860, 330, f"A warp stores {WARP} elements of A into sA[{s}][L]: words asked of each bank")
    for place, wide in enumerate((tile, tile + pad)):
        requests = np.bincount((lane % s * wide + lane // s) % BANKS, minlength=BANKS)
        top = 50 + place * 140
        passes = "1 pass" if requests.max() == 1 else f"{requests.max()} passes"
        scene.text(24, top, f"rows of {wide} words: {passes} over the banks", bold=True)
        for bank, count in enumerate(requests):
            x = 24 + bank * 25.5
            height = 5.2 * count
            scene.box(x, top + 96 - height, 22, max(height, 0.5), colour=1 if requests.max() > 1 else 2)
            scene.text(x + 11, top + 110, str(bank), size=8, align="mid", quiet=True)
    scene.note(24, 318, f"padding of {pad} words: element (k, row) lies in bank ({pad} k + row) mod 32")
    return scene.svg()


def divergence() -> str:
    """Two paths within a warp run one after the other; two paths in different warps do not wait for each other."""
    stretches, names = [], []
    for group, (title, together) in enumerate((("lanes 0, 2, ... and 1, 3, ...", False), ("whole warps", True))):
        for row, word in enumerate(("path A", "path B")):
            lane = group * 2 + row
            names.append(word)
            begin = 0 if together or row == 0 else 4
            stretches.append(LaneBlock(lane, begin, begin + 4, f"{word}, {title}", colour=row))
            if not together:
                stretches.append(LaneBlock(lane, 4 - begin, 8 - begin, "these lanes wait", colour=6, pale=True))
    inside = studies.divergence(2, 1, steps=200)
    apart = studies.divergence(2, 32, steps=200)
    used = [kernel.run(np.ones(kernel.inputs, np.float32))[0].lanes_used for kernel in (inside, apart)]
    note = f"lanes at work, counted: {used[0]:.0%} with both paths in a warp, {used[1]:.0%} with a path for each warp"
    return lanes("A branch within a warp, and between warps", names, stretches, unit="steps", note=note)


def convolution() -> str:
    """384 reads become 130."""
    reads = []
    for shared in (False, True):
        kernel = studies.convolution(shared=shared, blocks=1)
        counted, _ = kernel.run(np.ones(kernel.inputs, np.float32))
        reads.append(counted.total(shared=False).elements)
    scene = Scene(
        860, 210, f"A convolution of width 3, 128 threads: {reads[0]} reads of global memory become {reads[1]}"
    )
    words = ("each thread reads its three inputs", "the block brings 128 + 2 inputs to shared memory")
    for place, count in enumerate(reads):
        top = 50 + place * 76
        scene.text(24, top, words[place])
        scene.box(24, top + 10, count * 2, 34, f"{count}", colour=1 if place == 0 else 2)
    return scene.svg()


def buffers() -> str:
    """One tile: fetch, wait, multiply. Two tiles: the next is on its way."""
    stretches = []
    for tile in range(3):
        stretches += [
            LaneBlock(0, 3 * tile, 3 * tile + 1, f"tile {tile}", colour=0),
            LaneBlock(1, 3 * tile + 1, 3 * tile + 3, f"tile {tile}", colour=2),
            LaneBlock(2, 2 * tile if tile else 0, (2 * tile if tile else 0) + 1, f"tile {tile}", colour=0),
            LaneBlock(3, 2 * tile + 1, 2 * tile + 3, f"tile {tile}", colour=2),
        ]
    names = ["fetch", "multiply", "fetch", "multiply"]
    note = "above: one tile in shared memory, two barriers for each. Below: two tiles, one barrier; fetching is hidden"
    return lanes("Double buffering", names, stretches, note=note)


def reads() -> str:
    """Global reads by rung: formula and count agree, so one bar is both."""
    entries = [(rung.key, rung.reads, rung.predicted(N)[0]) for rung in rungs.ladder()]
    entries += [(rung.key, rung.reads, rung.predicted(N)) for rung in our_rungs()]
    scene = Scene(860, 60 + 26 * len(entries), f"Elements read from global memory, N = {N} (logarithmic)")
    smallest, largest = min(entry[2] for entry in entries), max(entry[2] for entry in entries)
    for place, (key, formula, count) in enumerate(entries):
        length = 60 + 400 * math.log(count / smallest) / math.log(largest / smallest)
        scene.bar(150, 40 + place * 26, length, 20, key, f"{formula} = {count:,}")
    return scene.svg()


def measured_times() -> str:
    """Predicted and measured times of the rungs on an H200."""
    rows = h200_rows()
    scene = Scene(
        860, 74 + 34 * len(rows), f"The ladder on an H200, N = {N}: predicted (pale) and measured (logarithmic)"
    )
    shortest = 1e-4
    scale = 470 / math.log(median_s(rows[0]) / shortest)
    for place, row in enumerate(rows):
        y = 40 + place * 34
        scene.text(140, y + 18, str(row.case["rung"]), align="end")
        if row.predicted is not None:
            scene.box(150, y, scale * math.log(row.predicted / shortest), 12, colour=6, pale=True)
        taken = median_s(row)
        length = scale * math.log(taken / shortest)
        scene.box(150, y + 13, length, 13, colour=2 if row.case["units"] == "fp16" else 0)
        peer = row.peers["torch"].median
        words = f"{format_seconds(taken)}, {2 * N**3 / taken / 1e12:.3g} TFLOP/s; torch {format_seconds(peer)}"
        scene.note(158 + length, y + 24, words)
    scene.note(150, 60 + 34 * len(rows), "blue: float32 and tf32; green: float16")
    return scene.svg()


def roofline() -> str:
    """FLOP/s over FLOPs for each byte asked of global memory; roofs from the datasheet."""
    device = find_device("h200")
    x = PlotAxis(0.1, 800.0, "FLOP per byte", log=True)
    y = PlotAxis(3e11, 2e15, "FLOP/s", lambda value: format_rate(value, "FLOP/s"), log=True)
    bandwidth = device.memory_bytes_per_s
    l1 = device.sm_count * times.clock_hz(device) * 128  # a line per cycle and multiprocessor
    layers: list[PlotLayer] = []
    for rate, words, colour in ((bandwidth, "device memory 4.8 TB/s", 1), (l1, f"L1 {format_rate(l1, 'B/s')}", 4)):
        begin, end = max(x.low, y.low / rate), device.peak("fp16") / rate
        layers.append(Line(words, [(begin, begin * rate), (end, end * rate)], colour))
    colours, bytes_of = {"fp32": 0, "tf32": 3, "fp16": 2}, {"fp32": 4, "tf32": 4, "fp16": 2}
    for units, colour in colours.items():
        peak = device.peak(units)
        layers.append(Line(f"{units} {format_rate(peak, 'FLOP/s')}", [(peak / l1, peak), (x.high, peak)], colour))
    points, names = [], []
    for row in h200_rows():
        units = str(row.case["units"])
        points.append((2 * N**3 / (reads_of(row) * bytes_of[units]), 2 * N**3 / median_s(row)))
        names.append(str(row.case["rung"]).replace(" ", "\u00a0"))  # beside a dot stands the first word
        layers.append(Dots("", [points[-1]], colours[units], 9))
    title = "Each rung on the roofline of an H200: FLOP/s over FLOPs per byte asked of global memory"
    return curves(title, x, y, *layers, *names_beside(points, [], names, x, y), height=380)
