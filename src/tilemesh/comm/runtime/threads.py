"""Ranks as threads of one process: for tests, notebooks, and for a single process (one rank).

A message is matched when both sides have posted it, and copied from the sender's memory straight into the receiver's:
the strictest of semantics, so that what works here does not lean on anybody's hidden buffers.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from tilemesh.comm.runtime.transport import TAGS, Bytes, Caps, Common, Message, NativeCall, Sent, Token, wrong_size
from tilemesh.core.errors import RunError
from tilemesh.core.units import format_bytes

T = TypeVar("T")

_GRACE_S = 3.0  # after a failure, ranks that do not end by themselves are left behind: a thread cannot be stopped


class World:
    """What the ranks of one process share: mailboxes, memory, and the reason why it all ended, if it did."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.posted: dict[tuple[Any, ...], deque[tuple[Message, _Pending]]] = defaultdict(deque)
        self.commons: dict[tuple[str, int], _Shared] = {}
        self.failure: str | None = None
        self.failed_at: float | None = None

    def fail(self, reason: str) -> None:
        with self.changed:
            self.failure = self.failure or reason
            self.failed_at = self.failed_at or time.monotonic()
            self.changed.notify_all()

    def require_whole(self) -> None:
        if self.failure is not None:
            raise RunError(self.failure)


class _Pending:
    """The messages of one post that have not been matched yet."""

    def __init__(self, world: World, count: int) -> None:
        self.world = world
        self.left = count

    def test(self) -> bool:
        if self.left:
            self.world.require_whole()
        return self.left == 0

    def wait(self) -> None:
        with self.world.changed:
            while self.left:
                self.world.require_whole()
                self.world.changed.wait()


class ThreadTransport:
    name = "threads"
    caps = Caps(arena=True, crowded=True)  # threads of one interpreter take turns, whatever the cores
    device = None
    staged_because = "its ranks are threads of one process"
    tags = TAGS

    def __init__(self, world: World, rank: int, size: int, label: str = "world") -> None:
        self.world = world
        self.rank = rank
        self.size = size
        self.names: Sequence[int] = range(size)
        self.label = label
        self.sent = Sent()
        self._commons = 0

    def view(self, region: Bytes) -> Bytes:
        return region

    def post(self, messages: Sequence[Message], tag: int, *, exact: bool = False) -> Token:
        pending = _Pending(self.world, len(messages))
        with self.world.changed:
            self.world.require_whole()
            for message in messages:
                self._match(message, pending, tag)
            self.world.changed.notify_all()
        return pending

    def _match(self, message: Message, pending: _Pending, tag: int) -> None:
        if message.is_send:
            self.sent.messages += 1
            self.sent.nbytes += message.nbytes
        pair = (self.rank, message.peer) if message.is_send else (message.peer, self.rank)
        mailbox = (self.label, *pair, tag, not message.is_send)
        waiting = self.world.posted.get(mailbox)
        if not waiting:
            self.world.posted[self.label, *pair, tag, message.is_send].append((message, pending))
            return
        other, others = waiting.popleft()
        if not waiting:
            del self.world.posted[mailbox]  # tags go on and on: empty mailboxes would pile up
        source, target = (message, other) if message.is_send else (other, message)
        if source.nbytes != target.nbytes:
            names = [self.names[rank] for rank in pair]
            self.world.fail(wrong_size(names[0], source.nbytes, names[1], target.nbytes))
            self.world.require_whole()
        target.view[:] = source.view
        pending.left -= 1
        others.left -= 1

    def lacks(self, collective: str, dtype: str, op: str, uneven: bool) -> str | None:
        return "threads have no library of collectives underneath"

    def native(self, call: NativeCall) -> Token:
        raise RunError(f"native {call.collective}: threads have no library of collectives underneath")

    def ready_native(self, call: Any, x: Any, pending: Sequence[object], watch: Any) -> None:
        return None

    def common(self, nbytes: int) -> Common | None:
        self._commons += 1
        world = self.world
        with world.changed:
            key = (self.label, self._commons)
            if key not in world.commons:
                world.commons[key] = _Shared(nbytes, self.size)
            shared = world.commons[key]
            shared.users += 1
            if shared.users == self.size:
                del world.commons[key]  # everybody has it: the list need not keep it alive

        def pause() -> None:
            world.require_whole()
            time.sleep(0)

        return Common(shared.memory, pause)

    def split(self, members: Sequence[int], label: str) -> ThreadTransport:
        return ThreadTransport(self.world, members.index(self.rank), len(members), label)

    def close(self) -> None:
        return None

    def abort(self, reason: str) -> NoReturn:
        self.world.fail(reason)
        raise RunError(reason)


class _Shared:
    def __init__(self, nbytes: int, ranks: int) -> None:
        try:
            self.memory = np.zeros(nbytes, np.uint8)  # taken from the machine when written to
        except MemoryError:
            words = f"{ranks} ranks cannot share {format_bytes(nbytes)} of address space"
            raise RunError(f"{words}: raise the limit (`ulimit -v`)") from None
        self.users = 0


def run_ranks(ranks: int, main: Callable[[ThreadTransport], T]) -> list[T]:
    """`main(transport)` in one thread a rank; results in rank order. The first exception ends all and is raised."""
    world = World()
    results: list[Any] = [None] * ranks
    errors: list[tuple[int, BaseException]] = []
    ended: set[int] = set()

    def body(rank: int) -> None:
        try:
            results[rank] = main(ThreadTransport(world, rank, ranks))
        except BaseException as error:
            errors.append((rank, error))
            world.fail(f"rank {rank} raised {type(error).__name__}: {error}")
        finally:
            with world.changed:
                ended.add(rank)
                world.changed.notify_all()

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(ranks)]
    try:
        for thread in threads:
            thread.start()
        _wait_for_all(ended, ranks, world)
    except BaseException as error:  # Ctrl-C, while the ranks run on: they end at their next call
        world.fail(f"interrupted by {type(error).__name__}")
        _wait_for_all(ended, sum(thread.ident is not None for thread in threads), world)
        raise
    if errors:
        raise errors[0][1]
    world.require_whole()
    return results


def _wait_for_all(ended: set[int], started: int, world: World) -> None:
    """Not by `Thread.join`: one that Ctrl-C interrupts takes its thread for ended from then on (CPython 3.11)."""
    with world.changed:
        while len(ended) < started and not (world.failed_at and time.monotonic() > world.failed_at + _GRACE_S):
            world.changed.wait(0.1)
