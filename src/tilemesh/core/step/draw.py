"""A step to look at: ranks over time in the terminal and as an SVG, with each rank's memory beneath it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tilemesh.core.errors import UsageError
from tilemesh.core.scene import Scene, text_width
from tilemesh.core.step.action import COMPUTE, Action, StepProgram, parts
from tilemesh.core.step.simulate import Slot, Timeline

MOST_SLOTS = 6_000  # of a drawing: beyond that nobody can read it
_COLOURS = {"F": 0, "B": 2, "I": 2, "W": 1, "R": 3}
_KEYS = {"F": "blue: forward", "B": "green: backward", "I": "green: gradient of inputs", "W": "brown: of weights",
         "R": "pink: forward again"}  # fmt: skip
_LEAST_WIDTH, _MOST_WIDTH = 820, 1600
_LANE = {"DISPATCH": ("d", 5), "COMBINE": ("c", 7)}
"""Of what passes exchange with experts of other ranks: a letter and a colour."""
_MOVES = {"GATHER": "weights gathered", "REDUCE": "gradients summed", "UPDATE": "update", "OUT": "out", "IN": "in"}
_BARS = " ▁▂▃▄▅▆▇█"

LEGEND = (
    "F forward, B backward, I and W its two halves (gradients of inputs and weights), R forward again; "
    "small letters: a rank's later chunks; ·: waiting"
)

EXCHANGES = "experts: d rows sent to the ranks that have their experts (dispatch), c results sent back (combine)"

Curve = Sequence[tuple[float, float]]
"""Moments and the bytes alive from then on."""


def curves(
    program: StepProgram, timeline: Timeline, memory: Sequence[Sequence[float]]
) -> list[list[tuple[float, float]]]:
    """`memory_curve` over time: what computing makes and gives back counts from its end, the rest from its start."""
    of_ranks = []
    for rank in range(program.ranks):
        mine = sorted((slot for slot in timeline.slots if slot.rank == rank), key=lambda slot: slot.place)
        points, now = [(0.0, memory[rank][0])], 0.0
        for slot in mine:
            now = max(now, slot.end_s if slot.action.kind in COMPUTE else slot.start_s)
            points.append((now, memory[rank][slot.place + 1]))
        of_ranks.append(points)
    return of_ranks


def bars(values: Sequence[float], most: float) -> str:
    """A curve in one line of text: for each value a bar, as high as its share of `most`, from none to all."""
    top = len(_BARS) - 1
    return "".join(_BARS[round(min(max(value / most, 0.0), 1.0) * top)] if most else " " for value in values)


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
        if timeline.exchanges:
            lines.append(f"experts |{_exchange_cells(timeline, rank, per_column, len(cells))}|")
        if memory:
            levels = [_at(memory[rank], column * per_column, (column + 1) * per_column) for column in range(len(cells))]
            lines.append(f" memory |{bars(levels, most)}|{peaks[rank]}")
    legends = [LEGEND, *([EXCHANGES] if timeline.exchanges else [])]
    return "\n".join([*lines, *(textwrap.fill(legend, columns) for legend in legends)])


def _exchange_cells(timeline: Timeline, rank: int, per_column: float, count: int) -> str:
    cells = [" "] * count
    for slot in timeline.exchanges:
        if slot.rank == rank and slot.end_s > slot.start_s:
            begin = min(round(slot.start_s / per_column), count - 1)
            end = min(max(round(slot.end_s / per_column), begin + 1), count)
            cells[begin:end] = _LANE[slot.action.kind][0] * (end - begin)
    return "".join(cells)


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
    left, top, lane, below = 64, 40, 24, 22 if memory else 4
    beside = 11 if timeline.exchanges else 0
    # Wide enough for a number in the shortest pass, and for the legend.
    width = max(_LEAST_WIDTH, min(_MOST_WIDTH, round(14 * timeline.total_s / _shortest_s(timeline))))
    scale = width / timeline.total_s if timeline.total_s else 1.0
    most = max((value for curve in memory for _, value in curve), default=0.0)
    pitch = lane + beside + below + 6
    scene = Scene(left + width + 60, top + program.ranks * pitch + 24, title or program.name)
    for rank in range(program.ranks):
        y = top + rank * pitch
        scene.text(left - 8, y + 16, f"rank {rank}", align="end")
        scene.line(left, y + lane, left + width, y + lane, faint=True)
        mine = (slot for slot in timeline.slots if slot.rank == rank)
        for slot in sorted(mine, key=lambda slot: slot.action.kind not in COMPUTE):  # lines over boxes
            _add_slot(scene, program, slot, left + slot.start_s * scale, y, (slot.end_s - slot.start_s) * scale, lane)
        for slot in timeline.exchanges:
            if slot.rank == rank and slot.end_s > slot.start_s:
                at, wide = left + slot.start_s * scale, (slot.end_s - slot.start_s) * scale
                place = round(at, 1), y + lane + 2, round(wide, 1), beside - 3
                scene.box(*place, colour=_LANE[slot.action.kind][1], tip=str(slot.action))
        if memory and most:
            floor, high = y + lane + beside + below, (below - 2) / most
            outline = _outline(memory[rank], timeline.total_s)
            scene.area([(left + moment * scale, floor - value * high) for moment, value in outline], 6, tinted=True)
            scene.text(left + width + 6, floor - 4, f"peak {max(value for _, value in memory[rank]):g}", size=11)
    keys = [_KEYS[kind] for kind in _KEYS if any(slot.action.kind.startswith(kind) for slot in timeline.slots)]
    if timeline.exchanges:
        keys.append("below: rows to experts of other ranks (light blue), results back (yellow)")
    moves = {slot.action.kind for slot in timeline.slots if slot.end_s > slot.start_s} & set(_MOVES)
    if moves:
        keys.append(f"lines below: {', '.join(_MOVES[kind] for kind in _MOVES if kind in moves)}")
    keys += ["pale: a rank's later chunks", *([f"grey areas: {areas}"] if memory else [])]
    scene.note(left, scene.height - 9, " · ".join(keys))
    return scene.svg()


def _add_slot(scene: Scene, program: StepProgram, slot: Slot, x: float, y: float, wide: float, lane: float) -> None:
    """A pass as a box, F over B where they are one action; what runs beside computing as a line under the lane."""
    if slot.action.kind in COMPUTE:
        halves = parts(slot.action) or (slot.action,)
        high = lane / len(halves)
        for place, part in enumerate(halves):
            number = str(part.microbatch)
            words = number if wide >= text_width(number, 9) + 3 else ""
            pale = not _is_first(program, slot.rank, part)
            at = round(x, 1), y + place * high, round(wide, 1), high
            scene.box(*at, words, colour=_COLOURS[part.kind[0]], pale=pale, size=9, tip=str(part))
    elif slot.end_s > slot.start_s and slot.action.kind not in ("SEND", "RECV"):
        scene.box(round(x, 1), y + lane - 3, round(wide, 1), 3, colour=4, tip=str(slot.action))


def _outline(curve: Curve, total_s: float) -> list[tuple[float, float]]:
    """A curve that jumps, from the ground and back to it."""
    points, before = [(0.0, 0.0)], 0.0
    for moment, value in curve:
        points += [(moment, before), (moment, value)]
        before = value
    return [*points, (total_s, before), (total_s, 0.0)]


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
    count = len(timeline.slots) + len(timeline.exchanges)
    if count > MOST_SLOTS:
        raise UsageError(
            f"a drawing of {count} actions: nobody can read one of more than {MOST_SLOTS}; "
            "fewer microbatches look alike"
        )
