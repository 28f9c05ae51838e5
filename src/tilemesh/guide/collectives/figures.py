"""Drawings of chapter 3, made from the schedules and promises that the runtime uses."""

from __future__ import annotations

from tilemesh.comm.schedules.book import build
from tilemesh.comm.schedules.collectives import COLLECTIVES, ends, starts
from tilemesh.comm.schedules.cost import seconds
from tilemesh.comm.schedules.draw import svg as schedule_svg
from tilemesh.comm.schedules.simulate import Memory, simulate
from tilemesh.comm.schedules.topology import LinearArray, Wire
from tilemesh.core.hardware import LINKS
from tilemesh.core.scene import Scene, files_of
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.report.draw import Line, PlotAxis
from tilemesh.report.picture import curves

RANKS = 4


def figures() -> dict[str, str]:
    return files_of(collectives, linear_array, ring_or_tree) | {
        f"{name}.svg": rounds(name) for name in ("ring", "tree")
    }


def collectives() -> str:
    """What each collective moves: blocks of each rank before and after."""
    names = [name for name in COLLECTIVES if name != "barrier"]
    scene = Scene(
        900, 60 + 2 * 190, "Eight collectives on 4 ranks: a row per rank, before → after; Σ is the sum of all ranks"
    )
    for place, name in enumerate(names):
        x, y = 16 + place % 4 * 222, 64 + place // 4 * 190
        scene.text(x, y - 8, name, bold=True)
        for rank in range(RANKS):
            _blocks(scene, name, rank, x, y + 6 + rank * 34)
    legend = (
        "a to d and their colours: whose block it is (rank 0 to 3); the number: which block of the array; empty: none"
    )
    scene.note(16, 428, legend)
    return scene.svg()


def _blocks(scene: Scene, name: str, rank: int, x: float, y: float) -> None:
    chunks = 1 if name == "broadcast" else RANKS
    wide = 92 / RANKS
    before = dict.fromkeys(range(chunks), "")
    for slot, (label, who) in enumerate(starts(name, rank, 0, RANKS, chunks)):
        place = rank if name in ("all_gather", "gather") else slot
        before[place] = f"{'abcd'[who]}{label}"
    after = dict.fromkeys(range(chunks), "")
    for slot, (label, whose) in ends(name, rank, 0, RANKS, chunks).items():
        after[slot] = f"Σ{label}" if len(whose) == RANKS else f"{'abcd'[min(whose)]}{label}"
    for side, blocks in enumerate((before, after)):
        for slot, words in blocks.items():
            colour = 4 if words.startswith("Σ") else "abcd".index(words[0]) if words else 6
            scene.box(x + side * 108 + slot * wide, y, wide - 2, 26, words, colour=colour, pale=not words, size=10)
    scene.text(x + 99, y + 17, "→", align="mid", quiet=True)


def rounds(algorithm: str) -> str:
    """Each round of an all-reduce as arrows between ranks, from the schedule that runs."""
    return schedule_svg(build("all_reduce", algorithm, RANKS), f"All-reduce by a {algorithm} on {RANKS} ranks")


def linear_array(ranks: int = 8, nbytes: int = 1 << 20) -> str:
    """A logical ring on ranks in a row, and what it costs with wormhole routing and without."""
    link = LINKS["ndr"]
    wire = Wire(link.latency_s, link.bytes_per_s)
    schedule, free = build("all_reduce", "ring", ranks), Memory(1e18, 1e18)
    times = {
        "a wire from the last to the first": seconds("all_reduce", "ring", ranks, nbytes, wire),
        "linear array, wormhole routing": simulate(schedule, nbytes, LinearArray(ranks, wire, 1e-7), free).seconds,
        "linear array, stored at every hop": simulate(
            schedule, nbytes, LinearArray(ranks, wire, stores=True), free
        ).seconds,
    }
    scene = Scene(
        860, 250, f"A ring of {ranks} ranks that stand in a row: the last one's message goes back over all wires"
    )
    for rank in range(ranks):
        x = 40 + rank * 100
        scene.box(x, 76, 56, 34, f"{rank}", colour=0)
        if rank + 1 < ranks:
            scene.arrow(x + 58, 86, x + 98, 86, colour=2)
            scene.arrow(x + 98, 102, x + 58, 102, colour=1, dashed=True)
    scene.note(40, 60, "→ to the next neighbour   ")
    dashed = f"dashed: from {ranks - 1} to 0, {ranks - 1} hops, against the others: no wire carries two messages"
    scene.note(240, 60, dashed)
    longest = max(times.values())
    for place, (name, value) in enumerate(times.items()):
        length, colour = max(2.0, 440 * value / longest), (2, 0, 1)[place]
        scene.bar(260, 140 + place * 32, length, 22, name, format_seconds(value), colour=colour, quiet=False)
    scene.note(40, 242, f"simulated: all-reduce of {format_bytes(nbytes)} over links like InfiniBand NDR")
    return scene.svg()


def ring_or_tree(ranks: int = 16) -> str:
    """Time of a ring and of a tree over the size of the array."""
    link = LINKS["nvlink4"]
    wire = Wire(link.latency_s, link.bytes_per_s)
    sizes = [float(2**power) for power in range(6, 29)]
    lines = [
        Line(name, [(size, seconds("all_reduce", name, ranks, size, wire)) for size in sizes], colour)
        for colour, name in enumerate(("ring", "tree"))
    ]
    values = [value for line in lines for _, value in line.points if value is not None]
    x = PlotAxis(
        sizes[0], 2 * sizes[-1], "bytes of the array", lambda value: format_bytes(value), log=True, binary=True
    )
    y = PlotAxis(min(values) / 1.5, max(values) * 1.5, "seconds", format_seconds, log=True)
    title = f"All-reduce on {ranks} ranks over NVLink, from α and β: tree for small arrays, ring for large"
    return curves(title, x, y, *lines)
