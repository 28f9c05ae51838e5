"""The library's own collectives, with what they lack put around them: 16-bit floats are widened to float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tilemesh.comm.runtime.arithmetic import BF16, as_torch_bf16
from tilemesh.comm.runtime.transport import Array, NativeCall, Token, Transport
from tilemesh.comm.schedules.collectives import REDUCING

WIDENED = (BF16, "float16")


def widens(collective: str, dtype: str) -> bool:
    """Whether the wire carries float32 instead: MPI has no 16-bit floats to add, and gloo not everywhere."""
    return collective in REDUCING and dtype in WIDENED


def native_steps(transport: Transport, call: NativeCall, dtype: str) -> Iterator[Token]:
    if not widens(call.collective, dtype):
        yield transport.native(call)
        return
    source = widened(call.source, dtype)
    target = np.empty(call.target.shape, np.float32)
    yield transport.native(replace(call, source=source, target=target))
    narrow(target, call.target, dtype)


def widened(array: Array, dtype: str) -> Array:
    if dtype == BF16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def narrow(values: Array, target: Array, dtype: str) -> None:
    """Round float32 to the nearest 16-bit float, into `target`."""
    if dtype == BF16:
        import torch

        as_torch_bf16(target).copy_(torch.from_numpy(values))
    else:
        np.copyto(target, values, casting="same_kind")
