"""The nearest layout that works: what to set where a plan cannot be run, as the fields that would have to change.

As many ranks where that can be, and as large a batch; a changed axis of the mesh is farther away than another schedule,
another ZeRO stage or another number of microbatches. What is offered has been tried: whoever types it is not refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from tilemesh.core.conflicts import is_runnable
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.book import find
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.weights import why_not

_FIELDS = (
    "dp", "tp", "pp", "sequence_parallel", "zero", "zero_group", "interleave", "chunk_layers", "microbatch",
    "accumulation",
)  # fmt: skip
_SETTINGS = ("schedule", "slices", "recompute", "recompute_every", "recompute_stages", "offload", "attention")

_MOST_RANKS, _FEWER = 4096, 32
"""Meshes beyond so many ranks are not looked around in; nor are meshes of so many ranks less."""
_MOST_TRIES = 40
"""Layouts that are looked at for one that is accepted."""


def nearest_layouts(model: ModelConfig, plan: ParallelPlan) -> Iterator[ParallelPlan]:
    """Plans that the model allows and training runs, the nearest first: those on as many ranks, then on fewer."""
    if plan.world > _MOST_RANKS:
        return
    for world in range(plan.world, max(0, plan.world - _FEWER), -1):
        possible = (layout for layout in _around(plan, world) if why_not(model, layout) is None and is_runnable(layout))
        yield from sorted(possible, key=lambda layout: (_distance(plan, layout), layout.tp, layout.pp))


def changes(plan: ParallelPlan, other: ParallelPlan) -> str:
    """The settings that make one plan of another: "plan.tp=4,plan.dp=2"."""
    names = [name for name in (*_FIELDS, *_SETTINGS) if getattr(plan, name) != getattr(other, name)]
    return ",".join(f"plan.{name}={_word(getattr(other, name))}" for name in names)


def advice(model: ModelConfig, plan: ParallelPlan, batch: int, accepts: Callable[[str], bool]) -> str:
    """Words to go after what is wrong with a plan; empty where nothing near it works.

    `batch`: sequences in a step, which replicas must divide. `accepts`: whether settings, typed beside all that was
    given, make a run that is not refused.
    """
    dividing = (layout for layout in nearest_layouts(model, plan) if batch % layout.dp == 0)
    for other in itertools.islice(dividing, _MOST_TRIES):
        # How the batch is cut follows from the rest, mostly.
        for text in dict.fromkeys((changes(plan, dataclasses.replace(other, accumulation=plan.accumulation)), "")):
            text = text or changes(plan, other)
            if text and accepts(text):
                return f"; the nearest layout that works: --set {text}"
    return ""


def without_offload(plan: ParallelPlan) -> Iterator[ParallelPlan]:
    """Plans that put less into the host's memory, the nearest first: more of it shared by replicas, then less moved,
    then both; last with everything computed again."""
    stages = range(plan.zero, 4 if plan.dp > 1 else plan.zero + 1)
    counts = range(len(plan.offloads), -1, -1)
    kept = ["+".join(names) for count in counts for names in itertools.combinations(plan.offloads, count)]
    ways = [(zero, kept[0]) for zero in stages] + [(plan.zero, what) for what in kept[1:]]
    ways += [(zero, what) for what in kept[1:] for zero in stages[1:]]
    for recompute in dict.fromkeys((plan.recompute, "full")):
        for zero, what in ways:
            other = dataclasses.replace(plan, zero=zero, offload=what, recompute=recompute)
            if other != plan and is_runnable(other):
                yield other


def smaller_microbatches(plan: ParallelPlan) -> Iterator[ParallelPlan]:
    """Plans with the same batch in more and smaller microbatches, the largest first."""
    size = plan.microbatch
    while size % 2 == 0:
        size //= 2
        yield dataclasses.replace(plan, microbatch=size, accumulation=plan.accumulation * plan.microbatch // size)


def _around(plan: ParallelPlan, world: int) -> Iterator[ParallelPlan]:
    for tp, pp in itertools.product(_divisors(world), repeat=2):
        if world % (tp * pp * plan.cp):
            continue
        dp = world // (tp * pp * plan.cp)
        schedules = dict.fromkeys((plan.schedule, "1f1b")) if pp > 1 else ("1f1b",)
        for schedule, zero in itertools.product(schedules, sorted({plan.zero if dp > 1 else 0, 0})):
            for accumulation in _accumulations(plan, dp, pp, schedule):
                fields = {
                    "dp": dp, "tp": tp, "pp": pp, "schedule": schedule, "zero": zero, "accumulation": accumulation,
                    "interleave": max(2, plan.interleave) if find(schedule).interleaves else 1,
                    "sequence_parallel": plan.sequence_parallel and tp > 1, "offload": "",
                    "zero_group": plan.zero_group if zero and dp % (plan.zero_group or 1) == 0 else 0,
                    "slices": plan.slices if find(schedule).cuts_sequences else 1, "chunk_layers": (),
                    "recompute_stages": (), "attention": "fused",
                }  # fmt: skip
                for more in (
                    {},
                    {name: getattr(plan, name) for name in ("chunk_layers", "offload", "recompute_stages")},
                ):
                    try:
                        yield dataclasses.replace(plan, **fields | more)
                    except UsageError:
                        continue


def _accumulations(plan: ParallelPlan, dp: int, pp: int, schedule: str) -> set[int]:
    """Microbatches that keep the batch, that are as many as before, or the next that the schedule takes."""
    counts = {plan.accumulation}
    if plan.batch % (dp * plan.microbatch) == 0:
        counts.add(plan.batch // (dp * plan.microbatch))
    return counts | {find(schedule).microbatches_from(pp, count) for count in counts if pp > 1}


def _distance(plan: ParallelPlan, other: ParallelPlan) -> float:
    axes: float = sum(abs(math.log2(getattr(plan, name) / getattr(other, name))) for name in ("dp", "tp", "pp"))
    batch = abs(math.log2(plan.batch / other.batch))
    rest = sum(getattr(plan, name) != getattr(other, name) for name in (*_FIELDS[3:8], *_SETTINGS))
    return float(4 * axes + 2 * batch + rest)


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
