"""Collectives of activations that `torch.compile` can trace.

The one idea: a tracer needs no more of a collective than the shape of its result, so in a graph it is one operator,
whose code calls the communicator when the graph runs. Operators take plain values: a communicator goes by a name.

A compiler may move what does not wait for anything. The collectives of a layer do, each for what the one before it
gave, in forward and in backward passes: their order is the same on all ranks.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.comm.schedules.collectives import cut
from tilemesh.core.shard import share

_COMMUNICATORS: WeakValueDictionary[str, Communicator] = WeakValueDictionary()
_numbers = itertools.count()
_library: Any = torch.library.Library("tilemesh", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("collective(Tensor x, str group, str name, str op, int dim, SymInt length, str algorithm) -> Tensor")


class TracedGroup:
    """The collectives of a communicator as activations call them; none has a gradient of its own."""

    def __init__(self, comm: Communicator, algorithm: str = "auto") -> None:
        self.comm, self.algorithm, self.size, self.rank = comm, algorithm, comm.size, comm.rank
        self.name = f"group {next(_numbers)}"
        _COMMUNICATORS[self.name] = comm

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        return self._call(x, "all_reduce", op)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self._call(x, "reduce_scatter", "sum", dim, share(x.shape[dim], self.size, self.rank)[1])

    def all_gather(self, x: Tensor, dim: int, total: int) -> Tensor:
        """`total`: the length of the dim over all ranks."""
        return self._call(x, "all_gather", "", dim, total)

    def _call(self, x: Tensor, name: str, op: str, dim: int = 0, length: int = 0) -> Tensor:
        """`length`: of the dim, in the result; all of them stay as they are in a sum."""
        call: Any = torch.ops.tilemesh.collective if is_compiling() else _run
        y: Tensor = call(x, self.name, name, op, dim, length, self.algorithm)
        return y


def _run(x: Tensor, group: str, name: str, op: str, dim: int, length: int, algorithm: str) -> Tensor:
    comm = _COMMUNICATORS[group]
    y: Tensor
    match name:
        case "all_reduce":
            y = comm.all_reduce(x, op, algorithm=algorithm)
        case "reduce_scatter":
            y = comm.reduce_scatter(x, op, axis=dim, algorithm=algorithm)
        case _:
            y = comm.all_gather(x, axis=dim, counts=cut(length, comm.size), algorithm=algorithm)
    return y


def _fake(x: Tensor, group: str, name: str, op: str, dim: int, length: int, algorithm: str) -> Tensor:
    shape = list(x.shape)
    if name != "all_reduce":
        shape[dim] = length
    return x.new_empty(shape)


for _device in ("CPU", "CUDA"):
    _library.impl("collective", _run, _device)
torch.library.register_fake("tilemesh::collective", _fake, lib=_library)
