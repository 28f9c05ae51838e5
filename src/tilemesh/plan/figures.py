"""A prediction as plain data: every figure by name, one object a plan, ready for JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from tilemesh.core import config
from tilemesh.model.config import ModelConfig
from tilemesh.plan.capability import trainable
from tilemesh.plan.choose import SearchResult
from tilemesh.plan.space import Pins
from tilemesh.plan.step import Prediction


def figures(result: SearchResult, place: int) -> dict[str, Any]:
    """The plan at that place of a search's result, 0 being the best, with what was asked."""
    return plan_figures(result.model, result.cluster.name, result.pins, place, result.predictions[place])


def plan_figures(model: ModelConfig, cluster: str, pins: Pins, place: int, found: Prediction) -> dict[str, Any]:
    """One layout with what was asked; also for one that does not fit."""
    case = {
        "model": config.to_dict(model),
        "cluster": cluster,
        "context": found.tokens // found.plan.batch,
        "batch": found.plan.batch,
        "fixed": pins.describe(),
    }
    return {"name": "plan", "place": place, "case": case, **prediction_figures(found)}


def prediction_figures(prediction: Prediction) -> dict[str, Any]:
    """Seconds, bytes and fractions; names end in their unit."""
    memory = dataclasses.asdict(prediction.memory)
    return {
        "plan": prediction.settled_plan.to_dict(),
        "fits": prediction.fits,
        "trainable": trainable(prediction.plan),
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
    }
