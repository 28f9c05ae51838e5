"""The communicator on threads: what can be tested without starting a process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.comm import Communicator, connect, minimal, run_threads
from tilemesh.comm.runtime import watch
from tilemesh.comm.runtime.engine import CallEngine, Running
from tilemesh.comm.runtime.records import private_board
from tilemesh.comm.runtime.texts import compare_calls
from tilemesh.comm.runtime.threads import ThreadTransport, World
from tilemesh.comm.runtime.transport import DONE, Lazy, NativeCall, Token
from tilemesh.comm.schedules.book import BOOK, is_direct
from tilemesh.core.errors import RunError, UsageError


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 7),
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    pick=st.integers(0, 100),
    axis=st.integers(0, 2),
    data=st.integers(0, 2**32 - 1),
)
def test_any_shape_axis_and_algorithm_agree_with_the_naive_way(
    ranks: int, shape: list[int], pick: int, axis: int, data: int
) -> None:
    axis %= len(shape)

    def main(comm: Communicator) -> None:
        x = np.random.default_rng([data, comm.rank]).integers(-50, 50, shape)
        total = minimal.all_reduce(comm, x)
        for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
            names = [name for name in BOOK[collective] if not is_direct(name)]  # those need arrays of `empty`
            options: dict[str, Any] = {"algorithm": names[pick % len(names)]}
            if collective != "all_reduce":
                options["axis"] = axis
            got = getattr(comm, collective)(x, **options)
            if collective == "all_reduce":
                wanted = total
            elif collective == "reduce_scatter":
                wanted = np.array_split(total, comm.size, axis)[comm.rank]
            elif collective == "all_gather":
                ones = [np.random.default_rng([data, rank]).integers(-50, 50, shape) for rank in range(ranks)]
                wanted = np.concatenate(ones, axis)
            else:
                wanted = np.moveaxis(minimal.all_to_all(comm, np.moveaxis(x, axis, 0)), 0, axis)
            assert got.shape == wanted.shape
            assert np.array_equal(got, wanted), (collective, options)

    run_threads(ranks, main)


def test_one_process_is_a_world_of_one() -> None:
    comm = connect("alone")
    assert (comm.rank, comm.size, comm.backend) == (0, 1, "threads")
    assert comm.all_reduce(np.arange(3)).tolist() == [0, 1, 2]
    assert comm.all_to_all(np.arange(3), wait=False).wait().tolist() == [0, 1, 2]
    group = comm.split(5)
    assert group is not None
    assert group.size == 1
    assert comm.sent.messages == 0


def test_a_rank_that_raises_ends_the_others() -> None:
    def main(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ValueError("the widget is bent")
        comm.barrier()

    with pytest.raises(ValueError, match="the widget is bent"):
        run_threads(3, main)


def test_a_rank_that_never_calls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def daydream() -> None:
        over.wait(60)

    def main(comm: Communicator) -> None:
        comm.all_gather(np.ones(2))
        if comm.rank == 2:
            daydream()
        else:
            try:
                comm.all_reduce(np.ones(256), algorithm="ring")
            finally:
                over.set()

    with pytest.raises(RunError) as caught:
        run_threads(3, main, timeout_s=2.0)
    words = str(caught.value)
    assert words.startswith("rank 0 has waited ")
    assert (
        "in all_reduce #2 of world (2 KiB); not arrived: rank 2 is in no collective, at test_comm_threads.py:" in words
    )
    assert "in daydream; arrived: 1; ending the job after 2 s" in words


def test_handles_under_way_count_as_arrived() -> None:
    """A rank that has begun a call and waits for another is not said to be missing from the first."""

    def main(comm: Communicator) -> None:
        first = comm.all_reduce(np.ones(300), algorithm="ring", wait=False)
        if comm.rank == 1:
            comm.recv(np.empty(1), source=0)  # never sent
        first.wait()
        comm.barrier()

    with pytest.raises(RunError) as caught:
        run_threads(2, main, timeout_s=2.0)
    words = str(caught.value)
    assert "rank 0 has waited" in words
    assert "rank 1 is in recv from rank 0 of world" in words


def test_sizes_that_do_not_fit_are_said() -> None:
    def main(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(np.ones(3), to=1)
        else:
            comm.recv(np.ones(4), source=0)

    with pytest.raises(RunError, match="rank 0 sent 24 bytes to rank 1, which expected 32"):
        run_threads(2, main)


def test_calls_that_differ_raise_on_every_rank_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEMESH_DEBUG", "collectives")

    def main(comm: Communicator) -> list[str]:
        odd = comm.rank == 2
        told = []
        for call in (
            lambda: comm.all_gather(np.ones(2)) if odd else comm.scatter(np.ones(3) if comm.rank == 0 else None),
            lambda: comm.split(0) if odd else comm.barrier(),
            lambda: comm.all_reduce(np.ones(2 + odd)),
        ):
            with pytest.raises(UsageError) as caught:
                call()
            told.append(str(caught.value))
        assert comm.all_reduce(np.ones(1))[0] == comm.size
        return told

    results = run_threads(3, main)
    assert results[0] == results[1] == results[2]
    assert results[0][0].startswith("the ranks disagree: rank 2 calls all_gather(")
    assert results[0][0].endswith("ranks 0, 1 call scatter(root=0, algorithm=auto, axis=0)")
    assert "rank 2 calls split()" in results[0][1]
    assert "rank 2 calls all_reduce(float64, op=sum, algorithm=auto, shape=(3), 3 elements)" in results[0][2]


def test_no_difference_hides_behind_the_length_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEMESH_DEBUG", "collectives")
    ranks = 64

    def main(comm: Communicator) -> str:
        counts = [1_000_000 * rank for rank in range(ranks)]
        counts[-1 if comm.rank == 5 else -2] += 1
        with pytest.raises(UsageError) as caught:
            comm.engine.run(
                Running(compare_calls(comm.transport, f"all_gather(float32, {counts})", 2_000_000), lambda: None)
            )
        return str(caught.value)

    told = set(run_threads(ranks, main))
    assert len(told) == 1
    words = told.pop()
    assert words.startswith("the ranks disagree: rank 5 calls all_gather(… ")
    assert "63000001" in words.partition("; ranks 0, 1")[0]
    assert len(words) < 900


def test_what_is_wrong_at_the_root_of_a_scatter_is_raised_everywhere() -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="scatter from rank 1: input is a list"):
            comm.scatter([1, 2] if comm.rank == 1 else None, root=1)
        with pytest.raises(UsageError, match="axis 3 of an array of shape"):
            comm.scatter(np.ones(4) if comm.rank == 0 else None, axis=3)
        with pytest.raises(UsageError, match=r"scatter from rank 0: counts .* add up to 6: the input has 4"):
            comm.scatter(np.ones(4) if comm.rank == 0 else None, counts=[2, 2, 2])
        with pytest.raises(UsageError, match=r"scatter from rank 0: out has shape \(9,\)"):
            comm.scatter(np.ones(3) if comm.rank == 0 else None, out=np.ones(9) if comm.rank == 0 else None)
        assert comm.scatter(np.arange(3) if comm.rank == 0 else None)[0] == comm.rank

    run_threads(3, main)


def test_what_a_rank_of_a_scatter_can_see_alone_is_refused_before_any_message() -> None:
    def main(comm: Communicator) -> None:
        x = np.ones(4) if comm.rank == 0 else None
        for options, message in (
            ({"root": 3}, "root 3 is not a rank"),
            ({"axis": "x"}, "axis is 'x': expected a whole number"),
            ({"counts": [1, 2]}, r"counts \[1, 2\]: expected one length"),
            ({"algorithm": "trie"}, "unknown algorithm for scatter 'trie': did you mean 'tree'"),
            ({"algorithm": "ring"}, "algorithm 'ring' cannot serve scatter"),
            ({"algorithm": "native"}, "algorithm 'native' cannot serve this scatter: threads have no library"),
        ):
            with pytest.raises(UsageError, match=message):
                comm.scatter(x, **options)  # type: ignore[arg-type]
        assert (comm.sent.messages, comm.watch.sequence) == (0, 0)

    run_threads(3, main)


@pytest.mark.parametrize(("dtype", "why"), [("int64", "would not be whole"), ("bool", "combined by logic")])
def test_averages_of_what_cannot_be_averaged_are_refused(dtype: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"avg of {dtype}: .*{why}"):
        connect("alone").all_reduce(np.ones(3, dtype), "avg")


def test_a_call_notes_itself_without_a_system_call_or_a_lock() -> None:
    """What a call pays for being watched: a tuple; the rest is the watchdog's business."""
    process = watch.Watchdog(0, private_board(1), lambda reason: None)
    mine = watch.Watch(process, [0])
    mine.enter(3, "all_reduce", 8)
    assert mine.note is not None
    assert mine.note[:3] == (3, "all_reduce", 8)
    process.look()
    record = process.board.read(0)
    assert record is not None
    assert record.doing is not None
    assert (record.doing.label, record.doing.sequence, record.doing.name) == ("world", 3, "all_reduce")
    mine.leave()
    assert process.look() is None


class Library(ThreadTransport):
    """A transport that has collectives of its own; they do nothing but call back."""

    def __init__(self, during: Callable[[], object]) -> None:
        super().__init__(World(), 0, 1)
        self.during = during

    def lacks(self, collective: str, dtype: str, op: str, uneven: bool) -> str | None:
        return None

    def native(self, call: NativeCall) -> Token:
        return Lazy(self.during, lambda: DONE)


def test_a_native_call_says_what_it_is_and_not_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no matter of what its frames look like: here there are none to look at."""
    monkeypatch.setattr("sys._current_frames", dict)
    looks: list[tuple[watch.Watch, watch.Note] | None] = []

    def look_twice() -> None:
        assert mine.note is None
        looks.extend([process.look(), process.look()])

    process = watch.Watchdog(0, private_board(1), lambda reason: None)
    mine = watch.Watch(process, [0])
    comm = Communicator(Library(look_twice), CallEngine(), mine)
    for _ in range(2):
        comm.all_reduce(np.ones(4, np.float32), algorithm="native")
    assert process.look() is None
    with pytest.raises(ZeroDivisionError):
        Communicator(Library(lambda: 1 // 0), CallEngine(), mine).barrier(algorithm="native")
    assert mine.native is None
    notes = [look[1] for look in looks if look is not None]
    assert [note[:3] for note in notes] == [(1, "all_reduce", 16)] * 2 + [(2, "all_reduce", 16)] * 2
    assert notes[0] is notes[1], "waiting since the first look"
    assert notes[2][3] > notes[1][3]
    record = process.board.read(0)
    assert record is not None
    assert record.seen == {"world": 2}


def test_a_closed_communicator_says_so_and_leaves_the_others_open() -> None:
    def main(comm: Communicator) -> None:
        with comm.split(comm.rank % 2) as group:  # type: ignore[union-attr]
            assert group.all_reduce(np.ones(1))[0] == group.size
            inner = group.split(0)
        assert inner is not None
        for attempt in (group.barrier, lambda: group.all_reduce(np.ones(2)), lambda: group.split(0)):
            with pytest.raises(UsageError, match=r"communicator world/1\.\d is closed"):
                attempt()
        group.close()
        assert group.label not in comm.watch.process.watches
        assert inner.all_reduce(np.ones(1))[0] == inner.size
        handle = comm.all_reduce(np.ones(300), algorithm="ring", wait=False)
        if comm.under_way:
            with pytest.raises(UsageError, match=r"close\(\) of world with 1 calls under way"):
                comm.close()
        assert handle.wait()[0] == comm.size
        comm.close()

    run_threads(4, main)


def test_a_group_left_by_an_exception_does_not_wait_for_the_others() -> None:
    def leave(group: Communicator) -> None:
        with group:
            raise ValueError("the widget is bent")

    def main(comm: Communicator) -> None:
        group = comm.split(0)
        assert group is not None
        if comm.rank == 0:
            with pytest.raises(ValueError, match="bent"):
                leave(group)
        group.barrier()  # rank 0 comes too, because it has not closed

    run_threads(2, main)


def test_finished_messages_leave_no_empty_mailboxes() -> None:
    def main(comm: Communicator) -> int:
        for _ in range(20):
            comm.all_reduce(np.ones(3), algorithm="ring")
        comm.barrier()
        return len(comm.transport.world.posted)  # type: ignore[attr-defined]

    assert max(run_threads(3, main)) < 20


def test_auto_and_explain_say_the_same() -> None:
    def main(comm: Communicator) -> None:
        assert ": flat_one (through shared memory" in comm.explain("all_reduce", 1024).splitlines()[0]
        assert ": flat_slices (through shared memory" in comm.explain("all_reduce", 1 << 20).splitlines()[0]
        assert ": tree (1 KiB, below 16 KiB on)" in comm.explain("reduce", 1024).splitlines()[0]
        before = comm.sent.messages
        comm.all_reduce(np.ones(128))
        assert comm.sent.messages == before  # nothing is sent: the stage is read
        lines = comm.explain("all_reduce", 1 << 20).splitlines()
        (native,) = [line for line in lines if line.startswith("  native")]
        assert "cannot: threads have no library" in native
        (ring,) = [line for line in lines if line.startswith("  ring ")]
        assert "6 messages, 1.5 MiB sent by the busiest rank" in ring

    run_threads(4, main)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_timeout_is_a_time(timeout_s: float) -> None:
    with pytest.raises(UsageError, match="timeout_s"):
        connect("alone", timeout_s=timeout_s)


@pytest.mark.parametrize("node_size", [0, -2])
def test_a_node_has_at_least_one_rank(node_size: int) -> None:
    with pytest.raises(UsageError, match="node_size"):
        connect("alone", node_size=node_size)


def test_unknown_transports_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown transport 'mp': did you mean 'mpi'"):
        connect("mp")


@pytest.mark.filterwarnings("error::DeprecationWarning")
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_rows_are_combined_by_any_operation_and_as_numpy_wants_it(ranks: int) -> None:
    """Half onto half, one by one, or in one reduction, by size and number of rows: each call made again with others."""
    operations = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}

    def main(comm: Communicator) -> None:
        for algorithm in ("flat", "flat_one", "flat_slices"):
            for op, function in operations.items():
                for shape in ((), (1,), (8,), (64,), (3000,)):
                    for turn in range(3):
                        total = comm.all_reduce(np.full(shape, comm.rank + turn), op, algorithm=algorithm)
                        assert (total == function.reduce(np.arange(ranks) + turn)).all(), (algorithm, op, shape)

    run_threads(ranks, main)


def test_an_input_that_is_also_out_is_refused_by_direct_for_what_it_is() -> None:
    def main(comm: Communicator) -> list[str]:
        x = comm.empty(8 * comm.size)
        x[:] = comm.rank
        words = []
        for call in (
            lambda: comm.all_reduce(x, out=x, algorithm="direct"),
            lambda: comm.all_to_all(x, out=x, algorithm="direct"),
            lambda: comm.all_reduce(np.ones(3, np.float32), algorithm="direct"),
            lambda: comm.all_reduce(np.ones(3, np.float16), "avg", algorithm="direct"),
        ):
            with pytest.raises(UsageError) as refused:
                call()
            words.append(str(refused.value))
        assert comm.all_reduce(x, out=x, algorithm="direct_slices") is x
        assert (x == 3).all()
        return words

    for words in run_threads(3, main):
        assert words[0] == (
            "algorithm 'direct' cannot serve this all_reduce: the out of ranks 0, 1, 2 overlaps the input, which the "
            "other ranks read while it would be written; give another out, or use algorithm='direct_slices', 'auto' or "
            "'flat'"
        )
        assert "all_to_all: the out of ranks 0, 1, 2 overlaps the input" in words[1]
        assert "the input of ranks 0, 1, 2 does not lie in memory that comm.empty() made" in words[2]
        assert "an average of float16 is computed in float32" in words[3]


def test_after_memory_that_does_not_fit_the_communicator_goes_on() -> None:
    def main(comm: Communicator) -> list[float]:
        x, ready = np.ones(10), comm.ready_calls
        handle = comm.all_reduce(x, algorithm="flat", wait=False)
        with pytest.raises(RunError, match=r"empty\(\): .* do not fit"):
            comm.empty(1 << 40)
        sums = [handle.wait()[0], *(comm.all_reduce(x, algorithm="flat")[0] for _ in range(3))]
        assert comm.ready_calls != ready
        return [*sums, comm.empty(10).size]

    assert run_threads(2, main) == [[2, 2, 2, 2, 10]] * 2


def test_one_rank_reserves_no_address_space_for_blocks() -> None:
    script = """
import resource
from tilemesh.comm import connect
def reserved():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
connect("alone")  # what is loaded on the way
before = reserved()
comms = [connect("alone") for _ in range(8)]
x = comms[0].empty((4, 5))
x[:] = 2
assert comms[0].all_reduce(x).sum() == 40 and comms[0].all_reduce(x, algorithm="direct").sum() == 40
print((reserved() - before) // 8)
"""
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not tell how much address space a process has")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert int(ended.stdout) < 64 << 20  # a stage of 4 MiB and a thread that watches


def test_threads_without_room_for_their_shared_memory_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(nbytes: int, dtype: object) -> None:
        raise MemoryError(f"Unable to allocate {nbytes}")

    monkeypatch.setattr("tilemesh.comm.runtime.threads.np.zeros", no_room)
    with pytest.raises(RunError, match=r"2 ranks cannot share 1\.01 GiB of address space: raise the limit"):
        run_threads(2, lambda comm: comm.rank)
