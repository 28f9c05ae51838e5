"""Bad arguments are one clear `UsageError`, whatever kind of thing was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tilemesh.comm import Communicator, connect, run_threads
from tilemesh.comm.runtime import watch
from tilemesh.comm.runtime.engine import CallEngine
from tilemesh.comm.runtime.records import private_board
from tilemesh.comm.runtime.threads import ThreadTransport, run_ranks
from tilemesh.comm.runtime.transport import TAG_KINDS, tags_below
from tilemesh.comm.schedules.book import build
from tilemesh.comm.schedules.check import BrokenScheduleError, check
from tilemesh.comm.schedules.schedule import Schedule
from tilemesh.core.errors import RunError, UsageError

X = np.ones(4, np.float32)
WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (lambda c: c.all_reduce(X, op=None), "operation is None: expected one of sum, prod"),
    (lambda c: c.all_reduce(X, op=3), "operation is 3: expected one of sum"),
    (lambda c: c.all_reduce(X, algorithm=None), "algorithm for all_reduce is None: expected one of ring"),
    (lambda c: c.scatter(X, algorithm=None), "algorithm for scatter is None"),
    (lambda c: c.all_gather(X, counts=2), "counts 2: expected one length for each of 1 ranks"),
    (lambda c: c.all_gather(X, counts=np.ones((1, 1), int)), "expected one length for each of 1 ranks"),
    (lambda c: c.all_gather(X, counts=[4.0]), "counts is 4.0: expected a whole number"),
    (lambda c: c.all_gather(X, axis=None), "axis is None: expected a whole number"),
    (lambda c: c.reduce(X, root=None), "root is None: expected a whole number"),
    (lambda c: c.reduce(X, root=0.0), "root is 0.0: expected a whole number"),
    (lambda c: c.all_reduce(None), "input is a NoneType"),
    (lambda c: c.all_reduce(np.ma.masked_array([1.0, 2.0], [0, 1])), "input is a MaskedArray"),
    (lambda c: c.all_reduce(X, out=[0.0]), "out is a list"),
    (lambda c: c.all_to_all(X, send_counts=[4], recv_counts=[3]), "give rank 0 4 and 3 for what it sends to itself"),
    (lambda c: c.recv(None, 0), "out is a NoneType"),
    (lambda c: c.send(X, to=None), "to is None"),
    (lambda c: c.send(X, to=0, tag=1_000_000), "tag 1000000: expected 0 to 999999"),
    (lambda c: c.split(0, key=None), "key is None"),
    (lambda c: c.split(1.5), "color is 1.5"),
    (lambda c: c.empty(3, "foo"), "dtype 'foo': expected one of numpy's or torch's"),
    (lambda c: c.empty(3, "U3"), "array has dtype <U3"),
    (lambda c: c.empty(-1), r"shape \(-1,\): expected lengths of 0 or more"),
    (lambda c: c.empty("ab"), "shape is 'ab'"),
    (lambda c: c.explain("all_reduce", 8, dtype="foo"), "dtype 'foo'"),
    (lambda c: c.explain("all_reduce", 8, op="add"), "unknown operation 'add'"),
    (lambda c: c.explain("all_reduce", -8), "nbytes -8: expected 0 or more"),
    (lambda c: c.explain("all_reduce", 8.0), "nbytes is 8.0"),
    (lambda c: c.explain(None, 8), "collective is None: expected one of all_reduce"),
    (lambda c: c.explain("all_reduce", 8, dtype="int32", op="avg"), "avg of int32"),
    (lambda c: run_threads(2.5, c), "ranks is 2.5: expected a whole number"),  # type: ignore[arg-type]
    (lambda c: run_threads(2, None), "main is None: expected a function"),  # type: ignore[arg-type]
    (lambda c: run_threads(2, print, timeout_s="a"), "timeout_s 'a': expected a number of seconds"),  # type: ignore[arg-type]
    (lambda c: connect("alone", timeout_s=None), "timeout_s None"),  # type: ignore[arg-type]
    (lambda c: connect("alone", node_size=2.5), "node_size is 2.5"),  # type: ignore[arg-type]
    (lambda c: connect(None), "transport is None: expected one of auto, mpi"),  # type: ignore[arg-type]
    (lambda c: build("all_reduce", "ring", 2.5), "ranks is 2.5"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("attempt", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_refused(attempt: Callable[[Any], Any], message: str) -> None:
    comm = connect("alone")
    with pytest.raises(UsageError, match=message):
        attempt(comm)
    assert comm.all_reduce(X).tolist() == [1, 1, 1, 1]


def test_memory_for_collectives() -> None:
    torch = pytest.importorskip("torch")
    comm = connect("alone")
    assert comm.empty((2, 3), np.int16).dtype == np.int16
    assert comm.empty(3, "float64").shape == (3,)
    assert comm.empty([2, 2], torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("collective", "ranks", "chunks", "temp", "message"),
    [
        ("all_reduce", 4, 0, 0, "of 0 chunks and 0 temp slots: expected 1 or more"),
        ("all_reduce", 4, 4, -1, "-1 temp slots"),
        ("all_reduce", 0, 4, 0, "of 0 ranks with root 0"),
        ("all_gather", 4, 6, 0, "of 6 chunks for 4 ranks: expected as many for each rank"),
    ],
)
def test_a_proof_of_nonsense_is_refused(collective: str, ranks: int, chunks: int, temp: int, message: str) -> None:
    with pytest.raises(BrokenScheduleError, match=message):
        check(Schedule(collective, "odd", ranks, 0, chunks, lambda: iter(()), temp=temp))


def test_a_proof_for_an_unknown_collective_names_those_there_are() -> None:
    with pytest.raises(UsageError, match="unknown collective 'all_reduse': did you mean 'all_reduce'"):
        check(Schedule("all_reduse", "odd", 2, 0, 1, lambda: iter(())))


@pytest.mark.parametrize(
    ("limit", "tags"), [(2**31 - 1, 1_000_000), (None, 5461), (32_767, 5461), (5_999_999, 1_000_000), (600, 100)]
)
def test_tags_end_where_the_library_s_do(limit: int | None, tags: int) -> None:
    assert tags_below(limit) == tags
    assert tags * TAG_KINDS - 1 <= (limit or 32_767)


def test_a_communicator_over_few_tags_works_on_and_refuses_others() -> None:
    class Few(ThreadTransport):
        tags = 3

    def main(transport: ThreadTransport) -> None:
        few = Few(transport.world, transport.rank, transport.size)
        process = watch.Watchdog(few.rank, private_board(2), lambda reason: None)
        comm = Communicator(few, CallEngine(), watch.Watch(process, [0, 1]))
        handles = [comm.all_reduce(np.ones(3), algorithm="ring", wait=False) for _ in range(3)]
        assert [handle.wait()[0] for handle in handles] == [2] * 3
        assert comm.split(0).all_reduce(np.ones(1))[0] == 2  # type: ignore[union-attr]
        with pytest.raises(UsageError, match="tag 3: expected 0 to 2"):
            comm.isend(np.ones(1), to=1 - comm.rank, tag=3)

    run_ranks(2, main)


@pytest.mark.parametrize(("sent", "expected"), [(3, 4), (4, 3), (0, 3), (3, 0)])
def test_messages_of_another_size_name_both(sent: int, expected: int) -> None:
    def main(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(np.ones(sent), to=1)
        else:
            comm.recv(np.ones(expected), source=0)

    with pytest.raises(RunError, match=f"rank 0 sent {8 * sent} bytes to rank 1, which expected {8 * expected}"):
        run_threads(2, main)
