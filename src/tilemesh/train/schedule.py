"""The learning rate of every step: a line up, then as the schedule says. A pure function: resuming needs no state."""

from __future__ import annotations

import math

from tilemesh.train.config import OptimizerConfig


def rate(step: int, steps: int, optimizer: OptimizerConfig) -> float:
    """The rate of step `step` (counted from 0) in a run of `steps`."""
    warmup = min(optimizer.warmup, steps)
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    lowest, fall = optimizer.lr * optimizer.lr_end, steps - 1 - warmup
    if optimizer.schedule == "wsd":
        fall = min(fall, round(optimizer.decay * steps))
    # From 0 where the rate begins to fall to 1 at the last step.
    progress = min(1.0, max(0.0, (step - (steps - 1 - fall)) / max(1, fall)))
    share = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "constant": 1.0}.get(optimizer.schedule, 1 - progress)
    return lowest + (optimizer.lr - lowest) * share
