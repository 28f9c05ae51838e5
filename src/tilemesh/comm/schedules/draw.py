"""A schedule to look at: round by round in the terminal, as an SVG, and the picture of what a collective moves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from tilemesh.comm.schedules.collectives import COLLECTIVES, ends, require_collective, starts
from tilemesh.comm.schedules.schedule import DATA, SPACES, Move, Round, Schedule, moves
from tilemesh.core.errors import UsageError
from tilemesh.core.scene import Scene, text_width

_LETTERS = "abcdefghijklmnopqrstuvwxyz"

LEGEND = (
    "→2:3 sends chunk 3 to rank 2; ←1:0 receives chunk 0 from rank 1, + adds it to what is there;\n"
    "⇒ copies; i: the caller's input, t: scratch, else the result; 1[0]: chunk 0 in rank 1's memory;\n"
    "sync: all meet; ·: idle"
)

MAX_ROUNDS = 400  # of a drawing: beyond that nobody can read it
MAX_RANKS = 128

_LEAST_WIDTH = 640
_LINE = 13  # pixels from one label to the next below it


def text(schedule: Schedule, columns: int | None = None) -> str:
    """One line per round, one column a rank: →2 is a send to rank 2, ←1 a receipt from it (+ adds), with the slots.

    `columns`: how wide a line may be. Ranks that do not fit follow below, with the rounds again."""
    _require_legible(schedule)
    rows = [["round", *(f"rank {rank}" for rank in range(schedule.ranks))]]
    for number, round_ in enumerate(schedule.rounds()):
        if number == MAX_ROUNDS:
            rows.append(["…", *("…" for _ in range(schedule.ranks))])
            break
        cells = ["  ".join(_words(move, rank) for move in moves(round_, rank)) for rank in range(schedule.ranks)]
        rows.append([str(number), *(cell or "·" for cell in cells)])
    widths = [max(len(row[column]) for row in rows) for column in range(schedule.ranks + 1)]
    lines: list[str] = []
    for ranks in _fitting(widths, columns):
        shown = (0, *ranks)
        lines += ["  ".join(row[place].ljust(widths[place]) for place in shown).rstrip() for row in rows]
        lines.append("")
    return "\n".join([_title(schedule), "", *lines, LEGEND])


def _fitting(widths: Sequence[int], columns: int | None) -> list[list[int]]:
    """The columns of a table but the first, in as few groups of one size as fit beside it: one at least in each."""
    places = list(range(1, len(widths)))
    for count in range(1, len(places) + 1):
        size = -(-len(places) // count)
        groups = [places[begin : begin + size] for begin in range(0, len(places), size)]
        if columns is None or all(widths[0] + sum(2 + widths[at] for at in group) <= columns for group in groups):
            return groups
    return [[at] for at in places]


def svg(schedule: Schedule, title: str = "") -> str:
    """Ranks side by side, time downwards; an arrow a message, coloured by chunk, dashed where it is only copied."""
    _require_legible(schedule)
    left, top, column = 60, 70, 110
    rounds = list(islice(schedule.rounds(), MAX_ROUNDS))
    # A label stands beside its arrow's tip, where only the arrows to one rank meet: those are put one under the other.
    most = [max(_received(round_, rank) for rank in range(schedule.ranks)) for round_ in rounds]
    heights = [34 + _LINE * (max(1, count) - 1) for count in most]
    tall = top + sum(heights)
    title = title or _title(schedule)
    width = max(left + column * schedule.ranks, _LEAST_WIDTH, 24 + round(text_width(title, 17)))
    scene = Scene(width, tall + 36, title)
    for rank in range(schedule.ranks):
        x = left + column * rank
        scene.text(x, 50, f"rank {rank}", align="mid", bold=True)
        scene.line(x, 56, x, tall, faint=True)
    y = top
    for number, (round_, height) in enumerate(zip(rounds, heights, strict=True)):
        scene.text(8, y + 6, str(number), quiet=True)
        for rank in range(schedule.ranks):
            _add_moves(scene, round_, rank, left, y, column)
        y += height
    scene.note(12, tall + 22, "an arrow: a message, its colour the chunk; solid and +: added; dashed: copied")
    return scene.svg()


def _received(round_: Round, rank: int) -> int:
    return sum(move.kind == "recv" for move in moves(round_, rank))


def _add_moves(scene: Scene, round_: Round, rank: int, left: int, y: int, column: int) -> None:
    x, tip = left + column * rank, y + 24
    for move in moves(round_, rank):
        colour = move.at % 8
        if move.kind == "recv":
            peer_x = left + column * move.peer
            scene.arrow(peer_x, y, x, tip, colour=colour, dashed=not move.reduce)
            label = _slots(move, move.at, move.space) + ("+" if move.reduce else "")
            # Beyond the tip, where no arrow to this rank passes: those from left and right have a side each.
            side, align = (6, "") if peer_x < x else (-6, "end")
            scene.text(x + side, tip + 4, label, size=11, align=align, quiet=True)
            tip += _LINE
        elif move.kind == "sync":
            scene.line(x - 40, y - 6, x + 40, y - 6, thick=True)
        elif move.kind in ("copy", "read"):
            scene.box(x - 4, y - 4, 8, 8, colour=colour, tip=_words(move, rank))


def _require_legible(schedule: Schedule) -> None:
    if schedule.ranks > MAX_RANKS:
        raise UsageError(
            f"a drawing of {schedule.ranks} ranks: nobody can read one of more than {MAX_RANKS}; "
            "the rounds look alike for fewer"
        )


def picture(collective: str, ranks: int, root: int = 0) -> str:
    """What a collective moves: each rank's blocks before and after. b2: block 2 of rank 1; Σ2: all ranks' block 2."""
    require_collective(collective)
    chunks = 1 if collective in ("broadcast", "barrier") else ranks
    rows = []
    for rank in range(ranks):
        before = [_name(label, {who}, ranks) for label, who in starts(collective, rank, root, ranks, chunks)]
        after = ["." for _ in range(chunks)]
        for slot, (label, whose) in ends(collective, rank, root, ranks, chunks).items():
            after[slot] = _name(label, whose, ranks)
        if collective in ("all_gather", "gather"):
            before = [before[0] if slot == rank else "." for slot in range(chunks)]
        rows.append((f"rank {rank}", " ".join(before or ["."] * chunks), " ".join(after)))
    width = max(len(before) for _, before, _ in rows)
    return "\n".join([collective, *(f"  {who}   {before.ljust(width)}   →   {after}" for who, before, after in rows)])


def pictures(ranks: int) -> str:
    """All collectives."""
    return "\n\n".join(picture(name, ranks) for name in COLLECTIVES if name != "barrier")


def _title(schedule: Schedule) -> str:
    s = schedule
    shared = ", through shared memory" if s.shared else ""
    ranks = f"{s.ranks} rank{'s' if s.ranks > 1 else ''}"
    return f"{s.algorithm} {s.collective}: {ranks}, {s.chunks} chunk{'s' if s.chunks > 1 else ''}{shared}"


def _slots(move: Move, at: int, space: int) -> str:
    last = f"-{at + move.count - 1}" if move.count > 1 else ""
    where = "" if space == DATA else SPACES[space][0]
    return f"{where}{at}{last}"


def _words(move: Move, rank: int) -> str:
    sign = "+" if move.reduce else ""
    if move.kind == "sync":
        return "sync"
    if move.kind == "send":
        return f"→{move.peer}:{_slots(move, move.at, move.space)}"
    if move.kind == "recv":
        return f"←{move.peer}:{_slots(move, move.at, move.space)}{sign}"
    source = _slots(move, move.source_at, move.source)
    if move.kind == "read" and move.peer != rank:
        return f"{move.peer}[{source}]⇒{_slots(move, move.at, move.space)}{sign}"
    return f"{source}⇒{_slots(move, move.at, move.space)}{sign}"


def _name(label: int, whose: frozenset[int] | set[int], ranks: int) -> str:
    if len(whose) == ranks and ranks > 1:
        return f"Σ{label}"
    who = min(whose)
    return f"{_LETTERS[who] if who < len(_LETTERS) else f'r{who}.'}{label}"
