"""What the watchdog says: by world rank, whatever the group; and of ranks that have gone, or have many groups."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from tilemesh.comm import Communicator, run_threads
from tilemesh.comm.runtime import watch
from tilemesh.comm.runtime.records import CallRecord, Doing, private_board
from tilemesh.comm.schedules.hierarchical import largest_block
from tilemesh.core.errors import RunError

# Long enough that a rank which a busy machine starves while it sets up is not the one that is found missing.
TIMEOUT_S = 2.0


def words_of(ranks: int, main: Callable[[Communicator, threading.Event], None]) -> str:
    """What the job's end says; the event lets a rank stay away for exactly as long as another waits."""
    over = threading.Event()

    def program(comm: Communicator) -> None:
        main(comm, over)

    with pytest.raises(RunError) as caught:
        run_threads(ranks, program, timeout_s=TIMEOUT_S)
    return str(caught.value)


def until_given_up(call: Callable[[], object], over: threading.Event) -> None:
    try:
        call()
    finally:
        over.set()


def test_ranks_of_a_group_are_named_by_their_numbers_in_the_world() -> None:
    def main(comm: Communicator, over: threading.Event) -> None:
        group = comm.split(comm.rank % 2, key=-comm.rank)
        assert group is not None
        if comm.rank in (1, 5):
            until_given_up(lambda: group.all_reduce(np.ones(4), algorithm="ring"), over)
        else:
            over.wait(60)

    words = words_of(6, main)
    assert "rank 1 has waited " in words
    assert "in all_reduce #1 of world/1.1 (ranks 1, 3, 5) (32 B); not arrived: rank 3 is in no collective" in words
    assert "arrived: 5;" in words


def test_every_rank_that_waits_says_for_whom_and_the_job_goes_on() -> None:
    lines: list[str] = []
    both = threading.Event()

    def main(comm: Communicator) -> float:
        def tell(text: str) -> None:
            lines.append(text)
            if {line.split(" has")[0] for line in lines} == {"rank 0", "rank 2"}:
                both.set()

        comm.watch.process.stage = f"step 3: {comm.rank}F0"
        comm.watch.process.tell_waits(tell, 0.3)
        if comm.rank == 1:
            assert both.wait(60)
        return float(comm.all_reduce(np.ones(1))[0])

    assert run_threads(3, main, timeout_s=60) == [3.0] * 3
    first = next(line for line in lines if line.startswith("rank 0"))
    assert (
        "in all_reduce #1 of world (8 B) at step 3: 0F0; not arrived: rank 1 is in no collective, at step 3: 1F0"
        in first
    )
    assert first.endswith("the job ends after 60 s")
    # Told again only when the wait has doubled.
    waits = [float(line.split("waited ")[1].split(" s")[0]) for line in lines if line.startswith("rank 0")]
    assert all(later >= 2 * sooner - 0.1 for sooner, later in pairwise(waits))


def test_messages_in_a_group_name_the_rank_of_the_world() -> None:
    def main(comm: Communicator, over: threading.Event) -> None:
        group = comm.split(comm.rank // 2)
        assert group is not None
        if comm.rank == 3:
            group.recv(np.empty(1), source=0)

    words = words_of(4, main)
    assert "rank 3 has waited" in words
    assert "in recv from rank 2 of world/1.1 (ranks 2, 3)" in words
    assert "meanwhile: rank 2 has ended: its program returned" in words


def test_a_rank_that_has_returned_is_said_to_have() -> None:
    def main(comm: Communicator, over: threading.Event) -> None:
        if comm.rank == 0:
            comm.barrier(algorithm="tree")

    words = words_of(3, main)
    assert "not arrived: rank 1 has ended: its program returned without this call; rank 2 has ended" in words


def test_three_hundred_groups_fit_a_record() -> None:
    def main(comm: Communicator, over: threading.Event) -> None:
        comm.watch.timeout_s = 60.0  # however slow this machine makes the groups
        groups = [comm.split(0) for _ in range(300)]
        assert all(groups)
        groups[7].watch.timeout_s = TIMEOUT_S  # type: ignore[union-attr]
        if comm.rank < 2:
            until_given_up(groups[7].barrier, over)  # type: ignore[union-attr]
        else:
            over.wait(60)

    assert "in barrier #1 of world/8.0 (1 B); not arrived: rank 2 is in no collective" in words_of(3, main)


def test_a_rank_that_stopped_inside_the_call_is_named_though_it_arrived() -> None:
    process = watch.Watchdog(0, private_board(3), lambda reason: None)
    mine = watch.Watch(process, [0, 1, 2])
    note = (4, "all_reduce", 1024, 0)
    now, seen = time.monotonic_ns(), {"world": 4}
    doing = Doing("world", 4, "all_reduce", 1024, now - int(6e9))
    process.board.write(1, CallRecord(os.getpid(), now - int(6e9), "step 4: gradients", doing, seen))
    process.board.write(2, CallRecord(os.getpid(), now, "step 4: gradients", doing, seen))
    words = mine.report(note, 6.0)
    assert (
        "; arrived, and went no further: rank 1 is in all_reduce #4 of world for 6.0 s, at step 4: gradients" in words
    )
    assert "(its last word is 6 s old: stopped, or in code that lets no other thread run); arrived: 1, 2;" in words
    process.board.write(1, CallRecord(os.getpid(), now, "step 4: gradients", doing, seen))
    assert "no rank is missing: the network, or a rank that died, holds it up; arrived: 1, 2;" in mine.report(note, 6.0)


def test_a_rank_that_stopped_outside_the_group_is_named_too() -> None:
    """Rank 0 waits for rank 1, which waits for rank 3 of another group: what is wrong is with rank 3."""
    process = watch.Watchdog(0, private_board(4), lambda reason: None)
    ours = watch.Watch(process, [0, 1], "world/1.0")
    now = time.monotonic_ns()
    waits = Doing("world/2.1", -1, "recv from rank 3", 1024, now - int(6e9))
    process.board.write(1, CallRecord(os.getpid(), now, "step 4: 0B0", waits, {"world/1.0": 6}))
    process.board.write(2, CallRecord(os.getpid(), now, "step 4: gradients"))
    process.board.write(3, CallRecord(os.getpid(), now - int(7e9), "step 4: 1RECV_F0"))
    words = ours.report((7, "all_reduce", 1024, 0), 6.0)
    assert "; not arrived: rank 1 is in recv from rank 3 of world/2.1 for 6.0 s, at step 4: 0B0; " in words
    assert (
        "; behind it: rank 3 is in no collective, at step 4: 1RECV_F0 (its last word is 7 s old: stopped, or in code "
        "that lets no other thread run); ending the job after 60 s"
    ) in words
    process.board.write(3, CallRecord(os.getpid(), now - int(7e9), "", is_over=True))
    assert "behind it" not in ours.report((7, "all_reduce", 1024, 0), 6.0)


def test_of_too_many_groups_those_that_moved_last_are_kept() -> None:
    process = watch.Watchdog(0, private_board(2), lambda reason: None)
    watches = [watch.Watch(process, [0, 1], f"world/{number}.0") for number in range(3000)]
    process.look()
    watches[5].sequence = 4
    process.look()
    record = process.board.read(0)
    assert record is not None
    assert record.is_cut
    assert record.seen["world/5.0"] == 4
    assert 100 < len(record.seen) < 3000
    process.board.write(1, CallRecord(1, 0, is_cut=True))
    assert "it may have arrived: it has too many groups to tell" in watches[0].report((1, "barrier", 0, 0), 1.0)


@pytest.mark.parametrize(
    ("ranks", "text"), [((), ""), ((3,), "3"), ((0, 1), "0, 1"), ((0, 1, 2, 3, 7, 9, 8), "0-3, 7-9")]
)
def test_ranges(ranks: tuple[int, ...], text: str) -> None:
    assert watch.ranges(ranks) == text


@pytest.mark.parametrize(
    ("nodes", "size"),
    [
        ([0, 0, 1, 1], 2),
        ([0, 0, 0, 1], 3),
        ([0, 0, 0, 1, 1], 3),
        ([0, 0, 0, 1, 1, 2], 1),
        ([0, 0, 0, 1, 1, 1, 2], 3),
        ([0] * 5, 5),
        ([0, 1, 0, 1], 1),
        ([3], 1),
    ],
)
def test_blocks_that_span_no_two_nodes(nodes: list[int], size: int) -> None:
    assert largest_block(nodes) == size


def test_a_group_knows_its_nodes_from_its_parent() -> None:
    def main(comm: Communicator) -> tuple[int | None, ...]:
        rows, columns = comm.split(comm.rank // 4), comm.split(comm.rank % 4)
        assert rows is not None
        assert columns is not None
        pairs = rows.split(rows.rank // 2)
        assert pairs is not None
        x = np.ones(3)
        for group in (rows, columns, pairs):
            assert group.all_reduce(x, algorithm="hierarchical")[0] == group.size
        return tuple(group.node_size for group in (comm, rows, columns, pairs, comm.duplicate()))

    assert run_threads(8, main, node_size=2) == [(2, 2, 1, 2, 2)] * 8


MEETING = """
import sys, time
from tilemesh.comm.runtime import meeting
from tilemesh.core.context import Membership
meeting.START_S = 0.5
with meeting.meeting(Membership("mpiexec", 2, 4, 2, 4), 0.1, is_first_mpi=sys.argv[1] == "guarded"):
    time.sleep(float(sys.argv[2]))
print("met", flush=True)
time.sleep(float(sys.argv[2]))
print("done")
"""


@pytest.mark.parametrize("how", ["guarded", "thread"])
def test_connect_ends_when_a_rank_never_comes(how: str, tmp_path: Path) -> None:
    environ = os.environ | {"TILEMESH_JOB": str(tmp_path)}
    (tmp_path / "connecting-1").mkdir()
    (tmp_path / "connecting-1" / "0").touch()
    line = [sys.executable, "-c", MEETING, how]
    done = subprocess.run([*line, "30"], env=environ, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode != 0
    words = "rank 2 has waited 0.5 s in connect() for 4 ranks; not arrived: 1, 3; ending the job"
    assert done.stderr == f"tilemesh: {words}\n"
    assert (tmp_path / "verdict").read_text() == f"{words}\n"
    assert done.stdout == ""


@pytest.mark.parametrize("how", ["guarded", "thread"])
def test_connect_is_left_alone_once_all_have_met(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", MEETING, how, "0.4"], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "met\ndone\n", "")


@pytest.mark.parametrize(("age_s", "is_said"), [(0.5, False), (40.0, True)])
def test_a_rank_that_no_longer_says_where_it_is_is_not_believed(age_s: float, is_said: bool) -> None:
    process = watch.Watchdog(0, private_board(2), lambda reason: None)
    ours = watch.Watch(process, [0, 1])
    at_ns = time.monotonic_ns() - int(age_s * 1e9)
    process.board.write(1, CallRecord(os.getpid(), at_ns, where="train.py:7 in step", seen={"world": 2}))
    words = ours.report((3, "barrier", 0, 0), 60.0)
    assert "rank 1 is in no collective, at train.py:7 in step" in words
    assert ("its last word is 40 s old: stopped, or in code that lets no other thread run" in words) == is_said


LOOKING = """
import gc, threading, time
from tilemesh.comm.runtime.watch import Stacks

class Cycle:
    def __init__(self): self.me = self
    def __del__(self): time.sleep(0)  # lets other threads run, as freeing a tensor does

def look():
    for _ in range(10):
        Cycle()
        with Stacks(): pass

gc.set_threshold(1)
for _ in range(50):  # most hangs are among the first looks of threads that have just begun
    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_a_collection_while_the_stacks_are_looked_at_does_not_stop_the_process() -> None:
    """With `sys._current_frames` itself, this never ends."""
    subprocess.run([sys.executable, "-c", LOOKING], check=True, timeout=60)


def test_stacks_are_walked_without_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in the midst lets the walked thread return: its frames are gone, and the process with them."""
    collecting, outer = [], watch._outer

    def noted(frame: FrameType) -> FrameType | None:
        collecting.append(gc.isenabled())
        return outer(frame)

    monkeypatch.setattr(watch, "_outer", noted)
    monkeypatch.setattr(watch, "_is_program", lambda file: False)
    process = watch.Watchdog(0, private_board(1), lambda words: None)
    process.look()
    assert len(collecting) > 2
    assert not any(collecting)
    assert gc.isenabled()


def test_frames_that_may_yield_meanwhile_are_not_followed() -> None:
    """Their link to the caller is stale once they have yielded: following it ended the process."""

    def numbers() -> Iterator[tuple[FrameType | None, FrameType | None]]:
        here = sys._getframe()
        yield here.f_back, watch._outer(here)

    def frame() -> FrameType:
        return sys._getframe()

    ((caller, followed),) = numbers()
    assert caller is sys._getframe()
    assert followed is None
    here = frame()
    assert watch._outer(here) is here.f_back is sys._getframe()
