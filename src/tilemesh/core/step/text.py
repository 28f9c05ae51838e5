"""Lists of actions as text, in the CSV format of torch's pipelining: a line per rank, `2F0`, `1SEND_F3`, `0UNSHARD`.

What torch has no word for follows the same form: `0UPDATE`, `1RECOMPUTE0`, `1OUT0`; a slice is written `2F0.1` and a
version other than 0 `2F0@1`. What a pass exchanges with experts of other ranks is written `0DISPATCH_F0/3` (of layer 3)
in traces and drawings; lists leave it out.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import EVERY, WITHIN, WORDS, Action, StepProgram, parts
from tilemesh.core.step.placement import ChunkPlacement

_MEANINGS = {word: meaning for meaning, word in WORDS.items()}
_FORM = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{0,9})(?:\.([0-9]{1,9}))?(?:@([0-9]{1,9}))?(?:/([0-9]{1,9}))?")
_PAIR = "OVERLAP_F_B"
_OF_A_MICROBATCH = ("F", "B", "I", "W", "SEND", "RECV", "RECOMPUTE", *WITHIN)


def parse_action(text: str) -> Action:
    """The inverse of `str`."""
    text = text.strip()
    if text.startswith("(") and text.endswith(f"){_PAIR}"):
        halves = [parse_action(half) for half in text[1 : -len(_PAIR) - 1].split(";")]
        if [half.kind for half in halves] != ["F", "B"]:
            raise UsageError(f"action '{text}': expected one F and one B, such as (3F1;2B0){_PAIR}")
        return halves[0]._replace(kind="FB", pair=halves[1])
    match = _FORM.fullmatch(text)
    if match is None or match[2] not in _MEANINGS:
        raise UsageError(f"action '{text}': expected chunk, kind and microbatch, such as 2F0, 1SEND_F3 or 0UNSHARD")
    kind, of = _MEANINGS[match[2]]
    if not match[3] and (kind in _OF_A_MICROBATCH or of == "activation"):
        raise UsageError(f"action '{text}': expected a microbatch after {match[2]}, such as {text}0")
    microbatch = int(match[3]) if match[3] else EVERY
    if (kind in WITHIN) != bool(match[6]):
        raise UsageError(
            f"action '{text}': a layer, such as /3, is said of rows that go to experts, and of nothing else"
        )
    layer = int(match[6]) if match[6] else EVERY
    return Action(kind, int(match[1]), microbatch, int(match[4] or 0), int(match[5] or 0), of, layer=layer)


def to_csv(program: StepProgram) -> str:
    """One line per rank."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    for actions in program.actions:
        writer.writerow([str(action) for action in actions])
    return target.getvalue()


def from_csv(text: str, name: str = "csv") -> StepProgram:
    """Lists as torch or `to_csv` wrote them; empty cells, torch's idle steps, are left out.

    The placement follows from who does what. Two ranks with the same chunk are two directions, of even and odd
    microbatches. How many versions of weights a rank keeps follows from what passes read (`@`) and updates make.
    """
    rows = [[cell for cell in row if cell.strip()] for row in csv.reader(io.StringIO(text))]
    actions = tuple(tuple(parse_action(cell) for cell in row) for row in rows if row)
    if not actions:
        raise UsageError(f"{name}: no actions; expected a line per rank, such as 0F0,0B0")
    inner = next((action for mine in actions for action in mine if action.kind in WITHIN), None)
    if inner is not None:
        raise UsageError(f"{name}: {inner} happens within a pass, which says so itself; leave it out")
    homes: dict[tuple[int, int], int] = {}
    passes = [(rank, part) for rank, mine in enumerate(actions) for action in mine for part in parts(action)]
    if not passes:
        raise UsageError(f"{name}: no forward or backward pass in it")
    for rank, part in passes:
        homes.setdefault((part.chunk, part.microbatch % 2), rank)
    chunks = 1 + max(part.chunk for _, part in passes)
    counts = {"chunks": chunks, "microbatches": 1 + max(part.microbatch for _, part in passes)}
    for what, count in counts.items():
        if count > len(passes):
            raise UsageError(f"{name}: {len(passes)} passes cannot be of {count} {what}")
    missing = next((chunk for chunk in range(chunks) if not {(chunk, 0), (chunk, 1)} & homes.keys()), None)
    if missing is not None:
        raise UsageError(f"{name}: nobody has chunk {missing} of {chunks}")
    tables = [
        tuple(homes.get((chunk, odd), homes.get((chunk, 1 - odd), 0)) for chunk in range(chunks)) for odd in (0, 1)
    ]
    directions = (tables[0],) if tables[0] == tables[1] else (tables[0], tables[1])
    return StepProgram(
        name,
        ChunkPlacement("csv", len(actions), directions),
        counts["microbatches"],
        actions,
        1 + max(part.slice for _, part in passes),
        versions=_held_versions(actions),
        keeps_versions=_goes_back_through_the_same(passes),
    )


def _held_versions(actions: Sequence[Sequence[Action]]) -> int:
    """Versions of its weights that a rank must hold so that every pass finds the one that it reads."""
    most = 1
    for mine in actions:
        newest: dict[int, int] = {}
        for action in mine:
            if action.kind == "UPDATE":
                newest[action.chunk] = action.version
            for part in parts(action):
                most = max(most, 1 + newest.get(part.chunk, 0) - part.version)
    return most


def _goes_back_through_the_same(passes: Sequence[tuple[int, Action]]) -> bool:
    """Whether every backward pass reads the version of its forward pass."""
    read: dict[tuple[int, int, int], set[int]] = {}
    for _, part in passes:
        read.setdefault((part.chunk, part.microbatch, part.slice), set()).add(part.version)
    return all(len(versions) == 1 for versions in read.values())
