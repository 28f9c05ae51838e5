"""Rows: a column says why it is not there, JSON is as documented and survives a round trip."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from tilemesh.core.errors import RunError, UsageError
from tilemesh.measure.row import Row, higher_is_better, read_rows, write_rows
from tilemesh.measure.sample import Sample


def row(**changes: Any) -> Row:
    fields: dict[str, Any] = {
        "name": "matmul kernel",
        "case": {"shape": "512x512x512", "dtype": "fp16", "ranks": 1, "oversubscribed": False},
        "unit": "s",
        "predicted": 4e-6,
        "measured": Sample(5e-6, 4.5e-6, 5.5e-6, 30),
        "limit": 2.5e-6,
        "peers": {"eager": Sample(10e-6, 9e-6, 11e-6, 30)},
        "missing": {},
        "machine": "box-1",
        "versions": {"python": "3.12.1"},
        "commit": None,
        "command": "tilemesh bench kernel",
    }
    return Row(**(fields | changes))


def test_json_has_the_documented_keys_and_nothing_else() -> None:
    body = json.loads(row().to_json())
    assert list(body) == [
        "name", "case", "unit", "predicted", "measured", "limit", "peers", "speedup", "missing",
        "machine", "versions", "commit", "command",
    ]  # fmt: skip
    assert body["measured"] == {"median": 5e-6, "p20": 4.5e-6, "p80": 5.5e-6, "n": 30}
    assert body["peers"] == {"eager": {"median": 10e-6, "p20": 9e-6, "p80": 11e-6, "n": 30}}
    assert body["speedup"] == {"eager": 2.0}
    assert "\n" not in row().to_json()


@pytest.mark.parametrize("column", ["predicted", "measured", "limit"])
def test_a_column_that_is_not_there_says_why(column: str) -> None:
    with pytest.raises(UsageError, match=column):
        row(**{column: None})
    with pytest.raises(UsageError, match=column):
        row(**{column: None}, missing={column: ""})
    assert getattr(row(**{column: None}, missing={column: "no datasheet"}), column) is None


def test_a_reason_for_a_column_that_is_there_is_refused() -> None:
    with pytest.raises(UsageError, match="limit"):
        row(missing={"limit": "unknown"})
    with pytest.raises(UsageError, match="eager"):
        row(missing={"eager": "failed"})


def test_no_peer_says_why() -> None:
    with pytest.raises(UsageError, match="peer"):
        row(peers={})
    assert row(peers={}, missing={"peers": "nothing else does this"}).speedup == {}
    assert row(peers={}, missing={"compile": "cannot be captured"}).missing["compile"] == "cannot be captured"


def test_a_peer_may_not_take_a_columns_name() -> None:
    with pytest.raises(UsageError, match="limit"):
        row(peers={"limit": Sample.of([1.0])})


@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_divides_so_it_is_positive(limit: float) -> None:
    with pytest.raises(UsageError, match="limit"):
        row(limit=limit)


@pytest.mark.parametrize(
    ("unit", "more"), [("s", False), ("B", False), ("B/s", True), ("FLOP/s", True), ("tokens/s", True)]
)
def test_the_unit_decides_what_is_better(unit: str, more: bool) -> None:
    assert higher_is_better(unit) is more


def test_an_unknown_unit_names_the_known() -> None:
    with pytest.raises(UsageError, match=r"furlongs.*FLOP/s"):
        row(unit="furlongs")


def test_speedup_and_share_of_the_limit_for_times_and_rates() -> None:
    time = row(measured=Sample.of([4.0]), limit=1.0, predicted=6.0, peers={"peer": Sample.of([8.0])})
    assert (time.speedup, time.of_limit, time.prediction_error) == ({"peer": 2.0}, 0.25, 0.5)
    rate = row(unit="B/s", measured=Sample.of([4.0]), limit=16.0, predicted=3.0, peers={"peer": Sample.of([8.0])})
    assert (rate.speedup, rate.of_limit, rate.prediction_error) == ({"peer": 0.5}, 0.25, -0.25)


def test_nothing_is_derived_from_what_was_not_measured() -> None:
    unmeasured = row(measured=None, missing={"measured": "needs a GPU"})
    assert (unmeasured.speedup, unmeasured.of_limit, unmeasured.prediction_error) == ({}, None, None)


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    rows = [row(), row(limit=None, missing={"limit": "line\u2028separator µ"}, commit="abc-dirty")]
    path = tmp_path / "results" / "rows.jsonl"
    write_rows(rows, path)
    assert read_rows(path) == rows
    assert len(path.read_text(encoding="utf-8").strip().split("\n")) == 2


@pytest.mark.parametrize(
    "key", ["name", "case", "unit", "peers", "missing", "limit", "predicted", "versions", "commit"]
)
@pytest.mark.parametrize("value", [True, [1], "x", {"a": {}}])
def test_a_line_that_is_no_row_is_named_whatever_it_holds(tmp_path: Path, key: str, value: object) -> None:
    good = row().to_json()
    (tmp_path / "rows").write_text(f"{good}\n{json.dumps({**json.loads(good), key: value})}\n")
    with contextlib.suppress(UsageError):  # some of these are rows: the point is that nothing else is raised
        read_rows(tmp_path / "rows")
    (tmp_path / "rows").write_text(good + '\n\n{"name": 3}\n')
    with pytest.raises(UsageError, match=r"rows', line 3: not a row"):
        read_rows(tmp_path / "rows")
    (tmp_path / "rows").write_bytes(b"\xd9\xff\n")
    with pytest.raises(UsageError, match="it is no text"):
        read_rows(tmp_path / "rows")


def test_a_path_that_does_not_work_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="absent"):
        read_rows(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file/rows"):
        write_rows([row()], tmp_path / "file" / "rows")


def test_dash_is_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows([row()], "-")
    assert Row.from_json(capsys.readouterr().out) == row()


def test_speedup_in_a_file_is_derived_again() -> None:
    body = json.loads(row().to_json()) | {"speedup": {"eager": 99.0}}
    assert Row.from_json(json.dumps(body)).speedup == {"eager": 2.0}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not a row"),
        ("[]", "not a row"),
        ('{"name": "x"}', "case"),
        (row().to_json().replace('"limit"', '"limits"'), "did you mean 'limit'"),
        (row().to_json().replace('"p20"', '"p21"', 1), "not a sample"),
    ],
)
def test_a_line_that_is_no_row_says_what_is_wrong(line: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Row.from_json(line)


def test_the_callers_mappings_are_copied() -> None:
    case = {"n": 1}
    made = row(case=case)
    case["n"] = 2
    assert made.case == {"n": 1}
