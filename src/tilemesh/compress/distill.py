"""What a student learns from a teacher: the loss of the text, and how far its predictions are from the teacher's.

B: rows; T: tokens; D: width; V: vocabulary, or this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tilemesh.compress.calibrate import require_transformer
from tilemesh.compress.config import DistillConfig, check_teacher
from tilemesh.model.loss import IGNORED, HeadOutput, loss_sum
from tilemesh.model.transformer import ResidualStream, Transformer

DistillLoss = Callable[..., tuple[Tensor, Tensor]]


class HeadSharing(Protocol):
    """How ranks share what a head gives: the classes of the logits, and perhaps the tokens of the activations."""

    def add(self, x: Tensor) -> Tensor:
        """The ranks' parts of a sum, added up: the gradient passes."""

    def largest(self, x: Tensor) -> Tensor:
        """Of each element, the largest of all ranks; without a gradient."""

    def own_tokens(self, x_BT: Tensor) -> Tensor:
        """Of something that all ranks have of every token, what belongs to the activations here."""

    def add_tokens(self, total: Tensor) -> Tensor:
        """A sum over the tokens that this rank has activations of, as a sum over all tokens."""


class Alone:
    """One process has everything."""

    def add(self, x: Tensor) -> Tensor:
        return x

    own_tokens = add_tokens = add

    def largest(self, x: Tensor) -> Tensor:
        return x.detach()


def distill(
    student: Transformer, teacher: Transformer, *, share: float = 0.5, temperature: float = 2.0, hidden: float = 0.0
) -> DistillLoss:
    """A loss (tokens, targets) -> (sum over targets, how many count), of whose gradient the student learns. Its other
    arguments are those of `Transformer.prepare`, for both."""
    require_transformer(student, "distil into")
    require_transformer(teacher, "distil from")
    config = DistillConfig(None, share, temperature, hidden)
    check_teacher(student.config, teacher.config, config)
    teacher.eval().requires_grad_(False)

    def loss(tokens_BT: Tensor, targets_BT: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        x_BTD = last_activations(student, tokens_BT, **options)
        ours = HeadOutput(x_BTD, student.project(x_BTD))
        with torch.no_grad():
            x_BTD = last_activations(teacher, tokens_BT, **options)
            theirs = HeadOutput(x_BTD, teacher.project(x_BTD))
        total, count = loss_sum(ours.logits_BTV, targets_BT)
        return student_loss(total, ours, theirs, targets_BT, config, Alone()), count

    return loss


def last_activations(model: Transformer, tokens_BT: Tensor, **options: object) -> Tensor:
    """What the output projection is given."""
    now = model.prepare(tokens_BT, **options)  # type: ignore[arg-type]
    stream = ResidualStream(model.enter(tokens_BT, None, now))
    for layer in model.layers:
        stream = layer(stream, now)
    return model.normalize(stream)


def student_loss(
    text_loss: Tensor,
    ours: HeadOutput,
    theirs: HeadOutput,
    targets_BT: Tensor,
    config: DistillConfig,
    ranks: HeadSharing,
) -> Tensor:
    """Summed over the targets that count, as the loss of the text is. The teacher's activations are of all tokens."""
    counts_BT = targets_BT != IGNORED
    apart_BT = divergence(ours.logits_BTV, theirs.logits_BTV, config.temperature, ranks) * config.temperature**2
    total = (1 - config.share) * text_loss + config.share * (apart_BT * counts_BT).sum()
    if config.hidden:
        distance_BT = (_wide(ours.x_BTD) - _wide(ranks.own_tokens(theirs.x_BTD))).square().mean(-1)
        total = total + config.hidden * ranks.add_tokens((distance_BT * ranks.own_tokens(counts_BT)).sum())
    return total


def divergence(ours_BTV: Tensor, theirs_BTV: Tensor, temperature: float, ranks: HeadSharing) -> Tensor:
    """KL(teacher, student) of each token, in nats.

    With s and t the two models' logits over the temperature, each less its largest, and sums over all classes:

        sum p_t (log p_t - log p_s)  =  sum e^t (t - s) / sum e^t  -  log sum e^t  +  log sum e^s

    so what ranks exchange is two maxima and three sums of each token, and a rank's gradient is of its own classes.
    """
    theirs, ours = (_wide(logits) / temperature for logits in (theirs_BTV, ours_BTV))
    tops = ranks.largest(torch.stack([theirs.amax(-1), ours.detach().amax(-1)]))[..., None].unbind()
    theirs, ours = theirs - tops[0], ours - tops[1]
    weights = theirs.exp()
    sums = torch.stack([weights.sum(-1), ours.exp().sum(-1), (weights * (theirs - ours)).sum(-1)])
    theirs_BT, ours_BT, apart_BT = ranks.add(sums).unbind()
    return apart_BT / theirs_BT - theirs_BT.log() + ours_BT.log()


def _wide(x: Tensor) -> Tensor:
    """At least float32, so that sums do not round."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
