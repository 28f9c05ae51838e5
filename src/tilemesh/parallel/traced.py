"""Exchanges of activations that `torch.compile` can trace.

The one idea: a tracer needs no more of an exchange than the shape of its result and which exchange its gradient goes
through, so in a graph it is one operator, whose code calls the ranks when the graph runs. Operators take plain values:
whoever exchanges goes by a name.

A compiler may move what does not wait for anything. The exchanges of a layer do, each for what the one before it gave,
in forward and in backward passes: their order is the same on all ranks.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tilemesh.core.shard import share


class Mover(Protocol):
    """What a name stands for."""

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and how many there are."""

    def move(self, x: Tensor, exchange: str, dim: int, total: int) -> Tensor:
        """`total`: the length of the dim that is cut, over all ranks."""


_MOVERS: WeakValueDictionary[str, Any] = WeakValueDictionary()
_numbers = itertools.count()
_library: Any = torch.library.Library("tilemesh", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("exchange(Tensor x, str mover, str there, str back, int dim, SymInt total, ScalarType dtype) -> Tensor")


def named(mover: Mover) -> str:
    """Its name in graphs, as long as there is one."""
    name = f"mover {next(_numbers)}"
    _MOVERS[name] = mover
    return name


def traced(x: Tensor, mover: str, there: str, back: str, dim: int, total: int, dtype: torch.dtype) -> Tensor:
    """A value exchanged one way, in this dtype, and its gradient, as wide as it is, the other way."""
    y: Tensor = torch.ops.tilemesh.exchange(x, mover, there, back, dim, total, dtype)
    return y


def _run(x: Tensor, mover: str, there: str, back: str, dim: int, total: int, dtype: torch.dtype) -> Tensor:
    y: Tensor = _MOVERS[mover].move(x.to(dtype), there, dim, total).to(x.dtype)
    is_same = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()  # an operator gives a tensor of its own
    return y.clone(memory_format=torch.contiguous_format) if is_same else y.contiguous()


def _fake(x: Tensor, mover: str, there: str, back: str, dim: int, total: int, dtype: torch.dtype) -> Tensor:
    shape = list(x.shape)
    if there == "all_gather":
        shape[dim] = total
    elif there in ("reduce_scatter", "slice"):
        rank, ranks = _MOVERS[mover].place
        shape[dim] = share(shape[dim], ranks, rank)[1]
    return x.new_empty(shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.how = inputs[1:6]


def _back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    mover, there, back, dim, total = ctx.how
    return traced(gradient, mover, back, there, dim, total, gradient.dtype), *(None,) * 6


for _device in ("CPU", "CUDA"):
    _library.impl("exchange", _run, _device)
torch.library.register_fake("tilemesh::exchange", _fake, lib=_library)
torch.library.register_autograd("tilemesh::exchange", _back, setup_context=_keep, lib=_library)
