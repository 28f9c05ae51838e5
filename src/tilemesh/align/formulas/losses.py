"""The loss of an algorithm's row over one microbatch, and what is worth knowing of it. Pure: tensors in, tensors out.

N: trained tokens of the microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilemesh.align.formulas.algorithms import Algorithm
from tilemesh.align.formulas.policy import CORRECTIONS, ESTIMATORS, RATIOS, SURROGATES, clip_shares, value_loss


@dataclass(frozen=True)
class PolicyTokens:
    """What a loss needs of the trained tokens; gradients flow through the first three."""

    logprob_N: Tensor
    entropy_N: Tensor | None
    value_N: Tensor | None
    old_N: Tensor
    """Log-probabilities before this batch's first update, by the program that trains."""
    sampled_N: Tensor
    """By the program that drew them."""
    advantage_N: Tensor
    weight_N: Tensor
    """What a token counts for in the global batch."""
    share_N: Tensor
    """One over the trained tokens of the global batch: for means that no choice of weighting touches."""
    sequence_N: Tensor
    reference_N: Tensor | None = None
    old_value_N: Tensor | None = None
    return_N: Tensor | None = None
    trained_N: Tensor | None = None
    """By the program that trains, where `old_N` is not: what that program is judged by."""


FIGURES = ("policy", "kl", "entropy", "value", "clipped_low", "clipped_high", "mismatch", "mismatch_square",
           "old_kl")  # fmt: skip
"""Means over the trained tokens of the global batch, of which each microbatch has a part: the policy's loss, KL to the
reference (k3), entropy, the value's loss, ratios held back, |trained - sampled| log-probability and its square, KL to
the weights that drew (k3)."""


def policy_loss(
    row: Algorithm, tokens: PolicyTokens, correction: str = "none", most: float = 2.0
) -> tuple[Tensor, Tensor]:
    """This microbatch's part of the loss, and of FIGURES. `correction`: for what other weights or another program drew,
    one of CORRECTIONS, bounded by `most`."""
    log_ratio_N = RATIOS[row.ratio](tokens.logprob_N, tokens.old_N, tokens.sequence_N)
    term_N = SURROGATES[row.surrogate](
        log_ratio_N, tokens.logprob_N, tokens.advantage_N, row.clip_low, row.clip_high, row.dual_clip
    )
    if correction != "none":
        term_N = term_N * CORRECTIONS[correction](tokens.old_N - tokens.sampled_N, most)
    zero = tokens.logprob_N.new_zeros(())
    policy, kl, entropy, value = (tokens.weight_N * term_N).sum(), zero, zero, zero
    total = policy
    if tokens.reference_N is not None:
        kl = (tokens.share_N * ESTIMATORS["k3"](tokens.logprob_N, tokens.reference_N)).sum()
        if row.kl == "loss":
            distance_N = ESTIMATORS[row.estimator](tokens.logprob_N, tokens.reference_N)
            total = total + row.kl_coefficient * (tokens.weight_N * distance_N).sum()
    if tokens.entropy_N is not None:
        entropy = (tokens.share_N * tokens.entropy_N).sum()
        total = total - row.entropy_coefficient * entropy
    if tokens.value_N is not None and tokens.old_value_N is not None and tokens.return_N is not None:
        errors_N = value_loss(tokens.value_N, tokens.old_value_N, tokens.return_N, row.value_clip)
        value = (tokens.share_N * errors_N).sum()
        total = total + row.value_coefficient * value
    with torch.no_grad():
        low_N, high_N = clip_shares(log_ratio_N, tokens.advantage_N, row.clip_low, row.clip_high)
        trained_N = tokens.old_N if tokens.trained_N is None else tokens.trained_N
        mismatch_N = (trained_N - tokens.sampled_N).abs()
        old_kl_N = ESTIMATORS["k3"](tokens.logprob_N, tokens.old_N)
        values = (low_N, high_N, mismatch_N, mismatch_N.square(), old_kl_N)
        counted = [(tokens.share_N * value_N).sum() for value_N in values]
        figures = torch.stack([part.detach() for part in (policy, kl, entropy, value, *counted)])
    return total, figures
