"""The library's own collectives, with what they lack put around them.

16-bit floats are widened to float32. The smallest and largest of floats travel as whole numbers of the same order:
a library compares with `<`, so which of two zeros wins, and whether a NaN does, would differ from rank to rank.
Sums of 8- and 16-bit integers are widened to uint32 where the library saturates them (Open MPI with AVX does: 200 + 200
in uint8 is 255 there); modulo 2³² and then cut to their own bits they wrap around as numpy's do. Complex numbers are
added as pairs of floats; their products are refused, because libraries differ in what they make of infinities.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tilemesh.comm.runtime import arithmetic
from tilemesh.comm.runtime.call_parts import Call
from tilemesh.comm.runtime.observe import Stopwatch
from tilemesh.comm.runtime.transport import Array, NativeCall, Token, Transport
from tilemesh.comm.schedules.collectives import REDUCING


def native_steps(
    transport: Transport, call: Call, inputs: Array, result: Array, stopwatch: Stopwatch | None = None
) -> Iterator[Token]:
    """A call on these flat arrays by the library; timed, all of it is one part, for the library tells nothing of it."""
    if np.may_share_memory(inputs, result) and inputs.size:
        inputs = inputs.copy()
    native_call = NativeCall(
        call.collective, inputs, result, call.op, call.root, call.sizes, call.received, call.private
    )
    if stopwatch is not None:
        stopwatch.begin("wire")
    yield from library_steps(transport, native_call, call.wire.dtype)
    if stopwatch is not None:
        stopwatch.begin(None)


def library_steps(transport: Transport, call: NativeCall, dtype: str) -> Iterator[Token]:
    is_wide = arithmetic.widens(call.collective, dtype, call.op, transport.caps) is not None
    is_ordered = arithmetic.orders(call.collective, dtype, call.op)
    if not is_wide and not is_ordered:
        yield transport.native(as_pairs(call) if arithmetic.is_complex(dtype) and call.collective in REDUCING else call)
        return
    source = widened(call.source, dtype) if is_wide else call.source
    target: Array = np.empty(call.target.shape, source.dtype)
    if is_ordered:
        # Both have names, so that both live until the library is done with them: it keeps neither.
        keys_in, keys = ordered(source, call.op), np.empty(target.shape, _whole(target.dtype))
        yield transport.native(replace(call, source=keys_in, target=keys))
        target = disordered(keys, target.dtype)
    else:
        yield transport.native(replace(call, source=source, target=target))
    if is_wide:
        narrow(target, call.target, dtype)
    else:
        call.target[:] = target


def ordered(values: Array, op: str) -> Array:
    """Whole numbers in the order of the floats, -0.0 below 0.0, and NaN where it wins: below all, or above all."""
    kind = _whole(values.dtype)
    bits = values.view(kind)
    keys = np.where(bits < 0, bits ^ np.iinfo(kind).max, bits)
    limits = np.iinfo(kind)
    return np.where(np.isnan(values), kind.type(limits.min if op == "min" else limits.max), keys)


def disordered(keys: Array, dtype: np.dtype[np.floating]) -> Array:
    """The floats again. Both ends of the whole numbers stand for a NaN, and for the same one."""
    bits = np.where(keys < 0, keys ^ np.iinfo(keys.dtype).max, keys)
    values = bits.view(dtype)
    return np.where(np.isnan(values), dtype.type(np.nan), values)


def _whole(dtype: np.dtype[np.floating]) -> np.dtype[np.signedinteger]:
    return np.dtype(f"int{8 * dtype.itemsize}")


def as_pairs(call: NativeCall) -> NativeCall:
    """A sum of complex numbers as one of twice as many floats."""
    source, target = (array.view(array.real.dtype) for array in (call.source, call.target))
    return replace(call, source=source, target=target, counts=tuple(2 * count for count in call.counts))


def widened(array: Array, dtype: str) -> Array:
    """16-bit floats in float32; 8- and 16-bit integers in uint32, negative ones as their residue."""
    if dtype == arithmetic.BF16:
        return arithmetic.bf16_as_float32(array)
    return array.astype(np.float32 if arithmetic.is_floating(dtype) else np.uint32)


def narrow(values: Array, target: Array, dtype: str) -> None:
    """Into `target`: float32 rounded to the nearest 16-bit float, or the lowest bits of an integer."""
    if dtype == arithmetic.BF16:
        import torch

        arithmetic.as_torch_bf16(target).copy_(torch.from_numpy(values))
    elif not arithmetic.is_floating(dtype):
        np.copyto(target, values, casting="unsafe")
    else:
        with np.errstate(over="ignore"):  # what is too large for 16 bits is infinite there, as everywhere
            np.copyto(target, values, casting="same_kind")
