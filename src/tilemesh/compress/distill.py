"""What a student learns from a teacher: the loss of the text, and how far its predictions are from the teacher's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.compress.calibrate import require_transformer
from tilemesh.compress.config import DistillConfig, check_teacher
from tilemesh.model.loss import IGNORED, loss_sum
from tilemesh.model.transformer import ResidualStream, Transformer

DistillLoss = Callable[..., tuple[Tensor, Tensor]]


def distill(
    student: Transformer, teacher: Transformer, *, share: float = 0.5, temperature: float = 2.0, hidden: float = 0.0
) -> DistillLoss:
    """A loss (tokens, targets) -> (sum over targets, how many count), of whose gradient the student learns."""
    require_transformer(student, "distil into")
    require_transformer(teacher, "distil from")
    config = DistillConfig(None, share, temperature, hidden)
    check_teacher(student.config, teacher.config, config)
    teacher.eval().requires_grad_(False)

    def loss(tokens_BT: Tensor, targets_BT: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        x_BTD = last_activations(student, tokens_BT, **options)
        return student_loss(student.project(x_BTD), x_BTD, tokens_BT, targets_BT, teacher, config)

    return loss


def last_activations(model: Transformer, tokens_BT: Tensor, **options: object) -> Tensor:
    """What the output projection is given."""
    now = model.prepare(tokens_BT, **options)  # type: ignore[arg-type]
    stream = ResidualStream(model.enter(tokens_BT, None, now))
    for layer in model.layers:
        stream = layer(stream, now)
    return model.normalize(stream)


def student_loss(
    logits_BTV: Tensor,
    x_BTD: Tensor,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    teacher: Transformer,
    config: DistillConfig,
) -> tuple[Tensor, Tensor]:
    """Summed over the targets that count, and how many those are."""
    total, count = loss_sum(logits_BTV, targets_BT)
    counts_BT = targets_BT != IGNORED
    with torch.no_grad():
        teacher_x = last_activations(teacher, tokens_BT)
        teacher_logits = teacher.project(teacher_x)
    theirs = functional.log_softmax(teacher_logits.float() / config.temperature, -1)
    ours = functional.log_softmax(logits_BTV.float() / config.temperature, -1)
    apart_BT = (theirs.exp() * (theirs - ours)).sum(-1) * config.temperature**2
    total = (1 - config.share) * total + config.share * (apart_BT * counts_BT).sum()
    if config.hidden:
        distance_BT = (x_BTD.float() - teacher_x.float()).square().mean(-1)
        total = total + config.hidden * (distance_BT * counts_BT).sum()
    return total, count
