"""The learning rate of every step: a line up, half a cosine down. A pure function, so a resumed run needs no state."""

from __future__ import annotations

import math

from tilemesh.train.config import OptimizerConfig


def rate(step: int, steps: int, optimizer: OptimizerConfig) -> float:
    """The rate of step `step` (counted from 0) in a run of `steps`."""
    warmup = min(optimizer.warmup, steps)
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    lowest = optimizer.lr * optimizer.lr_end
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return lowest + (optimizer.lr - lowest) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
