"""The communicator: what users hold. Collectives and messages among ranks, on numpy arrays and torch tensors alike.

Whatever is wrong with the arguments is said before anything is sent, so the communicator stays usable. Ranks must make
the same calls in the same order. An array's way through `all_reduce` is through five files
(`tests/pure/test_comm_way.py` counts them; of a repeated call it is this one, `ready.py` and `shared.stack_adder`):

1. Here: `all_reduce` looks whether a call like it was made before. If so, one function of `ready.py` does all the rest
   (put the array on the stage, meet the others, add up); else the arguments are checked and become a `Call`.
2. `memory.py`: the array, or torch tensor, becomes a flat array over the same memory, and the result what came in.
3. `call.py`: `Caller.run` decides upon the call and carries it out.

Ranks that share a node's memory:

4. `sharing.py`: whose turn it is, and which arrays lie in shared memory.
5. `shared.py`: `ArenaProgram.steps` does it: put, meet, add, get, as numpy calls.

Ranks that exchange messages:

4. `lower.py`: `Planner` binds this rank's instructions to memory: each has its view. `MessageProgram.steps` carries
   them out: post, wait, copy, add.
5. `mpi.py` (or `torchdist.py`, `threads.py`): `post` moves the bytes.

The library's own collective:

4. `native.py`: what the library lacks is put around its call (16-bit floats are widened, for one).
5. `mpi.py` (or `torchdist.py`): `native` makes the call.

What they ask never sees the array: `choose.py` picks the algorithm from what was measured on this machine, `lower.py`
makes a rank's instructions from a schedule, `stage.py` makes views of shared memory of them, `arena.py` is that memory,
`flags.py` is how ranks of a node wait for one another, `arguments.py` checks what else was given. Odd operations and
dtypes (the smallest of floats, bfloat16) are combined in `arithmetic.py`. `ready_views.py` lets `ready.py` serve torch
tensors and other axes than the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np

from tilemesh.comm.runtime import arguments as check
from tilemesh.comm.runtime.arithmetic import require_operation
from tilemesh.comm.runtime.call_parts import Call, Made, Scatter
from tilemesh.comm.runtime.choose import Request, choose
from tilemesh.comm.runtime.engine import CallEngine, Handle
from tilemesh.comm.runtime.group import Closed
from tilemesh.comm.runtime.inspection import Inspected
from tilemesh.comm.runtime.memory import Like, as_bytes, described, flattened, here, opened, out_array, store
from tilemesh.comm.runtime.messages import Messages
from tilemesh.comm.runtime.observe import Attached, Observers
from tilemesh.comm.runtime.transport import MIRROR, Message, Transport
from tilemesh.comm.runtime.watch import Watch
from tilemesh.comm.schedules.hierarchical import NODE_SIZE, largest_block
from tilemesh.core.errors import UsageError

# A call that is not kept ready: the first of its kind, or nothing that can be sent (a nested tensor has no shape).
NOT_READY = (KeyError, AttributeError, TypeError, RuntimeError)


class Communicator(Inspected):
    """Ranks 0 to size-1 of a group. `x` may be a numpy array or a torch tensor; what goes in comes out.

    Common to all collectives: `out` takes the result (and may be `x` itself), `algorithm` is "auto", "native" or a
    name from the book of schedules, `wait=False` returns a handle at once. `axis` is what is split or joined, into
    parts that differ by at most one unless `counts` says how long each rank's part is.
    """

    def __init__(
        self,
        transport: Transport,
        engine: CallEngine,
        watch: Watch,
        node_size: int | None = None,
        nodes: Sequence[int] | None = None,
        observers: Sequence[Attached] = (),
        parent: Observers | None = None,
    ) -> None:
        """`node_size`: how many neighbouring ranks share a node; `nodes`: on which node each rank is.

        `observers`: each with the number of repeated calls of which it is told once (`observe`); `parent`: those of the
        communicator that this one was split from.
        """
        self.nodes = tuple(nodes or [rank // (node_size or NODE_SIZE) for rank in range(transport.size)])
        super().__init__(transport, engine, watch, node_size, observers, parent)
        self._messages = Messages(self._caller)
        self._splits = 0
        self._is_closed = False

    # Collectives --------------------------------------------------------------------------------------------------
    # The look for a ready call is spelt out in each: one more function entered costs a small call a microsecond.

    def all_reduce(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto", wait: bool = True
    ) -> Any:
        """Every rank gets the combination of all ranks' arrays (global-sum)."""
        if wait:
            try:
                ready = self._ready["all_reduce", op, algorithm, x.dtype, x.shape]
            except NOT_READY:
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
            except NOT_READY:
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
        if wait:
            try:
                ready = self._ready["reduce_scatter", op, algorithm, x.dtype, x.shape, axis, counts]
            except NOT_READY:
                pass
            else:
                result = ready(x, out)
                if result is not NotImplemented:
                    return result
        shape, like = described(x)
        require_operation(op, like.dtype)
        key = ("reduce_scatter", op, algorithm, x.dtype, x.shape, axis, counts) if _is_kept(counts) else None
        axis = check.axis_of(axis, shape)
        parts = check.parts_of(counts, self.size, shape[axis], axis)
        mine = check.with_length(shape, axis, parts[self.rank])
        call = Call("reduce_scatter", like, mine, check.elements(parts, shape, axis), op=op, axis=axis, out=out)
        return self._caller.run(call, x, algorithm, wait, key)

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
        if wait:
            try:
                ready = self._ready["all_gather", "", algorithm, x.dtype, x.shape, axis, counts]
            except NOT_READY:
                pass
            else:
                result = ready(x, out)
                if result is not NotImplemented:
                    return result
        shape, like = described(x)
        key = ("all_gather", "", algorithm, x.dtype, x.shape, axis, counts) if _is_kept(counts) else None
        axis = check.axis_of(axis, shape)
        parts = check.lengths_of(counts, self.size, self.rank, shape[axis])
        joined = check.with_length(shape, axis, sum(parts))
        call = Call("all_gather", like, joined, check.elements(parts, shape, axis), axis=axis, out=out)
        return self._caller.run(call, x, algorithm, wait, key)

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
        parts = check.lengths_of(counts, self.size, self.rank, shape[axis])
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
            lengths = check.parts_of(parts, self.size, shape[along], along)
            mine = check.with_length(shape, along, lengths[self.rank])
            out_array(out, mine, like)
            return Call("scatter", like, mine, check.elements(lengths, shape, along), root=root, axis=along, out=out)

        def announcement() -> str:
            """What the root tells the others: kind, dtype and shape; or what is wrong, for all of them to raise."""
            try:
                shape, like = described(x)
                prepared(shape, like)
            except UsageError as error:
                return f"refused {error}"
            kind = "numpy" if like.device is None else "cuda" if like.is_cuda else "cpu"
            return f"{kind} {like.dtype} {','.join(map(str, shape))}"

        def prepare(text: str) -> Made:
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

        return self._caller.scatter(announcement, prepare, Scatter(root, axis, parts, algorithm, wait))

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
        if wait and send_counts is None and recv_counts is None:
            try:
                ready = self._ready["all_to_all", "", algorithm, x.dtype, x.shape, axis]
            except NOT_READY:
                pass
            else:
                result = ready(x, out)
                if result is not NotImplemented:
                    return result
        shape, like = described(x)
        axis = check.axis_of(axis, shape)
        if (send_counts is None) != (recv_counts is None):
            raise UsageError("all_to_all takes send_counts and recv_counts together, or neither")
        sends = check.parts_of(send_counts, self.size, shape[axis], axis, "send_counts")
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
        key = ("all_to_all", "", algorithm, x.dtype, x.shape, axis)
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

    def isend(self, x: Any, to: int, tag: int = 0, *, sized: bool = True) -> Handle:
        """`sized=False`: both sides are known to mean as many bytes, which then need not be compared; and to begin the
        messages between them in one order, which nccl, that moves those of GPU memory, goes by instead of tags."""
        if not sized and self._goes_by_device(x):
            return self._messages.start_on_device(True, x.detach().contiguous(), to)
        array, _ = opened(x)
        return self._message(True, to, tag, flattened(array), lambda: None, sized)

    def irecv(self, out: Any, source: int, tag: int = 0, *, sized: bool = True) -> Handle:
        """`sized`: as the sender says."""
        if not sized and self._goes_by_device(out) and out.is_contiguous():
            return self._messages.start_on_device(False, out.detach(), source)
        array, like = opened(out, "out")
        out_array(out, tuple(out.shape), like)
        landing = array.reshape(-1) if array.flags.c_contiguous else np.empty(array.size, array.dtype)

        def finish() -> Any:
            store(landing.reshape(array.shape), out)
            return out

        return self._message(False, source, tag, landing, finish, sized)

    def moving(self) -> AbstractContextManager[None]:
        """Inside, messages under way move while this rank computes.

        Nothing is done where the library moves them by itself (gloo, nccl), and where a rank has one core alone or a
        part of one, which the moving would be taken from.
        """
        return self.engine.moving() if self.is_moved_apart else nullcontext()

    @property
    def is_moved_apart(self) -> bool:
        """Whether `moving()` has a thread that moves messages."""
        return self.transport.caps.moved_by_threads and 2 * self.watch.process.board.ranks <= self.cores

    def _goes_by_device(self, x: Any) -> bool:
        return self._caller.device_for(bool(getattr(x, "is_cuda", False))) is not None

    def _message(self, is_send: bool, peer: int, tag: int, flat: Any, finish: Any, sized: bool) -> Handle:
        peer = check.rank_of(peer, self.size, "to" if is_send else "source")
        tag = check.tag_of(tag, self.transport.tags)
        if peer == self.rank:
            raise UsageError(f"rank {peer} {'sends to' if is_send else 'receives from'} itself: copy the array instead")
        region = as_bytes(flat)
        message = Message(is_send, peer, self.transport.view(region), region.nbytes)
        return self._messages.start(message, tag, finish, sized)

    # Groups and the rest ------------------------------------------------------------------------------------------

    def split(
        self, color: int | None, key: int = 0, *, observed: bool = True, expected: Sequence[int] | None = None
    ) -> Communicator | None:
        """A communicator for each color, its ranks in order of key (then rank); None for those who give None.

        `expected`: the ranks that come together with this one, where the caller knows: others are refused.

        A collective call: every rank of this communicator makes it, in the same order as its other splits.
        The group keeps to this one's table of choices (the first split, into groups of two: as "NAME/1:2"), and has its
        observers unless `observed` is False.
        """
        wanted = None if color is None else check.whole(color, "color")
        key = check.whole(key, "key")
        label = "none" if wanted is None else str(wanted)
        with self._observers.during("split"):
            answers = self._caller.ask("split", f"{label} {key}")
            self._splits += 1  # now that all are known to be here
            if wanted is None:
                return None
            places = [(int(text.split()[1]), rank) for rank, text in enumerate(answers) if text.split()[0] == label]
            members = [rank for _, rank in sorted(places)]
            if expected is not None and self.transport.name == MIRROR:  # whose other ranks all said the same
                members = list(expected)
            if expected is not None and members != list(expected):
                raise UsageError(f"split: ranks {members} come together, expected {list(expected)}")
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
        group = Communicator(transport, self.engine, watch, largest_block(nodes), nodes, observers, self._observers)
        if self._caller.choices is not None:
            choices, name = self._caller.choices
            # Without the color: the table that one rank has written then holds for the groups of all ranks.
            group.keep_to(choices, f"{name}/{self._splits}:{group.size}")
        return group

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
        self._observers.flush()
        self._ready.clear()
        self._caller = self._messages = cast(Any, Closed(self.label))
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

    def max_over_ranks(self, values: list[float]) -> list[float]:
        """The largest of each number over all ranks, for whoever agrees on timings."""
        try:
            mine = np.array(values, np.float64)
        except (OverflowError, TypeError, ValueError):
            raise UsageError(f"values {values!r}: expected a list of numbers") from None
        return [float(value) for value in self.all_reduce(mine, "max")]

    def abort(self, reason: str) -> None:
        """End the whole job, now."""
        self.transport.abort(reason)


def _is_kept(counts: Any) -> bool:
    """Whether calls with these lengths can be kept ready: by what can be looked up."""
    return counts is None or isinstance(counts, tuple)
