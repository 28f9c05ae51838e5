"""MPI's own collectives, kept ready: the same calls as `mpi.py` makes, with all that does not change made once.

The same functions in the same form, because another rank may make the call in the ordinary way, and MPI matches no
other: nonblocking, and vectors of counts where the ordinary call has them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from tilemesh.comm.runtime.fast import Ready, fits
from tilemesh.comm.runtime.native import orders, widens

if TYPE_CHECKING:
    from tilemesh.comm.runtime.asked import Call
    from tilemesh.comm.runtime.call import Caller

_OPS = {"sum": MPI.SUM, "avg": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}

Start = Callable[[Any, Any], Any]


def ready_native(caller: Caller, call: Call, x: Any) -> Ready | None:
    """The quick way, or None where the ordinary one puts something around the library's call."""
    dtype = call.like.dtype
    if widens(call.collective, dtype) or orders(call.collective, dtype, call.op) or x.dtype == bool:
        return None
    start = _start(caller, call, x)
    if start is None:
        return None
    engine, watch, result, made = caller.engine, caller.watch, call.shape, x.dtype
    turns, ranks, is_average = caller.turns, caller.transport.size, call.op == "avg"
    name, nbytes = call.collective, call.nbytes

    def ready(x: Any, out: Any) -> Any:
        if engine.pending or not turns.is_free or type(x) is not np.ndarray or not x.flags.c_contiguous:
            return NotImplemented
        if out is None:
            out = np.empty(result, made)
        elif not fits(out, result, made) or _overlap(x, out):
            return NotImplemented
        watch.sequence = sequence = watch.sequence + 1
        watch.enter(sequence, name, nbytes)
        start(x, out).Wait()
        watch.note = None
        if is_average:
            np.divide(out, ranks, out)
        return out

    return ready


def _overlap(x: Any, out: Any) -> bool:
    # Two arrays that own their memory do not; asking numpy takes longer than to see that.
    return (out is x or x.base is not None or out.base is not None) and np.may_share_memory(x, out)


def _start(caller: Caller, call: Call, x: Any) -> Start | None:
    comm: Any = caller.transport.comm  # type: ignore[attr-defined]
    size = x.itemsize
    sent, got = ([count * size for count in counts] for counts in (call.sizes, call.received or call.sizes))
    sent_at, got_at = ([0, *accumulate(lengths)][:-1] for lengths in (sent, got))
    op = _OPS[call.op]
    if call.collective == "all_reduce":
        return lambda x, out: comm.Iallreduce(x, out, op)
    if call.collective == "reduce_scatter":
        counts = list(call.sizes)
        return lambda x, out: comm.Ireduce_scatter(x, out, counts, op)
    if call.collective == "all_gather":
        return lambda x, out: comm.Iallgatherv([x, x.nbytes, MPI.BYTE], [out, sent, sent_at, MPI.BYTE])
    if call.collective == "all_to_all":
        return lambda x, out: comm.Ialltoallv([x, sent, sent_at, MPI.BYTE], [out, got, got_at, MPI.BYTE])
    return None
