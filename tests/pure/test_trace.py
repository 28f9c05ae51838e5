"""Traces: what a rank wrote survives its death, and the merged file is what Perfetto reads."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tilemesh.core.errors import UsageError
from tilemesh.measure import trace as tracing
from tilemesh.measure.trace import Trace, merge


class Clock:
    """Nanoseconds that pass only when told."""

    def __init__(self, start_ns: int = 0) -> None:
        self.now_ns = start_ns

    def __call__(self) -> int:
        return self.now_ns


def events(path: Path) -> list[dict[str, Any]]:
    body = json.loads(path.read_text(encoding="utf-8"))
    assert set(body) == {"displayTimeUnit", "traceEvents"}
    return list(body["traceEvents"])


def test_a_span_becomes_a_complete_event_in_microseconds(tmp_path: Path) -> None:
    clock = Clock(1_000)
    with Trace(tmp_path, rank=3, clock=clock) as trace:
        clock.now_ns += 2_000
        with trace.span("all_reduce", kind="exchange", bytes=64):
            clock.now_ns += 5_500
    (span,) = [e for e in events(merge(tmp_path)) if e["ph"] == "X"]
    assert span == {
        "ph": "X", "name": "all_reduce", "cat": "exchange", "pid": 3, "tid": 0,
        "ts": 2.0, "dur": 5.5, "args": {"bytes": 64},
    }  # fmt: skip


def test_a_span_that_somebody_else_timed(tmp_path: Path) -> None:
    with Trace(tmp_path, rank=3, clock=Clock(1_000)) as trace:
        trace.add("all_reduce", 3e-6, 8.5e-6, kind="exchange", bytes=64)
    trace.add("all_reduce", 9e-6, 9.5e-6)  # closed: nothing is recorded any more
    (span,) = [e for e in events(merge(tmp_path)) if e["ph"] == "X"]
    assert span == {
        "ph": "X", "name": "all_reduce", "cat": "exchange", "pid": 3, "tid": 0,
        "ts": 2.0, "dur": 5.5, "args": {"bytes": 64},
    }  # fmt: skip


def test_each_rank_is_a_named_lane_in_order(tmp_path: Path) -> None:
    for rank in (10, 2):
        with Trace(tmp_path, rank=rank) as trace, trace.span("step"):
            pass
    found = events(merge(tmp_path))
    names = [(e["pid"], e["args"]["name"]) for e in found if e["name"] == "process_name"]
    assert names == [(2, "rank 2"), (10, "rank 10")]
    assert {e["pid"] for e in found if e["ph"] == "X"} == {2, 10}


def test_counters_marks_and_threads(tmp_path: Path) -> None:
    with Trace(tmp_path) as trace:
        trace.counter("loss", 2.5)
        trace.mark("fault", rank=1)

        def helper() -> None:
            with trace.span("copy"):
                pass
            trace.flush()

        thread = threading.Thread(target=helper, name="helper")
        thread.start()
        thread.join()
    found = events(merge(tmp_path))
    assert [e["args"] for e in found if e["ph"] == "C"] == [{"loss": 2.5}]
    assert [e["args"] for e in found if e["ph"] == "i"] == [{"rank": 1}]
    lanes = {e["args"]["name"]: e["tid"] for e in found if e["name"] == "thread_name"}
    assert set(lanes) == {"MainThread", "helper"}
    assert [e["tid"] for e in found if e["ph"] == "X"] == [lanes["helper"]]


def test_an_error_that_passes_through_is_named_and_not_swallowed(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Trace(tmp_path) as trace, trace.span("lookup"):
        raise KeyError("x")
    (span,) = [e for e in events(merge(tmp_path)) if e["ph"] == "X"]
    assert span["args"] == {"error": "KeyError"}


def test_a_trace_that_is_off_writes_nothing(tmp_path: Path) -> None:
    trace = Trace(None)
    with trace.span("anything", kind="k", bytes=1):
        trace.counter("c", 1)
        trace.mark("m")
    trace.close()
    assert list(tmp_path.iterdir()) == []
    assert trace._events == []


def test_what_was_recorded_goes_to_the_file_as_time_passes(tmp_path: Path) -> None:
    """By itself: a rank that goes quiet after its last span must not take that span with it."""
    trace = Trace(tmp_path)
    with trace.span("first"):
        pass
    end = time.monotonic() + 30
    while "first" not in (tmp_path / "trace-rank0.jsonl").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    trace.close()


def test_numbers_that_json_lacks_become_words(tmp_path: Path) -> None:
    with Trace(tmp_path) as trace:
        trace.counter("loss", math.nan)
        trace.counter("loss", 1.5)
        with trace.span("step", scale=math.inf):
            pass
    text = merge(tmp_path).read_text()
    found = json.loads(text, parse_constant=pytest.fail)["traceEvents"]
    assert [event["args"] for event in found if event["ph"] == "C"] == [{"loss": 1.5}]
    assert "loss is nan" in [event["name"] for event in found]
    assert [event["args"] for event in found if event["ph"] == "X"] == [{"scale": "inf"}]


def test_a_killed_rank_leaves_a_trace_that_merges(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from tilemesh.measure.trace import Trace\n"
        "trace = Trace(sys.argv[1], rank=1)\n"
        "with trace.span('before'): pass\n"
        "trace.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=_environment(), timeout=60)
    assert done.returncode == -9
    with (tmp_path / "trace-rank1.jsonl").open("a") as file:
        file.write('[["X","cut off in the mid')  # as a write that was under way leaves it
    assert [e["name"] for e in events(merge(tmp_path)) if e["ph"] == "X"] == ["before"]


def _environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": str(Path(tracing.__file__).parents[2])}


def _rank_file(folder: Path, rank: int, *, boot: str, clock_ns: int, wall_ns: int, ended_ns: int) -> None:
    head = {"rank": rank, "name": f"rank {rank}", "boot": boot, "clock_ns": clock_ns, "wall_ns": wall_ns}
    batch = [["T", 7, "MainThread"], ["X", "step", 7, ended_ns, 1_000, "work", {}]]
    (folder / f"trace-rank{rank}.jsonl").write_text(f"{json.dumps(head)}\n{json.dumps(batch)}\n")


def _starts(path: Path) -> dict[int, float]:
    return {e["pid"]: e["ts"] for e in events(path) if e["ph"] == "X"}


def test_ranks_of_one_host_share_a_clock(tmp_path: Path) -> None:
    _rank_file(tmp_path, 0, boot="a", clock_ns=10_000, wall_ns=50, ended_ns=21_000)
    _rank_file(tmp_path, 1, boot="a", clock_ns=12_000, wall_ns=999_999, ended_ns=22_000)
    assert _starts(merge(tmp_path)) == {0: 10.0, 1: 11.0}


def test_ranks_of_two_hosts_are_aligned_by_wall_clock_or_as_told(tmp_path: Path) -> None:
    _rank_file(tmp_path, 0, boot="a", clock_ns=10_000, wall_ns=1_000_000, ended_ns=21_000)
    _rank_file(tmp_path, 1, boot="b", clock_ns=900_000, wall_ns=1_002_000, ended_ns=911_000)
    assert _starts(merge(tmp_path)) == {0: 10.0, 1: 12.0}
    told = merge(tmp_path, tmp_path / "told.json", offsets_ns={0: 0, 1: -890_000})
    assert _starts(told) == {0: 10.0, 1: 10.0}


def test_nothing_to_merge_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing was traced"):
        merge(tmp_path)


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace-rank0.jsonl").write_text("hello\n")
    with pytest.raises(UsageError, match=r"trace-rank0\.jsonl is not a rank's trace"):
        merge(tmp_path)


@pytest.mark.parametrize(
    ("written", "damaged"),
    [
        ('"clock_ns": 1000', '"clock_ns": [1]'),
        ('"rank": 1', '"rank": [1]'),
        ('"boot": "a"', '"boot": {}'),
        ('["T"', '["t"'),  # a thread that nothing names
        ("9000", '"x"'),
        ("step", "\udcff"),
    ],
)
def test_a_damaged_trace_is_refused_and_nothing_half_written(written: str, damaged: str, tmp_path: Path) -> None:
    _rank_file(tmp_path, 1, boot="a", clock_ns=1_000, wall_ns=50, ended_ns=9_000)
    path = tmp_path / "trace-rank1.jsonl"
    text = path.read_text()
    assert written in text
    path.write_bytes(text.replace(written, damaged).encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=r"is not a rank's trace|is damaged"):
        merge(tmp_path)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_what_goes_on_adds_to_what_is_there(tmp_path: Path) -> None:
    """A process that takes up a rank's trace: earlier spans stay, a cut line goes, threads keep their lanes."""
    _rank_file(tmp_path, 1, boot=tracing._boot_id(), clock_ns=1_000, wall_ns=50, ended_ns=9_000)
    path = tmp_path / "trace-rank1.jsonl"
    with path.open("a") as file:
        file.write('[["X","cut off in the mid')
    clock = Clock(20_000)
    with Trace(tmp_path, rank=1, resume=True, clock=clock) as trace, trace.span("later"):
        clock.now_ns += 1_000
    found = events(merge(tmp_path))
    spans = [(e["name"], e["ts"], e["tid"]) for e in found if e["ph"] == "X"]
    assert spans == [("step", 7.0, 0), ("later", 19.0, 0)]
    assert [e["ts"] for e in found if e["name"] == "resumed"] == [19.0]


def test_what_cannot_be_read_is_put_aside(tmp_path: Path) -> None:
    for number, text in enumerate(("[" * 100_000 + "\n", "\xff\n", "7\n", "")):
        path = tmp_path / f"trace-rank{number}.jsonl"
        path.write_text(text, encoding="latin-1")
        with Trace(tmp_path, rank=number, resume=True) as trace, trace.span("later"):
            pass
        assert path.with_name(f"earlier-{path.name}").read_text(encoding="latin-1") == text
    assert len([e for e in events(merge(tmp_path)) if e["ph"] == "X"]) == 4


def test_another_boots_trace_is_put_aside(tmp_path: Path) -> None:
    _rank_file(tmp_path, 1, boot="another", clock_ns=1_000, wall_ns=50, ended_ns=9_000)
    with Trace(tmp_path, rank=1, resume=True) as trace, trace.span("later"):
        pass
    assert [e["name"] for e in events(merge(tmp_path)) if e["ph"] == "X"] == ["later"]
    assert '"another"' in (tmp_path / "earlier-trace-rank1.jsonl").read_text()
