"""What can be asked of a communicator, and who looks on: all of it but the calls, which are in `communicator.py`.

Everything here is answered by this rank alone; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilemesh.comm.runtime import arguments as check
from tilemesh.comm.runtime.arena import Arena
from tilemesh.comm.runtime.arithmetic import require_operation
from tilemesh.comm.runtime.call import Caller
from tilemesh.comm.runtime.choose import Choice, Choices, Request, choose, explanation
from tilemesh.comm.runtime.engine import CallEngine
from tilemesh.comm.runtime.fit import Fit
from tilemesh.comm.runtime.lower import Planner
from tilemesh.comm.runtime.observe import EVERY, Attached, Every, Observer, Observers
from tilemesh.comm.runtime.transport import Sent, Transport
from tilemesh.comm.runtime.watch import Watch
from tilemesh.comm.schedules.collectives import REDUCING, require_collective
from tilemesh.comm.schedules.hierarchical import NODE_SIZE
from tilemesh.core.errors import UsageError


class Inspected:
    """The part of a communicator that tells about it."""

    def __init__(
        self,
        transport: Transport,
        engine: CallEngine,
        watch: Watch,
        node_size: int | None,
        observers: Sequence[Attached],
        parent: Observers | None,
    ) -> None:
        self.transport = transport
        self.engine = engine
        self.watch = watch
        self.label = watch.label
        self._observers = Observers(watch.label, observers, parent)
        self._caller = Caller(transport, engine, watch, self._observers, node_size)
        self._ready = self._caller.ready

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.size

    @property
    def backend(self) -> str:
        return self.transport.name

    @property
    def sent(self) -> Sent:
        """Messages and bytes this rank has sent point to point (the library's own collectives are not counted)."""
        return self.transport.sent

    @property
    def node_size(self) -> int:
        """How many neighbouring ranks the hierarchical schedules take for one node."""
        return self._caller.planner.node_size or NODE_SIZE

    @property
    def fit(self) -> Fit | None:
        """What was measured on this machine for this many ranks, by which `auto` picks; None: nothing was."""
        return self._caller.fit

    @property
    def cores(self) -> int:
        """Cores that its ranks may use together."""
        return self._caller.cores

    @property
    def arena(self) -> Arena | None:
        """The memory that all its ranks share; None where they are not on one node."""
        return None if self._caller.sharing is None else self._caller.sharing.arena

    @property
    def under_way(self) -> int:
        """Calls of this communicator that have been begun and not finished."""
        return self._caller.under_way

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way and no call waits for its turn to take shared memory."""
        return not self._caller.under_way and self._caller.turns.is_free

    @property
    def ready_calls(self) -> Mapping[object, Callable[..., Any]]:
        """What carries out calls that were made before, by everything that tells them apart; as it is now."""
        return dict(self._ready)

    @property
    def planner(self) -> Planner:
        """Makes programs of schedules and keeps them, with the memory they work in, for later calls."""
        return self._caller.planner

    def __repr__(self) -> str:
        return f"<Communicator {self.label}: rank {self.rank} of {self.size} over {self.backend}>"

    def observe(self, observer: Observer, *, every: int | Every = EVERY) -> Callable[[], None]:
        """Tell the observer of all that passes through this communicator and groups split from it from now on.

        See `observe.py` for what it is asked and told. `every`: where the same call of less than 10 µs comes again and
        again, one of so many is timed and told of, with how many it stands for (1: each of them, which costs it 0.5 µs
        instead of 0.2 to 0.3); or a function that says how many at present. Returns what detaches the observer from
        this communicator, after it has been told of all calls. Each rank does this by itself.
        """
        if not callable(every) and check.whole(every, "every") < 1:
            raise UsageError(f"every {every}: expected at least 1")
        self._observers.attach(observer, every)
        self._ready.clear()  # made anew, observed, by the next call of each kind

        def detach() -> None:
            self._observers.detach(observer)
            self._ready.clear()

        return detach

    def tell_observers(self) -> None:
        """Tell the observers now of repeated calls that were counted and not told of yet, those of groups that were
        split from this communicator (or with it from another) included."""
        self._observers.tell_counted()

    def breakdown(self, call: Callable[[], object]) -> dict[str, float]:
        """Seconds by part (copy, wire, reduce, wait) inside one blocking call of this communicator, on this rank.

        `call` makes it, and should have been made before. What is left of its whole time is set-up.
        """
        return self._caller.breakdown(call)

    def keep_to(self, choices: Choices, name: str | None = None) -> None:
        """From now on `auto` repeats the picks of the table, and notes in it what it picks (on all ranks alike).

        `name`: what this group is called in the table's keys; its label by default.
        """
        self._caller.choices = (choices, self.label if name is None else name)
        self._observers.flush()
        self._ready.clear()

    def choice(self, collective: str, nbytes: int, *, dtype: str = "float32", op: str = "sum") -> Choice:
        """What `auto` picks for a call of that size, and why; a table of choices is not looked at."""
        return choose(_request(collective, nbytes, dtype, op), "auto", self.transport, self.fit)

    def explain(self, collective: str, nbytes: int, *, dtype: str = "float32", op: str = "sum") -> str:
        """What `auto` would pick for a call of that size and why, and what every algorithm would send."""
        request = _request(collective, nbytes, dtype, op)
        return explanation(self.transport, request, self._caller.planner.node_size, self.fit)


def _request(collective: str, nbytes: int, dtype: str, op: str) -> Request:
    require_collective(collective)
    size = check.whole(nbytes, "nbytes")
    if size < 0:
        raise UsageError(f"nbytes {size}: expected 0 or more")
    kind = check.dtype_of(dtype).dtype
    if collective in REDUCING:
        require_operation(op, kind)
    return Request(collective, size, kind, op)
