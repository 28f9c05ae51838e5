"""The arena without processes: who gets which memory, what happens when there is none, and what is left behind."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tilemesh.comm.runtime import arena as arenas
from tilemesh.comm.runtime.arena import HALF_BYTES, SMALL_BYTES, STAGE_BYTES, Arena, ArenaTurn, Regions, open_arena
from tilemesh.comm.runtime.flags import DISAGREED, LINE, CallDigest, Flags, can_fence, make_fence
from tilemesh.core.context import JOB_VARIABLE
from tilemesh.core.errors import RunError

MIB = 1 << 20


def alone(text: str) -> list[str]:
    return [text]


def opened(blocks_bytes: int = 4 * MIB, **options: bool) -> Arena:
    arena = open_arena(0, 1, alone, blocks_bytes=blocks_bytes, **options)
    assert arena is not None
    return arena


def allocated(arena: Arena, nbytes: int) -> np.ndarray:
    steps = arena.allocate(nbytes)
    while True:
        try:
            next(steps).wait()
        except StopIteration as end:
            return end.value


def test_which_processors_are_trusted() -> None:
    assert can_fence("x86_64")
    assert can_fence("aarch64")
    assert not can_fence("ppc64le")
    assert not can_fence("riscv64")
    assert make_fence("x86_64") is None
    fence = make_fence("aarch64")
    assert fence is not None
    fence()


def test_ranks_on_another_kind_of_processor_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "can_fence", lambda: False)
    assert open_arena(0, 2, lambda text: [text, "other 1"], blocks_bytes=MIB) is None


def test_ranks_of_two_machines_share_nothing() -> None:
    assert open_arena(0, 2, lambda text: [text, "elsewhere"], blocks_bytes=MIB) is None


def test_a_path_that_leads_to_another_file_is_not_taken(tmp_path: Path) -> None:
    """Process numbers repeat between containers: what lies at the path must be what the first rank meant."""
    shape = Regions(1, MIB)
    other = tmp_path / "other"
    other.write_bytes(b"")
    os.truncate(other, shape.nbytes)
    assert arenas._map(str(other), b"12345678", shape) is None
    assert arenas._map(str(tmp_path / "none"), b"12345678", shape) is None


@pytest.mark.parametrize("use_memfd", [True, False])
def test_nothing_has_a_name_once_it_is_mapped(use_memfd: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_VARIABLE, str(tmp_path))
    arena = opened(use_memfd=use_memfd)
    assert list(tmp_path.iterdir()) == []
    block = allocated(arena, 1000)
    block[:] = 7
    assert block.sum() == 7000


def test_an_arena_that_is_dropped_leaves_no_file_open_but_lives_in_its_arrays() -> None:
    gc.collect()  # what other tests left open
    before = len(os.listdir("/proc/self/fd"))
    arenas_of = [opened() for _ in range(5)]
    block = allocated(arenas_of[0], 100)
    assert len(os.listdir("/proc/self/fd")) == before + 10  # the file, and the copy that a mapping keeps
    del arenas_of
    gc.collect()
    block[:] = 3
    assert block.sum() == 300
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # those of the block's own arena
    del block
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_mount_that_is_too_small_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JOB_VARIABLE, str(tmp_path))

    def full(handle: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert open_arena(0, 1, alone, blocks_bytes=MIB, use_memfd=False) is None
    assert list(tmp_path.iterdir()) == []


def test_no_room_for_a_block_is_an_error_and_the_arena_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = opened(MIB)
    with pytest.raises(RunError, match=r"empty\(\): 2 MiB for 1 ranks do not fit into the node's shared memory"):
        allocated(arena, 2 * MIB)
    first = allocated(arena, MIB // 2)

    def full(handle: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match="do not fit"):
        allocated(arena, 100)
    monkeypatch.undo()
    second = allocated(arena, 100)
    first[:], second[:] = 1, 2
    assert first.max() == 1


def test_a_block_lives_as_long_as_any_view_of_it() -> None:
    arena = opened(MIB)
    block = allocated(arena, MIB)
    part = block[10:20].view()
    del block
    with pytest.raises(RunError, match="do not fit"):
        allocated(arena, MIB)
    del part
    assert allocated(arena, MIB).size == MIB


def test_arrays_are_found_by_their_place() -> None:
    arena = opened()
    block = allocated(arena, 4096)
    address = int(block.__array_interface__["data"][0])
    assert arena.offset_of(address, 4096) == address - arena.start
    assert arena.offset_of(address, 1 << 40) == 0
    assert arena.offset_of(int(np.ones(3).__array_interface__["data"][0]), 24) == 0
    assert arena.offset_of(arena.start, 8) == 0  # the flags are nobody's array


def test_stages_do_not_overlap() -> None:
    shape = Regions(3, MIB)
    arena = Arena(bytearray(shape.nbytes), shape, 1, pids=False)
    for nbytes in (
        8,
        100,
        SMALL_BYTES,
        SMALL_BYTES + 1,
        HALF_BYTES,
    ):  # small ones lie side by side, in pages of their own
        arena.memory[:] = 0
        for rank in range(3):
            for half in range(2):
                stage = arena.staged_by(rank, half, nbytes)
                assert stage.size == nbytes
                assert stage.max() == 0
                stage[:] = 1 + rank + 3 * half
        for half in range(2):
            rows = arena.rows(half, nbytes // 2, nbytes // 4, nbytes)
            assert [set(row.tolist()) for row in rows] == [{1 + rank + 3 * half} for rank in range(3)]
        assert arena.memory[: shape.small_at].max() == arena.memory[shape.blocks_at :].max() == 0
    assert shape.blocks_at >= shape.stage_at + 3 * STAGE_BYTES


def test_calls_take_turns() -> None:
    arena = opened()
    first, second = arena.turn(), arena.turn()
    assert ArenaTurn(arena, first).test()
    assert not ArenaTurn(arena, second).test()
    with pytest.raises(RunError, match="waits for an earlier one"):
        ArenaTurn(arena, second).wait()
    arena.done = first
    ArenaTurn(arena, second).wait()


@pytest.fixture
def three_flags() -> list[Flags]:
    memory = np.zeros((3 + 1) * LINE, np.uint8)  # a flag for each, and what they share
    return [Flags(memoryview(memory), rank, 3, cores=1) for rank in range(3)]


def test_ranks_meet_when_all_have_come(three_flags: list[Flags]) -> None:
    first, second, third = three_flags
    epoch = first.raise_()
    assert not first.have_come(epoch)
    second.raise_()
    assert not first.have_come(epoch)
    third.raise_()
    assert first.have_come(epoch)
    third.raise_()  # on its way to the next meeting: this one has been held all the same
    assert first.have_come(epoch)
    order: list[int] = []

    def meet(flags: Flags) -> None:
        flags.meet()
        order.append(flags.rank)

    second.raise_()
    waiting = threading.Thread(target=meet, args=(first,))
    waiting.start()
    waiting.join(10)
    assert order == [0]


def test_ranks_that_come_with_different_calls_all_know(three_flags: list[Flags]) -> None:
    first, second, third = three_flags
    for flags, words in zip(three_flags, ("all_reduce(4)", "all_reduce(5)", "all_reduce(4)"), strict=True):
        flags.digest = CallDigest.of("all_reduce", 32, words)
    epoch = first.raise_()
    second.raise_()
    assert first.differs()
    assert first.have_come(epoch)  # nobody need wait for the third, which learns of it when it comes
    third.raise_()
    assert third.differs()
    assert second.published() == DISAGREED
    for flags in three_flags:  # and the next meeting is a meeting like any other
        flags.digest = CallDigest.of("all_reduce", 32, "all_reduce(4)")
        flags.raise_()
    assert not any(flags.differs() for flags in three_flags)
    assert second.published() == -1


def test_a_rank_that_is_gone_is_named(three_flags: list[Flags]) -> None:
    first, second, _ = three_flags
    first.require_alive()
    second.words[second.mine + 1] = 2**22 + 12345  # above the largest process number
    with pytest.raises(RunError, match=r"rank 1 of this node \(process 4206649\) is gone"):
        first.require_alive()
