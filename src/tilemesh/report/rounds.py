"""A collective's schedule drawn round by round: ranks in a circle, an arrow for each message with its chunk, the ranks'
buffers after the round, a slider for the round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from tilemesh.comm.schedules import draw as schedule_text
from tilemesh.comm.schedules.check import SlotContents, contents
from tilemesh.comm.schedules.schedule import DATA, Move, Schedule, moves
from tilemesh.report.draw import figure
from tilemesh.report.html import Html, el, join

MOST_ROUNDS, MOST_RANKS = 128, 32
SIDE = 420
MOST_BUFFERS, MOST_CHUNKS = 16, 16
"""Ranks and chunks whose buffers are shown: more would be too small to read."""
MOST_LABELS = 40
"""Arrows of a round that have room for the names of their chunks."""
CELL, ROW = 34, 24
Buffers = list[list[SlotContents | None]]


def schedule_title(schedule: Schedule) -> str:
    return f"{schedule.algorithm} {schedule.collective}, {schedule.ranks} ranks"


def draw_rounds(schedule: Schedule) -> Html:
    """Ranks in a circle and their buffers; a slider goes through the rounds, an arrow is a message."""
    if schedule.ranks > MOST_RANKS:
        return el("p", f"Not drawn: {schedule.ranks} ranks are more than a circle can show.", class_="missing")
    rounds = []
    for number, round_ in enumerate(schedule.rounds()):
        if number == MOST_ROUNDS:
            break
        rounds.append([(rank, move) for rank in range(schedule.ranks) for move in moves(round_, rank)])
    # The first rounds may only set things up: the slider starts where ranks talk to each other.
    first = next((i for i, done in enumerate(rounds) if any(move.kind == "recv" for _, move in done)), 0)
    name = f"rounds-{schedule.collective}-{schedule.algorithm}-{schedule.ranks}"
    buffers_by_round: list[Buffers | None] = [None] * len(rounds)
    if schedule.ranks <= MOST_BUFFERS and schedule.chunks <= MOST_CHUNKS:
        buffers_by_round = list(islice(contents(schedule), len(rounds)))
    panels = [
        el("div", _round(schedule, done, buffers), class_="round", data_words=_round_words(number, len(rounds), done))
        for number, (done, buffers) in enumerate(zip(rounds, buffers_by_round, strict=True))
    ]
    if not panels:
        return el("p", f"{schedule_title(schedule)}: nothing to do.")
    box = el(
        "div",
        el("div", el("label", "round", for_=name),
           el("input", type="range", id=name, min=0, max=len(panels) - 1, value=first, step=1), class_="controls"),
        el("output", class_="reading", aria_live="polite", for_=name),
        *panels,
        class_="rounds",
    )  # fmt: skip
    words = (
        "An arrow is a message or a read of a neighbour's memory, with the chunk that it carries; solid where it is "
        "added to what is there. A dot is a copy of one's own. Beside the circle: the chunks of every rank's result "
        "after the round, and whose contributions are in each; a full box is done. Colours are chunks."
    )
    text = el("details", el("summary", "Every move"), el("pre", schedule_text.text(schedule)))
    return figure(schedule_title(schedule), words, join(box, text), None)


def _round(schedule: Schedule, done: Sequence[tuple[int, Move]], buffers: Buffers | None) -> Html:
    middle, radius = SIDE / 2, SIDE / 2 - 38

    def at(rank: int, out: float = 1.0) -> tuple[float, float]:
        angle = 2 * math.pi * rank / schedule.ranks - math.pi / 2
        return middle + out * radius * math.cos(angle), middle + out * radius * math.sin(angle)

    shapes = []
    busy = {rank for rank, _ in done}
    for rank, move in done:
        colour = move.at % 8
        if move.kind in ("recv", "read") and move.peer != rank:
            label = _chunk_name(move) if len(done) <= MOST_LABELS else ""
            shapes.append(_arrow(at(move.peer), at(rank), colour, label, is_added=move.reduce))
        elif move.kind in ("copy", "read"):
            x, y = at(rank, 0.84)
            shapes.append(el("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=5, class_=f"f{colour}"))
    for rank in range(schedule.ranks):
        x, y = at(rank)
        shapes.append(el("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=17, class_="rank"))
        shapes.append(el("text", rank, x=f"{x:.1f}", y=f"{y + 5:.1f}", class_=None if rank in busy else "dim"))
    width, height = SIDE, SIDE
    if buffers is not None:
        shapes.append(_buffers(schedule, buffers))
        width += 84 + CELL * schedule.chunks
        height = max(SIDE, 60 + ROW * schedule.ranks)
    return el("svg", *shapes, viewBox=f"0 0 {width} {height}", role="img", aria_label="messages of this round")


def _buffers(schedule: Schedule, buffers: Buffers) -> Html:
    """A row for each rank: a box for each chunk of its result, fuller the more contributions it has."""
    left, top = SIDE + 74, max(40.0, (SIDE - ROW * schedule.ranks) / 2)
    most = max((len(slot[1]) for row in buffers for slot in row if slot), default=1)
    is_sum = schedule.collective in ("all_reduce", "reduce_scatter", "reduce")
    full_count = schedule.ranks if is_sum else most
    shapes = [
        el("text", chunk, x=f"{left + CELL * (chunk + 0.5):.1f}", y=f"{top - 8:.1f}", class_="dim")
        for chunk in range(schedule.chunks)
    ]
    for rank, row in enumerate(buffers):
        y = top + ROW * rank
        shapes.append(el("text", f"rank {rank}", x=f"{left - 34:.1f}", y=f"{y + 15:.1f}"))
        for chunk, slot in enumerate(row):
            place = {"x": f"{left + CELL * chunk:.1f}", "y": f"{y:.1f}", "width": CELL - 3, "height": ROW - 4}
            shapes.append(el("rect", **place, class_="slot"))
            if slot is None:
                continue
            label, who = slot
            full = f"{0.25 + 0.75 * len(who) / full_count:.2f}"
            shapes.append(el("rect", **place, class_=f"f{label % 8}", fill_opacity=full))
            words = el(
                "text", ranks_words(who, schedule.ranks), x=f"{left + CELL * (chunk + 0.46):.1f}", y=f"{y + 15:.1f}"
            )
            shapes.append(words)
    return el("g", *shapes)


def ranks_words(who: frozenset[int], ranks: int) -> str:
    """Ranks as short as a box is wide: all, 0-2, 0,3, or how many of them."""
    if len(who) == ranks and ranks > 1:
        return "all"
    first, last = min(who), max(who)
    if len(who) == last - first + 1:
        return str(first) if first == last else f"{first}-{last}"
    return ",".join(map(str, sorted(who))) if len(who) == 2 else f"{len(who)}/{ranks}"


def _chunk_name(move: Move) -> str:
    """Of what a message carries: chunks of the result by their numbers, others by where they lie."""
    if move.space != DATA:
        return ""
    return str(move.at) if move.count == 1 else f"{move.at}-{move.at + move.count - 1}"


def _arrow(start: tuple[float, float], end: tuple[float, float], colour: int, label: str, *, is_added: bool) -> Html:
    """Bent a little, so that two that cross in opposite directions are told apart; the tip ends at the circle."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = math.hypot(dx, dy) or 1.0
    ux, uy = dx / length, dy / length
    bend = 0.12 * length
    control = ((start[0] + end[0]) / 2 - uy * bend, (start[1] + end[1]) / 2 + ux * bend)
    tip = (end[0] - control[0], end[1] - control[1])
    far = math.hypot(*tip) or 1.0
    tx, ty = tip[0] / far, tip[1] / far
    point = (end[0] - 20 * tx, end[1] - 20 * ty)
    base = (end[0] - 31 * tx, end[1] - 31 * ty)
    wings = ((base[0] - 6 * ty, base[1] + 6 * tx), (base[0] + 6 * ty, base[1] - 6 * tx))
    head = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in (point, *wings)) + "Z"
    line = f"M{start[0]:.1f},{start[1]:.1f}Q{control[0]:.1f},{control[1]:.1f} {base[0]:.1f},{base[1]:.1f}"
    dashed = "" if is_added else " dashed"
    shapes = [el("path", d=line, class_=f"line s{colour}{dashed}"), el("path", d=head, class_=f"f{colour}")]
    if label:
        x, y = ((start[axis] + 2 * control[axis] + end[axis]) / 4 for axis in (0, 1))
        shapes.append(el("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=10, class_="rank"))
        shapes.append(el("text", label, x=f"{x:.1f}", y=f"{y + 5:.1f}"))
    return join(*shapes)


def _round_words(number: int, count: int, done: Sequence[tuple[int, Move]]) -> str:
    received = [move for _, move in done if move.kind == "recv"]
    reads = sum(move.kind == "read" for _, move in done)
    copies = sum(move.kind == "copy" for _, move in done)
    parts = []
    if received:
        parts.append(f"{len(received)} messages, {sum(move.reduce for move in received)} of them added")
    parts += [f"{reads} reads of shared memory"] if reads else []
    parts += [f"{copies} copies"] if copies else []
    if any(move.kind == "sync" for _, move in done):
        parts.insert(0, "all meet")
    return f"round {number + 1} of {count}: {', '.join(parts) or 'nothing'}"
