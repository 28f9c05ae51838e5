"""Whether this version of `tilemesh train` can run a plan. One list, one function: training adds to the list."""

from __future__ import annotations

from tilemesh.core.plan import ParallelPlan

TRAINABLE: frozenset[str] = frozenset(
    {
        "dp", "tp", "sequence_parallel", "accumulation", "full",
        *(f"precision:{name}" for name in ("fp32", "bf16", "bf16-master", "fp16", "fp64")),
    }
)  # fmt: skip
"""What training can do, of: "dp", "tp", "pp", "sequence_parallel", "accumulation", "zero1", "zero2", "zero3", "gpipe",
"1f1b", "interleaved", "selective", "full", "materialized", and "precision:NAME" for each precision. Empty: there is no
training in this version."""


def needs(plan: ParallelPlan) -> list[str]:
    """What a plan asks of training."""
    wanted = [axis for axis in ("dp", "tp", "pp") if getattr(plan, axis) > 1]
    if plan.sequence_parallel:
        wanted.append("sequence_parallel")
    if plan.accumulation > 1:
        wanted.append("accumulation")
    if plan.zero:
        wanted.append(f"zero{plan.zero}")
    if plan.pp > 1:
        wanted.append(plan.schedule)
    if plan.recompute != "none":
        wanted.append(plan.recompute)
    if plan.attention == "materialized":
        wanted.append("materialized")
    return [*wanted, f"precision:{plan.precision}"]


_INSTEAD = {
    "pp": "pp=1", "zero1": "zero=0", "zero2": "zero=0", "zero3": "zero=0", "sequence_parallel": "sequence_parallel=no",
    "selective": "recompute=full", "full": "recompute=none", "materialized": "attention=fused",
}  # fmt: skip


def pins_to_train(plan: ParallelPlan) -> str:
    """What to fix so that a search finds a plan without what this one has and training lacks."""
    return ",".join(_INSTEAD[need] for need in needs(plan) if need not in TRAINABLE and need in _INSTEAD)


def trainable(plan: ParallelPlan) -> str:
    """ "yes", or why not: what is missing."""
    missing = [need for need in needs(plan) if need not in TRAINABLE]
    return "yes" if not missing else f"not yet: {', '.join(missing)}"
