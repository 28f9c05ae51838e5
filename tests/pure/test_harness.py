"""The harness of the benchmarks: a case becomes a row, rows are kept as they come, processes take turns."""

from __future__ import annotations

import fcntl
import subprocess
import sys

import pytest

from tilemesh.bench.harness import NO_PEERS, BenchCase, Estimate, KeptRows, TimingTurn, exactly, make_row
from tilemesh.core.errors import RunError
from tilemesh.measure.row import read_rows
from tilemesh.measure.timing import Check

WAITS = """import sys
from tilemesh.bench.harness import TimingTurn
turn = TimingTurn(sys.argv[1])
print("ready", flush=True)
with turn.alone():
    print("timed", flush=True)
"""


def case_of(**values):
    shared = {"name": "thing", "labels": {"shape": "2x2"}, "ours": lambda index: 1, "repeats": 3}
    return BenchCase(**{**shared, "predict": Estimate(1.0), "limit": Estimate(None, "none is known"), **values})


def fails(index):
    raise RunError("this cannot be")


def test_a_case_is_a_row_in_which_whatever_is_not_there_says_why():
    row = case_of(peers={"quick": lambda index: 2, "broken": fails, "absent": "not installed"}).measure()
    assert (row.predicted, row.limit, list(row.peers)) == (1.0, None, ["quick"])
    assert row.missing == {"limit": "none is known", "broken": "this cannot be", "absent": "not installed"}
    assert case_of().measure().missing["peers"] == NO_PEERS
    with pytest.raises(RunError, match="2x2: this cannot be"):
        case_of(ours=fails).measure()


def test_what_was_timed_is_checked_with_its_own_result():
    def verify(name, result, index):
        if result != 1:
            raise RunError(f"{name} is wrong")

    row = case_of(peers={"other": lambda index: 2}, check=Check(lambda name, result: None, verify)).measure()
    assert row.missing["other"] == "other is wrong"
    assert row.measured is not None


def test_rows_are_in_the_file_as_soon_as_they_are_added(tmp_path):
    kept, path = KeptRows(tmp_path / "rows.jsonl"), tmp_path / "rows.jsonl"
    row = make_row("size", {}, exactly(3.0), unit="B", predicted=Estimate(3.0), limit=Estimate(1.0), no_peers="none")
    for count in (1, 2):
        kept.add([row])
        assert read_rows(path) == kept == [row] * count
    KeptRows("-").add([row])
    KeptRows(None).add([row])


def test_a_process_is_timed_when_nobody_else_compiles(tmp_path):
    """The other process is ready beside this one, and is timed only when this one has left its turn."""
    lock = tmp_path / "lock"
    turn = TimingTurn(lock)
    other = subprocess.Popen([sys.executable, "-c", WAITS, str(lock)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "ready\n"
    with turn.alone(), lock.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert other.poll() is None
    fcntl.flock(turn._file, fcntl.LOCK_UN)
    assert other.communicate(timeout=20)[0] == "timed\n"
