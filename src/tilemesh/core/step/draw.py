"""A step to look at: ranks over time in the terminal and as an SVG, with each rank's memory beneath it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape

from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import COMPUTE, Action, StepProgram, parts
from tilemesh.core.step.simulate import Slot, Timeline

MOST_SLOTS = 6_000  # of a drawing: beyond that nobody can read it
_COLOURS = {"F": "#7f9cf0", "B": "#6cc57c", "I": "#6cc57c", "W": "#f4c542", "R": "#d9a6f0"}
_LATER = {"F": "#c9d5fb", "B": "#bfe8c7", "I": "#bfe8c7", "W": "#fbe9b0", "R": "#efdaf9"}
_STYLE = "".join(
    f".{kind}{place}{{fill:{colours[kind]}}}" for place, colours in enumerate((_COLOURS, _LATER)) for kind in colours
)
_LEAST_WIDTH, _MOST_WIDTH = 820, 1600
_MOVES = {"GATHER": "weights gathered", "REDUCE": "gradients summed", "UPDATE": "update", "OUT": "out", "IN": "in"}
_BARS = " ▁▂▃▄▅▆▇█"

LEGEND = (
    "F forward, B backward, I and W its two halves (gradients of inputs and weights), R forward again; "
    "small letters: a rank's later chunks; ·: waiting"
)

Curve = Sequence[tuple[float, float]]
"""Moments and the bytes alive from then on."""


def curves(
    program: StepProgram, timeline: Timeline, held: Sequence[Sequence[float]]
) -> list[list[tuple[float, float]]]:
    """`memory_curve` over time: what computing makes and gives back counts from its end, the rest from its start."""
    of_ranks = []
    for rank in range(program.ranks):
        mine = sorted((slot for slot in timeline.slots if slot.rank == rank), key=lambda slot: slot.place)
        points, now = [(0.0, held[rank][0])], 0.0
        for slot in mine:
            now = max(now, slot.end_s if slot.action.kind in COMPUTE else slot.start_s)
            points.append((now, held[rank][slot.place + 1]))
        of_ranks.append(points)
    return of_ranks


def text(program: StepProgram, timeline: Timeline, memory: Sequence[Curve] = (), columns: int = 160) -> str:
    """A line per rank, in time, and one of its memory below it."""
    _require_legible(timeline)
    peaks = [f" peak {max(value for _, value in curve):g}" for curve in memory]
    room = max(20, columns - len("rank 0  ||") - max(map(len, peaks), default=0))
    # Three columns hold a letter and two digits; where the line gets too long, fewer do.
    per_column = max(_shortest_s(timeline) / 3, timeline.total_s / room)
    most = max((value for curve in memory for _, value in curve), default=0.0)
    lines = []
    for rank in range(program.ranks):
        cells = ["·"] * round(timeline.total_s / per_column)
        for start_s, end_s, part in _pieces(program, timeline, rank):
            begin, end = round(start_s / per_column), round(end_s / per_column)
            label = f"{_letter(program, rank, part)}{part.microbatch}" + (
                f".{part.slice}" if program.slices > 1 else ""
            )
            width = end - begin
            cells[begin:end] = (label if len(label) <= width else label[:width]).ljust(width)
        lines.append(f"rank {rank:<3}|{''.join(cells)}|")
        if memory:
            marks = []
            for column in range(len(cells)):
                until = (column + 1) * per_column
                value = max(_at(memory[rank], column * per_column, until), 0.0)
                marks.append(_BARS[round(value / most * (len(_BARS) - 1))] if most else " ")
            lines.append(f" memory |{''.join(marks)}|{peaks[rank]}")
    return "\n".join([*lines, textwrap.fill(LEGEND, columns)])


def _at(curve: Curve, begin_s: float, end_s: float) -> float:
    """The most that is alive in a stretch of time."""
    before = [value for moment, value in curve if moment <= begin_s]
    within = [value for moment, value in curve if begin_s < moment < end_s]
    return max([*before[-1:], *within])


def svg(
    program: StepProgram,
    timeline: Timeline,
    memory: Sequence[Curve] = (),
    title: str = "",
    areas: str = "activations kept",
) -> str:
    """The same in colours; pointing at a pass tells its name. `areas`: what the memory is of."""
    _require_legible(timeline)
    left, top, lane, below = 64, 34, 24, 22 if memory else 4
    # Wide enough for a number in the shortest pass, and for the legend.
    width = max(_LEAST_WIDTH, min(_MOST_WIDTH, round(14 * timeline.total_s / _shortest_s(timeline))))
    scale = width / timeline.total_s if timeline.total_s else 1.0
    most = max((value for curve in memory for _, value in curve), default=0.0)
    body = []
    for rank in range(program.ranks):
        y = top + rank * (lane + below + 6)
        body.append(f'<text x="8" y="{y + 16}">rank {rank}</text>')
        body.append(f'<rect x="{left}" y="{y}" width="{width}" height="{lane}" fill="#f1f1f1"/>')
        mine = (slot for slot in timeline.slots if slot.rank == rank)
        for slot in sorted(mine, key=lambda slot: slot.action.kind not in COMPUTE):  # lines over boxes
            body += _shapes(program, slot, left, y, lane, scale)
        if memory and most:
            body.append(_area(memory[rank], timeline.total_s, most, left, y + lane + 2, below - 2, scale))
    height = top + program.ranks * (lane + below + 6) + 22
    total = left + width + 60
    keys = [("F", "forward"), ("B", "backward, or gradient of inputs (I)"), ("W", "gradient of weights")]
    x = left
    for kind, words in keys:
        body.append(f'<rect x="{x}" y="{height - 18}" width="10" height="10" fill="{_COLOURS[kind]}"/>')
        body.append(f'<text x="{x + 14}" y="{height - 9}">{words}</text>')
        x += 34 + 6 * len(words)
    words = "pale: a rank's later chunks" + (f"; grey areas: {areas}" if memory else "")
    moves = {slot.action.kind for slot in timeline.slots if slot.end_s > slot.start_s} & set(_MOVES)
    if moves:
        red = f"red: {', '.join(_MOVES[kind] for kind in _MOVES if kind in moves)}"
        body.append(f'<text x="{left + width}" y="20" text-anchor="end">{red}</text>')
    body.append(f'<text x="{x}" y="{height - 9}">{words}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" '
            'font-family="sans-serif" font-size="11">',
            f"<style>.p{{stroke:#fff;stroke-width:.7}}.m{{font-size:9px;text-anchor:middle}}{_STYLE}</style>",
            f'<rect width="{total}" height="{height}" fill="white"/>',
            f'<text x="8" y="20" font-size="14">{escape(title or program.name)}</text>',
            *body,
            "</svg>",
            "",
        ]
    )


def _shapes(program: StepProgram, slot: Slot, left: int, y: int, lane: int, scale: float) -> list[str]:
    """A pass as a box, F over B where they are one action; what runs beside computing as a line under the lane."""
    x, wide = left + slot.start_s * scale, (slot.end_s - slot.start_s) * scale
    if slot.action.kind not in COMPUTE:
        if slot.end_s == slot.start_s or slot.action.kind in ("SEND", "RECV"):
            return []
        mark = f'<rect x="{x:.1f}" y="{y + lane - 3}" width="{wide:.1f}" height="3" fill="#ff725c">'
        return [f"{mark}<title>{escape(str(slot.action))}</title></rect>"]
    shapes = []
    halves = parts(slot.action) or (slot.action,)
    high = lane / len(halves)
    for place, part in enumerate(halves):
        colour = f"{part.kind[0]}{0 if _is_first(program, slot.rank, part) else 1}"
        at = y + place * high
        shapes.append(
            f'<rect class="p {colour}" x="{x:.1f}" y="{at:g}" width="{wide:.1f}" height="{high:g}">'
            f"<title>{part}</title></rect>"
        )
        if wide >= 9:
            shapes.append(f'<text class="m" x="{x + wide / 2:.1f}" y="{at + high / 2 + 4:g}">{part.microbatch}</text>')
    return shapes


def _area(curve: Curve, total_s: float, most: float, left: int, y: int, height: int, scale: float) -> str:
    points = [f"{left},{y + height}"]
    value = 0.0
    for moment, after in curve:
        x = left + moment * scale
        points += [
            f"{x:.1f},{y + height - value / most * height:.1f}",
            f"{x:.1f},{y + height - after / most * height:.1f}",
        ]
        value = after
    points += [
        f"{left + total_s * scale:.1f},{y + height - value / most * height:.1f}",
        f"{left + total_s * scale:.1f},{y + height}",
    ]
    peak = max(after for _, after in curve)
    return (
        f'<polygon points="{" ".join(points)}" fill="#bbb"/>'
        f'<text x="{left + total_s * scale + 6:.1f}" y="{y + height - 4}">peak {peak:g}</text>'
    )


def _pieces(program: StepProgram, timeline: Timeline, rank: int) -> list[tuple[float, float, Action]]:
    """Computing of a rank in time; an FB is its F and then its B."""
    pieces = []
    for slot in timeline.slots:
        if slot.rank == rank and slot.action.kind in COMPUTE:
            halves = parts(slot.action) or (slot.action,)
            each_s = (slot.end_s - slot.start_s) / len(halves)
            pieces += [
                (slot.start_s + place * each_s, slot.start_s + (place + 1) * each_s, part)
                for place, part in enumerate(halves)
            ]
    return pieces


def _is_first(program: StepProgram, rank: int, part: Action) -> bool:
    return part.chunk == program.placement.held[rank][0]


def _letter(program: StepProgram, rank: int, part: Action) -> str:
    letter = part.kind[0]
    return letter if _is_first(program, rank, part) else letter.lower()


def _shortest_s(timeline: Timeline) -> float:
    passes = (slot for slot in timeline.slots if slot.action.kind in COMPUTE)
    return min((slot.end_s - slot.start_s for slot in passes if slot.end_s > slot.start_s), default=1.0)


def _require_legible(timeline: Timeline) -> None:
    if len(timeline.slots) > MOST_SLOTS:
        raise UsageError(
            f"a drawing of {len(timeline.slots)} actions: nobody can read one of more than {MOST_SLOTS}; "
            "fewer microbatches look alike"
        )
