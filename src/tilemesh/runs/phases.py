"""Seconds of a step that learns from feedback, by phase: as its run measured them, and as the planner told them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilemesh.runs.values import number, section

PHASES = ("rollout", "reward", "passes", "update", "weight sync")
_PARTS = {"passes": ("old", "reference", "values"), "update": ("critic update",)}
"""What a planner tells apart of a phase."""
_WARM_UP = 3


def measured_phases(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over steps without the first ones, which warm up; nothing where none was measured."""
    if not any("seconds/rollout" in step for step in steps):
        return {}
    ordinary = [step for step in steps if "seconds" in step and number(step.get("step"), 0) > _WARM_UP] or steps
    keys = {phase: f"seconds/{phase}" for phase in PHASES} | {"update": "seconds"}
    mean = {phase: sum(number(step.get(key), 0.0) for step in ordinary) / len(ordinary) for phase, key in keys.items()}
    mean["update"] = max(0.0, 2 * mean["update"] - sum(mean.values()))
    return mean


def predicted_phases(predicted: Mapping[str, Any]) -> dict[str, float]:
    """Of a run's predicted.json; nothing where there was no prediction."""
    seconds_by_phase = {phase: number(seconds, 0.0) for phase, seconds in section(predicted, "phases").items()}
    if not seconds_by_phase:
        return {}
    return {phase: sum(seconds_by_phase.get(part, 0.0) for part in (phase, *_PARTS.get(phase, ()))) for phase in PHASES}
