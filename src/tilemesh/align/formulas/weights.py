"""What each token counts for in a loss: made once over the global batch, so any cut of it has the same sum.

The one idea: every way of averaging is a weight per token, and the loss is the sum of weight times term. A mean that is
taken per microbatch, per packed row or per rank is another loss as soon as lengths differ.

N: trained tokens of the whole batch; S: its sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilemesh.align.formulas.rollout import Floats, Whole

Weighting = Callable[[Whole, int, int], Floats]
"""From the sequence of each token, how many sequences there are, and the longest answer allowed."""


def per_token(sequence_N: Whole, sequences: int, longest: int) -> Floats:
    """Every token counts alike (DAPO): long answers count for more."""
    return np.full(len(sequence_N), 1 / max(len(sequence_N), 1))


def per_sequence(sequence_N: Whole, sequences: int, longest: int) -> Floats:
    """Every sequence counts alike (GRPO): the tokens of long ones count for less."""
    lengths = np.bincount(sequence_N, minlength=sequences)
    return 1 / (max(sequences, 1) * lengths[sequence_N])


def constant_length(sequence_N: Whole, sequences: int, longest: int) -> Floats:
    """Every token counts alike, whatever the lengths in this batch (Dr. GRPO)."""
    return np.full(len(sequence_N), 1 / (max(sequences, 1) * longest))


def summed_sequences(sequence_N: Whole, sequences: int, longest: int) -> Floats:
    """The sum over an answer, averaged over answers (REINFORCE: the gradient of the expected reward)."""
    return np.full(len(sequence_N), 1 / max(sequences, 1))


WEIGHTINGS: dict[str, Weighting] = {
    "token": per_token,
    "sequence": per_sequence,
    "constant": constant_length,
    "sum": summed_sequences,
}
