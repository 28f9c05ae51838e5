"""A schedule to look at: round by round in the terminal, as an SVG, and the picture of what a collective moves."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import islice

from tilemesh.comm.schedules.collectives import COLLECTIVES, ends, require_collective, starts
from tilemesh.comm.schedules.schedule import DATA, SPACES, Move, Round, Schedule, moves
from tilemesh.core.errors import UsageError

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#3ca951", "#6cc5b0", "#a463f2", "#97bbf5", "#9c6b4e")

LEGEND = (
    "→2:3 sends chunk 3 to rank 2; ←1:0 receives chunk 0 from rank 1, + adds it to what is there;\n"
    "⇒ copies; i: the caller's input, t: scratch, else the result; 1[0]: chunk 0 in rank 1's memory;\n"
    "sync: all meet; ·: idle"
)

MAX_ROUNDS = 400  # of a drawing: beyond that nobody can read it
MAX_RANKS = 128

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


def svg(schedule: Schedule) -> str:
    """Ranks side by side, time downwards; an arrow a message, coloured by chunk, dashed where it is only copied."""
    _require_legible(schedule)
    left, top, column = 60, 60, 110
    rounds = list(islice(schedule.rounds(), MAX_ROUNDS))
    parts, y = [], top
    for number, round_ in enumerate(rounds):
        drawn, height = _round(round_, schedule.ranks, left, y, column)
        parts += [f'<text x="8" y="{y + 6}" fill="#666">{number}</text>', *drawn]
        y += height
    width, height = left + column * schedule.ranks, y + 20
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(_title(schedule))}</text>',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">'
        '<path d="M0,0 L7,3 L0,6 z" fill="#444"/></marker></defs>',
    ]
    for rank in range(schedule.ranks):
        x = left + column * rank
        head.append(f'<text x="{x}" y="44" text-anchor="middle">rank {rank}</text>')
        head.append(f'<line x1="{x}" y1="50" x2="{x}" y2="{height - 8}" stroke="#ddd"/>')
    return "\n".join([*head, *parts, "</svg>", ""])


def _round(round_: Round, ranks: int, left: int, y: int, column: int) -> tuple[list[str], int]:
    """The marks of one round, and how high it has to be for its labels to stand clear of one another.

    A label stands beside its arrow's tip, where only the arrows to one rank meet: those are put one under the other.
    """
    marks: list[str] = []
    most = 1
    for rank in range(ranks):
        x = left + column * rank
        row = 0
        for move in moves(round_, rank):
            if move.kind == "recv":
                marks.append(_arrow(move, x, left + column * move.peer, y, y + 24 + _LINE * row))
                row += 1
            elif move.kind == "sync":
                marks.append(
                    f'<line x1="{x - 40}" y1="{y - 6}" x2="{x + 40}" y2="{y - 6}" stroke="#888" stroke-width="3"/>'
                )
            elif move.kind in ("copy", "read"):
                colour = _COLOURS[move.at % len(_COLOURS)]
                words = escape(_words(move, rank))
                marks.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"><title>{words}</title></circle>')
        most = max(most, row)
    return marks, 34 + _LINE * (most - 1)


def _arrow(move: Move, x: int, peer_x: int, y: int, tip: int) -> str:
    colour = _COLOURS[move.at % len(_COLOURS)]
    dash = "" if move.reduce else ' stroke-dasharray="4 3"'
    label = _slots(move, move.at, move.space) + ("+" if move.reduce else "")
    # On the far side of the tip, where no arrow to this rank passes: those from left and right have a side each.
    side, anchor = (6, "start") if peer_x < x else (-6, "end")
    return (
        f'<line x1="{peer_x}" y1="{y}" x2="{x}" y2="{tip}" stroke="{colour}" stroke-width="2"{dash} '
        f'marker-end="url(#tip)"/><text x="{x + side}" y="{tip + 4}" text-anchor="{anchor}">{label}</text>'
    )


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
