"""What a transport must be able to do: move regions of bytes between ranks, and nothing about what they mean.

`post` starts messages and returns a token; everything else waits through tokens, so that the same program runs
blocking or in the background. A transport may also offer the library's own collectives (`native`) and memory that
ranks share (`arena`); without them those algorithms are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

TAGS = 1_000_000
MIRROR = "mirror"  # the transport whose other ranks are copies of this one (`mirror.py`)
TAG_KINDS = 6  # of messages that a communicator's own tags keep apart

Bytes = NDArray[np.uint8]
Array = NDArray[Any]
ReadyCall: TypeAlias = Callable[[Any, Any], Any]  # a call kept ready: (x, out) to its result, or NotImplemented


class Message(NamedTuple):
    """One side of a point-to-point message; `view` is what the transport's own `view` made of the region."""

    is_send: bool
    peer: int
    view: Any
    nbytes: int


class Token(Protocol):
    """Something under way."""

    def test(self) -> bool: ...

    def wait(self) -> None: ...


@dataclass(frozen=True)
class Caps:
    """What a transport has beyond messages. `native`: collectives of its library; `arena`: shared memory.

    `crowded`: ranks outnumber the cores that they may use together (looked at where there is an arena).

    `spins`: who waits for a message keeps a core busy.
    `moves_alone`: a message that was posted arrives without anybody looking at it.
    `moved_by_threads`: it arrives while a thread beside the rank's own looks at it, and only then.
    `tells_sizes`: an exact `post` notices a message of another size; elsewhere the size has to be sent along.
    `saturating`: integer dtypes whose sums the library may cut off at the largest value instead of wrapping around.
    """

    native: frozenset[str] = frozenset()
    arena: bool = False
    crowded: bool = False
    tells_sizes: bool = True
    moves_alone: bool = False
    moved_by_threads: bool = False
    spins: bool = False
    saturating: frozenset[str] = frozenset()


@dataclass(frozen=True)
class NativeCall:
    """A collective for the library underneath: flat arrays, and where each rank's part lies.

    `counts`, `received`: elements of each rank's block (sent, and for all_to_all received); empty where there are none.
    `private`: what this rank knows of them, the others may not.
    """

    collective: str
    source: Array
    target: Array
    op: str = "sum"
    root: int = 0
    counts: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    private: bool = False

    @property
    def is_even(self) -> bool:
        """Whether all blocks are known to be equally long, by every rank alike."""
        return not self.private and len(set(self.counts)) == 1


class Common(NamedTuple):
    """Memory that the ranks have in common anyway, because they are threads; `pause` while one waits in it."""

    memory: Bytes
    pause: Callable[[], object]


@dataclass
class Sent:
    """What this rank has sent point to point, counted where it leaves."""

    messages: int = 0
    nbytes: int = 0


class Transport(Protocol):
    name: str
    rank: int
    size: int
    caps: Caps
    sent: Sent
    device: Any  # collectives on GPU memory (`device.DeviceCollectives`), or None
    staged_because: str  # why there are none, and GPU tensors go through the host's memory
    tags: int  # a user's tags lie below this, those of collectives in a few times as many above
    names: Sequence[int]  # what its ranks are called in messages to people: their numbers in the world

    def view(self, region: Bytes) -> Any: ...

    def post(self, messages: Sequence[Message], tag: int, *, exact: bool = False) -> Token:
        """Start messages. `exact`: nobody has proved that both sides agree on the size, so that must be checked."""

    def lacks(self, collective: str, dtype: str, op: str, uneven: bool) -> str | None:
        """Why the library's own collective cannot serve such a call; None when it can. The same on every rank."""

    def native(self, call: NativeCall) -> Token:
        """The library's own collective; it starts when the token is first tested or waited for."""

    def ready_native(self, call: Any, x: Array, pending: Sequence[object], watch: Any) -> ReadyCall | None:
        """The library's own collective kept ready for calls like this `asked.Call`; None: there is no quicker way.

        `pending`: what is under way, during which the quick way is not open; `watch`: the communicator's.
        """

    def common(self, nbytes: int) -> Common | None:
        """Memory that all ranks have without asking the system; None: `arena.py` asks. A collective call."""

    def split(self, members: Sequence[int], label: str) -> Transport:
        """A transport among these ranks of this one, in that order; called by each of them, and by no other."""

    def close(self) -> None:
        """Give back what the library keeps for it; called by all its ranks when nothing is under way."""

    def abort(self, reason: str) -> NoReturn:
        """End the job: all ranks, now."""


class Lazy:
    """A library's collective: blocking when waited for at once, in the background when tested first."""

    def __init__(self, blocking: Callable[[], object], start: Callable[[], Token]) -> None:
        self.blocking = blocking
        self.start = start
        self.token: Token | None = None

    def test(self) -> bool:
        if self.token is None:
            self.token = self.start()
        return self.token.test()

    def wait(self) -> None:
        if self.token is None:
            self.blocking()
        else:
            self.token.wait()


class Done:
    """A token of something that is already finished."""

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        return None


DONE = Done()


def tags_below(limit: int | None) -> int:
    """How many tags each kind of message may have, where the library's largest is `limit` (MPI promises 32,767)."""
    return min(TAGS, (1 + (32_767 if limit is None else limit)) // TAG_KINDS)


def wrong_size(source: int, sent: int, to: int, expected: int) -> str:
    return f"rank {source} sent {sent} bytes to rank {to}, which expected {expected}"
