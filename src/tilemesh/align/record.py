"""What engines that draw batch after batch did, in a run's folder: a line when they begin, and one for each batch (or
held-out prompts) with the events since the last, of every engine. Who repeats a run reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tilemesh.core.errors import RunError
from tilemesh.core.files import replacing
from tilemesh.runs.names import DRAWING

WEIGHTS, BATCH, HELD_OUT = "weights", "batch", "held out"


class EngineEvent(NamedTuple):
    """What came before a step of the engine, counted from the first batch that it began."""

    step: int
    kind: str
    number: int
    """Of a batch; or the version of weights, or by which held-out prompts are answered."""
    turn: int = 0
    """Of the batch's conversations."""


Events = list[list[EngineEvent]]
"""Of each engine."""


def note_begin(folder: Path, first: int, version: int) -> None:
    """Engines begin with a batch and these weights: what they did of later ones never counted."""
    lines, kept = _lines(folder), 0
    for place, line in enumerate(lines, 1):
        if "first" not in line and line["number"] < (first if line["kind"] == BATCH else version + 1):
            kept = place
    with replacing(folder / DRAWING) as part:
        part.write_text("".join(json.dumps(line) + "\n" for line in [*lines[:kept], {"first": first}]))


def note_drawn(folder: Path, kind: str, number: int, events: Events) -> None:
    with (folder / DRAWING).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, "number": number, "events": events}) + "\n")


def read_events(folder: Path, engines: int) -> dict[int, Events]:
    """All events, by the batch that engines began with."""
    begun: dict[int, Events] = {}
    events: Events = []
    for line in _lines(folder):
        if "first" in line:
            events = begun[line["first"]] = [[] for _ in range(engines)]
            continue
        if len(line["events"]) != engines:
            raise RunError(f"{folder}: {len(line['events'])} ranks drew answers there, and {engines} engines are here")
        for own, more in zip(events, line["events"], strict=True):
            own += [EngineEvent(*each) for each in more]
    if not begun:
        raise RunError(f"{folder} has no {DRAWING}: expected a run whose placement is asynchronous")
    return begun


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Up to one that was cut off with the run that wrote it."""
    path, lines = folder / DRAWING, list[dict[str, Any]]()
    for text in path.read_text("utf-8", "replace").splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not isinstance(line, dict) or not {"first", "events"} & line.keys():
            break
        lines.append(line)
    return lines
