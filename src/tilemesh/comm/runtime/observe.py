"""Observing a communicator: what passes through it, how many bytes, by which algorithm, and when it began and ended.

    def observer(seen):                                # asked once for each kind of call
        return lambda began_ns, ended_ns: ...          # told of every call of that kind; None: not interested

    detach = comm.observe(observer)

Collectives, messages and the making of groups are seen; groups that are split from an observed communicator are
observed too, under labels of their own. The one idea: an observer is asked once per *kind* of call, not once per call,
so that a call which is kept ready is wrapped once, when it is made ready, and then costs two readings of the clock and
one function call. A communicator without an observer runs the same functions as if there were no observers at all.

The watchdog is not an observer. It must know of a call that never ends, which an observer is told of too late, and
telling it at the beginning of every call would cost each of them as much as an observer does; see `watch.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

# Phases: a blocking call is seen once, as a whole; of one that is not, each stretch in which it had the rank is seen.
CALL, BEGIN, TEST, WAIT = "call", "begin", "test", "wait"

_MOST_KINDS = 4096  # of calls that are remembered

clock_ns = time.perf_counter_ns  # the clock of `measure.trace`


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


Note: TypeAlias = Callable[[int, int], object]  # (began_ns, ended_ns) of one call
Observer: TypeAlias = Callable[[Seen], Note | None]


class Observers:
    """The observers of one communicator. It is false while there are none."""

    def __init__(self, label: str, observers: Iterable[Observer] = ()) -> None:
        self.label = label
        self.attached = list(observers)
        self._notes: dict[Seen, Note | None] = {}

    def __bool__(self) -> bool:
        return bool(self.attached)

    def attach(self, observer: Observer) -> None:
        self.attached.append(observer)
        self._notes.clear()

    def detach(self, observer: Observer) -> None:
        if observer in self.attached:
            self.attached.remove(observer)
            self._notes.clear()

    def note_of(self, operation: str, phase: str, nbytes: int, algorithm: str = "", peer: int = -1) -> Note | None:
        """Who is to be told of calls of this kind, all observers in one; None: nobody."""
        seen = Seen(self.label, operation, phase, nbytes, algorithm, peer)
        if seen not in self._notes:
            if len(self._notes) >= _MOST_KINDS:
                self._notes.clear()
            self._notes[seen] = _joined([note for observer in self.attached if (note := observer(seen)) is not None])
        return self._notes[seen]

    def tell(self, began_ns: int, operation: str, phase: str, nbytes: int, algorithm: str = "", peer: int = -1) -> None:
        """Something that began then has just ended."""
        ended_ns = clock_ns()
        note = self.note_of(operation, phase, nbytes, algorithm, peer)
        if note is not None:
            note(began_ns, ended_ns)

    def wrapped(
        self, ready: Callable[[Any, Any], Any], operation: str, nbytes: int, algorithm: str
    ) -> Callable[[Any, Any], Any]:
        """A call that is kept ready, observed; the very same one where nobody is interested."""
        note = self.note_of(operation, CALL, nbytes, algorithm)
        if note is None:
            return ready
        clock = clock_ns

        def observed(x: Any, out: Any) -> Any:
            began_ns = clock()
            result = ready(x, out)
            if result is not NotImplemented:
                note(began_ns, clock())
            return result

        return observed

    @contextmanager
    def during(self, operation: str) -> Iterator[None]:
        """A call of no bytes that is never repeated quickly: the making of a group, of memory."""
        began_ns = clock_ns()
        yield
        if self.attached:
            self.tell(began_ns, operation, CALL, 0)


def _joined(notes: list[Note]) -> Note | None:
    if len(notes) < 2:
        return notes[0] if notes else None

    def tell_all(began_ns: int, ended_ns: int) -> None:
        for note in notes:
            note(began_ns, ended_ns)

    return tell_all


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
        self._since_ns = 0

    def begin(self, part: str | None) -> None:
        """The part before ends here; None: nothing of the program's begins."""
        now = clock_ns()
        if self._part is not None:
            self.seconds[self._part] += (now - self._since_ns) / 1e9
        self._part, self._since_ns = part, now
