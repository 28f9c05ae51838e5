"""What the cost model says of one layout: seconds by what they go to, bytes, fractions; and whether training runs it.

Plain values, ready for JSON: every figure by name, names end in their unit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tilemesh.core.conflicts import OR, PLAN_CONFLICTS, ConflictWords, refusals
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.memory import StepBytes
from tilemesh.core.step.simulate import StepTimes
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.operations import model_flops, published_flops
from tilemesh.plan.memory import RankMemory

Refused = Callable[[ParallelPlan], Iterable[ConflictWords]]
"""What keeps training from running a plan: of the plan alone, or of all that whoever asks knows."""


def refused_plan(plan: ParallelPlan) -> Iterable[ConflictWords]:
    """By the plan alone."""
    return refusals(PLAN_CONFLICTS, plan)


@dataclass(frozen=True)
class Times:
    """Where a step's seconds go, seen from the slowest stage."""

    compute_s: float
    recompute_s: float
    tp_s: float
    """Tensor-parallel exchanges."""
    pp_s: float
    """Sending to the next stage."""
    bubble_s: float
    """Waiting for the pipeline to fill and drain, and for slower stages."""
    dp_s: float
    """Of the gradient (and, with ZeRO, weight) exchange, what no pass hides."""
    optimizer_s: float
    offload_s: float = 0.0
    """Moving states, activations or weights to the host and back, what no pass hides."""
    host_s: float = 0.0
    """What the step takes beyond all that because the host, where that was measured, launches it no faster."""
    cp_s: float = 0.0
    """Keys and values, or heads, between ranks that share sequences, what attention does not hide."""
    ep_s: float = 0.0
    """Rows to experts of other ranks and back."""

    @property
    def total_s(self) -> float:
        return float(sum(getattr(self, field.name) for field in dataclasses.fields(self)))

    @property
    def exposed_s(self) -> float:
        """Communication that nothing hides."""
        return self.tp_s + self.cp_s + self.ep_s + self.pp_s + self.dp_s


@dataclass(frozen=True)
class Prediction:
    """Everything the cost model says of one layout."""

    plan: ParallelPlan
    step_time_s: float
    tokens: int
    model_flops: int
    hardware_flops: int
    peak_flops_per_s: float
    """Of all ranks together."""
    memory: RankMemory
    usable_bytes: int
    """What a rank's device has for it."""
    times: Times
    traffic: dict[str, float]
    """Bytes one rank sends in a step, by axis of the mesh."""
    bubble_fraction: float
    """Of the schedule itself, as if all stages took equally long."""
    chunk_layers: tuple[int, ...]
    """Layers of each chunk; the schedule says on which stage a chunk lies."""
    exchanges: dict[str, dict[str, int]]
    """Bytes of the buffers the first rank hands to each collective in a step, by axis: what a run can count exactly."""
    passes: StepTimes | None = None
    """Seconds of a pipeline's passes, as they were simulated ..."""
    kept: StepBytes | None = None
    """... and bytes of their activations, as their liveness was counted."""

    @property
    def settled_plan(self) -> ParallelPlan:
        """The plan with the cut that was predicted: what a file should say, so that it is what runs."""
        return self.plan if self.plan.pp == 1 else dataclasses.replace(self.plan, chunk_layers=self.chunk_layers)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_time_s

    @property
    def mfu(self) -> float:
        """Of the peak, what the FLOPs that had to be done make up."""
        return self.model_flops / (self.step_time_s * self.peak_flops_per_s)

    @property
    def hfu(self) -> float:
        """Of the peak, what all FLOPs done make up, recomputed ones too."""
        return self.hardware_flops / (self.step_time_s * self.peak_flops_per_s)

    @property
    def fits(self) -> bool:
        return self.memory.total_bytes <= self.usable_bytes


def mfu_words(mfu: float, model: ModelConfig, context: int) -> str:
    """Which attention MFU counts, and what it would be by the other common count of FLOPs."""
    share = published_flops(model, context) / (model_flops(model, 1, context) / context)
    other = f"as published tables count, without masked scores, it is {100 * mfu * share:.1f} %"
    return f"MFU counts attention, the whole square of its scores; {other}"


def prediction_figures(prediction: Prediction, refused: Refused = refused_plan) -> dict[str, Any]:
    """Seconds, bytes and fractions; names end in their unit."""
    memory = dataclasses.asdict(prediction.memory)
    return {
        "plan": prediction.settled_plan.to_dict(),
        "fits": prediction.fits,
        "trainable": trainable(prediction.plan, refused),
        "step_time_s": prediction.step_time_s,
        "tokens": prediction.tokens,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "model_flops": prediction.model_flops,
        "hardware_flops": prediction.hardware_flops,
        "memory": {**memory, "total_bytes": prediction.memory.total_bytes, "usable_bytes": prediction.usable_bytes},
        "bubble_fraction": prediction.bubble_fraction,
        "exposed_communication_s": prediction.times.exposed_s,
        "times": dataclasses.asdict(prediction.times),
        "traffic": {axis: round(nbytes) for axis, nbytes in prediction.traffic.items()},
        "exchanges": prediction.exchanges,
        "chunk_layers": list(prediction.chunk_layers),
        **({} if prediction.passes is None else {"pipeline": _pipeline_figures(prediction)}),
    }


def _pipeline_figures(prediction: Prediction) -> dict[str, Any]:
    """By chunk, what `core/step/` takes: a reader simulates and counts the same step."""
    times, sizes = prediction.passes, prediction.kept
    assert times is not None
    assert sizes is not None
    return {
        "forward_s": list(times.forward_s),
        "input_s": list(times.input_s),
        "weight_s": list(times.weight_s),
        "transfer_s": times.transfer_s,
        "slice_shares": list(times.slice_shares),
        **({} if times.routed is None else {"routed": list(times.routed)}),
        "kept_bytes": list(sizes.kept),
        "kept_for_weights_bytes": list(sizes.kept_for_weights),
    }


def trainable(plan: ParallelPlan, refused: Refused = refused_plan) -> str:
    """ "yes", or "no" and why `tilemesh train` does not run it, with what else than the plan may end that."""
    reasons = [
        f"{words.setting}: {words.why}" + f"; set {words.instead}" * ("." in words.instead) for words in refused(plan)
    ]
    return "yes" if not reasons else f"no, {'; '.join(reasons)}"


def pins_to_train(plan: ParallelPlan) -> str:
    """What to fix so that a search finds a plan without what this one has and training lacks."""
    return ",".join(refusal.instead.split(OR)[0] for refusal in refused_plan(plan))
