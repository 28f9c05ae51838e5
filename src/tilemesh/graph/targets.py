"""Targets of a loss, looked at before they are used: as eager, a program refuses one that is no class.

A generated kernel compares a target with the number of each column and would take one that is no column as any other.
"""

from __future__ import annotations

import torch

from tilemesh.graph.ir import Node, make
from tilemesh.graph.opaque import InputSlot

Tensor = torch.Tensor

_library = torch.library.Library("tilemesh", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("class_targets(Tensor(a) target, int classes, int ignored) -> Tensor(a)")  # type: ignore[no-untyped-call]


@torch.library.impl(_library, "class_targets", "CPU")
def _on_host(target: Tensor, classes: int, ignored: int) -> Tensor:
    if target.numel():
        low, high = torch.aminmax(target)
        if low < 0 or high >= classes:
            for value in target[(target < 0) | (target >= classes)].tolist():
                if value != ignored:
                    raise IndexError(f"Target {value} is out of bounds.")
    return target


@torch.library.impl(_library, "class_targets", "CUDA")
def _on_gpu(target: Tensor, classes: int, ignored: int) -> Tensor:
    """The host does not wait: the device ends with an error, as in eager."""
    known = (target.clamp(0, classes - 1) == target) | (target == ignored)
    torch._assert_async(known.all(), f"a target is out of bounds: there are {classes} classes")
    return target


@torch.library.register_fake("tilemesh::class_targets", lib=_library)  # type: ignore[untyped-decorator]
def _without_data(target: Tensor, classes: int, ignored: int) -> Tensor:
    return target


def checked_targets(target: Node, classes: int, ignored: int) -> Node:
    """The targets, of which each is a class or the one to be ignored."""
    name, args = "tilemesh.class_targets.default", (InputSlot(0), classes, ignored)
    return make("opaque", target, target=name, args=args, kwargs=(), shape=target.shape, dtype=target.dtype)
