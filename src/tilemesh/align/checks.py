"""What must be true of every batch of answers, and what is wrong where it is not: found before the next step.

Each check names the fault. They cost a few operations over arrays, so they are always on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tilemesh.align.config import AlignConfig
from tilemesh.align.formulas.rollout import Rollout
from tilemesh.core.errors import RunError

Scoring = Callable[[int], float]


def check_position(steps: int, position: int, rows: int) -> None:
    """A run that goes on has taken as many prompts as its steps needed."""
    if position != steps * rows:
        raise RunError(
            f"the checkpoint of step {steps} says that {position} answers were trained on, and its steps took "
            f"{steps * rows}: prompts would be skipped or repeated; go on with the batch that the run had"
        )


def check_rollout(rollout: Rollout, version: int, answers: int) -> None:
    """Of a batch that was drawn by weights of this version."""
    _, size = np.unique(rollout.group, return_counts=True)
    if (size != answers).any():
        raise RunError(f"a group has {int(size[size != answers][0])} of its {answers} answers: groups were split")
    drawn = rollout.versions[rollout.trainable]
    if (drawn < 0).any():
        raise RunError("tokens are trained that the model did not draw: a prompt, or a turn of the history")
    if (drawn != version).any():
        wrong = int(drawn[drawn != version][0])
        raise RunError(f"answers were drawn by weights of version {wrong}, and {version} train: the engine is behind")
    if (rollout.trained == 0).any():
        raise RunError("an answer has no trained token: its end was masked with padding")
    last = rollout.starts[1:] - 1
    if not rollout.trainable[last].all():
        raise RunError("the last token of an answer is not trained: its end was masked with padding")


def check_rewards(rollout: Rollout, paid: np.ndarray, places: range) -> None:
    """Rewards of some answers, scored once more, are theirs and not a neighbour's."""
    for place in places:
        if not np.isclose(paid[place], rollout.reward[place]):
            is_next = place + 1 < len(paid) and np.isclose(paid[place], rollout.reward[place + 1])
            why = "rewards are shifted by one" if is_next else "it was paid for another answer"
            raise RunError(f"answer {place} was paid {rollout.reward[place]:g} and is worth {paid[place]:g}: {why}")


def check_mismatch(mismatch: float, dtype: torch.dtype, config: AlignConfig) -> None:
    """The engine's and the training program's log-probabilities of the same tokens by the same weights."""
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.align.dtype or config.plan.precision, dtype)
    most = 4 * torch.finfo(narrow).eps ** 0.5
    if mismatch > most:
        raise RunError(
            f"log-probabilities of the engine and of training differ by {mismatch:.3g} nats on average, and rounding "
            f"explains {most:.2g}: they are of other weights (stale pages, none after a sleep), at another "
            "temperature, or of other tokens"
        )
