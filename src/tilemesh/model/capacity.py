"""Which picks experts take where each takes so many of a sequence at most, and which are dropped.

The one idea: picks are counted sequence by sequence, and of tokens that pick an expert the earliest get it. So what is
dropped is the same however a batch is cut into replicas, microbatches and stages, padding behind a sequence's tokens
takes nothing from them, and no token's fate depends on a later one. (GShard and Switch count a whole group of tokens,
which is another group on every layout.) Ranks that share a sequence tell one another how often its runs of tokens
picked each expert.

B: sequences; T: tokens here, in their order; X: experts; C: experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from tilemesh.kernels.routing.reference import inverse
from tilemesh.model.config import ModelConfig


class PicksBefore(NamedTuple):
    """What ranks that share sequences know of all their tokens."""

    earlier_BTX: Tensor
    """How often those of other ranks that stand before each token here picked each expert."""
    tokens: int
    """Of a whole sequence."""


OrderedCounts = Callable[[Tensor], PicksBefore]
"""From which experts each token here picks, 1 of those and 0 of others (B, T, X)."""


def most_taken(config: ModelConfig, tokens: int) -> int:
    """Of a sequence of so many tokens, by each expert."""
    even = Fraction(tokens * config.experts_per_token, config.experts)
    return -int(-Fraction(str(config.expert_capacity)) * even // 1)


@torch.no_grad()
def rows_within(config: ModelConfig, experts_BTC: Tensor, ordered: OrderedCounts | None) -> tuple[Tensor, Tensor]:
    """Where each pick's row lies among those of all experts, one after the other, with dropped ones behind all; and how
    many rows each expert takes."""
    experts, (rows, tokens, _) = config.experts, experts_BTC.shape
    picks_BTX = torch.zeros(rows, tokens, experts, dtype=torch.int32, device=experts_BTC.device)
    picks_BTX.scatter_(-1, experts_BTC, 1)
    before_BTX = picks_BTX.cumsum(1, dtype=torch.int32) - picks_BTX
    if ordered is not None:
        earlier_BTX, tokens = ordered(picks_BTX)
        before_BTX += earlier_BTX
    is_taken_BTC = before_BTX.gather(-1, experts_BTC) < most_taken(config, tokens)
    owners = torch.where(is_taken_BTC, experts_BTC, experts).flatten()
    counts = owners.new_zeros(experts + 1).scatter_add(0, owners, torch.ones_like(owners))
    return inverse(owners.argsort(stable=True)), counts[:-1]
