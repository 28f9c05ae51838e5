"""What a reader's function does with a communicator: whom it talks to, and what it begins and never waits for.

A communicator's observer is told of each message twice: when it is begun, and when it has been waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilemesh.comm import Communicator
from tilemesh.comm.runtime.observe import BEGIN, TEST, WAIT, Note, Seen

_NO_MESSAGE = -1  # the peer that an observer is told for what is not a message


@dataclass(frozen=True)
class WatchedCalls:
    """What one rank did."""

    peers: frozenset[int]
    """The ranks it exchanged messages with."""
    used_collective: bool
    unfinished: str
    """What it began and neither waited for nor tested: "send", "receive" or empty."""

    @property
    def why_unfinished(self) -> str:
        """What may happen to what was never waited for; empty if everything was."""
        return {
            "": "",
            "send": "but a send was begun and never waited for. The array may be changed as soon as the function has "
            "returned, and the other rank would then get a mixture: keep what isend returns and call its wait().",
            "receive": "this time, but a receive was never waited for, so nothing says that it was there: keep what "
            "irecv returns and call its wait().",
        }[self.unfinished]


def watched(comm: Communicator, function: Callable[[], Any]) -> tuple[Any, WatchedCalls]:
    """Call a function; its result, and what it did with the communicator on this rank."""
    kinds, calls = set[Seen](), Counter[tuple[str, str]]()

    def observer(seen: Seen) -> Note:
        kinds.add(seen)

        def count(began_s: float, ended_s: float, times: int) -> None:
            calls[seen.operation, seen.phase] += times

        return count

    detach = comm.observe(observer, every=1)
    result = function()
    detach()
    # Whoever asks with test() until it is done has waited, too.
    left = [name for name in ("send", "recv") if calls[name, BEGIN] > calls[name, WAIT] and not calls[name, TEST]]
    peers = frozenset(seen.peer for seen in kinds)
    unfinished = {"send": "send", "recv": "receive"}[left[0]] if left else ""
    return result, WatchedCalls(peers - {_NO_MESSAGE}, _NO_MESSAGE in peers, unfinished)
