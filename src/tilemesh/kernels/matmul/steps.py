"""What a plan is made of: launches, their arguments and the scratch memory of one call, as plain values.

Written by plan.py, copies.py and padded.py; read by launch.py, which compiles and launches, and interpret.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pointer:
    """The address of a tensor by the name it has in the plan: a, b, c, d, z (kept), or one of the plan's buffers."""

    of: str


@dataclass(frozen=True)
class Descriptor:
    """A TMA descriptor over a tensor: the last stride is 1, the shape is what bounds loads and stores."""

    of: str
    shape: tuple[int, int]
    strides: tuple[int, int]
    block: tuple[int, int]


Argument = Pointer | Descriptor | int | None


@dataclass(frozen=True)
class Step:
    """One launch. Arguments are by name; `wide` makes every stride 64-bit, which makes all index math so."""

    kernel: str
    grid: tuple[int, int]
    arguments: Mapping[str, Argument]
    constants: Mapping[str, object]
    warps: int = 4
    stages: int = 3
    wide: bool = False
    hints: bool = True  # tell the compiler what divides sizes and strides, so that accesses are wide
    varying: tuple[str, ...] = ()  # sizes that change from call to call: no hint, so that one kernel serves them all
    early: bool = False  # launched while the kernel before still runs; the kernel itself waits for it


@dataclass(frozen=True)
class Buffer:
    """Scratch memory for one call."""

    elements: int
    dtype: str


@dataclass(frozen=True)
class LaunchPlan:
    steps: tuple[Step, ...]
    buffers: Mapping[str, Buffer] = field(default_factory=dict)


def blocks(size: int, block: int) -> int:
    """How many blocks cover a size."""
    return -(-size // block)
