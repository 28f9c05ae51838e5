"""Observers and tables of choices: what passes through a communicator is seen, whichever way it goes."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from tilemesh.comm import Communicator, run_threads
from tilemesh.comm.runtime import observe
from tilemesh.comm.runtime.choose import Choices, Request
from tilemesh.comm.runtime.observe import BEGIN, CALL, TEST, WAIT, Note, Seen
from tilemesh.core.errors import UsageError

TIMEOUT_S = 20.0


class Record:
    """Counts what it is told of, and by which kind of call."""

    def __init__(self) -> None:
        self.calls: Counter[Seen] = Counter()
        self.asked: list[Seen] = []
        self.told = 0

    def __call__(self, seen: Seen) -> Note:
        self.asked.append(seen)

        def note(began_s: float, ended_s: float, calls: int) -> None:
            assert began_s <= ended_s
            self.calls[seen] += calls
            self.told += 1

        return note

    def of(self, operation: str) -> dict[tuple[str, int], int]:
        """Calls by phase and bytes."""
        found: Counter[tuple[str, int]] = Counter()
        for seen, count in self.calls.items():
            if seen.operation == operation:
                found[seen.phase, seen.nbytes] += count
        return dict(found)


def test_repeated_calls_are_all_seen_and_asked_about_once() -> None:
    def main(comm: Communicator) -> None:
        record, x, out = Record(), np.ones(256, np.float32), np.empty(256, np.float32)
        comm.observe(record)
        for _ in range(7):
            comm.all_reduce(x, out=out)
        assert record.of("all_reduce") == {(CALL, 1024): 7}
        assert len(record.asked) == 1
        (seen,) = record.asked
        assert seen == ("world", "all_reduce", CALL, 1024, comm.choice("all_reduce", 1024).algorithm, -1)
        assert comm.ready_calls, "an observed call is kept ready, too"

    run_threads(2, main, timeout_s=TIMEOUT_S)


def test_an_observer_that_comes_later_sees_calls_that_were_kept_ready_before() -> None:
    def main(comm: Communicator) -> None:
        first, second, x = Record(), Record(), np.ones(8)
        comm.all_reduce(x)
        detach = comm.observe(first)
        comm.all_reduce(x)
        comm.observe(second)
        comm.all_reduce(x)
        detach()
        for _ in range(3):
            comm.all_reduce(x)
        assert first.of("all_reduce") == {(CALL, 64): 2}
        assert second.of("all_reduce") == {(CALL, 64): 4}

    run_threads(3, main, timeout_s=TIMEOUT_S)


@pytest.fixture
def all_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of ranks that are threads take longer than what is worth counting only."""
    monkeypatch.setattr(observe, "SHORT_S", TIMEOUT_S)


def test_a_call_that_takes_long_is_told_of_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "SHORT_S", 0.0)

    def main(comm: Communicator) -> None:
        record, x = Record(), np.ones(8)
        comm.observe(record, every=4)
        for _ in range(100):
            comm.all_reduce(x)
        assert record.calls.total() == record.told == 100

    run_threads(2, main, timeout_s=TIMEOUT_S)


@pytest.mark.usefixtures("all_short")
def test_one_in_several_repeated_calls_stands_for_all_of_them() -> None:
    def main(comm: Communicator) -> None:
        record, x = Record(), np.ones(8)
        comm.observe(record, every=4)
        for made in range(1, 66):  # one that makes the call ready, and the first of its repetitions: each of them
            comm.all_reduce(x)
            assert record.calls.total() == record.told == made
        for repeated in range(1, 11):
            comm.all_reduce(x)
            assert record.calls.total() == 65 + repeated // 4 * 4
        assert record.told == 67
        handle = comm.all_reduce(x, wait=False)  # while something is under way a ready call is not taken
        for _ in range(2):
            comm.all_reduce(x)
        handle.wait()
        with pytest.raises(UsageError, match="every 0"):
            comm.observe(record, every=0)

    run_threads(2, main, timeout_s=TIMEOUT_S)


@pytest.mark.usefixtures("all_short")
def test_how_many_calls_one_stands_for_can_change() -> None:
    def main(comm: Communicator) -> None:
        record, x, every = Record(), np.ones(8), 1
        comm.observe(record, every=lambda: every)
        for _ in range(100):
            comm.all_reduce(x)
        assert record.told == 100
        every = 5
        for _ in range(11):  # one more that is timed for itself, then one in five
            comm.all_reduce(x)
        assert (record.told, record.calls.total()) == (103, 111)

    run_threads(2, main, timeout_s=TIMEOUT_S)


def test_who_is_not_interested_leaves_the_ready_call_as_it_is() -> None:
    def main(comm: Communicator) -> None:
        x = np.ones(8)
        comm.observe(lambda seen: None)
        comm.all_reduce(x)
        comm.all_reduce(x)
        (ready,) = comm.ready_calls.values()
        assert "observe" not in ready.__code__.co_filename

    run_threads(2, main, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("algorithm", ["auto", "ring", "flat"])
def test_a_call_under_way_is_seen_when_it_begins_is_tested_and_waited_for(algorithm: str) -> None:
    def main(comm: Communicator) -> None:
        record, x = Record(), np.ones(16)
        comm.observe(record)
        handle = comm.all_reduce(x, algorithm=algorithm, wait=False)
        tests = 1
        while not handle.test():
            tests += 1
        assert handle.wait()[0] == comm.size
        assert record.of("all_reduce") == {(BEGIN, 128): 1, (TEST, 128): tests, (WAIT, 128): 1}
        assert sum(count for seen, count in record.calls.items() if seen.is_new) == 1

    run_threads(2, main, timeout_s=TIMEOUT_S)


def test_every_collective_is_seen() -> None:
    def main(comm: Communicator) -> None:
        record, x = Record(), np.ones(12)
        comm.observe(record)
        for _ in range(2):
            comm.all_reduce(x)
            comm.reduce(x)
            comm.broadcast(x)
            comm.reduce_scatter(x)
            comm.all_gather(x)
            comm.gather(x)
            comm.scatter(x if comm.rank == 0 else None)
            comm.all_to_all(x)
            comm.barrier()
        nbytes = {"all_gather": 96 * comm.size, "gather": 96 * comm.size, "barrier": 1}
        for operation in ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "gather", "scatter"):
            assert record.of(operation) == {(CALL, nbytes.get(operation, 96)): 2}, operation
        assert record.of("all_to_all") == {(CALL, 96): 2}
        assert record.of("barrier") == {(CALL, 1): 2}
        assert all(seen.algorithm for seen in record.calls)

    run_threads(3, main, timeout_s=TIMEOUT_S)


def test_a_scatter_under_way_knows_its_bytes_once_the_root_has_spoken() -> None:
    def main(comm: Communicator) -> None:
        record = Record()
        comm.observe(record)
        comm.scatter(np.ones(6) if comm.rank == 1 else None, 1, wait=False).wait()
        assert record.of("scatter")[WAIT, 48] == 1

    run_threads(2, main, timeout_s=TIMEOUT_S)


def test_messages_are_seen_with_their_peer() -> None:
    def main(comm: Communicator) -> None:
        record, x = Record(), np.arange(5.0)
        comm.observe(record)
        other = 1 - comm.rank
        if comm.rank == 0:
            comm.send(x, other)
        else:
            comm.recv(x, other)
        operation = "send" if comm.rank == 0 else "recv"
        assert record.calls == {
            Seen("world", operation, phase, 40, peer=other): 1 for phase in (BEGIN, WAIT)
        }  # messages have no algorithm
        handles = [comm.isend(x, other), comm.irecv(np.empty(5), other)]
        for handle in handles:
            handle.wait()
        assert record.of("send")[BEGIN, 40] == (2 if comm.rank == 0 else 1)

    run_threads(2, main, timeout_s=TIMEOUT_S)


def test_groups_inherit_observers_under_their_own_label_unless_told_otherwise() -> None:
    def main(comm: Communicator) -> None:
        record, x = Record(), np.ones(4)
        comm.observe(record)
        seen_group = comm.split(comm.rank % 2)
        unseen_group = comm.split(comm.rank % 2, observed=False)
        again = comm.duplicate()
        assert seen_group is not None
        assert unseen_group is not None
        for group in (seen_group, unseen_group, again):
            group.all_reduce(x)
            group.all_reduce(x)
        by_label = Counter(
            {seen.group: count for seen, count in record.calls.items() if seen.operation == "all_reduce"}
        )
        assert by_label == {seen_group.label: 2, again.label: 2}
        assert record.of("split") == {(CALL, 0): 2}
        assert record.of("duplicate") == {(CALL, 0): 1}

    run_threads(4, main, timeout_s=TIMEOUT_S)


def test_a_communicator_without_an_observer_keeps_the_bare_call() -> None:
    def main(comm: Communicator) -> None:
        comm.all_reduce(np.ones(4))
        (ready,) = comm.ready_calls.values()
        assert "observe" not in ready.__code__.co_filename

    run_threads(2, main, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("algorithm", ["ring", "flat", "flat_one", "flat_slices", "recursive_doubling"])
def test_where_the_time_of_a_call_went(algorithm: str) -> None:
    def main(comm: Communicator) -> None:
        x, out = np.ones(1000), np.empty(1000)
        comm.all_reduce(x, out=out, algorithm=algorithm)
        ready = comm.ready_calls
        out[:] = 0
        parts = comm.breakdown(lambda: comm.all_reduce(x, out=out, algorithm=algorithm))
        assert list(parts) == ["copy", "wire", "reduce", "wait"]
        assert np.all(out == comm.size)
        shared = algorithm.startswith("flat")
        assert (parts["wait"] > 0) == shared
        assert (parts["wire"] > 0) != shared
        assert comm.ready_calls == ready, "ready calls are there again"
        comm.all_reduce(x, out=out, algorithm=algorithm)
        assert np.all(out == comm.size)

    run_threads(2, main, timeout_s=TIMEOUT_S)


def test_a_table_of_choices_notes_and_repeats_what_auto_picked() -> None:
    def main(comm: Communicator) -> dict[str, str]:
        choices, record, x = Choices(), Record(), np.ones(256, np.float32)
        comm.keep_to(choices, "dp")
        comm.all_reduce(x)
        comm.all_reduce(x)
        comm.all_reduce(x, algorithm="ring")  # asked for by name: no choice
        picked = comm.choice("all_reduce", 1024).algorithm
        assert choices.table == {"dp all_reduce 1024 float32 sum": picked}

        earlier = json.loads(json.dumps({"dp all_reduce 1024 float32 sum": "ring"}))
        again = Choices(earlier)
        comm.keep_to(again, "dp")
        comm.observe(record)
        assert comm.all_reduce(x)[0] == comm.size
        comm.all_reduce(x[:8])
        assert [seen.algorithm for seen in record.asked] == ["ring", comm.choice("all_reduce", 32).algorithm]
        return again.table

    tables = run_threads(2, main, timeout_s=TIMEOUT_S)
    assert tables[0] == tables[1]
    assert tables[0]["dp all_reduce 1024 float32 sum"] == "ring"


def test_a_choice_that_this_transport_has_not_is_made_anew() -> None:
    """Threads have no library whose own collective a run over MPI may have chosen."""

    def main(comm: Communicator) -> None:
        choices, x = Choices({"dp all_reduce 1024 float32 sum": "native"}), np.ones(256, np.float32)
        comm.keep_to(choices, "dp")
        assert comm.all_reduce(x)[0] == comm.size
        assert choices.table == {"dp all_reduce 1024 float32 sum": comm.choice("all_reduce", 1024).algorithm}

    run_threads(2, main, timeout_s=TIMEOUT_S)


def test_blocks_of_unequal_sizes_are_a_choice_of_their_own() -> None:
    """gloo's own all_gather serves blocks of one size alone."""
    choices, even = Choices(), Request("all_gather", 24, "float64", "sum")
    for request, algorithm in ((even, "native"), (even._replace(uneven=True), "ring")):
        assert choices.pick("tp", request, lambda of=algorithm: of, lambda name: True) == algorithm  # type: ignore[misc]


def test_groups_keep_to_the_same_table_whatever_their_color() -> None:
    def main(comm: Communicator) -> dict[str, str]:
        choices = Choices()
        comm.keep_to(choices, "all")
        group = comm.split(comm.rank % 2)
        assert group is not None
        group.all_reduce(np.ones(2))
        group.duplicate().all_reduce(np.ones(2))
        return choices.table

    keys = ["all/1:2 all_reduce 16 float64 sum", "all/1:2/1:2 all_reduce 16 float64 sum"]
    assert [list(table) for table in run_threads(4, main, timeout_s=TIMEOUT_S)] == [keys] * 4


@pytest.mark.usefixtures("all_short")
@pytest.mark.parametrize("ending", ["detach", "close", "another observer", "keep_to", "tell_observers"])
def test_no_repeated_call_stays_untold(ending: str) -> None:
    def main(comm: Communicator) -> None:
        group = comm.duplicate()
        record, x, out = Record(), np.ones(256, np.float32), np.empty(256, np.float32)
        detach = group.observe(record, every=16)
        for _ in range(64 + 16 + 7):  # one by one, one that stands for sixteen, and seven that are only counted
            group.all_reduce(x, out=out)
        group.all_gather(x)
        assert record.of("all_reduce")[CALL, 1024] < 64 + 16 + 7, "some are not told of yet"
        if ending == "detach":
            detach()
        elif ending == "close":
            group.close()
        elif ending == "another observer":
            group.observe(Record())
        elif ending == "keep_to":
            group.keep_to(Choices())
        else:
            comm.tell_observers()  # of groups that were split from it, too
            comm.tell_observers()
        assert record.of("all_reduce") == {(CALL, 1024): 64 + 16 + 7}
        if ending == "detach":
            group.all_reduce(x, out=out)
            assert record.of("all_reduce") == {(CALL, 1024): 64 + 16 + 7}

    run_threads(2, main, timeout_s=TIMEOUT_S)
