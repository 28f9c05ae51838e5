"""The communicator: what users hold. Collectives and messages among ranks, on numpy arrays and torch tensors alike.

Every collective goes the same way: check the arguments, flatten, choose an algorithm, run it (or hand it to the
library), give the result the shape and kind of what came in (`call.py`). Whatever is wrong with the arguments is said
before anything is sent, so the communicator stays usable. Ranks must make the same calls in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from tilemesh.comm.runtime import arguments as check
from tilemesh.comm.runtime.arena import Arena
from tilemesh.comm.runtime.arithmetic import require_operation
from tilemesh.comm.runtime.asked import Call, Made, Scatter
from tilemesh.comm.runtime.call import Caller, Closed, flattened
from tilemesh.comm.runtime.choose import Choice, Choices, Request, choose, explanation
from tilemesh.comm.runtime.engine import Engine, Handle
from tilemesh.comm.runtime.fit import Fit
from tilemesh.comm.runtime.memory import Like, described, here, opened, store
from tilemesh.comm.runtime.observe import Observer, Observers
from tilemesh.comm.runtime.transport import Message, Sent, Transport, as_bytes
from tilemesh.comm.runtime.watch import Watch
from tilemesh.comm.schedules.collectives import REDUCING, cut, require_collective
from tilemesh.comm.schedules.hierarchical import NODE_SIZE, largest_block
from tilemesh.core.errors import UsageError


class Communicator:
    """Ranks 0 to size-1 of a group. `x` may be a numpy array or a torch tensor; what goes in comes out.

    Common to all collectives: `out` takes the result (and may be `x` itself), `algorithm` is "auto", "native" or a
    name from the book of schedules, `wait=False` returns a handle at once. `axis` is what is split or joined, into
    parts that differ by at most one unless `counts` says how long each rank's part is.
    """

    def __init__(
        self,
        transport: Transport,
        engine: Engine,
        watch: Watch,
        node_size: int | None = None,
        nodes: Sequence[int] | None = None,
        observers: Sequence[tuple[Observer, int]] = (),
    ) -> None:
        """`node_size`: how many neighbouring ranks share a node; `nodes`: on which node each rank is.

        `observers`: each with the number of repeated calls of which it is told once (`observe`).
        """
        self.nodes = tuple(nodes or [rank // (node_size or NODE_SIZE) for rank in range(transport.size)])
        self.transport = transport
        self.engine = engine
        self.watch = watch
        self.label = watch.label
        self._observers = Observers(watch.label, observers)
        self._caller = Caller(transport, engine, watch, self._observers, node_size)
        self._ready = self._caller.kept
        self._splits = 0
        self._is_closed = False

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
    def arena(self) -> Arena | None:
        """The memory that all its ranks share; None where they are not on one node."""
        return None if self._caller.sharing is None else self._caller.sharing.arena

    @property
    def under_way(self) -> int:
        """Calls of this communicator that have been begun and not finished."""
        return self._caller.under_way

    def __repr__(self) -> str:
        return f"<Communicator {self.label}: rank {self.rank} of {self.size} over {self.backend}>"

    # Collectives --------------------------------------------------------------------------------------------------
    # The look for a ready call is spelt out in each: one more function entered costs a small call a microsecond.

    def all_reduce(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto", wait: bool = True
    ) -> Any:
        """Every rank gets the combination of all ranks' arrays (global-sum)."""
        if wait:
            try:
                ready = self._ready["all_reduce", op, algorithm, x.dtype, x.shape]
            except (KeyError, AttributeError, TypeError):  # the first of its kind, or nothing that can be sent
                pass
            else:
                result = ready(x, out)
                if result is not NotImplemented:
                    return result
        shape, like = described(x)
        require_operation(op, like.dtype)
        call = Call("all_reduce", like, shape, (math.prod(shape),), op=op, out=out)
        return self._caller.run(call, x, algorithm, wait, ("all_reduce", op, algorithm, x.dtype, x.shape))

    def reduce(
        self, x: Any, op: str = "sum", root: int = 0, *, out: Any = None, algorithm: str = "auto", wait: bool = True
    ) -> Any:
        """The root gets the combination of all ranks' arrays; the others get None."""
        shape, like = described(x)
        require_operation(op, like.dtype)
        root = check.rank_of(root, self.size, "root")
        call = Call("reduce", like, shape, (math.prod(shape),), op=op, root=root, out=out)
        return self._caller.run(call, x, algorithm, wait)

    def broadcast(self, x: Any, root: int = 0, *, out: Any = None, algorithm: str = "auto", wait: bool = True) -> Any:
        """Every rank gets the root's array. The others' `x` gives shape and dtype; its values are not looked at."""
        if wait:
            try:
                ready = self._ready["broadcast", root, algorithm, x.dtype, x.shape]
            except (KeyError, AttributeError, TypeError):  # the first of its kind, or nothing that can be sent
                pass
            else:
                result = ready(x, out)
                if result is not NotImplemented:
                    return result
        shape, like = described(x)
        root = check.rank_of(root, self.size, "root")
        call = Call("broadcast", like, shape, (math.prod(shape),), root=root, out=out)
        key = ("broadcast", root, algorithm, x.dtype, x.shape)
        return self._caller.run(call, x if self.rank == root else None, algorithm, wait, key)

    def reduce_scatter(
        self,
        x: Any,
        op: str = "sum",
        *,
        axis: int = 0,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: str = "auto",
        wait: bool = True,
    ) -> Any:
        """Rank r gets part r of the combination of all ranks' arrays (scatter-sum)."""
        if wait and counts is None and axis == 0:
            try:
                ready = self._ready["reduce_scatter", op, algorithm, x.dtype, x.shape]
            except (KeyError, AttributeError, TypeError):  # the first of its kind, or nothing that can be sent
                pass
            else:
                result = ready(x, out)
                if result is not NotImplemented:
                    return result
        shape, like = described(x)
        require_operation(op, like.dtype)
        axis = check.axis_of(axis, shape)
        parts = self._parts(counts, shape[axis], axis)
        mine = check.with_length(shape, axis, parts[self.rank])
        call = Call("reduce_scatter", like, mine, check.elements(parts, shape, axis), op=op, axis=axis, out=out)
        key = ("reduce_scatter", op, algorithm, x.dtype, x.shape)
        return self._caller.run(call, x, algorithm, wait, key if counts is None else None)

    def all_gather(
        self,
        x: Any,
        *,
        axis: int = 0,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: str = "auto",
        wait: bool = True,
    ) -> Any:
        """Every rank gets all ranks' arrays, joined along `axis` (gather-all); `counts` where their lengths differ."""
        if wait and counts is None and axis == 0:
            try:
                ready = self._ready["all_gather", "", algorithm, x.dtype, x.shape]
            except (KeyError, AttributeError, TypeError):  # the first of its kind, or nothing that can be sent
                pass
            else:
                result = ready(x, out)
                if result is not NotImplemented:
                    return result
        shape, like = described(x)
        axis = check.axis_of(axis, shape)
        parts = self._lengths(counts, shape[axis])
        joined = check.with_length(shape, axis, sum(parts))
        call = Call("all_gather", like, joined, check.elements(parts, shape, axis), axis=axis, out=out)
        key = ("all_gather", "", algorithm, x.dtype, x.shape)
        return self._caller.run(call, x, algorithm, wait, key if counts is None else None)

    def gather(
        self,
        x: Any,
        root: int = 0,
        *,
        axis: int = 0,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: str = "auto",
        wait: bool = True,
    ) -> Any:
        """The root gets all ranks' arrays, joined along `axis`; the others get None."""
        shape, like = described(x)
        root = check.rank_of(root, self.size, "root")
        axis = check.axis_of(axis, shape)
        parts = self._lengths(counts, shape[axis])
        joined = check.with_length(shape, axis, sum(parts))
        call = Call("gather", like, joined, check.elements(parts, shape, axis), root=root, axis=axis, out=out)
        return self._caller.run(call, x, algorithm, wait)

    def scatter(
        self,
        x: Any,
        root: int = 0,
        *,
        axis: int = 0,
        counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: str = "auto",
        wait: bool = True,
    ) -> Any:
        """Rank r gets part r of the root's array. Only the root's `x` is looked at; the others may give None."""
        root = check.rank_of(root, self.size, "root")
        axis, parts = check.whole(axis, "axis"), check.counts_of(counts, self.size, "counts")
        choose(Request("scatter", 0, "uint8", "sum"), algorithm, self.transport)  # refused by name, whatever the array

        def prepared(shape: tuple[int, ...], like: Like, out: Any = out) -> Call:
            along = check.axis_of(axis, shape)
            lengths = self._parts(parts, shape[along], along)
            mine = check.with_length(shape, along, lengths[self.rank])
            check.out_array(out, mine, like)
            return Call("scatter", like, mine, check.elements(lengths, shape, along), root=root, axis=along, out=out)

        def told() -> str:
            """What the root tells the others: kind, dtype and shape; or what is wrong, for all of them to raise."""
            try:
                shape, like = described(x)
                prepared(shape, like)
            except UsageError as error:
                return f"refused {error}"
            kind = "numpy" if like.device is None else "cuda" if like.is_cuda else "cpu"
            return f"{kind} {like.dtype} {','.join(map(str, shape))}"

        def made(text: str) -> Made:
            kind, rest = text.split(" ", 1)
            if kind == "refused":
                raise UsageError(f"scatter from rank {root}: {rest}")
            if self.rank == root:
                return prepared(*described(x)), x, None
            dtype, lengths = rest.split(" ")
            shape = tuple(int(length) for length in lengths.split(",") if length)
            like = Like(dtype, here(kind))
            try:
                return prepared(shape, like), None, None
            except UsageError as error:  # an `out` that does not fit: the others are on their way, so take part first
                return prepared(shape, like, None), None, error

        return self._caller.scatter(told, made, Scatter(root, axis, parts, algorithm, wait))

    def all_to_all(
        self,
        x: Any,
        *,
        axis: int = 0,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        out: Any = None,
        algorithm: str = "auto",
        wait: bool = True,
    ) -> Any:
        """Part d of every rank's array goes to rank d, which gets them joined in rank order (peer-exchange).

        With `send_counts` and `recv_counts` parts may have any length; what s sends to d must be what d expects of s.
        """
        if wait and send_counts is None and recv_counts is None and axis == 0:
            try:
                ready = self._ready["all_to_all", "", algorithm, x.dtype, x.shape]
            except (KeyError, AttributeError, TypeError):  # the first of its kind, or nothing that can be sent
                pass
            else:
                result = ready(x, out)
                if result is not NotImplemented:
                    return result
        shape, like = described(x)
        axis = check.axis_of(axis, shape)
        if (send_counts is None) != (recv_counts is None):
            raise UsageError("all_to_all takes send_counts and recv_counts together, or neither")
        sends = self._parts(send_counts, shape[axis], axis, "send_counts")
        receives = check.counts_of(recv_counts, self.size, "recv_counts") or (sends[self.rank],) * self.size
        if sends[self.rank] != receives[self.rank]:
            raise UsageError(
                f"send_counts and recv_counts give rank {self.rank} {sends[self.rank]} and {receives[self.rank]} for "
                "what it sends to itself: expected the same"
            )
        call = Call(
            "all_to_all",
            like,
            check.with_length(shape, axis, sum(receives)),
            check.elements(sends, shape, axis),
            received=check.elements(receives, shape, axis),
            axis=axis,
            out=out,
            private=send_counts is not None,
        )
        key = ("all_to_all", "", algorithm, x.dtype, x.shape)
        return self._caller.run(call, x, algorithm, wait, key if send_counts is None else None)

    def barrier(self, *, algorithm: str = "auto", wait: bool = True) -> Any:
        """Nobody leaves before everybody has come."""
        call = Call("barrier", Like("uint8"), (1,), (1,), op="max")
        return self._caller.run(call, np.zeros(1, np.uint8), algorithm, wait)

    # Messages -----------------------------------------------------------------------------------------------------

    def send(self, x: Any, to: int, tag: int = 0) -> None:
        """Send an array; returns when it may be changed again, which can be as late as its receipt."""
        self.isend(x, to, tag).wait()

    def recv(self, out: Any, source: int, tag: int = 0) -> Any:
        """Receive into `out`, which must have the size of what was sent; returns it."""
        return self.irecv(out, source, tag).wait()

    def isend(self, x: Any, to: int, tag: int = 0) -> Handle:
        array, _ = opened(x)
        return self._message(True, to, tag, flattened(array), lambda: None)

    def irecv(self, out: Any, source: int, tag: int = 0) -> Handle:
        array, like = opened(out, "out")
        check.out_array(out, tuple(out.shape), like)
        landing = array.reshape(-1) if array.flags.c_contiguous else np.empty(array.size, array.dtype)

        def finish() -> Any:
            store(landing.reshape(array.shape), out)
            return out

        return self._message(False, source, tag, landing, finish)

    def _message(self, is_send: bool, peer: int, tag: int, flat: Any, finish: Any) -> Handle:
        peer = check.rank_of(peer, self.size, "to" if is_send else "source")
        tag = check.tag_of(tag, self.transport.tags)
        if peer == self.rank:
            raise UsageError(f"rank {peer} {'sends to' if is_send else 'receives from'} itself: copy the array instead")
        region = as_bytes(flat)
        message = Message(is_send, peer, self.transport.view(region), region.nbytes)
        name = f"{'send to' if is_send else 'recv from'} rank {self.watch.members[peer]}"
        return self._caller.start_message(name, message, tag, finish)

    # Groups and the rest ------------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0, *, observed: bool = True) -> Communicator | None:
        """A communicator for each color, its ranks in order of key (then rank); None for those who give None.

        A collective call: every rank of this communicator makes it, in the same order as its other splits.
        The group keeps to this one's table of choices, and has its observers unless `observed` is False.
        """
        wanted = None if color is None else check.whole(color, "color")
        key = check.whole(key, "key")
        given = "none" if wanted is None else str(wanted)
        with self._observers.during("split"):
            answers = self._caller.ask("split", f"{given} {key}")
            self._splits += 1  # now that all are known to be here
            if wanted is None:
                return None
            places = [(int(text.split()[1]), rank) for rank, text in enumerate(answers) if text.split()[0] == given]
            members = [rank for _, rank in sorted(places)]
            return self._group(members, f"{self.label}/{self._splits}.{wanted}", observed)

    def duplicate(self, *, observed: bool = True) -> Communicator:
        """A communicator of the same ranks whose messages do not meet those of this one (a collective call).

        What a second thread needs: calls of one communicator must follow one another, those of two may overlap. An
        observer is then called from both threads, unless `observed` is False.
        """
        with self._observers.during("duplicate"):
            self._caller.ask("duplicate", "")
            self._splits += 1
            return self._group(range(self.size), f"{self.label}/{self._splits}", observed)

    def _group(self, members: Sequence[int], label: str, observed: bool) -> Communicator:
        transport = self._caller.split(members, label)
        nodes = [self.nodes[member] for member in members]
        watch, observers = self.watch.of(members, label), self._observers.attached if observed else ()
        group = Communicator(transport, self.engine, watch, largest_block(nodes), nodes, observers)
        if self._caller.choices is not None:
            group.keep_to(self._caller.choices[0])
        return group

    # Looking on ---------------------------------------------------------------------------------------------------

    def observe(self, observer: Observer, *, every: int = 16) -> Callable[[], None]:
        """Tell the observer of all that passes through this communicator and groups split from it from now on.

        See `observe.py` for what it is asked and told. `every`: where the same call comes again and again, one of so
        many is timed and told of, with how many it stands for (1: each of them, which costs it 0.5 µs instead of 0.15).
        Returns what detaches the observer from this communicator. Each rank does this by itself.
        """
        if check.whole(every, "every") < 1:
            raise UsageError(f"every {every}: expected at least 1")
        self._observers.attach(observer, every)
        self._ready.clear()  # made anew, observed, by the next call of each kind

        def detach() -> None:
            self._observers.detach(observer)
            self._ready.clear()

        return detach

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
        self._ready.clear()

    def choice(self, collective: str, nbytes: int, *, dtype: str = "float32", op: str = "sum") -> Choice:
        """What `auto` picks for a call of that size, and why."""
        return choose(Request(collective, nbytes, dtype, op), "auto", self.transport, self.fit)

    def close(self) -> None:
        """Give back what the library keeps for this communicator (a collective call). Twice is as good as once.

        Groups that were split from it stay open. `with comm.split(…) as group:` closes the group at the end.
        """
        if self._is_closed:
            return
        if self.under_way:
            raise UsageError(f"close() of {self.label} with {self.under_way} calls under way: wait() for them")
        self.barrier()  # until all have come, the others must be able to see that this rank has
        self._is_closed = True
        self._ready.clear()
        self._caller = cast(Any, Closed(self.label))
        self.watch.forget()
        self.transport.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # otherwise the others may be elsewhere, and must not be waited for
            self.close()

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32) -> Any:
        """An array that neighbours can read where it is, which saves large collectives a copy (a collective call).

        Every rank gives the same shape and dtype (numpy's or torch's; "bfloat16" by torch's). The memory is the node's
        and goes back when all ranks have dropped their arrays. Ranks that share no memory get an ordinary array.
        """
        lengths, like = check.shape_of(shape), check.dtype_of(dtype)
        with self._observers.during("empty"):
            return self._caller.empty(lengths, like)

    def explain(self, collective: str, nbytes: int, *, dtype: str = "float32", op: str = "sum") -> str:
        """What `auto` would pick for a call of that size and why, and what every algorithm would send."""
        require_collective(collective)
        size = check.whole(nbytes, "nbytes")
        if size < 0:
            raise UsageError(f"nbytes {size}: expected 0 or more")
        kind = check.dtype_of(dtype).dtype
        if collective in REDUCING:
            require_operation(op, kind)
        request = Request(collective, size, kind, op)
        return explanation(self.transport, request, self._caller.planner.node_size, self.fit)

    def max_over_ranks(self, values: list[float]) -> list[float]:
        """The largest of each number over all ranks, for whoever agrees on timings."""
        return [float(value) for value in self.all_reduce(np.array(values, np.float64), "max")]

    def abort(self, reason: str) -> None:
        """End the whole job, now."""
        self.transport.abort(reason)

    def _parts(self, counts: Sequence[int] | None, length: int, axis: int, what: str = "counts") -> tuple[int, ...]:
        parts = check.counts_of(counts, self.size, what)
        if parts is None:
            return cut(length, self.size)
        check.require_total(parts, length, axis, what)
        return parts

    def _lengths(self, counts: Sequence[int] | None, mine: int) -> tuple[int, ...]:
        parts = check.counts_of(counts, self.size, "counts") or (mine,) * self.size
        if parts[self.rank] != mine:
            raise UsageError(f"counts {list(parts)} give rank {self.rank} {parts[self.rank]}: its array has {mine}")
        return parts
