"""The loss of a language model: cross-entropy in nats.

B: rows; T: tokens; V: vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.core.errors import UsageError

IGNORED = -100  # a target with this value counts for nothing


class HeadOutput(NamedTuple):
    """What a model's head makes of the last layer's activations."""

    x_BTD: Tensor
    """After the last norm: what the output projection is given. Where ranks cut sequences, of this rank's tokens."""
    logits_BTV: Tensor
    """Of all tokens; where ranks cut the vocabulary, of this rank's part."""


def check_targets(logits_BTV: Tensor, targets_BT: Tensor) -> None:
    if targets_BT.shape != logits_BTV.shape[:-1]:
        raise UsageError(
            f"targets are {tuple(targets_BT.shape)} and logits {tuple(logits_BTV.shape)}: expected a target a token"
        )


def loss_sum(logits_BTV: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats summed over the targets that are not `IGNORED`, and how many those are.

    The two apart, because parts of a batch (ranks, microbatches) may count differently: the mean is a ratio of sums.
    """
    check_targets(logits_BTV, targets_BT)
    wide = torch.promote_types(logits_BTV.dtype, torch.float32)
    logits, targets = logits_BTV.flatten(0, -2).to(wide), targets_BT.flatten().long()
    total = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


def loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token, at least float32; the target of a token is the one after it."""
    total, count = loss_sum(logits_BTV, targets_BT)
    return total / count.clamp(min=1)
