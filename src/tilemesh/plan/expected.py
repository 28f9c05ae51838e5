"""What the planner expected of a run that is read back from its folder: said before the run, or counted now."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tilemesh.core.config import from_dict
from tilemesh.core.errors import RunError
from tilemesh.core.hardware import device_for, parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import ModelConfig
from tilemesh.plan.step import predict
from tilemesh.runs.names import CONFIG
from tilemesh.runs.values import number, section


def expected_memory(
    config: Mapping[str, Any], predicted: Mapping[str, Any], summary: Mapping[str, Any]
) -> dict[str, float]:
    """Bytes per rank by kind: what was predicted before the run, else counted from its configuration.

    On a GPU these are the bytes that torch allocates, as a run measures them, without what the context and the
    libraries reserve. Nothing where the configuration is not one that can be counted.
    """
    told: Mapping[str, object] = section(predicted, "memory")
    if not told:
        try:
            model = from_dict(ModelConfig, dict(section(config, "model")), CONFIG)
            plan = from_dict(ParallelPlan, dict(section(config, "plan")), CONFIG)
            context = section(config, "train").get("context") or model.context
            name = str(summary.get("cluster", "")).partition("x")[2]
            device = device_for(name) if name != "local" else None
            cluster = parse_cluster(f"{plan.world}x{device.name if device else 'cpu'}")
            told = dataclasses.asdict(predict(model, cluster, plan, context).memory)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RunError):
            return {}
    kinds = {key.removesuffix("_bytes"): number(size, 0.0) for key, size in told.items()}
    unseen = ("total", "usable") if summary.get("device") in (None, "cpu") else ("total", "usable", "reserved")
    return {kind: size for kind, size in kinds.items() if size > 0 and kind not in unseen}
