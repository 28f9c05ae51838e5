"""MPI's own collectives, kept ready: the same calls as `mpi.py` makes, with all that does not change made once.

The same functions in the same form, because another rank may make the call in the ordinary way, and MPI matches no
other. When the same two arrays come again, even what mpi4py finds out about them is kept: where they lie.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from tilemesh.comm.runtime.fast import ReadyCall, fits, native_codes
from tilemesh.comm.runtime.native import orders, widens

if TYPE_CHECKING:
    from tilemesh.comm.runtime.asked import Call
    from tilemesh.comm.runtime.call import Caller
    from tilemesh.comm.runtime.watch import Watch

_OPS = {"sum": MPI.SUM, "avg": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
_MOST = 2**31 - 1
_NAMES = {
    "all_reduce": "Allreduce",
    "reduce_scatter": "Reduce_scatter_block",
    "all_gather": "Allgather",
    "all_to_all": "Alltoall",
}


def ready_native(caller: Caller, call: Call, x: Any) -> ReadyCall | None:
    """The quick way, or None where the ordinary one puts something around the library's call."""
    transport: Any = caller.transport
    dtype = call.like.dtype
    if widens(call.collective, dtype) or orders(call.collective, dtype, call.op) or x.dtype == bool:
        return None
    is_even = len(set(call.sizes)) == 1 and call.nbytes <= _MOST
    if not transport.blocks or call.collective not in _NAMES or not is_even:
        return None
    function = getattr(transport.comm, _NAMES[call.collective])
    combines = call.collective in ("all_reduce", "reduce_scatter")
    rest = (_OPS[call.op],) if combines else ()
    unit = MPI.Datatype.fromcode(x.dtype.char) if combines else MPI.BYTE
    return _ready(caller, call, x.dtype, function, rest, unit)


def _ready(
    caller: Caller, call: Call, made: np.dtype[Any], function: Callable[..., object], rest: tuple[Any, ...], unit: Any
) -> ReadyCall:
    pending, watch, result = caller.engine.pending, caller.watch, call.shape
    ranks, is_average = caller.transport.size, call.op == "avg"
    watched = (watch, call.collective, call.nbytes)
    ndarray, combines = np.ndarray, bool(rest)
    count = call.sizes[0] * made.itemsize // unit.Get_size()  # of one block, where there are blocks
    seen = (0, 0)
    # The arrays that come again and again; known weakly, so that they are their owner's alone.
    known_x: Callable[[], Any] = _nobody
    known_out: Callable[[], Any] = _nobody
    again: Callable[[], object] = _nobody

    def place(array: Any) -> list[Any]:
        there = MPI.buffer.fromaddress(array.__array_interface__["data"][0], array.nbytes)
        return [there, count, unit]

    def ready(x: Any, out: Any, watched: tuple[Watch, str, int] = watched) -> Any:
        # No notes for the watchdog: it knows of the call from this frame's `watched` (`call.native_call`).
        nonlocal seen, known_x, known_out, again
        if pending:
            return NotImplemented
        if out is not None and out is known_out() and x is known_x() and out.flags.writeable:
            watch.sequence += 1
            again()
        else:
            if type(x) is not ndarray or not x.flags.c_contiguous or not x.flags.aligned:
                return NotImplemented
            if out is None:
                out = np.empty(result, made)
            elif not fits(out, result, made) or _overlap(x, out):
                return NotImplemented
            elif seen == (id(x), id(out)):
                # An array that is weakly known cannot be resized where it is, so its place holds while it lives.
                known_x, known_out = weakref.ref(x), weakref.ref(out)
                again = partial(function, place(x), place(out), *rest)
            else:
                seen = (id(x), id(out))
            watch.sequence += 1
            if combines:
                function(x, out, *rest)
            else:
                function([x, count, unit], [out, count, unit])
        if is_average:
            np.divide(out, ranks, out)
        return out

    native_codes.add(ready.__code__)
    return ready


def _nobody() -> None:
    return None


def _overlap(x: Any, out: Any) -> bool:
    # Two arrays that own their memory do not; asking numpy takes longer than to see that.
    return (out is x or x.base is not None or out.base is not None) and np.may_share_memory(x, out)
