"""Global and shared memory as the counting interpreter sees them: values, and what each access costs.

An access is one instruction of all threads of a grid at once: an array of element indices, and a mask of the threads
that take part. Counted are elements (what the formulas speak of), requests (one for each warp that takes part), for
global memory the 32-byte sectors that each request touches, and for shared memory its wavefronts: the passes over the
32 banks that it needs. Shared memory also finds races: two threads that touch one element, one of them writing, with
no barrier between.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilemesh.core.errors import RunError

Array = NDArray[Any]
WARP = 32
SECTOR, LINE = 32, 128  # bytes
BANKS = 32
BANK_BYTES = 4
_NOBODY, _SEVERAL = -1, -2
Observer = Callable[[str, Array], None]
"""Told of every access to global memory: the array's name and the elements, in the order of threads."""


@dataclass
class Accesses:
    """What the accesses of one kind (reads or writes of one array) came to."""

    elements: int = 0
    bytes: int = 0
    requests: int = 0
    passes: int = 0  # global: sectors; shared: wavefronts
    lines: int = 0  # global: 128-byte lines, one of which a multiprocessor's L1 looks up in a cycle
    fewest: int = 0  # passes, had neighbouring threads touched neighbouring elements

    def count_single(self, size: int) -> None:
        """A single thread's access to one element."""
        self.elements += 1
        self.bytes += size
        self.requests += 1
        self.passes += 1
        self.lines += 1
        self.fewest += 1

    def __add__(self, other: "Accesses") -> "Accesses":
        return Accesses(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Lanes:
    """The threads of a grid in one row: block after block, each padded to whole warps."""

    grid: tuple[int, int]
    block: tuple[int, int]

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1]

    @property
    def padded(self) -> int:
        return -(-self.threads // WARP) * WARP

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def count(self) -> int:
        return self.blocks * self.padded

    def thread_of(self) -> Array:
        """The index of each lane's thread within its block."""
        return np.tile(np.arange(self.padded), self.blocks)

    def block_of(self) -> Array:
        return np.repeat(np.arange(self.blocks), self.padded)

    def active(self) -> Array:
        """False for lanes that only fill a warp."""
        return self.thread_of() < self.threads

    def name(self, lane: int) -> str:
        return f"thread {lane % self.padded} of block {lane // self.padded}"


class _SingleThread:
    """Accesses of a grid that is a single thread, a loop nest of a CPU: counted as others are, and a hundred times
    faster. One thread cannot race with itself."""

    name: str
    flat: Array
    read: Accesses
    written: Accesses
    observer: Observer | None = None

    def load_one(self, at: int) -> Any:
        self._one(self.read, at)
        return self.flat[at]

    def store_one(self, at: int, value: Any) -> None:
        self._one(self.written, at)
        self.flat[at] = value

    def _one(self, accesses: Accesses, at: int) -> None:
        if not 0 <= at < self.flat.size:
            raise RunError(f"{self.name}[{at}] is touched, which has {self.flat.size} elements")
        if self.observer is not None:
            self.observer(self.name, np.array([at]))
        accesses.count_single(self.flat.itemsize)


@dataclass
class GlobalArray(_SingleThread):
    name: str
    data: Array  # one-dimensional
    lanes: Lanes
    read: Accesses = field(default_factory=Accesses)
    written: Accesses = field(default_factory=Accesses)
    observer: Observer | None = None

    def __post_init__(self) -> None:
        self.flat = self.data

    def load(self, at: Array, mask: Array, width: int = 1) -> Array:
        """The elements at `at` for the lanes in `mask`; (width, lanes) where a lane loads several."""
        self._count(self.read, at, mask, width)
        safe = np.where(mask, at, 0)
        return self.data[safe] if width == 1 else self.data[safe + np.arange(width)[:, None]]

    def store(self, at: Array, values: Array, mask: Array, width: int = 1) -> None:
        self._count(self.written, at, mask, width)
        if width == 1:
            self.data[at[mask]] = np.broadcast_to(values, at.shape)[mask]
        else:
            self.data[(at + np.arange(width)[:, None])[:, mask]] = values[:, mask]

    def _count(self, traffic: Accesses, at: Array, mask: Array, width: int) -> None:
        _inside(self.name, at, mask, width, self.data.size, self.lanes)
        if self.observer is not None:
            self.observer(self.name, at[mask])
        size = self.data.itemsize
        sectors = distinct(np.where(mask, at * size // SECTOR, -1).reshape(-1, WARP))
        taking_part = mask.reshape(-1, WARP).sum(1)
        traffic.elements += int(mask.sum()) * width
        traffic.bytes += int(mask.sum()) * width * size
        traffic.requests += int((taking_part > 0).sum())
        traffic.passes += int(sectors.sum())
        # Lanes that move 16 bytes are served in quarters of a warp.
        parts = np.where(mask, at * size // LINE, -1).reshape(-1, WARP // _phases(width * size))
        traffic.lines += int(distinct(parts).sum())
        traffic.fewest += int((-(-taking_part * width * size // SECTOR)).sum())


@dataclass
class SharedArray(_SingleThread):
    """One array for each block. `barrier` begins a new epoch: accesses of different epochs are in order."""

    name: str
    lengths: tuple[int, ...]
    data: Array  # (blocks, elements)
    lanes: Lanes
    read: Accesses = field(default_factory=Accesses)
    written: Accesses = field(default_factory=Accesses)
    epoch: int = 0

    def __post_init__(self) -> None:
        size = self.data.size
        self.flat = self.data.reshape(-1)
        self.writer, self.written_in = np.full(size, _NOBODY), np.full(size, -1)
        self.reader, self.read_in = np.full(size, _NOBODY), np.full(size, -1)
        self.block_at = self.lanes.block_of() * self.data.shape[1]

    def barrier(self) -> None:
        self.epoch += 1

    def load(self, at: Array, mask: Array, width: int = 1) -> Array:
        self._count(self.read, at, mask, width)
        places = self._places(at, width)
        self._reading(places, mask)
        values = self.flat[np.where(mask, places, 0)]
        return values[0] if width == 1 else values

    def store(self, at: Array, values: Array, mask: Array, width: int = 1) -> None:
        self._count(self.written, at, mask, width)
        self.writing(at, mask, width)
        self.place(at, values, mask, width)

    def writing(self, at: Array, mask: Array, width: int) -> None:
        """Checks that no other thread touched these elements since the barrier, and notes who writes them."""
        places = self._places(at, width)[:, mask].reshape(-1)
        me = np.tile(np.flatnonzero(mask), width)
        others_wrote = (self.written_in[places] == self.epoch) & (self.writer[places] != me)
        others_read = (self.read_in[places] == self.epoch) & (self.reader[places] != me)
        self.writer[places], self.written_in[places] = me, self.epoch
        both_write = self.writer[places] != me  # two lanes of this very access
        for clash, word in ((others_wrote, "wrote"), (others_read, "read"), (both_write, "writes")):
            if clash.any():
                self._race(int(np.flatnonzero(clash)[0]), me, places, f"writes {{}}, which another thread {word}")

    def place(self, at: Array, values: Array, mask: Array, width: int) -> None:
        places = self._places(at, width)
        self.flat[places[:, mask]] = np.broadcast_to(values, places.shape)[:, mask]

    def count_store(self, at: Array, mask: Array, width: int) -> None:
        self._count(self.written, at, mask, width)

    def _reading(self, places: Array, mask: Array) -> None:
        width = places.shape[0]
        chosen = places[:, mask].reshape(-1)
        me = np.tile(np.flatnonzero(mask), width)
        clash = (self.written_in[chosen] == self.epoch) & (self.writer[chosen] != me)
        if clash.any():
            self._race(int(np.flatnonzero(clash)[0]), me, chosen, "reads {}, which another thread wrote")
        before = np.where(self.read_in[chosen] == self.epoch, self.reader[chosen], me)
        self.reader[chosen], self.read_in[chosen] = me, self.epoch
        several = (before != me) | (self.reader[chosen] != me)
        self.reader[chosen[several]] = _SEVERAL

    def _race(self, which: int, me: Array, places: Array, what: str) -> None:
        at = np.unravel_index(int(places[which]) % self.data.shape[1], self.lengths)
        element = self.name + "".join(f"[{index}]" for index in at)
        raise RunError(
            f"race: {self.lanes.name(int(me[which]))} {what.format(element)} with no __syncthreads() between"
        )

    def _places(self, at: Array, width: int) -> Array:
        places: Array = (self.block_at + at) + np.arange(width)[:, None]
        return places

    def _count(self, traffic: Accesses, at: Array, mask: Array, width: int) -> None:
        _inside(self.name, at, mask, width, self.data.shape[1], self.lanes)
        size = self.data.itemsize
        traffic.elements += int(mask.sum()) * width
        traffic.bytes += int(mask.sum()) * width * size
        traffic.requests += int(mask.reshape(-1, WARP).any(1).sum())
        traffic.passes += int(wavefronts(at * size, mask, width * size).sum())
        groups = mask.reshape(-1, WARP // _phases(width * size))
        traffic.fewest += int(groups.any(1).sum())


def _inside(name: str, at: Array, mask: Array, width: int, size: int, lanes: Lanes) -> None:
    outside = mask & ((at < 0) | (at + width > size))
    if outside.any():
        lane = int(np.flatnonzero(outside)[0])
        raise RunError(f"{lanes.name(lane)} touches {name}[{int(at[lane])}], which has {size} elements")
    if width > 1 and (at[mask] % width).any():
        lane = int(np.flatnonzero(mask & (at % width != 0))[0])
        raise RunError(
            f"{lanes.name(lane)} touches {width} elements from {name}[{int(at[lane])}]: not aligned to their size"
        )


def distinct(keys: Array) -> Array:
    """How many different keys each line has; keys below 0 are nobody's."""
    ordered = np.sort(keys, axis=1)
    new = np.ones(ordered.shape, bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    counted: Array = (new & (ordered >= 0)).sum(1)
    return counted


def _phases(bytes_each: int) -> int:
    """A warp that moves 8 bytes a thread takes turns in halves, with 16 bytes in quarters."""
    return max(1, bytes_each // BANK_BYTES)


def wavefronts(addresses: Array, mask: Array, bytes_each: int) -> Array:
    """Passes over the banks that each group of threads needs: the most different words that one bank is asked for."""
    words = max(1, bytes_each // BANK_BYTES)
    group = WARP // _phases(bytes_each)
    first = np.where(mask, addresses // BANK_BYTES, -1).reshape(-1, group)
    words_read = np.where(first[:, :, None] < 0, -1, first[:, :, None] + np.arange(words)).reshape(len(first), -1)
    ordered = np.sort(words_read, axis=1)
    new = np.ones(ordered.shape, bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    new &= ordered >= 0
    bank = np.arange(len(first))[:, None] * BANKS + np.where(new, ordered, 0) % BANKS
    counted = np.bincount(bank[new], minlength=len(first) * BANKS)
    most: Array = counted.reshape(-1, BANKS).max(1)
    return most
