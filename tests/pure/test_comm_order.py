"""Calls under way while others begin: whatever a rank waits in, everything that is pending moves."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from tilemesh.comm import Communicator, run_threads
from tilemesh.comm.runtime.engine import Turns
from tilemesh.core.errors import RunError, UsageError

TIMEOUT_S = 30.0


def ring(comm: Communicator) -> Callable[[], None]:
    """A call under way, and what waits for it."""
    handle = comm.all_reduce(np.ones(3000), algorithm="ring", wait=False)

    def finish() -> None:
        assert handle.wait()[0] == comm.size

    return finish


CALLS: dict[str, Callable[[Communicator], object]] = {
    "split": lambda comm: comm.split(comm.rank % 2),
    "duplicate": lambda comm: comm.duplicate(),
    "scatter": lambda comm: comm.scatter(np.arange(6) if comm.rank == 0 else None),
    "gather": lambda comm: comm.gather(np.arange(6)),
    "barrier": lambda comm: comm.barrier(),
    "flat": lambda comm: comm.all_reduce(np.ones(3), algorithm="flat"),
}


@pytest.mark.parametrize("debug", ["", "collectives"])
@pytest.mark.parametrize("name", list(CALLS))
def test_ranks_may_wait_before_or_after_another_call(name: str, debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits first and comes late to the call, in which the others must move what rank 0 waits for."""
    monkeypatch.setenv("TILEMESH_DEBUG", debug)

    def main(comm: Communicator) -> None:
        finish = ring(comm)
        if comm.rank == 0:
            finish()
        CALLS[name](comm)
        if comm.rank:
            finish()

    run_threads(3, main, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("debug", ["", "collectives"])
def test_a_scatter_in_the_background_does_not_wait_for_its_root(debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEMESH_DEBUG", debug)
    begun = threading.Barrier(3)

    def main(comm: Communicator) -> None:
        if comm.rank == 1:
            begun.wait(TIMEOUT_S)  # the root comes only when the others have come back from theirs
        handle = comm.scatter(np.arange(6) if comm.rank == 1 else None, root=1, wait=False)
        if comm.rank != 1:
            assert not handle.test()
            begun.wait(TIMEOUT_S)
        assert handle.wait().tolist() == [2 * comm.rank, 2 * comm.rank + 1]

    run_threads(3, main, timeout_s=TIMEOUT_S)


def test_what_is_wrong_with_a_scatter_in_the_background_is_raised_by_its_wait_alone() -> None:
    def main(comm: Communicator) -> None:
        handle = comm.scatter(np.ones(4) if comm.rank == 0 else None, axis=3, wait=False)
        comm.barrier()  # moves the scatter, which fails: not the barrier's business
        while not handle.test():
            pass
        with pytest.raises(UsageError, match="scatter from rank 0: axis 3 of an array of shape"):
            handle.wait()

    run_threads(3, main, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("algorithm", ["auto", "flat", "tree"])
def test_an_out_that_does_not_fit_is_refused_where_it_is_and_the_ranks_stay_in_step(algorithm: str) -> None:
    def scattered(comm: Communicator, out: np.ndarray, wait: bool) -> np.ndarray:
        x = np.arange(6.0) if comm.rank == 0 else None
        answer = comm.scatter(x, out=out, algorithm=algorithm, wait=wait)
        return answer if wait else answer.wait()

    def main(comm: Communicator) -> None:
        for wait in (True, False):
            if comm.rank == 1:
                with pytest.raises(UsageError, match="out"):
                    scattered(comm, np.empty(5), wait)
            else:
                assert list(scattered(comm, np.empty(2), wait)) == [2 * comm.rank, 2 * comm.rank + 1]
            assert comm.all_reduce(np.ones(1))[0] == 3
            assert comm.is_idle

    run_threads(3, main, timeout_s=TIMEOUT_S)


def test_calls_behind_a_scatter_begin_in_order() -> None:
    """Shared memory is taken in the order of the calls: those made while a scatter waits for its root, after it."""

    def main(comm: Communicator) -> None:
        x = np.arange(30.0)
        for root in range(comm.size):
            if comm.rank == root:
                time.sleep(0.02)
            first = comm.scatter(x if comm.rank == root else None, root, algorithm="flat", wait=False)
            second = comm.all_reduce(x, algorithm="flat", wait=False)
            third = comm.scatter(x + 1 if comm.rank == 0 else None, algorithm="flat", wait=False)
            assert third.wait()[0] == 10 * comm.rank + 1
            assert np.array_equal(second.wait(), 3 * x)
            assert first.wait()[0] == 10 * comm.rank
            assert comm.is_idle

    run_threads(3, main, timeout_s=TIMEOUT_S)


def test_a_turn_given_up_early_does_not_let_later_ones_pass() -> None:
    turns = Turns()
    first, second, third = (turns.take() for _ in range(3))
    second.release()  # failed while waiting
    assert first.test()
    assert not third.test()
    with pytest.raises(RunError, match="call 2 of a communicator waits for its turn"):
        third.wait()
    first.release()
    assert third.test()
    third.release()
    assert turns.is_free


def test_a_mismatch_in_the_background_is_raised_by_wait_and_leaves_the_rest_in_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TILEMESH_DEBUG", "collectives")

    def main(comm: Communicator) -> None:
        wrong = comm.all_reduce(np.ones(2 + (comm.rank == 1)), algorithm="flat", wait=False)
        right = comm.all_reduce(np.ones(4), algorithm="flat", wait=False)
        assert right.wait()[0] == comm.size
        with pytest.raises(UsageError, match="rank 1 calls all_reduce"):
            wrong.wait()

    run_threads(3, main, timeout_s=TIMEOUT_S)


def test_what_nobody_waited_for_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    def main(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.irecv(np.empty(3), source=1)

    run_threads(2, main)
    assert capfd.readouterr().err == "tilemesh: rank 0 ended without wait() for recv from rank 1\n"


def test_after_a_mismatch_that_was_caught_groups_are_the_same_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEMESH_DEBUG", "collectives")

    def main(comm: Communicator) -> tuple[str, float]:
        with pytest.raises(UsageError, match=r"rank 0 calls split\(\); ranks 1, 2 call barrier"):
            comm.split(0) if comm.rank == 0 else comm.barrier()
        group = comm.split(0)
        assert group is not None
        return group.label, float(group.all_reduce(np.ones(1))[0])

    assert run_threads(3, main, timeout_s=TIMEOUT_S) == [("world/1.0", 3.0)] * 3


def test_a_rank_without_memory_for_a_call_stays_in_step() -> None:
    def main(comm: Communicator) -> list[float]:
        if comm.rank == 1:
            with pytest.raises(UsageError, match="no memory for it here"):
                comm.all_gather(np.ones(1), counts=[10**15, 1, 1])
        total: list[float] = comm.all_reduce(np.ones(2)).tolist()
        return total

    assert run_threads(3, main, timeout_s=TIMEOUT_S) == [[3.0, 3.0]] * 3


def test_a_groups_ranks_are_called_by_their_numbers_in_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEMESH_DEBUG", "collectives")

    def main(comm: Communicator) -> None:
        group = comm.split(comm.rank // 2)
        assert group is not None
        first = 2 * (comm.rank // 2)
        with pytest.raises(UsageError, match=rf"rank {first + 1} calls .*; rank {first} calls"):
            group.all_reduce(np.ones(1 + group.rank))

    run_threads(4, main, timeout_s=TIMEOUT_S)


def test_ctrl_c_ends_the_ranks_too() -> None:
    ended = []

    def main(comm: Communicator) -> None:
        try:
            if comm.rank == 0:
                comm.barrier()
            comm.recv(np.empty(1), source=0)
        finally:
            ended.append(comm.rank)

    import _thread

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins without one
    try:
        threading.Timer(0.3, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            run_threads(2, main)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(ended) == [0, 1]
