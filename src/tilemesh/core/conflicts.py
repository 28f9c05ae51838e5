"""Settings that do not go together: a conflict is a row (these settings, when, why, what instead) of a table.

The one idea: whoever refuses, predicts or explains reads the same rows. Those of a parallel plan alone are here, for
the planner's "train" column, the laying of a model on a mesh, the gate and training; those of a whole training
configuration are in `train/conflicts.py`. What cannot exist for a model at all is `why_not` in `model/work/weights.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan

T = TypeVar("T")
OR = " or "
"""Between alternatives of what to set instead."""


class ConflictWords(NamedTuple):
    """A conflict as a configuration meets it."""

    setting: str
    """What is set: "plan.zero is 1 and plan.dp is 1"."""
    why: str
    instead: str
    """Settings that end it, such as "plan.tp=1"; alternatives with `OR` between them."""

    def __str__(self) -> str:
        return f"{self.setting}: {self.why}; set {self.instead}"


class ConflictError(UsageError):
    """Settings that were refused by a row."""

    refusal: ConflictWords

    @classmethod
    def of(cls, refusal: ConflictWords) -> ConflictError:
        error = cls(str(refusal))
        error.refusal = refusal
        return error


@dataclass(frozen=True)
class Conflict(Generic[T]):
    """One row: settings of a `T` that cannot be together."""

    settings: tuple[str, ...]
    """Names of what is set, as paths of attributes."""
    holds: Callable[[T], bool]
    """Whether they are set so."""
    why: str | Callable[[T], str]
    instead: str | Callable[[T], str]

    def refusal(self, values: T) -> ConflictWords:
        settings = " and ".join(f"{path} is {_shown(_value(values, path))}" for path in self.settings)
        return ConflictWords(settings, _words(self.why, values), _words(self.instead, values))

    def under(self, section: str) -> Conflict[Any]:
        """The same row of something that has a `T` as one of its sections."""

        def instead(config: Any) -> str:
            ways = _words(self.instead, getattr(config, section)).split(OR)
            return OR.join(re.sub(r"(^|,)(?=\w+=)", rf"\1{section}.", way) for way in ways)

        return dataclasses.replace(
            self, settings=tuple(f"{section}.{path}" for path in self.settings), instead=instead,
            holds=lambda config: self.holds(getattr(config, section)),
            why=lambda config: _words(self.why, getattr(config, section)),
        )  # fmt: skip


def row(
    settings: str, holds: Callable[[T], bool], why: str | Callable[[T], str], instead: str | Callable[[T], str]
) -> Conflict[T]:
    """A conflict whose settings are written with blanks between them."""
    return Conflict(tuple(settings.split()), holds, why, instead)


def refusals(rows: Iterable[Conflict[T]], values: T) -> Iterator[ConflictWords]:
    """All rows that apply, in words."""
    return (conflict.refusal(values) for conflict in rows if conflict.holds(values))


def refuse(rows: Iterable[Conflict[T]], values: T) -> None:
    """Raise the first row that applies."""
    for refusal in refusals(rows, values):
        raise ConflictError.of(refusal)


def _words(words: str | Callable[[T], str], values: T) -> str:
    return words if isinstance(words, str) else words(values)


def _value(values: object, path: str) -> Any:
    for name in path.split("."):
        values = getattr(values, name)
    return values


def _shown(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value) or "empty"


# ---- rows of a parallel plan -----------------------------------------------------------------------------------


def is_runnable(plan: ParallelPlan) -> bool:
    """Whether no row of a plan alone keeps it from being run."""
    return not any(conflict.holds(plan) for conflict in PLAN_CONFLICTS)


def _updates_within(plan: ParallelPlan) -> bool:
    """Whether weights are updated while microbatches are under way."""
    return plan.pipeline.updates is not None


def _reads_newer_weights(plan: ParallelPlan) -> bool:
    """Whether what is computed again would be, by weights that have been updated since the first time."""
    updates = plan.pipeline.updates
    return updates is not None and (
        plan.recompute == "full" or (plan.recompute == "operators" and not updates.keeps_versions)
    )


def _nearest_group(plan: ParallelPlan) -> str:
    """Of the divisors of dp above 1, the one nearest to what was asked for; none where there is one replica."""
    divisors = [size for size in range(2, plan.dp + 1) if plan.dp % size == 0]
    return f"zero_group={min(divisors or [0], key=lambda size: abs(size - plan.zero_group))}"


def _stages_there(plan: ParallelPlan) -> str:
    within = sorted(stage for stage in {*plan.recompute_stages} if stage < plan.pp)
    return f"recompute_stages=[{','.join(map(str, within)) if plan.pp > 1 else ''}]"


def _both_ways(plan: ParallelPlan) -> set[int]:
    """The stages that recompute and those that hold the same chunks."""
    stages = {*plan.recompute_stages}
    return stages.union(*(holders for holders in plan.placement.holders if stages & {*holders}))


def _chunks_per_stage(plan: ParallelPlan) -> int:
    return max(map(len, plan.placement.held))


def _without(offload: str) -> Callable[[ParallelPlan], str]:
    return lambda plan: "offload=" + "+".join(name for name in plan.offloads if name != offload)


def _expert_ranks(plan: ParallelPlan) -> int:
    """That may hold different experts."""
    return plan.replicas * plan.tp // plan.ranks_per_expert


def _spread_over_dp(plan: ParallelPlan) -> int:
    return dict(plan.expert_spread).get("dp", 1)


PLAN_CONFLICTS: tuple[Conflict[ParallelPlan], ...] = (
    row(
        "expert_tp tp",
        lambda plan: plan.expert_tp not in (0, 1, plan.tp),
        "in groups of some ranks of tp each row would travel to all of a group, where with expert_tp=1 and ep as many "
        "times as large it goes to one rank and each holds as much",
        "expert_tp=1 or expert_tp=0",
    ),
    row(
        "ep zero_group",
        lambda plan: _expert_ranks(plan) % plan.ep == 0 and plan.zero_group % _spread_over_dp(plan) > 0,
        "a group that cuts rows must hold all experts",
        lambda plan: f"zero_group={-(-plan.zero_group // _spread_over_dp(plan)) * _spread_over_dp(plan)}",
    ),
    row(
        "zero dp",
        lambda plan: plan.zero > 0 and plan.replicas == 1,
        "ZeRO shares among replicas and there is one",
        "zero=0",
    ),
    row(
        "zero_group zero",
        lambda plan: plan.zero_group > 0 and not plan.zero,
        "without ZeRO nothing is cut within a group of replicas",
        "zero_group=0",
    ),
    row(
        "zero_group dp",
        lambda plan: (
            plan.zero > 0
            and plan.replicas > 1
            and plan.zero_group > 0
            and (plan.dp % plan.zero_group > 0 or plan.zero_group == 1)
        ),
        "groups of several replicas must make up dp",
        _nearest_group,
    ),
    row(
        "recompute_every recompute",
        lambda plan: plan.recompute_every != 1 and plan.recompute != "full",
        "only full recomputation has stretches of layers",
        "recompute=full or recompute_every=1",
    ),
    row(
        "recompute_stages recompute",
        lambda plan: bool(plan.recompute_stages) and plan.repeated == "none",
        "no stage computes anything again",
        "recompute=full or recompute_stages=[]",
    ),
    row(
        "recompute_stages pp",
        lambda plan: bool(plan.recompute_stages) and max(plan.recompute_stages) >= plan.pp,
        lambda plan: f"the stages of pp {plan.pp} are 0 to {plan.pp - 1}",
        _stages_there,
    ),
    row(
        "recompute_stages schedule",
        lambda plan: (
            bool(plan.recompute_stages)
            and max(plan.recompute_stages) < plan.pp
            and _both_ways(plan) != {*plan.recompute_stages}
        ),
        "it has chunks on several stages, which must do the same",
        lambda plan: f"recompute_stages=[{','.join(map(str, sorted(_both_ways(plan))))}]",
    ),
    row(
        "offload zero",
        lambda plan: plan.zero == 3 and "weights" in plan.offloads,
        "ZeRO-3 keeps a rank's rows of the weights alone and has nothing to move",
        _without("weights"),
    ),
    row(
        "offload pp",
        lambda plan: plan.pp > 1 and "weights" in plan.offloads and _chunks_per_stage(plan) <= 1 + plan.prefetch,
        lambda plan: (
            f"a stage has {_chunks_per_stage(plan)} chunk{'s' * (_chunks_per_stage(plan) > 1)}, of which 1 + prefetch "
            "are on the device while a pass reads one of them, so no weights would move"
        ),
        lambda plan: "prefetch=0" if _chunks_per_stage(plan) > 1 else _without("weights")(plan),
    ),
    row(
        "schedule pp",
        lambda plan: _updates_within(plan) and plan.pp == 1,
        "on one stage no microbatch is under way while weights are updated",
        "schedule=1f1b",
    ),
    row(
        "schedule zero",
        lambda plan: _updates_within(plan) and plan.zero > 0,
        "each of its updates would gather what ZeRO cuts",
        "zero=0",
    ),
    row(
        "schedule recompute",
        _reads_newer_weights,
        "what is computed again would read newer weights than the first time",
        "recompute=none",
    ),
    row(
        "schedule offload",
        lambda plan: _updates_within(plan) and bool({"activations", "weights"} & {*plan.offloads}),
        "versions of weights stay on the device, and what is kept of a pass has one in it",
        lambda plan: "offload=" + "optimizer" * ("optimizer" in plan.offloads),
    ),
    row(
        "attention",
        lambda plan: plan.attention == "materialized",
        "attention here is one fused kernel",
        "attention=fused",
    ),
)
"""What of a parallel plan cannot be run, whatever the model."""
