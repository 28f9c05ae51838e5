"""Memory that the ranks of a node share: one mapping a communicator, cut into flags, a stage a rank, and blocks.

It is an anonymous file (`memfd`) of the node's first rank that the others reach through procfs: it has no name, so
nothing stays behind after a kill. Where that is not allowed it is a file in shared memory, whose space is reserved when
it is used (a small mount is then an error, not a crash) and whose name is removed once all have mapped it.

The **stage** is where a rank puts what its neighbours are to read: two halves, used in turn by the calls that need
one. A neighbour that still reads one half in call k has come to call k + 1 before anybody gets to call k + 2, so one
meeting a call is enough. Calls on one arena are carried out in the order in which they were made (`turn`), whether
they are waited for or not. **Blocks** are what `Communicator.empty` hands out: the first rank allocates for all, in a
table that all see, and takes a block back when every rank has let go of it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilemesh.comm.runtime.flags import ANSWER, LINE, Flags, can_fence
from tilemesh.comm.runtime.transport import Bytes, Common, Token
from tilemesh.core.context import JOB_VARIABLE
from tilemesh.core.errors import RunError
from tilemesh.core.units import format_bytes

SEGMENT_BYTES = 512 << 10  # of a large payload that passes over the stage at once: stays in the caches of all ranks
DIRECT_SEGMENT_BYTES = 4 << 20  # of one that is read where it is: each rank reduces its share of this at once
HALF_BYTES = 4 * SEGMENT_BYTES
# Not powers of two apart: the same slot of all ranks would fall into the same few places of every cache.
_HALF_STRIDE = HALF_BYTES + 17 * 128
STAGE_BYTES = 2 * _HALF_STRIDE + 33 * 128
# Up to this much a rank, all stages lie side by side: a rank that comes back to a core finds few pages to look up.
SMALL_BYTES = 4 << 10
_PAGE = 64 << 10  # the largest page of the architectures served
_MOST_BLOCKS = 4096
_FULL = (1 << 64) - 1

Exchange = Callable[[str], list[str]]  # every rank's text, on every rank


@dataclass(frozen=True)
class Regions:
    """Where things lie in the mapping, for a number of ranks and bytes of blocks."""

    ranks: int
    blocks_bytes: int

    @property
    def table_at(self) -> int:
        return (self.ranks + 1) * LINE

    @property
    def small_at(self) -> int:
        return _round_up(self.table_at + self.ranks * _MOST_BLOCKS, _PAGE)

    @property
    def stage_at(self) -> int:
        return _round_up(self.small_at + 2 * self.ranks * SMALL_BYTES, _PAGE)

    @property
    def blocks_at(self) -> int:
        return _round_up(self.stage_at + self.ranks * STAGE_BYTES, _PAGE)

    @property
    def nbytes(self) -> int:
        return self.blocks_at + self.blocks_bytes


class Arena:
    """One rank's view of the node's shared memory. `memory`: the whole mapping."""

    def __init__(
        self,
        memory: Any,
        regions: Regions,
        rank: int,
        *,
        reserve: Callable[[int, int], None] | None = None,
        pause: Callable[[], object] | None = None,
        pids: bool = True,
        cores: int = 1,
    ) -> None:
        """`reserve(start, length)`: makes sure that the bytes exist, or raises OSError. `cores`: of all its ranks."""
        self.regions = regions
        self.rank = rank
        self.ranks = regions.ranks
        self.memory: Bytes = np.frombuffer(memory, np.uint8)
        self.flags = Flags(
            memoryview(self.memory[: (self.ranks + 1) * LINE]),  # type: ignore[arg-type]
            rank,
            self.ranks,
            cores=cores,
            pids=pids,
            pause=pause,
        )
        self.start = int(self.memory.__array_interface__["data"][0])
        self.turns = 0  # calls made
        self.done = 0  # calls carried out
        self.staged = 0  # calls that used the stage
        self.live = 0  # blocks handed out and not known to be free
        self._reserve = reserve
        self._allocator = _Allocator(regions.blocks_bytes) if rank == 0 else None
        self._table: Any = self.memory[regions.table_at :][: self.ranks * _MOST_BLOCKS].reshape(
            self.ranks, _MOST_BLOCKS
        )

    # Calls in order -----------------------------------------------------------------------------------------------

    def turn(self) -> int:
        """A call's number; to be taken when the call is made, on every rank alike."""
        self.turns += 1
        return self.turns

    def half(self) -> int:
        """Which half of the stage the present call has."""
        self.staged += 1
        return self.staged % 2

    def staged_by(self, rank: int, half: int, nbytes: int) -> Bytes:
        """The first `nbytes` of a rank's stage, as a call that puts so many there has it."""
        at, stride = self._stage(half, nbytes)
        return self.memory[at + rank * stride :][:nbytes]

    def rows(self, half: int, at: int, length: int, nbytes: int) -> Any:
        """`length` bytes from `at` on of every rank's stage, one row a rank, in a call that puts `nbytes` there."""
        start, stride = self._stage(half, nbytes)
        return np.lib.stride_tricks.as_strided(self.memory[start + at :], (self.ranks, length), (stride, 1))

    def _stage(self, half: int, nbytes: int) -> tuple[int, int]:
        """Where the stages of a call begin, and how far apart they lie: the same on every rank.

        Small calls lay them out by their own size. Those of an earlier call lie elsewhere in the same half, but nobody
        looks at them any more: who puts something there has met all since.
        """
        regions = self.regions
        if nbytes <= SMALL_BYTES:
            return regions.small_at + half * self.ranks * SMALL_BYTES, _round_up(max(nbytes, 1), 64)
        return regions.stage_at + half * _HALF_STRIDE, STAGE_BYTES

    # Blocks -------------------------------------------------------------------------------------------------------

    def offset_of(self, address: int, nbytes: int) -> int:
        """Where in the mapping an array lies; 0 when it does not lie in this arena's blocks."""
        at = address - self.start
        return at if self.regions.blocks_at <= at and at + nbytes <= self.regions.nbytes else 0

    def allocate(self, nbytes: int) -> Generator[Token, None, Bytes]:
        """Steps of the collective call behind `empty`; what they return is this rank's block."""
        stride = max(_PAGE, _round_up(nbytes, _PAGE))
        yield from met(self)
        answer = _FULL
        if self._allocator is not None:
            answer = self._take(stride)
            self.flags.put(ANSWER, answer)
        yield from met(self)
        answer = self.flags.get(0, ANSWER)
        if answer == _FULL:
            size, most = format_bytes(stride * self.ranks), format_bytes(self.regions.blocks_bytes)
            raise RunError(f"empty(): {size} for {self.ranks} ranks do not fit into the node's shared memory ({most})")
        number, at = answer & (_MOST_BLOCKS - 1), (answer >> 12) * _PAGE
        return self._block(number, self.regions.blocks_at + at + self.rank * stride, nbytes)

    def _take(self, stride: int) -> int:
        """First rank only: a place for all ranks' parts, as one word: number and offset."""
        allocator = self._allocator
        assert allocator is not None
        agreed = [number for number in allocator.taken if self._table[:, number].all()]
        for number in agreed:
            allocator.free(number)
            self._table[:, number] = 0
        place = allocator.take(stride * self.ranks)
        if place is None:
            return _FULL
        number, at = place
        try:
            if self._reserve is not None:
                self._reserve(self.regions.blocks_at + at, stride * self.ranks)
        except OSError:
            allocator.free(number)
            return _FULL
        return number | (at // _PAGE) << 12

    def _block(self, number: int, at: int, nbytes: int) -> Bytes:
        self.live += 1
        owner = _Block(self.memory, at, nbytes)
        weakref.finalize(owner, self._let_go, number)
        return np.asarray(owner)

    def _let_go(self, number: int) -> None:
        """This rank has no array left in the block. It is free when all say so: see `_take`."""
        self._table[self.rank, number] = 1


class _Block:
    """What the arrays of one block hang on: dies with the last of them."""

    def __init__(self, memory: Bytes, at: int, nbytes: int) -> None:
        self.memory = memory
        self.__array_interface__ = memory[at : at + nbytes].__array_interface__


class _Allocator:
    """First fit in a row of bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.taken: dict[int, tuple[int, int]] = {}

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """(number, offset), or None when there is no room."""
        at = 0
        for start, end in sorted(self.taken.values()):
            if start - at >= nbytes:
                break
            at = end
        number = next((number for number in range(_MOST_BLOCKS) if number not in self.taken), None)
        if number is None or at + nbytes > self.nbytes:
            return None
        self.taken[number] = (at, at + nbytes)
        return number, at

    def free(self, number: int) -> None:
        del self.taken[number]


class _Awaited:
    """A token that is asked again and again; once a second it makes sure that the others still live."""

    def __init__(self, arena: Arena) -> None:
        self.flags = arena.flags
        self.looked_at = 0.0

    def is_there(self) -> bool:
        raise NotImplementedError

    def test(self) -> bool:
        if self.is_there():
            return True
        self.flags.pause()
        now = time.monotonic()
        if now > self.looked_at + 1.0:
            self.looked_at = now
            self.flags.require_alive()
        return False


class Meeting(_Awaited):
    """A token: all ranks of the arena have come. It begins when it is made."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.epoch = arena.flags.raise_()

    def is_there(self) -> bool:
        return self.flags.have_come(self.epoch)

    def wait(self) -> None:
        self.flags.wait(self.epoch)


def met(arena: Arena) -> Iterator[Token]:
    """Steps of a meeting of all ranks; they end in an error on every rank if these make different calls."""
    yield Meeting(arena)
    if arena.flags.differs():
        yield from arena.flags.disagreement()


class Published(_Awaited):
    """A token: whoever came last to the present meeting has done what was to be done for all, or has seen that the
    ranks make different calls."""

    def is_there(self) -> bool:
        return self.flags.published() >= 0

    def wait(self) -> None:
        if self.flags.published() < 0:
            self.flags._until(self.flags.common, self.flags.epoch)


class ArenaTurn:
    """A token: the calls that were made on this arena before are carried out."""

    def __init__(self, arena: Arena, number: int) -> None:
        self.arena = arena
        self.number = number

    def test(self) -> bool:
        return self.arena.done == self.number - 1

    def wait(self) -> None:
        if not self.test():
            raise RunError("a call in shared memory waits for an earlier one that nobody carries out")


# Making one ---------------------------------------------------------------------------------------------------------


def open_arena(
    rank: int, ranks: int, exchange: Exchange, *, blocks_bytes: int, use_memfd: bool = True, cores: int = 1
) -> Arena | None:
    """The arena of all these ranks, or None (on every rank alike) when they do not share memory. A collective call.

    `cores`: that the ranks may use together.
    """
    texts = exchange(_node() if can_fence() else f"other {rank}")
    if len(set(texts)) > 1:
        return None
    regions = Regions(ranks, blocks_bytes)
    for way in [_memfd, _file] if use_memfd else [_file]:
        token = secrets.token_bytes(8)
        handle, path, end = way(regions, token) if rank == 0 else (-1, "", _nothing)
        path_of_all, hex_token = exchange(f"{path} {token.hex()}")[0].split(" ")
        memory = _map(path_of_all, bytes.fromhex(hex_token), regions) if path_of_all else None
        all_have = all(text == "yes" for text in exchange("yes" if memory is not None else "no"))
        end()
        if all_have:
            arena = Arena(memory, regions, rank, reserve=_reserver(handle) if rank == 0 else None, cores=cores)
            if rank == 0:
                weakref.finalize(arena, os.close, handle)
            return arena
        if handle >= 0:
            os.close(handle)
    return None


def private_arena(common: Common, ranks: int, rank: int, blocks_bytes: int, cores: int) -> Arena:
    """Over memory that the ranks share anyway, because they are threads of one process."""
    return Arena(common.memory, Regions(ranks, blocks_bytes), rank, pause=common.pause, pids=False, cores=cores)


def _memfd(regions: Regions, token: bytes) -> tuple[int, str, Callable[[], None]]:
    if not hasattr(os, "memfd_create"):
        return -1, "", _nothing
    try:
        handle = os.memfd_create("tilemesh-arena", os.MFD_CLOEXEC)
    except OSError:
        return -1, "", _nothing
    return _prepared(handle, f"/proc/{os.getpid()}/fd/{handle}", regions.nbytes, regions.stage_at, token, _nothing)


def _file(regions: Regions, token: bytes) -> tuple[int, str, Callable[[], None]]:
    folder = os.environ.get(JOB_VARIABLE) or "/dev/shm"
    path = Path(folder, f"tilemesh-arena-{token.hex()}")
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1, "", _nothing
    # The stages are not sparse here: a mount that is too small must say so now.
    return _prepared(handle, str(path), regions.nbytes, regions.blocks_at, token, lambda: path.unlink(missing_ok=True))


def _prepared(
    handle: int, path: str, nbytes: int, reserved: int, token: bytes, end: Callable[[], None]
) -> tuple[int, str, Callable[[], None]]:
    """Full length, its beginning reserved, and the token by which others know that it is this file."""
    try:
        os.ftruncate(handle, nbytes)
        os.posix_fallocate(handle, 0, reserved)
        os.pwrite(handle, token, nbytes - 8)
    except OSError:
        os.close(handle)
        end()
        return -1, "", _nothing
    return handle, path, end


def _map(path: str, token: bytes, regions: Regions) -> mmap.mmap | None:
    """The mapping, if what lies at that path is what the first rank meant."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(handle).st_size != regions.nbytes or os.pread(handle, 8, regions.nbytes - 8) != token:
            return None
        return mmap.mmap(handle, regions.nbytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(handle)


def _reserver(handle: int) -> Callable[[int, int], None]:
    def reserve(start: int, length: int) -> None:
        os.posix_fallocate(handle, start, length)

    return reserve


def _node() -> str:
    """What is equal for ranks that may share memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot, space = "", ""
    return f"{socket.gethostname()} {boot} {space}"


def _nothing() -> None:
    return None


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to
