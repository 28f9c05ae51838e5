"""How ranks of one node meet: one flag per rank, written by that rank alone, in memory that all of them map.

A flag is a counter that only grows. To meet, a rank raises its own and reads the others' until all have come as far:
no lock, no message, nothing to repair when a rank is killed. What a rank wrote before it met the others must be
visible to them afterwards, and what it read must have been read. On x86 plain loads and stores already keep that
order (only a load may pass an earlier store, and no decision here hangs on that). Elsewhere a fence stands before a
flag is raised and after the others' have been seen.

Below the number of the meeting a flag holds the mark of the call that its rank makes (20 bits of a checksum of its
words). Ranks that meet look whether the other flags are equal to their own, which costs no more than to look whether
they have come. If they are not, the ranks make different calls, and each of them notices: nobody gets past a meeting
without having seen all flags of it, or the word of one that has. They then tell each other their calls and raise.

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
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from tilemesh.comm.runtime.transport import Token
from tilemesh.core.errors import RunError

if TYPE_CHECKING:
    from tilemesh.comm.runtime.watch import Watch

LINE = 128  # bytes from flag to flag: a cache line, and the neighbour that processors fetch with it
WORDS = LINE // 8

# Words of a rank's line.
EPOCH, PID, SOURCE, TARGET, ARRIVED, ANSWER = range(6)

MARK_BITS = 20  # of a flag: the mark of a call, below the number of the meeting; of the common word: who has published
MEETING = 1 << MARK_BITS  # from one meeting to the next
MARK_MASK = MEETING - 1
DISAGREED = MARK_MASK  # in place of a rank that has published: the ranks of this meeting make different calls

_SPIN = 2000  # looks before giving the core away, where every rank has one of its own
_FEW = 20  # the same, where two share one
_NAP_AFTER_S = 0.004  # a wait this long is not part of a collective: somebody computes, and should have the core
_NAP_S = 0.0001
_CHECK_EVERY_S = 0.5  # how often a long wait looks whether the others are still alive

_ORDERED = ("x86_64", "amd64", "i686")
_FENCED = ("aarch64", "arm64")


class CallDigest(NamedTuple):
    """What a rank calls, as the others must: the collective, its bytes, all of it in words, and their mark."""

    collective: str
    nbytes: int
    words: str
    mark: int

    @classmethod
    def of(cls, collective: str, nbytes: int, words: str) -> CallDigest:
        return cls(collective, nbytes, words, zlib.crc32(words.encode()) & MARK_MASK)


NO_CALL = CallDigest("meeting", 0, "", 0)


def _no_disagreement() -> Iterator[Token]:
    raise RunError("the ranks make different calls")


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
    """The flags of the ranks of one node. `memory`: a line per rank and one more, zero in the beginning.

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
        self.different = self.common + 1  # the meeting to which ranks came with different calls, if there was one
        yields: Callable[[], object] = getattr(os, "sched_yield", _sleep_0)
        self.pause = yields if pause is None else pause
        self.spin = _SPIN if ranks <= cores else 0
        # Of a small call, where two ranks share a core: those of the other core are about to come.
        self.looks = range(_FEW if cores < ranks <= 2 * cores else self.spin)
        self.epoch = 0  # number of the present meeting, in units of `MEETING`
        self.digest = NO_CALL  # what this rank calls at present
        self.disagreement: Callable[[], Iterator[Token]] = _no_disagreement  # steps that end in an error on every rank
        self.has_pids = pids
        self.watch: Watch | None = None
        self.words[self.mine + PID] = os.getpid()

    def raise_(self) -> int:
        """Say that this rank has come to its next meeting; returns that meeting's number."""
        if self.fence is not None:
            self.fence()
        epoch = self.epoch = self.epoch + MEETING
        self.words[self.mine] = epoch | self.digest.mark
        return epoch

    def have_come(self, epoch: int) -> bool:
        """Whether all have come to that meeting. After True, what they wrote before is there to be read."""
        words = self.words
        for other in self.others:
            if words[other] < epoch:
                return words[self.different] == epoch  # then nobody need be waited for
        if self.fence is not None:
            self.fence()
        return True

    def meet(self) -> None:
        """`raise_`, then wait for all and compare calls: the fast way, for a blocking call."""
        fence, words = self.fence, self.words
        if fence is not None:
            fence()
        epoch = self.epoch = self.epoch + MEETING
        words[self.mine] = word = epoch | self.digest.mark
        for other in self.others:
            if words[other] != word and words[other] - epoch < MEETING:
                self.await_same(other, word)
        if fence is not None:
            fence()

    def wait(self, epoch: int) -> None:
        """Until all have come to that meeting."""
        for other in self.others:
            if self.words[other] < epoch:
                self._until(other, epoch)
        if self.fence is not None:
            self.fence()

    # Different calls ---------------------------------------------------------------------------------------------

    def await_same(self, other: int, word: int, digest: CallDigest | None = None) -> None:
        """Until that rank has come to the meeting of this flag; raises on all ranks if it makes another call.

        `asked`: what a ready call asks for that has not said so before. A rank that is further on had seen this flag.
        """
        epoch = word & ~MARK_MASK
        if self.words[other] < epoch:
            self._until(other, epoch, digest)
        there = self.words[other]  # read once: it may go on at any moment
        if there != word and there - epoch < MEETING:
            self.disagree(digest)

    def differs(self) -> bool:
        """Whether a rank has come to the present meeting with another call. If so, all others learn it."""
        words, epoch = self.words, self.epoch
        word = words[self.mine]
        for other in self.others:
            there = words[other]  # read once: it may go on at any moment
            if there != word and 0 <= there - epoch < MEETING:
                words[self.different] = epoch
        return words[self.different] == epoch

    def disagree(self, digest: CallDigest | None = None) -> None:
        """Blocking: tell the others, and raise with what each rank asked for."""
        if digest is not None:
            self.digest = digest
        self.words[self.different] = self.epoch
        for token in self.disagreement():
            token.wait()

    # Whoever comes last does something for all -----------------------------------------------------------------------

    def is_last(self) -> bool:
        """Raise one's flag; True when all others' are up. At least one rank is told so, several that come together may.

        Each must see the other's flag if that was raised first: hence a fence between a store and a load, which no
        processor orders by itself.
        """
        if self.fence is not None:
            self.fence()
        epoch = self.epoch = self.epoch + MEETING
        words = self.words
        words[self.mine] = epoch | self.digest.mark
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
        self.words[self.common] = self.epoch | self.rank

    def published(self) -> int:
        """Who has published for the present meeting; -1: nobody yet; `DISAGREED`: the ranks make different calls."""
        word = self.words[self.common]
        if word < self.epoch:
            # A word of its own: a slow rank may still have to read the common one of the meeting before.
            return DISAGREED if self.words[self.different] == self.epoch else -1
        if self.fence is not None:
            self.fence()
        return int(word & MARK_MASK)

    def await_published(self, digest: CallDigest | None = None) -> int:
        if self.words[self.common] < self.epoch:
            self._until(self.common, self.epoch, digest)
        rank = self.published()
        if rank == DISAGREED:
            self.disagree(digest)
        return rank

    def _until(self, other: int, epoch: int, digest: CallDigest | None = None) -> None:
        """Until a word has come so far, or the ranks of the meeting are known to make different calls."""
        words, pause = self.words, self.pause
        for _ in range(self.spin):
            if words[other] >= epoch:
                return
        for _ in range(64):
            pause()
            if words[other] >= epoch or words[self.different] == epoch:
                return
        # Only a wait that lasts is worth telling the watchdog of: a ready call notes nothing before.
        watch = self.watch if self.watch is not None and self.watch.note is None else None
        if watch is not None:
            doing = digest or self.digest
            watch.enter(watch.sequence, doing.collective, doing.nbytes)
        try:
            self._wait_long(other, epoch)
        finally:
            if watch is not None:
                watch.leave()

    def _wait_long(self, other: int, epoch: int) -> None:
        words, pause = self.words, self.pause
        began = checked = time.monotonic()
        while words[other] < epoch and words[self.different] != epoch:
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
