"""The four exchanges of a tensor-parallel projection, written plainly: numpy arrays and torch tensors alike.

    forward_input     the ranks' slices of the input, joined        its adjoint: backward_x
    forward_output    partial outputs summed (the input was split), or slices of the output joined (the output was)
    backward_output   the rank's own slice of a gradient that all ranks have: the adjoint of joining outputs
    backward_x        the ranks' gradients of the joined input, summed, and of the sum the rank's own slice

All work on the last axis, for any shape before it; slices differ by at most one element. dtypes are kept. Layers with
autograd are in `tensor.py`; this is what they do, to read first.
"""

from __future__ import annotations

from typing import Any

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.comm.runtime.memory import described
from tilemesh.comm.schedules.collectives import cut
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.shard import share

SPLITS = ("input", "output")


def forward_input(x: Any, comm: Communicator, *, total: int | None = None) -> Any:
    """The whole input from every rank's slice of the last axis; `total`: its length, where the slices are uneven."""
    return comm.all_gather(x, axis=-1, counts=_counts(x, comm, total))


def forward_output(y: Any, comm: Communicator, split: str = "input", *, total: int | None = None) -> Any:
    """The whole output: the sum of partial ones after a layer split by its input, the slices joined after `output`."""
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    if split == "input":
        return comm.all_reduce(y)
    return comm.all_gather(y, axis=-1, counts=_counts(y, comm, total))


def backward_output(grad: Any, comm: Communicator) -> Any:
    """This rank's own slice of the last axis: a view, nothing is sent."""
    shape, _ = described(grad)
    if not shape:
        raise UsageError("a gradient without an axis: expected an array whose last axis is cut over the ranks")
    start, count = share(shape[-1], comm.size, comm.rank)
    return grad[..., start : start + count]


def backward_x(grad: Any, comm: Communicator) -> Any:
    """The ranks' gradients summed, and of the sum this rank's slice of the last axis."""
    return comm.reduce_scatter(grad, axis=-1)


def _counts(x: Any, comm: Communicator, total: int | None) -> tuple[int, ...] | None:
    if total is None:
        return None
    sizes = cut(total, comm.size)
    if x.shape[-1] != sizes[comm.rank]:
        raise UsageError(
            f"a slice of {x.shape[-1]} on rank {comm.rank} of {comm.size}: {total} are cut into {list(sizes)}"
        )
    return sizes
