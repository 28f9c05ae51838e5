"""Drawings of chapter 3, made from the schedules and promises that the runtime uses."""

from __future__ import annotations

from tilemesh.comm.schedules.book import build
from tilemesh.comm.schedules.collectives import COLLECTIVES, ends, starts
from tilemesh.comm.schedules.cost import seconds
from tilemesh.comm.schedules.schedule import moves
from tilemesh.comm.schedules.simulate import Memory, simulate
from tilemesh.comm.schedules.topology import LinearArray, Wire
from tilemesh.core.hardware import LINKS
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.guide.svg import Canvas
from tilemesh.report.draw import Drawing, Line, PageTable, Plot, PlotAxis
from tilemesh.report.picture import svg

RANKS = 4


def figures() -> dict[str, str]:
    return {
        "collectives.svg": collectives(),
        "ring.svg": rounds("ring"),
        "tree.svg": rounds("tree"),
        "linear_array.svg": linear_array(),
        "ring_or_tree.svg": ring_or_tree(),
    }


def collectives() -> str:
    """What each collective moves: blocks of each rank before and after."""
    names = [name for name in COLLECTIVES if name != "barrier"]
    canvas = Canvas(
        900, 60 + 2 * 190, "Eight collectives on 4 ranks: a row per rank, before → after; Σ is the sum of all ranks"
    )
    for place, name in enumerate(names):
        x, y = 16 + place % 4 * 222, 64 + place // 4 * 190
        canvas.text(x, y - 8, name, bold=True)
        for rank in range(RANKS):
            _blocks(canvas, name, rank, x, y + 6 + rank * 34)
    legend = (
        "a to d and their colours: whose block it is (rank 0 to 3); the number: which block of the array; empty: none"
    )
    canvas.text(16, 428, legend, quiet=True, size=11)
    return canvas.svg()


def _blocks(canvas: Canvas, name: str, rank: int, x: float, y: float) -> None:
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
            canvas.box(x + side * 108 + slot * wide, y, wide - 2, 26, words, colour=colour, pale=not words, size=10)
    canvas.text(x + 99, y + 17, "→", align="mid", quiet=True)


def rounds(algorithm: str) -> str:
    """Each round of an all-reduce as arrows between ranks, from the schedule that runs."""
    schedule = build("all_reduce", algorithm, RANKS)
    steps = [
        round_
        for round_ in schedule.rounds()
        if any(move.kind == "send" for move in moves(round_, 0))
        or any(move.kind == "send" for rank in range(RANKS) for move in moves(round_, rank))
    ]
    canvas = Canvas(
        860, 70 + len(steps) * 58 + 30,
        f"All-reduce by a {algorithm} on {RANKS} ranks: {len(steps)} rounds, {schedule.chunks} "
        f"piece{'s' if schedule.chunks > 1 else ''}; solid arrows add, dashed ones copy",
    )  # fmt: skip
    left, wide = 130, 200
    for rank in range(RANKS):
        canvas.text(left + rank * wide, 52, f"rank {rank}", bold=True, align="mid")
        canvas.line(left + rank * wide, 60, left + rank * wide, 66 + len(steps) * 58)
    for number, round_ in enumerate(steps):
        y = 66 + number * 58
        canvas.text(20, y + 26, f"round {number + 1}", quiet=True)
        for rank in range(RANKS):
            for move in moves(round_, rank):
                if move.kind != "recv":
                    continue
                colour = move.at % 4 if schedule.chunks > 1 else 0
                canvas.arrow(
                    left + move.peer * wide, y + 4, left + rank * wide, y + 44, colour=colour, dashed=not move.reduce
                )
                words = f"piece {move.at}" if schedule.chunks > 1 else "all"
                canvas.text(left + rank * wide + 8, y + 52, words, size=10, quiet=True)
    legend = "an arrow: a message" + ("; its colour: which piece" if schedule.chunks > 1 else " with the whole array")
    canvas.text(left, 66 + len(steps) * 58 + 22, legend, quiet=True, size=11)
    return canvas.svg()


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
    canvas = Canvas(
        860, 250, f"A ring of {ranks} ranks that stand in a row: the last one's message goes back over all wires"
    )
    for rank in range(ranks):
        x = 40 + rank * 100
        canvas.box(x, 76, 56, 34, f"{rank}", colour=0)
        if rank + 1 < ranks:
            canvas.arrow(x + 58, 86, x + 98, 86, colour=2)
            canvas.arrow(x + 98, 102, x + 58, 102, colour=1, dashed=True)
    canvas.text(40, 60, "→ to the next neighbour   ", quiet=True, size=11)
    canvas.text(
        240,
        60,
        f"dashed: from {ranks - 1} to 0, {ranks - 1} hops, against the others: no wire carries two messages",
        quiet=True,
        size=11,
    )
    longest = max(times.values())
    for place, (name, value) in enumerate(times.items()):
        y = 140 + place * 32
        canvas.text(250, y + 15, name, align="end")
        canvas.box(260, y, max(2.0, 440 * value / longest), 22, colour=(2, 0, 1)[place])
        canvas.text(268 + 440 * value / longest, y + 15, format_seconds(value), size=11)
    canvas.text(
        40, 242, f"simulated: all-reduce of {format_bytes(nbytes)} over links like InfiniBand NDR", quiet=True, size=11
    )
    return canvas.svg()


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
    table = PageTable(["bytes", "ring", "tree"], [])
    return svg(
        [
            Drawing(
                f"All-reduce on {ranks} ranks over NVLink, from α and β: tree for small arrays, ring for large",
                "",
                Plot(x, y, lines),
                table,
            )
        ]
    )
