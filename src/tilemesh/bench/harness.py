"""The harness of every benchmark. A benchmark is values, given for one `BenchCase`:

    labels    what is measured: a problem, a size, a model (a benchmark's *cases* are a list of these)
    predict   what ours should take, computed before anything is timed
    ours      a call
    peers     what a user would call instead, by name: a call, or why there is none here
    limit     the least that this machine allows
    check     trust in what was timed

The rest belongs to the harness and is the same for all: candidates take turns (`measure.timing.compare`, on ranks with
a timer that agrees over them), a column without a value says why, rows are in a file as soon as there are any
(`KeptRows`), and processes that compile side by side are timed one after the other (`TimingTurn`).
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from tilemesh.core.errors import RunError
from tilemesh.measure.machine import Stamp, stamp
from tilemesh.measure.row import COLUMNS, CaseValue, Row, write_rows
from tilemesh.measure.sample import Sample
from tilemesh.measure.timing import Call, Check, Timer, compare

OURS = "ours"
NO_PEERS = "none was asked for"


class Estimate(NamedTuple):
    """A prediction or a limit in the row's unit; None, and why there is none."""

    value: float | None
    why: str = ""


def exactly(value: float) -> Sample:
    """A figure that was counted, or measured once."""
    return Sample(value, value, value, 1)


def calling(function: Callable[..., object], *arguments: object) -> Call:
    """The same call in every turn."""
    return lambda index: function(*arguments)


def make_row(
    name: str,
    case: Mapping[str, CaseValue],
    measured: Sample | None,
    *,
    unit: str = "s",
    predicted: Estimate,
    limit: Estimate,
    peers: Mapping[str, Sample] | None = None,
    missing: Mapping[str, str] | None = None,
    no_peers: str = "",
    marks: Stamp | None = None,
) -> Row:
    """A row in which whatever is not there says why. `no_peers`: why a row has none. `marks`: whose stamp it bears."""
    reasons = dict(missing or {})
    for column, estimate in (("predicted", predicted), ("limit", limit)):
        if estimate.value is None:
            reasons[column] = estimate.why
    if no_peers and not peers and reasons.keys() <= set(COLUMNS):
        reasons["peers"] = no_peers
    return Row(
        name=name, case=case, unit=unit, predicted=predicted.value, measured=measured, limit=limit.value,
        peers=peers or {}, missing=reasons, **(marks or stamp()),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    """One row to be: built whole before anything is timed, so its prediction cannot have seen the measurement."""

    name: str
    labels: Mapping[str, CaseValue]
    ours: Call
    peers: Mapping[str, Call | str] = field(default_factory=dict)
    """A call, or why there is none."""
    predict: Estimate
    limit: Estimate
    check: Check | None = None
    timer: Timer | None = None
    """A host loop unless given."""
    sets: int = 1
    warmup: int = 3
    repeats: int = 30
    seconds: float = 10.0
    on_error: Literal["missing", "raise"] = "missing"
    """`raise` on ranks: one that went on without the others would wait for ever."""

    @property
    def calls(self) -> dict[str, Call]:
        return {OURS: self.ours, **{name: call for name, call in self.peers.items() if not isinstance(call, str)}}

    def warm(self) -> None:
        """Call every candidate once, which compiles what is to be compiled; one that fails is named by the row."""
        for call in self.calls.values():
            with suppress(Exception):
                call(0)

    def measure(self) -> Row:
        """Candidates in turns. A peer that fails is missing with its reason; without ours there is no row."""
        timed = compare(
            self.calls, timer=self.timer, repeats=self.repeats, warmup=self.warmup, seconds=self.seconds,
            sets=self.sets, check=self.check, on_error=self.on_error,
        )  # fmt: skip
        if OURS in timed.missing:
            raise RunError(f"{self.labels.get('shape', self.name)}: {timed.missing[OURS]}")
        absent = {name: why for name, why in self.peers.items() if isinstance(why, str)}
        return make_row(
            self.name, self.labels, timed[OURS], predicted=self.predict, limit=self.limit,
            peers={name: sample for name, sample in timed.items() if name != OURS}, missing=absent | timed.missing,
            no_peers=NO_PEERS,
        )  # fmt: skip


class KeptRows(list[Row]):
    """Rows that are in a file as soon as they are added. None or `-`: whoever prints them writes them in the end."""

    def __init__(self, path: str | Path | None) -> None:
        super().__init__()
        self.path = None if path in (None, "-") else path

    def add(self, rows: Iterable[Row]) -> None:
        self += rows
        if self.path is not None:
            write_rows(self, self.path)


class TimingTurn:
    """Processes that get ready side by side and are timed one after the other, by a file that all of them lock.

    A process shares the lock while it compiles and has it alone while it times: so it times when nobody compiles and
    nobody else is timed.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("a")  # noqa: SIM115 - the lock is held until the process ends
        fcntl.flock(self._file, fcntl.LOCK_SH)

    @contextmanager
    def alone(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_SH)
