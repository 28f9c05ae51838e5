"""What was asked for, as values: a collective call, what was decided about it, and a scatter before its root speaks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilemesh.comm.runtime.arithmetic import WIDENED
from tilemesh.comm.runtime.choose import Choice
from tilemesh.comm.runtime.flags import NO_CALL, CallDigest
from tilemesh.comm.runtime.lower import ProgramKey
from tilemesh.comm.runtime.memory import Like
from tilemesh.comm.runtime.transport import Array
from tilemesh.comm.schedules.collectives import BLOCKED, REDUCING, ROOTED
from tilemesh.core.errors import UsageError

_FLOAT32 = Like("float32")


# Tuples here and in `Decided`, because every call makes them: a frozen dataclass is slower to make and to hash.
class Call(NamedTuple):
    """A collective as asked for. `shape`: of this rank's result; `sizes`, `received`: elements, as for `layout`."""

    collective: str
    like: Like
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    received: tuple[int, ...] = ()
    op: str = "sum"
    root: int = 0
    axis: int = 0
    out: Any = None
    private: bool = False
    digest: CallDigest = NO_CALL  # for the other ranks to compare with their own call

    @property
    def wire(self) -> Like:
        """What is combined: of 16-bit floats an average is one in float32, or their sum could be too large to hold."""
        is_wide = self.op == "avg" and self.like.dtype in WIDENED
        return _FLOAT32 if is_wide else self.like

    @property
    def nbytes(self) -> int:
        """The payload that all ranks agree on: the whole vector, or all blocks together."""
        total = sum(self.received) if self.private else sum(self.sizes)
        return total * self.like.carrier.itemsize

    @property
    def length(self) -> int:
        """Elements of the result."""
        return math.prod(self.shape)

    @property
    def is_block(self) -> bool:
        """Whether a rank's result is one block of what the algorithm works on."""
        return self.collective in ("reduce_scatter", "scatter")

    def begins_at(self, rank: int) -> int:
        """Where in the algorithm's data a rank's result begins, in elements."""
        return sum(self.sizes[:rank]) if self.is_block else 0

    def key(self, algorithm: str) -> ProgramKey:
        """All that a program for this call depends on."""
        return ProgramKey(self.collective, algorithm, self.root, self.sizes, self.received, self.wire, self.op)

    def words(self, algorithm: str) -> str:
        """What must be the same on every rank, as text; the sizes, which can be long, last."""
        parts = [self.like.dtype]
        if self.collective in REDUCING:
            parts.append(f"op={self.op}")
        if self.collective in ROOTED:
            parts.append(f"root={self.root}")
        parts.append(f"algorithm={algorithm}")
        lengths = [str(length) for length in self.shape]
        if self.collective in BLOCKED:
            parts.append(f"axis={self.axis}")
            lengths[self.axis] = "*"  # each rank's own
        parts.append(f"shape=({', '.join(lengths)})")
        if not self.private:
            parts.append(f"{sum(self.sizes)} elements")
            if len(set(self.sizes)) > 1:
                parts[-1] += f" in {list(self.sizes)}"
        return f"{self.collective}({', '.join(parts)})"


class Decided(NamedTuple):
    """A call with all that was decided about it. `device`: what runs it on GPU memory, if anything does."""

    call: Call
    x: Any
    choice: Choice
    device: Any
    target: Array | None
    has_result: bool
    wait: bool

    @property
    def name(self) -> str:
        return self.choice.algorithm

    @property
    def used(self) -> str:
        """The algorithm as an observer is told of it: on GPU memory the library's own, whatever was chosen."""
        return "native" if self.device is not None else self.choice.algorithm


@dataclass(frozen=True)
class Scatter:
    """What every rank of a scatter knows before the root has spoken."""

    root: int
    axis: int
    counts: tuple[int, ...] | None
    algorithm: str
    wait: bool

    def words(self) -> str:
        counts = "" if self.counts is None else f", counts={list(self.counts)}"
        return f"scatter(root={self.root}, algorithm={self.algorithm}, axis={self.axis}{counts})"


# What a rank makes of the root's words: the call, what it contributes, and what it must refuse once it has taken part.
Made = tuple[Call, Any, UsageError | None]
