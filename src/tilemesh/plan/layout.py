"""What the cost model needs to know of a plan: the fields of `ParallelPlan`, however they are held.

A search looks at tens of thousands of layouts and a `ParallelPlan` checks itself thoroughly each time, so the search
holds them as `Candidate`, a plain tuple, and makes plans of the few that are shown.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tilemesh.core.plan import Attention, ParallelPlan, Precision, Recompute, Schedule

_COMPUTE_DTYPE = {
    precision: ParallelPlan(precision=precision).compute_dtype
    for precision in ("fp32", "bf16", "bf16-master", "fp16", "fp64")
}


class PlanFields(Protocol):
    """Read-only fields of a plan."""

    @property
    def dp(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def sequence_parallel(self) -> bool: ...
    @property
    def zero(self) -> int: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def accumulation(self) -> int: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def interleave(self) -> int: ...
    @property
    def recompute(self) -> Recompute: ...
    @property
    def attention(self) -> Attention: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def compute_dtype(self) -> str: ...
    @property
    def chunk_layers(self) -> tuple[int, ...]: ...


class Candidate(NamedTuple):
    """A layout on its way through the search; fields as in `ParallelPlan`."""

    dp: int
    tp: int
    pp: int
    sequence_parallel: bool
    zero: int
    microbatch: int
    accumulation: int
    schedule: Schedule
    interleave: int
    recompute: Recompute
    attention: Attention
    precision: Precision
    chunk_layers: tuple[int, ...] = ()

    @property
    def compute_dtype(self) -> str:
        return _COMPUTE_DTYPE[self.precision]

    def plan(self) -> ParallelPlan:
        return ParallelPlan(**self._asdict())


def short(plan: PlanFields) -> str:
    """A layout in a few words: the mesh and what sets it apart."""
    parts = [f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp}"]
    if plan.sequence_parallel:
        parts.append("sequence parallel")
    if plan.zero:
        parts.append(f"ZeRO-{plan.zero}")
    if plan.pp > 1:
        parts.append(plan.schedule + (f" {plan.interleave}" if plan.interleave > 1 else ""))
    parts.append(f"microbatch {plan.microbatch}")
    if plan.recompute != "none":
        parts.append(f"{plan.recompute} recomputation")
    return ", ".join(parts)
