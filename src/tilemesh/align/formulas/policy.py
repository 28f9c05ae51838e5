"""Terms of a policy's loss, per token: ratios, surrogates, KL estimates, value loss. Pure functions of torch tensors.

Each gives what is to be lowered, before weights: the loss is the sum of weight times term (`weights.py`).
N: trained tokens, one sequence after the other; `sequence_N` says which sequence of this batch a token is of.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Ratios: log of new over old probability --------------------------------------------------------------------------

Ratio = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From the new and old log-probabilities and the sequence of each token to log ratios, per token."""


def token_ratio(logprob_N: Tensor, old_N: Tensor, sequence_N: Tensor) -> Tensor:
    return logprob_N - old_N


def sequence_ratio(logprob_N: Tensor, old_N: Tensor, sequence_N: Tensor) -> Tensor:
    """The mean over a sequence's tokens, for each of them (GSPO)."""
    total_S, count_S = _sums(logprob_N - old_N, sequence_N)
    return (total_S / count_S)[sequence_N]


def sequence_token_ratio(logprob_N: Tensor, old_N: Tensor, sequence_N: Tensor) -> Tensor:
    """The value of `sequence_ratio`, the gradient of each token's own (GSPO-token): the loss's gradient is the same
    where all tokens of a sequence have one advantage."""
    return sequence_ratio(logprob_N, old_N, sequence_N).detach() + logprob_N - logprob_N.detach()


def product_ratio(logprob_N: Tensor, old_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Of the whole answer's probability (RLOO as trl clips it)."""
    return _sums(logprob_N - old_N, sequence_N)[0][sequence_N]


RATIOS: dict[str, Ratio] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "sequence-token": sequence_token_ratio,
    "product": product_ratio,
}


def _sums(values_N: Tensor, sequence_N: Tensor) -> tuple[Tensor, Tensor]:
    count_S = torch.bincount(sequence_N)
    return sequence_sums(values_N, sequence_N, len(count_S)), count_S.clamp(min=1).to(values_N)


def _finite_exp(values_N: Tensor) -> Tensor:
    """e to these, up to the root of the largest number there is: it and its gradient then have finite squares, and
    where another term is taken no gradient of this one is NaN."""
    most = math.log(torch.finfo(values_N.dtype).max) / 2
    return (values_N - (values_N.detach() - most).clamp(min=0)).exp()


def sequence_sums(values_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Of each sequence the sum over its tokens."""
    return values_N.new_zeros(sequences).index_add(0, sequence_N, values_N)


# Surrogates -------------------------------------------------------------------------------------------------------

Surrogate = Callable[[Tensor, Tensor, Tensor, float, float, float], Tensor]
"""From log ratio, log-probability, advantage, the two clips and the dual clip to a term, per token."""


def plain(log_ratio_N: Tensor, logprob_N: Tensor, advantage_N: Tensor, low: float, high: float, dual: float) -> Tensor:
    """The policy gradient itself (REINFORCE)."""
    return -advantage_N * logprob_N


def clipped(
    log_ratio_N: Tensor, logprob_N: Tensor, advantage_N: Tensor, low: float, high: float, dual: float
) -> Tensor:
    """PPO's, with a bound for each direction (DAPO); `dual`: where the advantage is negative the ratio counts for at
    most so much (0: no such bound)."""
    ratio_N = _finite_exp(log_ratio_N)
    bounded_N = ratio_N.clamp(1 - low, 1 + high)
    if dual:
        ratio_N = ratio_N.clamp(max=dual)
    return -torch.minimum(ratio_N * advantage_N, bounded_N * advantage_N)


def clipped_weight(
    log_ratio_N: Tensor, logprob_N: Tensor, advantage_N: Tensor, low: float, high: float, dual: float
) -> Tensor:
    """The clipped ratio as a constant weight of the policy gradient: no token loses its gradient (CISPO). Bounds are
    1 - low and 1 + high as in verl; `low` 0: no lower one, as in trl, whose absolute upper bound is 1 + high."""
    bound_N = log_ratio_N.detach().exp().clamp(1 - low if low else 0.0, 1 + high)
    return -bound_N * advantage_N * logprob_N


SURROGATES: dict[str, Surrogate] = {"plain": plain, "clip": clipped, "weight": clipped_weight}


def clip_shares(log_ratio_N: Tensor, advantage_N: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Which tokens' ratios are held back by the lower and by the upper bound."""
    ratio_N = log_ratio_N.exp()
    return (ratio_N < 1 - low) & (advantage_N < 0), (ratio_N > 1 + high) & (advantage_N > 0)


# KL to a reference, estimated from the token that was drawn (Schulman, "Approximating KL divergence") ----------------


def k1(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """Unbiased, of high variance, and may be negative. In a loss its gradient is 0 on average: it belongs in a
    reward."""
    return logprob_N - reference_N


def k2(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """Biased in its value; in a loss its gradient is that of the KL, on average."""
    return (logprob_N - reference_N).square() / 2


def k3(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """Unbiased and never negative; in a loss its gradient is that of the KL in the other direction."""
    difference_N = reference_N - logprob_N
    return _finite_exp(difference_N) - difference_N - 1


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


# Values, and rollouts by other weights ----------------------------------------------------------------------------


def value_loss(value_N: Tensor, old_N: Tensor, return_N: Tensor, clip: float) -> Tensor:
    """Half the squared error; with `clip` the larger one of the value as it is and within so much of the old one."""
    error_N = (value_N - return_N).square()
    if clip:
        near_N = old_N + (value_N - old_N).clamp(-clip, clip)
        error_N = torch.maximum(error_N, (near_N - return_N).square())
    return error_N / 2


def truncated(log_ratio_N: Tensor, most: float) -> Tensor:
    """Importance of a token that other weights, or another program, have drawn: at most so much (verl: 2)."""
    return log_ratio_N.detach().exp().clamp(max=most)


def masked(log_ratio_N: Tensor, most: float) -> Tensor:
    """The same, and 0 above it (trl: 3)."""
    importance_N = log_ratio_N.detach().exp()
    return importance_N.masked_fill(importance_N > most, 0)


CORRECTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {"truncate": truncated, "mask": masked}
