"""What of a parallel plan this version cannot run: one list, from which what is built is taken out.

The planner's "train" column, training's refusals and the laying of a model on a mesh all read it, so that they agree.
What cannot exist for a model at all is `why_not` in `model/work/weights.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tilemesh.core.plan import ASYNCHRONOUS, IN_A_V, INTERLEAVED, TWO_WAYS, ParallelPlan


class Lack(NamedTuple):
    """One thing that a plan asks for and that cannot be run."""

    name: str
    """In a word, for a table: "pp", "zero2"."""
    given: str
    """What the plan says: "pp is 4"."""
    why: str
    instead: str
    """What to set in its place: "pp=1"."""
    is_wrong: bool = False
    """Whether the plan contradicts itself: no search would have made it."""


def lacks(plan: ParallelPlan) -> Iterator[Lack]:
    """All that keeps this plan from being run; nothing where it can be."""
    if plan.slices > 1 and plan.sequence_parallel:
        given = f"slices is {plan.slices} with sequence_parallel"
        yield Lack("slices", given, "both cut sequences, and not together", "sequence_parallel=false")
    if plan.zero and plan.dp == 1:
        why = "ZeRO shares among replicas and there is one"
        yield Lack(f"zero{plan.zero}", f"zero is {plan.zero} and dp is 1", why, "zero=0", is_wrong=True)
    elif plan.zero_group and not plan.zero:
        given = f"zero_group is {plan.zero_group} and zero is 0"
        why = "without ZeRO nothing is cut within a group of replicas"
        yield Lack("zero_group", given, why, "zero_group=0", is_wrong=True)
    elif plan.zero and plan.zero_group and (plan.dp % plan.zero_group or plan.zero_group == 1):
        given = f"zero_group is {plan.zero_group} and dp is {plan.dp}"
        why = "groups of several replicas must make up dp"
        yield Lack("zero_group", given, why, f"zero_group={_nearest_divisor(plan.dp, plan.zero_group)}", True)
    if plan.recompute_every != 1 and plan.recompute != "full":
        given = f"recompute_every is {plan.recompute_every} and recompute is {plan.recompute}"
        yield Lack("recompute_every", given, "only full recomputation has stretches of layers", "recompute=full", True)
    if plan.recompute_stages:
        yield from _lacks_of_stages(plan)
    yield from _lacks_of_offloads(plan)
    if plan.schedule in ASYNCHRONOUS:
        yield from _lacks_of_versions(plan)
    if plan.attention == "materialized":
        yield Lack("materialized", "attention is materialized", "attention here is one fused kernel", "attention=fused")


def _lacks_of_stages(plan: ParallelPlan) -> Iterator[Lack]:
    stages, given = {*plan.recompute_stages}, f"recompute_stages is {list(plan.recompute_stages)}"
    if plan.repeated == "none":
        why = f"recompute is {plan.recompute}, so no stage computes anything again"
        yield Lack("recompute_stages", given, why, "recompute=full", True)
    if max(stages) >= plan.pp:
        why = f"the stages of pp {plan.pp} are 0 to {plan.pp - 1}"
        within = sorted(stage for stage in stages if stage < plan.pp)
        instead = f"recompute_stages=[{','.join(map(str, within))}]"
        yield Lack("recompute_stages", given, why, instead if plan.pp > 1 and within else "recompute_stages=[]", True)
    elif plan.schedule in TWO_WAYS and stages != {plan.pp - 1 - stage for stage in stages}:
        why = f"{plan.schedule} has each chunk on two stages, s and {plan.pp - 1} - s, which must do the same"
        both = sorted(stages | {plan.pp - 1 - stage for stage in stages})
        yield Lack("recompute_stages", given, why, f"recompute_stages=[{','.join(map(str, both))}]", True)


def _lacks_of_versions(plan: ParallelPlan) -> Iterator[Lack]:
    """Of schedules that update weights while microbatches are under way."""
    given = f"schedule is {plan.schedule}"
    if plan.pp == 1:
        why = "on one stage no microbatch is under way while weights are updated"
        yield Lack("schedule", f"{given} and pp is 1", why, "schedule=1f1b", True)
    if plan.zero:
        why = "each of its updates would gather what ZeRO cuts"
        yield Lack(f"zero{plan.zero}", f"{given} with zero {plan.zero}", why, "zero=0", True)
    if plan.recompute == "full":
        why = "what is computed again would read newer weights than the first time"
        yield Lack("recompute", f"{given} with recompute full", why, "recompute=none", True)
    if plan.offloads:
        yield Lack("offload", f"{given} with offload {plan.offload}", "versions stay on the device", "offload=", True)


def _lacks_of_offloads(plan: ParallelPlan) -> Iterator[Lack]:
    given = f"offload is {plan.offload}"
    if "activations" in plan.offloads and plan.slices > 1:
        instead = "offload=" + "+".join(name for name in plan.offloads if name != "activations")
        yield Lack("offload", f"{given} with slices", "slices of a sequence share keys and values", instead, True)
    if "activations" in plan.offloads and plan.recompute == "operators":
        why = "results that are kept by operator are not autograd's, and only what is autograd's is moved"
        yield Lack("offload", f"{given} with recompute operators", why, "recompute=full", True)
    if "weights" not in plan.offloads:
        return
    instead = "offload=" + "+".join(name for name in plan.offloads if name != "weights")
    if plan.zero == 3:
        why = "ZeRO-3 keeps a rank's rows of the weights alone and has nothing to move"
        yield Lack("offload", f"{given} with zero 3", why, instead, True)
    held = plan.interleave if plan.schedule in INTERLEAVED else 2 if plan.schedule in IN_A_V else 1
    if plan.pp > 1 and held <= 1 + plan.prefetch:
        why = f"a stage has {held} chunk{'s' * (held > 1)} and holds 1 + prefetch of them, so no weights would move"
        yield Lack("offload", f"{given} with pp {plan.pp}", why, "prefetch=0" if held > 1 else instead, True)


def _nearest_divisor(number: int, wanted: int) -> int:
    """Of the divisors above 1, the one nearest to what was asked for."""
    divisors = (size for size in range(2, number + 1) if number % size == 0)
    return min(divisors, key=lambda size: abs(size - wanted))
