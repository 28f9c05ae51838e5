"""How much better than expected each answer, or each token of it, was: functions over numpy arrays in float64.

N: trained tokens of all sequences, one sequence after the other; S: sequences. `sequence_N` says which sequence a token
is of. Tokens that are not trained (a user's turn, padding) are not among N: values are carried past them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from tilemesh.align.formulas.rollout import Floats, Whole

WHITENING_EPSILON = 1e-8


def group_means(reward_S: Floats, group_S: Whole) -> tuple[Floats, Floats, Whole]:
    """Of each sequence its group's mean, standard deviation (of a sample: ddof 1; 0 for a group of one) and size.

    Exact where all of a group are paid the same: a mean of 0.1 eight times is not 0.1, and no spread is no signal.
    """
    _, index, count = np.unique(group_S, return_inverse=True, return_counts=True)
    least, most = np.full(len(count), np.inf), np.full(len(count), -np.inf)
    np.minimum.at(least, index, reward_S)
    np.maximum.at(most, index, reward_S)
    mean = np.where(least == most, most, np.bincount(index, reward_S) / count)
    spread = np.bincount(index, (reward_S - mean[index]) ** 2)
    deviation = np.sqrt(spread / np.maximum(count - 1, 1))
    return mean[index], deviation[index], count[index]


def group_mean(reward_S: Floats, group_S: Whole) -> Floats:
    """Above the mean of the answers to the same prompt (Dr. GRPO)."""
    return reward_S - group_means(reward_S, group_S)[0]


def group_normalized(reward_S: Floats, group_S: Whole, epsilon: float = 1e-4) -> Floats:
    """The same in standard deviations of the group (GRPO). `epsilon`: 1e-4 in trl, 1e-6 in verl."""
    mean, deviation, _ = group_means(reward_S, group_S)
    return (reward_S - mean) / np.where(deviation > 0, deviation + epsilon, 1.0)


def leave_one_out(reward_S: Floats, group_S: Whole) -> Floats:
    """Above the mean of the other answers to the same prompt (RLOO); 0 where there is no other."""
    mean, _, count = group_means(reward_S, group_S)
    return (reward_S - mean) * count / np.maximum(count - 1, 1)


def batch_mean(reward_S: Floats, group_S: Whole) -> Floats:
    """Above the mean of the batch (REINFORCE with a constant baseline)."""
    return np.asarray(reward_S - reward_S.mean())


def whiten(values: Floats, epsilon: float = WHITENING_EPSILON) -> Floats:
    """Mean 0 and variance 1 (of a sample: ddof 1)."""
    if len(values) < 2:
        return np.asarray(values - values.mean())
    return np.asarray((values - values.mean()) / np.sqrt(values.var(ddof=1) + epsilon), np.float64)


def token_rewards(score_S: Floats, sequence_N: Whole, kl_N: ArrayLike = 0.0, coefficient: float = 0.0) -> Floats:
    """What each token is paid: a penalty for leaving the reference, and the last one of a sequence its score."""
    paid = np.broadcast_to(-coefficient * np.asarray(kl_N, np.float64), sequence_N.shape).copy()
    paid[last_tokens(sequence_N)] += score_S[sequence_N[last_tokens(sequence_N)]]
    return paid


def last_tokens(sequence_N: Whole) -> Whole:
    """Where the last trained token of each sequence stands."""
    return np.flatnonzero(np.diff(sequence_N, append=-1) != 0)


def summed(values_N: Floats, sequence_N: Whole, sequences: int) -> Floats:
    """Of each sequence the sum over its trained tokens."""
    return np.bincount(sequence_N, values_N, minlength=sequences).astype(np.float64)


def gae(
    reward_N: Floats, value_N: Floats, sequence_N: Whole, discount: float = 1.0, decay: float = 0.95
) -> tuple[Floats, Floats]:
    """Generalized advantage estimates and returns (Schulman et al. 2015). `decay` is λ; nothing follows a last token.

    Backwards in time, all sequences at once: a step costs S, so T steps cost N.
    """
    last = last_tokens(sequence_N)
    lengths = np.diff(last, prepend=-1)
    advantage_N = np.empty_like(value_N)
    after = np.zeros(len(last))  # of the token one later: its advantage, and its value
    value_after = np.zeros(len(last))
    for back in range(int(lengths.max(initial=0))):
        here = last[lengths > back] - back
        living = lengths > back
        step = reward_N[here] + discount * value_after[living] - value_N[here]
        after[living] = step + discount * decay * after[living]
        advantage_N[here], value_after[living] = after[living], value_N[here]
    return advantage_N, advantage_N + value_N


def returns_to_go(reward_N: Floats, sequence_N: Whole, discount: float = 1.0) -> Floats:
    """What a token and those after it are paid (REINFORCE++)."""
    return gae(reward_N, np.zeros(len(reward_N)), sequence_N, discount, 1.0)[0]
