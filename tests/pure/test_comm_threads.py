"""The communicator on threads: what can be tested without starting a process."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.comm import Communicator, connect, minimal, run_threads
from tilemesh.comm.runtime import watch
from tilemesh.comm.schedules.book import BOOK
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
            names = list(BOOK[collective])
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
    def daydream() -> None:
        time.sleep(3)

    def main(comm: Communicator) -> None:
        comm.all_gather(np.ones(2))
        if comm.rank == 2:
            daydream()
        else:
            comm.all_reduce(np.ones(256), algorithm="ring")

    with pytest.raises(RunError) as caught:
        run_threads(3, main, timeout_s=0.4)
    words = str(caught.value)
    assert words.startswith("rank 0 has waited 0.")
    assert (
        "in all_reduce #2 of world (2 KiB); not arrived: rank 2 is in no collective, at test_comm_threads.py:" in words
    )
    assert "in daydream; arrived: 1; ending the job after 0.4 s" in words


def test_handles_under_way_count_as_arrived() -> None:
    """A rank that has begun a call and waits for another is not said to be missing from the first."""

    def main(comm: Communicator) -> None:
        first = comm.all_reduce(np.ones(300), algorithm="ring", wait=False)
        if comm.rank == 1:
            comm.recv(np.empty(1), source=0)  # never sent
        first.wait()
        comm.barrier()

    with pytest.raises(RunError) as caught:
        run_threads(2, main, timeout_s=0.4)
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
    assert results[0][0].endswith("ranks 0, 1 call scatter(root=0)")
    assert "rank 2 calls split()" in results[0][1]
    assert "rank 2 calls all_reduce(3 elements of float64" in results[0][2]


def test_what_is_wrong_at_the_root_of_a_scatter_is_raised_everywhere() -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="scatter from rank 1: input is a list"):
            comm.scatter([1, 2] if comm.rank == 1 else None, root=1)
        with pytest.raises(UsageError, match="axis 3 of an array of shape"):
            comm.scatter(np.ones(4) if comm.rank == 0 else None, axis=3)
        with pytest.raises(UsageError, match="unknown algorithm for scatter 'trie': did you mean 'tree'"):
            comm.scatter(np.ones(4) if comm.rank == 0 else None, algorithm="trie")
        assert comm.scatter(np.arange(3) if comm.rank == 0 else None)[0] == comm.rank

    run_threads(3, main)


def test_a_call_notes_itself_without_a_system_call_or_a_lock() -> None:
    """What a call pays for being watched: a dictionary entry and a tuple; the rest is the watchdog's business."""
    process = watch.Process(0, None, 60.0, lambda reason: None)
    mine = watch.Watch(process, [0])
    mine.enter("world", 3, "all_reduce", 8)
    assert process.seen == {"world": 3}
    assert process.doing is not None
    assert process.doing[1:5] == ("world", 3, "all_reduce", 8)
    mine.leave()
    assert process.doing is None
    assert process.thread is None


def test_auto_and_explain_say_the_same() -> None:
    def main(comm: Communicator) -> None:
        assert "recursive_doubling (1 KiB, below 16 KiB on)" in comm.explain("all_reduce", 1024).splitlines()[0]
        assert ": ring (1 MiB, from 16 KiB on)" in comm.explain("all_reduce", 1 << 20).splitlines()[0]
        before = comm.sent.messages
        comm.all_reduce(np.ones(128))  # 1 KiB
        assert comm.sent.messages - before == 2  # log2 4: recursive doubling
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


def test_unknown_transports_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown transport 'mp': did you mean 'mpi'"):
        connect("mp")
