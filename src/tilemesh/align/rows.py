"""Rows of a run that learns from feedback: what its phases took beside what the planner says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilemesh.align.config import AlignConfig
from tilemesh.align.placement import predict_run_placement
from tilemesh.core import placement as placed
from tilemesh.core.errors import UsageError
from tilemesh.measure.machine import stamp
from tilemesh.measure.row import Row
from tilemesh.measure.sample import Sample
from tilemesh.runs.metrics import STEP, latest

PARTS = {
    placed.ROLLOUT: (placed.ROLLOUT,),
    placed.SYNC: (placed.SYNC,),
    placed.UPDATE: (placed.UPDATE, placed.CRITIC_UPDATE, placed.REFERENCES, placed.VALUES, placed.OLD),
}
"""Phases as a run's clock knows them, and as the planner does."""
_WARM_UP = 2
_NO_PEER = "a run has no peer of its own"
_NO_STEP = "too few steps: the first two batches do not count"


def phase_rows(config: AlignConfig, folder: Path, gpus: Sequence[str]) -> list[Row]:
    """Rollouts, weights to the engine, updates, and the share of the time that is none of the first and last, over
    batches and all their steps. No rows of pairs of answers."""
    align = config.align
    if align.is_of_pairs:
        return []
    steps = [line for line in latest(folder) if line["kind"] == STEP]
    batches = [steps[at : at + align.steps_per_batch] for at in range(0, len(steps), align.steps_per_batch)]
    batches = [lines for lines in batches[_WARM_UP:] if len(lines) == align.steps_per_batch]
    try:
        prediction, _ = predict_run_placement(config, gpus)
        phases, limits, why = prediction.seconds, prediction.limits, ""
    except UsageError as error:
        phases, limits, why = {}, {}, str(error)
    predicted = {
        name: sum(phases.get(part, 0.0) for part in parts) if phases else None for name, parts in PARTS.items()
    }
    least = {name: sum(limits.get(part, 0.0) for part in parts) for name, parts in PARTS.items()}
    measured = {name: [parts[name] for parts in map(_parts, batches)] for name in (*PARTS, "outside")}
    case: dict[str, str | int | bool] = {
        "algorithm": align.algorithm, "prompts": align.prompts, "answers": align.answers, "tokens": align.longest,
        "running": align.running, "exact": align.invariant, "precision": config.plan.precision,
        "ranks": config.plan.world + align.ranks_beside,
    }  # fmt: skip

    is_beside = align.placement in ("one-step-off", "asynchronous")
    beside = "others draw while these ranks update: what is measured is how long they wait"

    def row(name: str, unit: str, key: str) -> Row:
        guess, limit = predicted.get(key), least.get(key) or None
        missing = {"peers": _NO_PEER}
        if key == placed.ROLLOUT and is_beside and guess is not None:
            guess = limit = None
            missing |= {"predicted": beside, "limit": beside}
        if guess is None:
            missing.setdefault("predicted", why or "the planner takes what lies between phases for nothing")
        if limit is None:
            missing.setdefault("limit", why or "0: nothing would have to be copied or waited for")
        if not batches:
            missing["measured"] = _NO_STEP
        values = Sample.of(measured[key]) if batches else None
        return Row(
            name=name, case=case, unit=unit, predicted=guess, measured=values, limit=limit, missing=missing, **stamp()
        )

    return [
        row("waiting for rollouts of a batch" if is_beside else "rollouts of a batch", "s", placed.ROLLOUT),
        row("weights to the engine", "s", placed.SYNC),
        row("updates on a batch", "s", placed.UPDATE),
        row("share outside of rollouts and updates", "fraction", "outside"),
    ]


def _parts(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of a batch's steps, in seconds; what is `outside` as a share. Log-probabilities that an update needs are part of
    it."""
    names = (placed.ROLLOUT, placed.SYNC, placed.UPDATE, "passes")
    rollout, sync, tail, passes = (sum(float(line.get(f"seconds/{name}", 0.0)) for line in lines) for name in names)
    total = sum(line["seconds"] for line in lines)
    update = passes + tail + total - sum(line["data_s"] for line in lines)
    outside = max(0.0, total - rollout - update) / total
    return {placed.ROLLOUT: rollout, placed.SYNC: sync, placed.UPDATE: update, "outside": outside}
