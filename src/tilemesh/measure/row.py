"""A measurement and its neighbours: predicted | measured | limit | peers, one value a row.

A row is what every command that measures or predicts prints (`table.py`) and writes (one JSON
object per line). A column that is not there says why: a row that leaves one out without a reason
cannot be built. Two figures for one thing, such as kernel time and call time, are two rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.files import write_output
from tilemesh.measure.sample import Sample, speedup

CaseValue = str | int | float | bool | None

# The columns every row has, besides one for each peer.
COLUMNS = ("predicted", "measured", "limit")

COMPUTES_LESS = ("a @ b alone",)
"""Columns beside the peers' that do less than ours: shown, never counted as a peer."""

# True: more is better. Any other unit that ends in "/s" is a rate, so more is better there too.
DIRECTIONS = {"s": False, "B": False, "nats": False, "fraction": True, "count": False, "messages": False, "J": False}

_KEYS = (
    "name", "case", "unit", "predicted", "measured", "limit", "peers", "speedup", "missing",
    "machine", "versions", "commit", "command", "guess", "predicted_range",
)  # fmt: skip
_OPTIONAL = ("speedup", "guess", "predicted_range")
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "unit", "machine", "command"), (str,)),
    **dict.fromkeys(("case", "versions", "missing", "peers"), (dict,)),
    **dict.fromkeys(("predicted", "limit"), (int, float, type(None))),
    "commit": (str, type(None)),
    "guess": (int, float, type(None)),
    "predicted_range": (list, type(None)),
}


def higher_is_better(unit: str) -> bool:
    """Whether more of this unit is better: yes for rates, no for times and bytes."""
    if unit in DIRECTIONS:
        return DIRECTIONS[unit]
    if unit.endswith("/s"):
        return True
    raise unknown("unit", unit, [*DIRECTIONS, "B/s", "FLOP/s", "tokens/s"])


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a result. `missing` maps a column (or a peer's name, or `peers`) to why it is not there."""

    name: str
    case: Mapping[str, CaseValue]
    unit: str
    predicted: float | None
    measured: Sample | None
    limit: float | None
    peers: Mapping[str, Sample] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    machine: str
    versions: Mapping[str, str]
    commit: str | None
    command: str
    guess: float | None = None
    """What a reader of the guide predicted; no other row has one."""
    predicted_range: tuple[float, float] | None = None
    """Where eight of ten measurements are expected (`plan/ranges.py`)."""

    def __post_init__(self) -> None:
        for mapping in ("case", "peers", "missing", "versions"):  # the caller may go on changing its own
            object.__setattr__(self, mapping, dict(getattr(self, mapping)))
        higher_is_better(self.unit)
        _check_columns(self)
        _check_peers(self)

    @property
    def speedup(self) -> dict[str, float]:
        """How many times faster ours is than each peer; empty when ours was not measured."""
        if self.measured is None:
            return {}
        more = higher_is_better(self.unit)
        return {name: speedup(self.measured, peer, higher_is_better=more) for name, peer in self.peers.items()}

    @property
    def of_limit(self) -> float | None:
        """The fraction of the limit that was reached: 1 is the limit, for times and for rates."""
        if self.measured is None or self.limit is None:
            return None
        if higher_is_better(self.unit):
            return self.measured.median / self.limit
        return self.limit / self.measured.median if self.measured.median else None

    @property
    def prediction_error(self) -> float | None:
        """(predicted - measured) / measured: +0.5 predicted half as much again as was measured; None of nothing."""
        if self.measured is None or self.predicted is None or not self.measured.median:
            return None
        return self.predicted / self.measured.median - 1

    @property
    def guess_error(self) -> float | None:
        """The same of a reader's guess."""
        if self.measured is None or self.guess is None or not self.measured.median:
            return None
        return self.guess / self.measured.median - 1

    def to_json(self) -> str:
        """One line of JSON; `from_json` gives the same row back."""
        body: dict[str, Any] = {
            "name": self.name,
            "case": self.case,
            "unit": self.unit,
            "predicted": self.predicted,
            "measured": None if self.measured is None else _sample_object(self.measured),
            "limit": self.limit,
            "peers": {name: _sample_object(peer) for name, peer in self.peers.items()},
            "speedup": self.speedup,
            "missing": self.missing,
            "machine": self.machine,
            "versions": self.versions,
            "commit": self.commit,
            "command": self.command,
        }
        if self.guess is not None:
            body["guess"] = self.guess
        if self.predicted_range is not None:
            body["predicted_range"] = list(self.predicted_range)
        return json.dumps(body, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Row:
        """The row a line of JSON describes; `speedup` is derived again, never believed."""
        try:
            body = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"not a row: {error.msg} at column {error.colno} of {line[:80]!r}") from None
        except ValueError:  # Python reads no integer of more than 4,300 digits
            raise UsageError(f"not a row: a number of too many digits in {line[:80]!r}") from None
        except RecursionError:
            raise UsageError(f"not a row: nested beyond all use: {line[:80]!r}") from None
        if not isinstance(body, dict):
            raise UsageError(f"not a row: expected a JSON object, got {line[:80]!r}")
        for key in body:
            if key not in _KEYS:
                raise unknown("key of a row", key, _KEYS)
        absent = [key for key in _KEYS if key not in body and key not in _OPTIONAL]
        if absent:
            raise UsageError(f"not a row: {', '.join(absent)} not in {line[:80]!r}")
        body.pop("speedup", None)
        body |= {"guess": body.get("guess"), "predicted_range": body.get("predicted_range")}
        for key, kinds in _TYPES.items():
            if not isinstance(body[key], kinds) or isinstance(body[key], bool):
                raise UsageError(f"not a row: {key} is {str(body[key])[:80]!r}, expected {_kinds(kinds)}")
        body["measured"] = None if body["measured"] is None else _sample(body["measured"])
        body["peers"] = {name: _sample(peer) for name, peer in body["peers"].items()}
        if body["predicted_range"] is not None:
            body["predicted_range"] = _range(body["predicted_range"])
        return cls(**body)


def write_rows(rows: Iterable[Row], path: str | Path) -> None:
    """Write rows to a file, one object per line, or to standard output when the path is `-`."""
    write_output("".join(row.to_json() + "\n" for row in rows), path)


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a file that `write_rows` wrote; empty lines are passed over."""
    try:
        text = sys.stdin.read() if str(path) == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"no rows can be read from '{path}': {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"no rows can be read from '{path}': it is no text") from None
    rows = []
    # Not splitlines(): that also splits at characters a JSON string may hold as they are.
    for index, line in enumerate(text.split("\n"), start=1):
        try:
            rows += [Row.from_json(line)] if line.strip() else []
        except UsageError as error:
            raise UsageError(f"'{path}', line {index}: {error}") from None
    return rows


def _check_columns(row: Row) -> None:
    for column in COLUMNS:
        value, reason = getattr(row, column), row.missing.get(column)
        if value is None and not reason:
            raise UsageError(f"row '{row.name}': {column} is None and missing[{column!r}] does not say why")
        if value is not None and column in row.missing:
            raise UsageError(f"row '{row.name}': {column} is there, yet missing[{column!r}] says {reason!r}")
    for column in ("predicted", "limit", "guess"):
        value = getattr(row, column)
        # A prediction of nothing is allowed (no bytes to move); a limit divides.
        if value is not None and not (0 <= value < float("inf") and (value > 0 or column != "limit")):
            raise UsageError(f"row '{row.name}': {column} is {value}, expected a positive number of {row.unit}")

    if row.predicted_range is not None:
        low, high = row.predicted_range
        if row.predicted is None or not 0 <= low <= row.predicted <= high < float("inf"):
            raise UsageError(
                f"row '{row.name}': predicted_range is {low} to {high}, around a prediction of {row.predicted}"
            )


def _check_peers(row: Row) -> None:
    for name in row.peers:
        if name in (*COLUMNS, "peers"):
            raise UsageError(f"row '{row.name}': a peer cannot be named '{name}', which is a column")
        if name in row.missing:
            raise UsageError(f"row '{row.name}': peer '{name}' is there, yet missing says {row.missing[name]!r}")
    unnamed = not row.peers and not any(name not in COLUMNS for name in row.missing)
    if unnamed:
        raise UsageError(f"row '{row.name}': no peer, and missing['peers'] does not say why")
    silent = [name for name, reason in row.missing.items() if not reason]
    if silent:
        raise UsageError(f"row '{row.name}': missing[{silent[0]!r}] gives no reason")


def _kinds(kinds: tuple[type, ...]) -> str:
    words = {str: "text", dict: "an object", float: "a number", list: "a list", type(None): "null"}
    return " or ".join(words[kind] for kind in kinds if kind in words)


def _range(body: list[Any]) -> tuple[float, float]:
    try:
        low, high = map(float, body)
    except (TypeError, ValueError):
        raise UsageError(f"not a row: predicted_range is {body!r}, expected two numbers") from None
    return low, high


def _sample_object(sample: Sample) -> dict[str, float | int]:
    return {"median": sample.median, "p20": sample.p20, "p80": sample.p80, "n": sample.n}


def _sample(body: Any) -> Sample:
    try:
        return Sample(float(body["median"]), float(body["p20"]), float(body["p80"]), int(body["n"]))
    except (KeyError, TypeError, ValueError):
        raise UsageError(f'not a sample: expected {{"median", "p20", "p80", "n"}}, got {body!r}') from None
