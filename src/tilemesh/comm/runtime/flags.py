"""How ranks of one node meet: one flag a rank, written by that rank alone, in memory that all of them map.

A flag is a counter that only grows. To meet, a rank raises its own and reads the others' until all have come as far:
no lock, no message, nothing to repair when a rank is killed. What a rank wrote before it met the others must be
visible to them afterwards, and what it read must have been read. On x86 plain loads and stores already keep that
order (only a load may pass an earlier store, and no decision here hangs on that). Elsewhere a fence stands before a
flag is raised and after the others' have been seen.

The fence is the release and the acquisition of a lock that nobody else knows. CPython makes them of an atomic operation
with release order and one with acquire order (`sem_post`, `sem_trywait`; since 3.14 of sequentially consistent ones).
The AArch64 memory model orders a release before every later acquire in program order (RCsc), everything earlier before
the release, and everything later after the acquire; so all that came before is ordered before all that follows. Other
architectures have weaker releases: there `can_fence` says no, and ranks send messages instead.
`tests/mpi/litmus_script.py` tries it: without the fence stores are seen to pass loads, with it never.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tilemesh.core.errors import RunError

if TYPE_CHECKING:
    from tilemesh.comm.runtime.watch import Watch

LINE = 128  # bytes from flag to flag: a cache line, and the neighbour that processors fetch with it
WORDS = LINE // 8

# Words of a rank's line.
EPOCH, PID, SOURCE, TARGET, ARRIVED, ANSWER = range(6)

RANK_BITS = 12  # of the common word: who has published, below the number of the meeting

_SPIN = 2000  # looks before giving the core away, where every rank has one of its own
_FEW = 20  # the same, where two share one
_NAP_AFTER_S = 0.004  # a wait this long is no part of a collective: somebody computes, and should have the core
_NAP_S = 0.0001
_CHECK_EVERY_S = 0.5  # how often a long wait looks whether the others are still alive

_ORDERED = ("x86_64", "amd64", "i686")
_FENCED = ("aarch64", "arm64")


def can_fence(machine: str | None = None) -> bool:
    """Whether this processor's order of loads and stores is known to be kept here."""
    return (machine or platform.machine()).lower() in (*_ORDERED, *_FENCED)


def make_fence(machine: str | None = None) -> Callable[[], object] | None:
    """What orders all loads and stores before it against all after it; None where the processor does so by itself."""
    if (machine or platform.machine()).lower() in _ORDERED:
        return None
    release, acquire = fence_parts()

    def fence() -> None:
        release()
        acquire()

    return fence


def fence_parts() -> tuple[Callable[[], object], Callable[[], object]]:
    """The two calls that are a fence, one after the other, for whoever cannot afford a function around them."""
    lock = threading.Lock()
    lock.acquire()
    return lock.release, lock.acquire


def _sleep_0() -> None:
    time.sleep(0)


class Flags:
    """The flags of the ranks of one node. `memory`: a line a rank and one more, zero in the beginning.

    `pause`: gives the core to whoever needs it; `cores`: where ranks outnumber them, a rank gives its own away at once.
    """

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        ranks: int,
        *,
        cores: int,
        pause: Callable[[], object] | None = None,
        pids: bool = True,
    ) -> None:
        self.words = memory.cast("B").cast("Q")
        self.rank = rank
        self.ranks = ranks
        self.mine = rank * WORDS
        # Begin with the next rank: ranks that all waited for rank 0 first would all be woken by it alone.
        self.others = [(rank + k) % ranks * WORDS for k in range(1, ranks)]
        self.fence = make_fence()
        self.full_fence = make_fence("any") or _sleep_0  # also where stores are in order: a load may pass a store there
        self.common = ranks * WORDS
        yields: Callable[[], object] = getattr(os, "sched_yield", _sleep_0)
        self.pause = yields if pause is None else pause
        self.spin = _SPIN if ranks <= cores else 0
        # Of a small call, where two ranks share a core: those of the other core are about to come.
        self.looks = range(_FEW if cores < ranks <= 2 * cores else self.spin)
        self.epoch = 0
        self.has_pids = pids
        self.watch: Watch | None = None
        self.doing = ("meeting", 0)  # what a ready call does, for the watchdog
        self.words[self.mine + PID] = os.getpid()

    def raise_(self) -> int:
        """Say that this rank has come to its next meeting; returns that meeting's number."""
        if self.fence is not None:
            self.fence()
        epoch = self.epoch = self.epoch + 1
        self.words[self.mine] = epoch
        return epoch

    def have_come(self, epoch: int) -> bool:
        """Whether all have come to that meeting. After True, what they wrote before is there to be read."""
        words = self.words
        for other in self.others:
            if words[other] < epoch:
                return False
        if self.fence is not None:
            self.fence()
        return True

    def meet(self) -> None:
        """`raise_`, then wait for all: the fast way, for a blocking call."""
        fence, words = self.fence, self.words
        if fence is not None:
            fence()
        epoch = self.epoch = self.epoch + 1
        words[self.mine] = epoch
        for other in self.others:
            if words[other] < epoch:
                self._wait(other, epoch)
        if fence is not None:
            fence()

    def wait(self, epoch: int) -> None:
        """Until all have come to that meeting."""
        for other in self.others:
            if self.words[other] < epoch:
                self._wait(other, epoch)
        if self.fence is not None:
            self.fence()

    # Whoever comes last does something for all -----------------------------------------------------------------------

    def is_last(self) -> bool:
        """Raise one's flag; True when all others' are up. At least one rank is told so, several that come together may.

        Each must see the other's flag if that was raised first: hence a fence between a store and a load, which no
        processor orders by itself.
        """
        if self.fence is not None:
            self.fence()
        epoch = self.epoch = self.epoch + 1
        words = self.words
        words[self.mine] = epoch
        self.full_fence()
        for other in self.others:
            if words[other] < epoch:
                return False
        if self.fence is not None:
            self.fence()
        return True

    def publish(self) -> None:
        """For a rank that was last: what it wrote is there for all. Of several that were, any will do."""
        if self.fence is not None:
            self.fence()
        self.words[self.common] = self.epoch << RANK_BITS | self.rank

    def published(self) -> int:
        """Who has published for the present meeting; -1: nobody yet."""
        word = self.words[self.common]
        if word >> RANK_BITS < self.epoch:
            return -1
        if self.fence is not None:
            self.fence()
        return int(word & ((1 << RANK_BITS) - 1))

    def await_published(self, doing: tuple[str, int] | None = None) -> int:
        wanted = self.epoch << RANK_BITS
        if self.words[self.common] < wanted:
            self._wait(self.common, wanted, doing)
        return self.published()

    def _wait(self, other: int, epoch: int, doing: tuple[str, int] | None = None) -> None:
        """`doing`: what a ready call does that has not said so before."""
        words, pause = self.words, self.pause
        for _ in range(self.spin):
            if words[other] >= epoch:
                return
        for _ in range(64):
            pause()
            if words[other] >= epoch:
                return
        # Only a wait that lasts is worth telling the watchdog of: a ready call notes nothing before.
        watch = self.watch if self.watch is not None and self.watch.note is None else None
        if watch is not None:
            watch.enter(watch.sequence, *(doing or self.doing))
        try:
            self._wait_long(other, epoch)
        finally:
            if watch is not None:
                watch.leave()

    def _wait_long(self, other: int, epoch: int) -> None:
        words, pause = self.words, self.pause
        began = checked = time.monotonic()
        while words[other] < epoch:
            pause()
            now = time.monotonic()
            if now - began > _NAP_AFTER_S:
                time.sleep(_NAP_S)
            if now - checked > _CHECK_EVERY_S:
                checked = now
                self.require_alive()

    def require_alive(self) -> None:
        """Raise if a rank of this node is gone: nobody else would ever say so."""
        if not self.has_pids:
            return
        for rank in range(self.ranks):
            pid = self.words[rank * WORDS + PID]
            if pid and not os.path.exists(f"/proc/{pid}"):
                raise RunError(f"rank {rank} of this node (process {pid}) is gone while others wait for it")

    def get(self, rank: int, word: int) -> int:
        return self.words[rank * WORDS + word]

    def put(self, word: int, value: int) -> None:
        """Into this rank's own line; the others see it after the next meeting."""
        self.words[self.mine + word] = value
