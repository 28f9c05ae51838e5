"""Everything a run's folder holds, as plain values: whatever is there, and for whatever is not, why.

The folder may be of a run that has ended, died, is still running or was made by an older version; reading never fails
over its contents. What the values mean is for the report to say.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tilemesh.core.errors import RunError, UsageError
from tilemesh.measure.row import Row
from tilemesh.measure.trace import RANK_FILE, merge
from tilemesh.runs import names
from tilemesh.runs.files import NotThere, Unread, names_in, read_lines, read_object, read_text, read_toml
from tilemesh.runs.folder import kind_of, read_small
from tilemesh.runs.kind import ALIGN
from tilemesh.runs.manifest import step_of
from tilemesh.runs.metrics import CHECKPOINT, STOPPED, WARNING, Event, Told, read_metrics

T = TypeVar("T")

QUIET_S = 60.0
"""A run without a summary that has written nothing for so long, and for ten of its steps, is taken for dead."""
_READ = (
    names.ABOUT,
    names.CONFIG,
    names.METRICS,
    names.SUMMARY,
    names.PREDICTED,
    names.SAMPLE,
    names.SAMPLES,
    names.ENVIRONMENT,
    names.ROWS,
    names.TRACE,
    names.CHECKPOINTS,
    names.TRACE_PARTS,
)


@dataclass(frozen=True)
class Contents:
    """A folder as it is now."""

    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    told: Told = field(default_factory=Told)
    """The metrics, with the events that only the folder itself shows."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    trace: Sequence[Any] | None = None
    """Events of the Trace Event Format."""
    sample: str = ""
    samples: Sequence[Mapping[str, Any]] = ()
    """Answers to held-out prompts, of a run that learns from feedback."""
    rows: Sequence[Row] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    """Files that gave nothing, or not all, and why: not there, damaged, a link."""
    absent: frozenset[str] = frozenset()
    """Those of them that are not there. Which ones there should be depends on the kind of run."""
    written_at: float | None = None
    """When the metrics were last written to."""
    summed_at: float | None = None
    """When the summary was."""
    is_unread: bool = False
    """Whether there are lines of metrics and none of them can be read."""


def read_contents(folder: str | Path) -> Contents:
    """What a folder holds. UsageError when there is no run in it, RunError when run.json does not say of which kind:
    what the other files mean is then unknown."""
    place = Path(folder)
    kind = kind_of(place)
    missing: dict[str, str] = {}
    absent: set[str] = set()

    def take(name: str, reader: Callable[[Path], T], otherwise: T) -> T:
        try:
            return reader(place / name)
        except Unread as why:
            missing[name] = str(why)
            if isinstance(why, NotThere):
                absent.add(name)
            return otherwise

    nothing: dict[str, Any] = {}
    config = take(names.CONFIG, read_toml, nothing)
    no_lines: list[dict[str, Any]] = []
    lines, damaged = take(names.METRICS, read_lines, (no_lines, 0))
    if damaged:
        missing[names.METRICS] = f"{damaged:,} of its lines {'are' if damaged > 1 else 'is'} damaged"
    read = read_metrics(lines)
    read.events += _from_folder(place, names_in(place.resolve()), {(event.step, event.kind) for event in read.events})
    return Contents(
        kind=kind,
        config=config,
        told=read,
        summary=take(names.SUMMARY, _summary, nothing),
        environment=read_small(place, names.ENVIRONMENT),
        predicted=take(names.PREDICTED, read_object, nothing),
        trace=take(names.TRACE, lambda _: read_trace(place), None),
        sample=take(names.SAMPLE, read_text, ""),
        samples=take(names.SAMPLES, read_lines, (no_lines, 0))[0] if kind == ALIGN.name else no_lines,
        rows=_rows(place),
        missing=missing,
        absent=frozenset(absent),
        written_at=_written_at(place / names.METRICS),
        summed_at=_written_at(place / names.SUMMARY),
        is_unread=bool(damaged) and not lines,
    )


def _summary(path: Path) -> dict[str, Any]:
    summary = read_object(path)
    if summary.get("schema", names.SCHEMA) != names.SCHEMA:
        raise Unread(f"schema {summary['schema']!r}, this version of tilemesh reads {names.SCHEMA}")
    return summary


def version(folder: str | Path) -> str:
    """Changes when a file that a page is made of does, and now and then while nothing does: a run that is silent for
    long is dead, and the page has to say so."""
    written = _written_at(Path(folder) / names.METRICS)
    silent = 0.0 if written is None else max(0.0, time.time() - written)
    marks = [f"{math.floor(math.log2(1 + silent / QUIET_S))}"]
    for name in _READ:
        try:
            status = (Path(folder) / name).lstat()
            marks.append(f"{status.st_mtime_ns:x}.{status.st_size:x}")
        except OSError:
            marks.append("-")
    return "_".join(marks)


def read_trace(folder: Path) -> Sequence[Any]:
    """The trace of a run: the merged one, or what its ranks have written so far; `Unread` says why there is none."""
    try:
        body = read_object(folder / names.TRACE)
    except NotThere:
        body = _merged(folder / names.TRACE_PARTS)
    events = body.get("traceEvents")
    if not isinstance(events, list):
        raise Unread("holds no events")
    return events


def _merged(parts: Path) -> dict[str, Any]:
    """Ranks' files joined, written beside nothing of the run's: a page leaves the folder as it was."""
    files = [name for name in names_in(parts) if name.startswith(RANK_FILE.partition("{")[0])]
    if not files:
        raise NotThere("not there: nothing was traced")
    if any((parts / name).is_symlink() or not (parts / name).is_file() for name in files):
        raise Unread("a link, which is not followed")
    with tempfile.TemporaryDirectory(prefix="tilemesh-report-") as place:
        try:
            return read_object(merge(parts, Path(place) / names.TRACE))
        except (RunError, OSError, ValueError) as error:
            raise Unread(f"ranks' files cannot be joined: {error}") from None


def _from_folder(place: Path, files: Sequence[str], known: set[tuple[int, str]]) -> list[Event]:
    """Checkpoints that are on disk, and batches kept because of a loss that was NaN or infinite."""
    events = []
    for name in names_in(place / names.CHECKPOINTS):
        if (step := step_of(name)) is not None and (step, CHECKPOINT) not in known:
            events.append(Event(step, CHECKPOINT, f"checkpoint of step {step}"))
        elif name.startswith(names.DAMAGED) and (step := step_of(name.removeprefix(names.DAMAGED))) is not None:
            events.append(Event(step, WARNING, f"the checkpoint of step {step} was damaged"))
    bad = {int(match[1]) for name in files if (match := names.BAD_BATCH.match(name))}
    words = "stopped at step {}: it came to no number; the batch is kept"
    events += [Event(step, STOPPED, words.format(step)) for step in sorted(bad) if (step, STOPPED) not in known]
    return events


def _rows(place: Path) -> list[Row]:
    """Rows the run wrote of itself; none where there are none, or another version's."""
    try:
        return [Row.from_json(line) for line in read_text(place / names.ROWS).split("\n") if line.strip()]
    except (Unread, UsageError, TypeError):
        return []


def _written_at(path: Path) -> float | None:
    try:
        return path.lstat().st_mtime
    except OSError:
        return None
