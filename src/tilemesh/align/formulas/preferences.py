"""Losses of preferences, per pair or per answer: pure functions of torch tensors.

P: pairs. `chosen` and `rejected` are log-probabilities of whole answers, summed over their tokens; `Side` has those of
the model and of the reference, and how many tokens they are of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class Side(NamedTuple):
    """One answer of each pair."""

    logprob_P: Tensor
    reference_P: Tensor
    tokens_P: Tensor

    @property
    def gain_P(self) -> Tensor:
        """How much likelier the model finds it than the reference does, in nats."""
        return self.logprob_P - self.reference_P


PairLoss = Callable[[Side, Side, float, float], Tensor]
"""From the chosen and the rejected answers, beta and margin to a loss per pair."""


def dpo(chosen: Side, rejected: Side, beta: float, margin: float) -> Tensor:
    return -logsigmoid(beta * (chosen.gain_P - rejected.gain_P) - margin)


def ipo(chosen: Side, rejected: Side, beta: float, margin: float) -> Tensor:
    """Of means over tokens, as its authors ran it."""
    difference_P = chosen.gain_P / chosen.tokens_P - rejected.gain_P / rejected.tokens_P
    return (difference_P - 1 / (2 * beta)).square()


def kto(chosen: Side, rejected: Side, beta: float, margin: float) -> Tensor:
    """Each answer by itself, against `margin`: the KL to the reference, which the paper estimates over the batch."""
    kept_P = 1 - torch.sigmoid(beta * (chosen.gain_P - margin))
    return (kept_P + 1 - torch.sigmoid(beta * (margin - rejected.gain_P))) / 2


def orpo(chosen: Side, rejected: Side, beta: float, margin: float) -> Tensor:
    """Without a reference: the chosen answer's own loss, and the odds of one over the other."""
    ours_P, theirs_P = chosen.logprob_P / chosen.tokens_P, rejected.logprob_P / rejected.tokens_P
    odds_P = (ours_P - theirs_P) - (_log_of_rest(ours_P) - _log_of_rest(theirs_P))
    return -ours_P - beta * logsigmoid(odds_P)


def simpo(chosen: Side, rejected: Side, beta: float, margin: float) -> Tensor:
    """Without a reference, of means over tokens."""
    difference_P = chosen.logprob_P / chosen.tokens_P - rejected.logprob_P / rejected.tokens_P
    return -logsigmoid(beta * difference_P - margin)


def _log_of_rest(logprob_P: Tensor) -> Tensor:
    """log(1 - p), also where p is nearly 1: one that rounds to 1 counts as the largest below it."""
    over_P = (logprob_P.detach() + torch.finfo(logprob_P.dtype).eps / 2).clamp(min=0)
    return torch.log(-torch.expm1(logprob_P - over_P))


PAIR_LOSSES: dict[str, PairLoss] = {"dpo": dpo, "ipo": ipo, "kto": kto, "orpo": orpo, "simpo": simpo}


def bradley_terry(chosen_P: Tensor, rejected_P: Tensor, margin: float = 0.0, centre: float = 0.0) -> Tensor:
    """Of a reward model's scores. `centre`: a pull of their sum towards 0, which they are otherwise free to leave."""
    return -logsigmoid(chosen_P - rejected_P - margin) + centre * (chosen_P + rejected_P).square()
