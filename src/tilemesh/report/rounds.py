"""A collective's schedule drawn round by round: ranks in a circle, an arrow a message, a slider for the round."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilemesh.comm.schedules import draw as schedule_text
from tilemesh.comm.schedules.schedule import Move, Schedule, moves
from tilemesh.report.draw import figure
from tilemesh.report.html import Html, el, join

MOST_ROUNDS, MOST_RANKS = 128, 32
SIDE = 420


def schedule_title(schedule: Schedule) -> str:
    return f"{schedule.algorithm} {schedule.collective}, {schedule.ranks} ranks"


def draw_rounds(schedule: Schedule) -> Html:
    """Ranks in a circle; a slider goes through the rounds, an arrow is a message."""
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
    panels = [
        el("div", _round(schedule, done), class_="round", data_words=_round_words(number, len(rounds), done))
        for number, done in enumerate(rounds)
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
        "An arrow is a message or a read of a neighbour's memory, solid where it is added to what is there; "
        "a dot is a copy of one's own. Colours are chunks."
    )
    text = el("details", el("summary", "Every move"), el("pre", schedule_text.text(schedule)))
    return figure(schedule_title(schedule), words, join(box, text), None)


def _round(schedule: Schedule, done: Sequence[tuple[int, Move]]) -> Html:
    middle, radius = SIDE / 2, SIDE / 2 - 38

    def at(rank: int, out: float = 1.0) -> tuple[float, float]:
        angle = 2 * math.pi * rank / schedule.ranks - math.pi / 2
        return middle + out * radius * math.cos(angle), middle + out * radius * math.sin(angle)

    shapes = []
    busy = {rank for rank, _ in done}
    for rank, move in done:
        colour = move.at % 8
        if move.kind in ("recv", "read") and move.peer != rank:
            shapes.append(_arrow(at(move.peer), at(rank), colour, is_added=move.reduce))
        elif move.kind in ("copy", "read"):
            x, y = at(rank, 0.84)
            shapes.append(el("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=5, class_=f"f{colour}"))
    for rank in range(schedule.ranks):
        x, y = at(rank)
        shapes.append(el("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=17, class_="rank"))
        shapes.append(el("text", rank, x=f"{x:.1f}", y=f"{y + 5:.1f}", class_=None if rank in busy else "dim"))
    return el("svg", *shapes, viewBox=f"0 0 {SIDE} {SIDE}", role="img", aria_label="messages of this round")


def _arrow(start: tuple[float, float], end: tuple[float, float], colour: int, *, is_added: bool) -> Html:
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
    return join(el("path", d=line, class_=f"line s{colour}{dashed}"), el("path", d=head, class_=f"f{colour}"))


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
