"""Observing a communicator: what passes through it, how many bytes, by which algorithm, and when it began and ended.

    def observer(seen):                                    # asked once for each kind of call
        return lambda began_s, ended_s, calls: ...         # told of the calls of that kind; None: not interested

    detach = comm.observe(observer)

Collectives, messages and the making of groups are seen; groups that are split from an observed communicator are
observed too, under labels of their own. The one idea: an observer is asked once per *kind* of call, not once per call,
so that a call which is kept ready is wrapped once, when it is made ready. Reading the clock twice and telling of it
costs such a call 0.5 µs, which for one of 4 µs is a lot. So of calls that come again and again (beyond the first 64 of
a kind) and take less than 10 µs only one in `every` is timed and told of, together with how many it stands for: 0.2
to 0.3 µs. All are counted; `comm.tell_observers()` tells of those that were counted and not told of yet. `every=1`
times all of them.
A communicator without an observer runs the very same functions as if there were no such thing.

The watchdog is not an observer. It must know of a call that never ends, which an observer is told of too late, and
telling it at the beginning of every call would cost each of them as much as an observer does; see `watch.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakSet

from tilemesh.comm.runtime.transport import ReadyCall

# Phases: a blocking call is seen once, as a whole; of one that is not, each stretch in which it had the rank is seen.
CALL, BEGIN, TEST, WAIT = "call", "begin", "test", "wait"

EVERY = 61  # short calls of which one is timed: a prime, or of 20 calls in a program's step it might always be the same
SHORT_S = 10e-6  # a call that takes longer is timed each time: telling of it costs it less than a twentieth
_MOST_KINDS = 4096  # of calls that are remembered
_EACH = 64  # ready calls of a kind that are timed one by one before only one in `every` is

clock = time.perf_counter  # the clock of `measure.trace`, in seconds: quicker to read than in nanoseconds


class Seen(NamedTuple):
    """A kind of call. `group`: the communicator's label; `nbytes`: the payload that all ranks agree on, or a message's.

    `algorithm`: what was asked for or chosen (direct where it was chosen in case all arrays lie in the arena); empty
    for messages and groups. `peer`: the other rank of a message, in this group; -1 for everything else.
    """

    group: str
    operation: str
    phase: str
    nbytes: int
    algorithm: str = ""
    peer: int = -1

    @property
    def is_new(self) -> bool:
        """Whether this is where a call is counted: the others are the later stretches of one that was begun before."""
        return self.phase in (CALL, BEGIN)


Note: TypeAlias = Callable[[float, float, int], object]  # (began_s, ended_s) of a call, and how many it stands for
Observer: TypeAlias = Callable[[Seen], Note | None]
Every: TypeAlias = Callable[[], int]  # how many repeated calls one is timed of, asked whenever one was
Attached: TypeAlias = tuple[Observer, int | Every]


class Observers:
    """The observers of one communicator. It is false while there are none."""

    def __init__(self, label: str, attached: Iterable[Attached] = (), parent: Observers | None = None) -> None:
        """`attached`: observers, and of how many repeated calls each is told once. `parent`: of what it was split."""
        self.label = label
        self.attached = list(attached)
        self._family: WeakSet[Observers] = WeakSet() if parent is None else parent._family
        self._family.add(self)
        self._notes: dict[Seen, Note | None] = {}
        self._untold: list[Callable[[], None]] = []  # what tells of counted calls, for each that is kept ready

    def __bool__(self) -> bool:
        return bool(self.attached)

    def attach(self, observer: Observer, every: int | Every) -> None:
        self.flush()
        self.attached.append((observer, every))
        self._notes.clear()

    def detach(self, observer: Observer) -> None:
        self.flush()
        self.attached = [entry for entry in self.attached if entry[0] is not observer]
        self._notes.clear()

    def tell_counted(self) -> None:
        """Tell of the repeated calls that were counted and not told of, as if they had taken as long as the last timed.

        Of this communicator and all that have a common origin with it.
        """
        for observers in list(self._family):
            for tell in observers._untold:
                tell()

    def flush(self) -> None:
        """The same, of this communicator alone, for good: calls that are kept ready must be wrapped anew after it."""
        for tell in self._untold:
            tell()
        self._untold.clear()

    def note_of(self, operation: str, phase: str, nbytes: int, algorithm: str = "", peer: int = -1) -> Note | None:
        """Who is to be told of calls of this kind, all observers in one; None: nobody."""
        seen = Seen(self.label, operation, phase, nbytes, algorithm, peer)
        if seen not in self._notes:
            if len(self._notes) >= _MOST_KINDS:
                self._notes.clear()
            self._notes[seen] = _joined([note for observer, _ in self.attached if (note := observer(seen)) is not None])
        return self._notes[seen]

    def tell(
        self, began_s: float, operation: str, phase: str, nbytes: int, algorithm: str = "", peer: int = -1
    ) -> None:
        """Something that began then has just ended."""
        ended_s = clock()
        note = self.note_of(operation, phase, nbytes, algorithm, peer)
        if note is not None:
            note(began_s, ended_s, 1)

    def wrapped(self, ready: ReadyCall, operation: str, nbytes: int, algorithm: str) -> ReadyCall:
        """A call that is kept ready, observed; the very same one where nobody is interested."""
        note = self.note_of(operation, CALL, nbytes, algorithm)
        if note is None:
            return ready
        every = [every for _, every in self.attached]
        if 1 in every:
            return _every_one(ready, note)
        observed, tell = _one_in(_fewest(every), ready, note)
        if len(self._untold) >= _MOST_KINDS:  # the oldest is of a ready call that was given up long ago
            self._untold.pop(0)()
        self._untold.append(tell)
        return observed

    @contextmanager
    def during(self, operation: str) -> Iterator[None]:
        """A call of no bytes that is never repeated quickly: the making of a group, of memory."""
        began_s = clock()
        yield
        if self.attached:
            self.tell(began_s, operation, CALL, 0)


def _joined(notes: list[Note]) -> Note | None:
    if len(notes) < 2:
        return notes[0] if notes else None

    def tell_all(began_s: float, ended_s: float, calls: int) -> None:
        for note in notes:
            note(began_s, ended_s, calls)

    return tell_all


def _every_one(ready: ReadyCall, note: Note) -> ReadyCall:
    read = clock

    def observed(x: Any, out: Any) -> Any:
        began_s = read()
        result = ready(x, out)
        if result is not NotImplemented:
            note(began_s, read(), 1)
        return result

    return observed


def _fewest(every: list[int | Every]) -> Every:
    """Of all observers the one that is told most often decides."""
    fixed = min((number for number in every if isinstance(number, int)), default=None)
    measured = [number for number in every if not isinstance(number, int)]
    if not measured:
        return lambda: fixed or 1
    if fixed is None and len(measured) == 1:
        return measured[0]
    return lambda: min(*(number() for number in measured), *([] if fixed is None else [fixed]))


def _one_in(every: Every, ready: ReadyCall, note: Note) -> tuple[ReadyCall, Callable[[], None]]:
    """Of each so many the last is timed, and stands for all of them; of the first few, and of long ones, every one.

    Also returns what tells of those that were counted since: they are taken to be like the last one that was timed.
    """
    planned = left = 0  # calls before the next one that is timed: when that was decided (or they were told of), and now
    each, read = _EACH, clock
    began_s = ended_s = 0.0

    def observed(x: Any, out: Any) -> Any:
        nonlocal planned, left, each, began_s, ended_s
        if left:
            left -= 1
            result = ready(x, out)
            if result is not NotImplemented:
                return result
            left += 1
            return result
        start_s = read()
        result = ready(x, out)
        if result is NotImplemented:
            return result
        began_s, ended_s = start_s, read()
        note(began_s, ended_s, planned + 1)
        each -= each > 0
        planned = left = 0 if each or ended_s - began_s > SHORT_S else every() - 1
        return result

    def tell() -> None:
        nonlocal planned
        counted, planned = planned - left, left
        if counted:
            note(began_s, ended_s, counted)

    return observed, tell


# Inside one call ------------------------------------------------------------------------------------------------------

PARTS = ("copy", "wire", "reduce", "wait")


class Stopwatch:
    """Seconds of a call's program by part: copies, messages (or the library's collective), reductions, barriers.

    A program that is given one says which part begins; what it waits for meanwhile counts for that part. Reading the
    clock costs about 0.1 µs per instruction, so this is for reports.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._part: str | None = None
        self._since_s = 0.0

    def begin(self, part: str | None) -> None:
        """The part before ends here; None: nothing of the program's begins."""
        now_s = clock()
        if self._part is not None:
            self.seconds[self._part] += now_s - self._since_s
        self._part, self._since_s = part, now_s
