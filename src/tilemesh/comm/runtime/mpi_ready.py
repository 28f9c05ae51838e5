"""MPI's own collectives, kept ready: the same calls as `mpi.py` makes, with all that does not change made once.

The same functions in the same form, because another rank may make the call in the ordinary way, and MPI matches no
other. When the same two arrays come again, even what mpi4py finds out about them is kept: where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from tilemesh.comm.runtime.fast import Pair, Ready, native_codes
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


def ready_native(caller: Caller, call: Call, pair: Pair) -> Ready | None:
    """The quick way, or None where the ordinary one puts something around the library's call."""
    transport: Any = caller.transport
    dtype = call.like.dtype
    if widens(call.collective, dtype) or orders(call.collective, dtype, call.op) or pair.dtype == bool:
        return None
    is_even = len(set(call.sizes)) == 1 and call.nbytes <= _MOST
    if not transport.blocks or call.collective not in _NAMES or not is_even:
        return None
    function = getattr(transport.comm, _NAMES[call.collective])
    combines = call.collective in ("all_reduce", "reduce_scatter")
    rest = (_OPS[call.op],) if combines else ()
    unit = MPI.Datatype.fromcode(pair.dtype.char) if combines else MPI.BYTE
    return _ready(caller, call, pair, function, rest, unit)


def _ready(
    caller: Caller, call: Call, pair: Pair, function: Callable[..., object], rest: tuple[Any, ...], unit: Any
) -> Ready:
    pending, watch, result = caller.engine.pending, caller.watch, call.shape
    ranks, is_average = caller.transport.size, call.op == "avg"
    watched = (watch, call.collective, call.nbytes)
    dtype, combines = pair.dtype, bool(rest)
    count = call.sizes[0] * dtype.itemsize // unit.Get_size()  # of one block, where there are blocks
    bound = (_nobody, _nobody)  # of which two arrays `again` knows the places
    again: Callable[[], object] = _nobody

    def place(array: Any) -> list[Any]:
        there = MPI.buffer.fromaddress(array.__array_interface__["data"][0], array.nbytes)
        return [there, count, unit]

    def ready(x: Any, out: Any, watched: tuple[Watch, str, int] = watched) -> Any:
        # No notes for the watchdog: it knows of the call from this frame's `watched` (`call.native_call`).
        nonlocal bound, again
        if pending:
            return NotImplemented
        if out is not None and x is bound[0]() and out is bound[1]():
            watch.sequence += 1
            again()
        else:
            if out is None:
                if not pair.is_alike(x) or not x.flags.c_contiguous:
                    return NotImplemented
                out = np.empty(result, dtype)
            elif not pair.serves(x, out) or not x.flags.c_contiguous or _overlap(x, out):
                return NotImplemented
            elif x is pair.x() and out is pair.out():
                bound, again = (pair.x, pair.out), partial(function, place(x), place(out), *rest)
            watch.sequence += 1
            if combines:
                function(x, out, *rest)
            else:
                function([x, count, unit], [out, count, unit])
        if is_average:
            np.divide(out, ranks, out)
        return out

    pair.ready = ready
    native_codes.add(ready.__code__)
    return ready


def _nobody() -> Any:
    return None


def _overlap(x: Any, out: Any) -> bool:
    # Two arrays that own their memory do not; asking numpy takes longer than to see that.
    return (out is x or x.base is not None or out.base is not None) and np.may_share_memory(x, out)
