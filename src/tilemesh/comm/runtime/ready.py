"""Calls that have been made before: what does not change about them is kept, and the rest is a few numpy calls.

A ready call is made by the first ordinary call of its kind (same collective, operation, algorithm, dtype and shape) and
found by that key alone. It returns `NotImplemented` where something is not as it was (a call under way, an `out` of
another kind, an odd array), and the ordinary way is taken. Both ways are the same to the other ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np

from tilemesh.comm.runtime.arithmetic import ufunc_of
from tilemesh.comm.runtime.call_parts import Call
from tilemesh.comm.runtime.choose import Choice
from tilemesh.comm.runtime.flags import MARK_MASK, MEETING, fence_parts
from tilemesh.comm.runtime.group import Group
from tilemesh.comm.runtime.memory import fits
from tilemesh.comm.runtime.ready_views import along_axis_0, with_views
from tilemesh.comm.runtime.shared import ByLast, stack_adder
from tilemesh.comm.runtime.stage import STACK_BYTES
from tilemesh.comm.runtime.transport import ReadyCall
from tilemesh.comm.schedules.book import is_direct, is_shared


def ready_call(group: Group, call: Call, shape: tuple[int, ...], choice: Choice) -> ReadyCall | None:
    """The quick way for calls like this one, or None when there is none. `given`: the shape of what a rank brings."""
    is_quick = choice.algorithm == "native" or is_shared(choice.algorithm) or choice.direct is not None
    if not is_quick or group.is_debugging or call.private or group.transport.size == 1 or call.wire is not call.like:
        return None
    along = along_axis_0(call, shape)
    ready = None if along is None else _of_arrays(group, *along, choice)
    # Nobody asks for places while there are no arrays of `empty`; the first one clears what is ready (`Group.empty`).
    is_live = group.sharing is not None and group.sharing.arena.live > 0
    by_place = is_live and (choice.direct is not None or is_direct(choice.algorithm))
    return None if ready is None else with_views(ready, call, shape, by_place)


def _of_arrays(group: Group, call: Call, x: Any, choice: Choice) -> ReadyCall | None:
    """The same, for numpy arrays like `x` that are split or joined along axis 0."""
    name = choice.algorithm
    if not x.size:
        return None
    natively = None
    if name == "native":
        natively = group.transport.ready_native(call, x, group.engine.pending, group.watch)
        # While there are no arrays of `empty` nobody asks for them; the first one clears what is ready (`Group.empty`).
        if choice.direct is None or group.sharing is None or not group.sharing.arena.live:
            return natively
    if group.sharing is None or not (is_shared(name) or choice.direct):
        return None
    if name == "flat_one" and choice.direct is None:
        shared = group.sharing.call(call, choice)
        bound = group.sharing.bound(shared.key, shared.lo)
        if isinstance(bound, ByLast):
            return _by_last(group, call, x, bound)
    even = len(set(call.sizes)) == 1 and ufunc_of(call.op, call.like.dtype) is not None
    if name == "flat" and even and x.nbytes <= STACK_BYTES and choice.direct is None and call.collective in _SMALL:
        return _SMALL[call.collective](group, call, x)
    return _large(group, call, x, choice, natively)


def unowned(array: Any) -> Any:
    """A view that does not keep the array alive: for who knows it weakly, and looks whether it is there first."""
    there = (ctypes.c_char * array.nbytes).from_address(array.__array_interface__["data"][0])
    return np.frombuffer(there, array.dtype)


def _nobody() -> None:
    return None


def _small_reduce(group: Group, call: Call, x: Any) -> ReadyCall:
    """all_reduce and reduce_scatter of at most a few pages: put on the stage, meet, add up all rows.

    Here and below the meeting is `Flags.meet` spelt out, with the looks that are enough for most ranks with a core of
    their own, and the one yield that almost every meeting of others needs. An `out` that has been looked at is known
    again, unless its owner has locked it since: between two calls another rank had the core, and each function that is
    entered then costs a microsecond.
    """
    assert group.sharing is not None
    arena, pending, watch = group.sharing.arena, group.engine.pending, group.watch
    flags, ranks, dtype, shape, result = arena.flags, arena.ranks, x.dtype, x.shape, call.shape
    at = 0 if call.collective == "all_reduce" else group.transport.rank * call.length * dtype.itemsize
    nbytes = call.length * dtype.itemsize
    mine = [arena.staged_by(arena.rank, half, x.nbytes).view(dtype).reshape(shape) for half in range(2)]
    rows = [arena.rows(half, at, nbytes, x.nbytes).view(dtype).reshape((ranks, *result)) for half in range(2)]
    add_up = [stack_adder(ufunc_of(call.op, call.like.dtype), rows[half], dtype) for half in range(2)]
    words, me, others, await_same = flags.words, flags.mine, flags.others, flags.await_same
    pause, looks = flags.pause, flags.looks
    (release, acquire), fences = fence_parts(), flags.fence is not None
    empty, ndarray, is_average = np.empty, np.ndarray, call.op == "avg"
    digest, mark = call.digest, call.digest.mark
    known: Callable[[], Any] = _nobody

    def ready(x: Any, out: Any) -> Any:
        nonlocal known
        if pending or arena.turns != arena.done or type(x) is not ndarray:
            return NotImplemented
        if out is None:
            out = empty(result, dtype)
        elif out is not known() or not out.flags.writeable:
            if not fits(out, result, dtype):
                return NotImplemented
            known = ref(out)
        watch.sequence += 1
        arena.staged = staged = arena.staged + 1
        half = staged & 1
        mine[half][...] = x
        if fences:
            release()
            acquire()
        flags.epoch = epoch = flags.epoch + MEETING
        words[me] = word = epoch + mark
        for other in others:
            if words[other] != word and words[other] < epoch + MEETING:
                for _ in looks:
                    if words[other] == word:
                        break
                else:
                    pause()
                    if words[other] != word:
                        await_same(other, word, digest)
        if fences:
            release()
            acquire()
        add_up[half](out)
        if is_average:
            np.divide(out, ranks, out)
        return out

    return ready


def _by_last(group: Group, call: Call, x: Any, bound: ByLast) -> ReadyCall:
    """all_reduce and reduce_scatter so small that calls are what costs: `ByLast.steps`, all of it in one function."""
    assert group.sharing is not None
    arena, pending, watch = group.sharing.arena, group.engine.pending, group.watch
    flags, ranks, dtype, result = arena.flags, arena.ranks, x.dtype, call.shape
    mine = [stage.reshape(x.shape) for stage in bound.mine]
    parts = [[part.reshape(result) for part in parts] for parts in bound.parts]
    published, add, words, me = flags.await_published, bound.add, flags.words, flags.mine
    others, full_fence, common, pause, yields = (
        flags.others,
        flags.full_fence,
        flags.common,
        flags.pause,
        not flags.spin,
    )
    (release, acquire), fences = fence_parts(), flags.fence is not None
    empty, ndarray, is_average, rank = np.empty, np.ndarray, call.op == "avg", arena.rank
    digest, mark = call.digest, call.digest.mark
    known: Callable[[], Any] = _nobody

    def ready(x: Any, out: Any) -> Any:
        nonlocal known
        if pending or arena.turns != arena.done or type(x) is not ndarray:
            return NotImplemented
        if out is None:
            out = empty(result, dtype)
        elif out is not known() or not out.flags.writeable:
            if not fits(out, result, dtype):
                return NotImplemented
            known = ref(out)
        watch.sequence += 1
        arena.staged = staged = arena.staged + 1
        half = staged & 1
        mine[half][...] = x
        if fences:  # from here on what `Flags.is_last` does
            release()
            acquire()
        flags.epoch = epoch = flags.epoch + MEETING
        words[me] = word = epoch + mark
        full_fence()
        for other in others:
            there = words[other]
            if there != word:
                if there < epoch:
                    if yields:
                        pause()
                        last = words[common]
                        if last >= epoch:
                            if fences:
                                release()
                                acquire()
                            out[...] = parts[half][last & MARK_MASK]
                            break
                    out[...] = parts[half][published(digest)]
                    break
                if there - epoch < MEETING:
                    flags.disagree(digest)
        else:
            if fences:
                release()
                acquire()
            add(half)
            out[...] = parts[half][rank]
        if is_average:
            np.divide(out, ranks, out)
        return out

    return ready


def _small_gather(group: Group, call: Call, x: Any) -> ReadyCall:
    """all_gather and all_to_all: put on the stage, meet, copy the rows that are this rank's."""
    assert group.sharing is not None
    arena, pending, watch = group.sharing.arena, group.engine.pending, group.watch
    flags, ranks, dtype, shape, result = arena.flags, arena.ranks, x.dtype, x.shape, call.shape
    block = x.nbytes if call.collective == "all_gather" else x.nbytes // ranks
    at = 0 if call.collective == "all_gather" else group.transport.rank * block
    mine = [arena.staged_by(arena.rank, half, x.nbytes).view(dtype).reshape(shape) for half in range(2)]
    stacked = (ranks, result[0] // ranks, *result[1:])
    rows = [arena.rows(half, at, block, x.nbytes).view(dtype).reshape(stacked) for half in range(2)]
    words, me, others, await_same = flags.words, flags.mine, flags.others, flags.await_same
    pause, looks = flags.pause, flags.looks
    (release, acquire), fences = fence_parts(), flags.fence is not None
    empty, ndarray = np.empty, np.ndarray
    digest, mark = call.digest, call.digest.mark
    known: Callable[[], Any] = _nobody
    known_rows = rows[0]  # of `known`

    def ready(x: Any, out: Any) -> Any:
        nonlocal known, known_rows
        if pending or arena.turns != arena.done or type(x) is not ndarray:
            return NotImplemented
        if out is None:
            out = empty(result, dtype)
            target = out.reshape(stacked)
        elif out is known() and out.flags.writeable:
            target = known_rows
        else:
            if not fits(out, result, dtype):
                return NotImplemented
            known, known_rows = ref(out), unowned(out).reshape(stacked)
            target = known_rows
        watch.sequence += 1
        arena.staged = staged = arena.staged + 1
        half = staged & 1
        mine[half][...] = x
        if fences:
            release()
            acquire()
        flags.epoch = epoch = flags.epoch + MEETING
        words[me] = word = epoch + mark
        for other in others:
            if words[other] != word and words[other] < epoch + MEETING:
                for _ in looks:
                    if words[other] == word:
                        break
                else:
                    pause()
                    if words[other] != word:
                        await_same(other, word, digest)
        if fences:
            release()
            acquire()
        target[...] = rows[half]
        return out

    return ready


def _small_broadcast(group: Group, call: Call, x: Any) -> ReadyCall:
    assert group.sharing is not None
    arena, pending, watch = group.sharing.arena, group.engine.pending, group.watch
    flags, dtype, shape, root = arena.flags, x.dtype, x.shape, call.root
    is_root = group.transport.rank == root
    staged_by = [arena.staged_by(root, half, x.nbytes).view(dtype).reshape(shape) for half in range(2)]
    digest = call.digest

    def ready(x: Any, out: Any) -> Any:
        if pending or arena.turns != arena.done or type(x) is not np.ndarray:
            return NotImplemented
        if out is not None and not fits(out, shape, dtype):
            return NotImplemented
        watch.sequence += 1
        flags.digest = digest
        arena.staged = staged = arena.staged + 1
        half = staged & 1
        if is_root:
            staged_by[half][...] = x
        flags.meet()
        if out is None:
            return staged_by[half].copy()
        out[...] = staged_by[half]
        return out

    return ready


_SMALL: dict[str, Callable[..., ReadyCall]] = {
    "all_reduce": _small_reduce,
    "reduce_scatter": _small_reduce,
    "all_gather": _small_gather,
    "all_to_all": _small_gather,
    "broadcast": _small_broadcast,
}


def _large(group: Group, call: Call, x: Any, choice: Choice, natively: ReadyCall | None) -> ReadyCall | None:
    """Any shared-memory call over flat arrays, without what the first one has found out.

    Where the same two arrays come again, not even they are looked at, only where the neighbours' lie; and that only if
    there are arrays of `empty` at all. `natively`: the library's own, ready, where that is the choice for other arrays.
    """
    sharing = group.sharing
    assert sharing is not None
    if call.collective in ("reduce", "gather", "scatter"):
        return None
    pending, watch, arena = group.engine.pending, group.watch, sharing.arena
    flags, dtype, result, ranks = arena.flags, x.dtype, call.shape, arena.ranks
    shared = sharing.repeated(sharing.call(call, choice))
    run, agreed, asks = shared.run, shared.agreed, shared.wanted is not None
    contributes = call.collective != "broadcast" or group.transport.rank == call.root
    nothing = np.empty(0, dtype)
    is_average, ndarray = call.op == "avg", np.ndarray
    digest = call.digest
    # As in `mpi.py`: known weakly, and what is weakly known cannot be resized where it is.
    known_x: Callable[[], Any] = _nobody
    known_out: Callable[[], Any] = _nobody
    places, seen = (0, 0), (0, 0)

    def ready(x: Any, out: Any) -> Any:
        nonlocal known_x, known_out, places, seen
        if pending or arena.turns != arena.done or type(x) is not ndarray:
            return NotImplemented
        if out is not None and out is known_out() and x is known_x() and out.flags.writeable:
            watch.sequence += 1
            flags.digest = digest
            way = agreed(*places)
            if isinstance(way, list):
                for step in way:
                    step()
            elif way is None and natively is not None:
                flags.meet()  # the places must not change while somebody still looks at them
                watch.sequence -= 1  # it counts by itself
                return natively(x, out)
            else:
                shared.otherwise(way, x.reshape(-1) if contributes else nothing, out.reshape(-1))
        else:
            if not x.flags.c_contiguous or not x.flags.aligned:
                return NotImplemented
            if out is None:
                out = np.empty(result, dtype)
            elif not fits(out, result, dtype):
                return NotImplemented
            watch.sequence += 1
            flags.digest = digest
            inputs, data = x.reshape(-1) if contributes else nothing, out.reshape(-1)
            if asks and arena.live:
                if seen != (id(x), id(out)):
                    seen = (id(x), id(out))
                elif (shared_places := shared.places(inputs, data)) is not None:
                    known_x, known_out, places = ref(x), ref(out), shared_places
            run(inputs, data)
        if is_average:
            np.divide(out, ranks, out)
        return out

    return ready
