"""A student's objective: the loss of its text, and how far its predictions are from a teacher's.

The one idea: only the loss at the head differs. What comes before it (stages, gathered or moved weights, recomputation,
compiled layers, cut sequences) is as without a teacher; and the teacher, which is never trained, lies beside the model
on the ranks that have its head, cut over tp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemesh.compress.config import DistillConfig
from tilemesh.compress.distill import student_loss
from tilemesh.model.families.book import read_config
from tilemesh.model.kinds import put_kinds
from tilemesh.model.loss import HeadOutput
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.apply import lay_beside
from tilemesh.parallel.laid import Laid, Teaching
from tilemesh.parallel.pipeline import Pipeline
from tilemesh.parallel.tensor import Seams
from tilemesh.train.config import TrainConfig
from tilemesh.train.resume import load_stored
from tilemesh.train.source import Objective, next_token


class TeacherLesson(NamedTuple):
    """A teacher's predictions, and what they count for."""

    theirs: HeadOutput
    config: DistillConfig

    def loss(self, text_loss: Tensor, ours: HeadOutput, targets_BT: Tensor, seams: Seams) -> Tensor:
        return student_loss(text_loss, ours, self.theirs, targets_BT, self.config, seams)


def from_teacher(config: TrainConfig, laid: Laid) -> Objective:
    """The loss of a student; it is judged by its text's."""
    text = next_token(config, laid)
    if not laid.has_head:
        return text
    assert config.distill.teacher is not None
    teacher = read_teacher(config.distill.teacher, laid)
    teaching = lessons(config, teacher, by_layers=isinstance(laid, Pipeline) or config.train.compile == "layers")
    if isinstance(laid, Pipeline):
        laid.data.teaching = teaching
        return text

    def loss(tokens_BT: Tensor, targets_BT: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return text.loss(tokens_BT, targets_BT, lesson=teaching(tokens_BT, tokens_BT.shape[1]), **options)

    return Objective(loss, text.held_out)


def read_teacher(folder: Path, laid: Laid) -> Laid:
    """The model of a Hugging Face folder beside the one that it teaches, in the dtype of its weights. One matrix of it
    at a time is whole."""
    from tilemesh.model import huggingface  # late: it needs safetensors

    model = Transformer(read_config(folder), device="meta", dtype=laid.stream_dtype)
    put_kinds(model, huggingface.stored_kinds(folder))
    teacher = lay_beside(model, laid)
    load_stored(teacher, folder)
    return teacher


def lessons(config: TrainConfig, teacher: Laid, *, by_layers: bool) -> Teaching:
    """What the teacher says of tokens, compiled where the student is. `by_layers`: layer by layer."""
    predictions: Any = teacher.predictions
    layers = None
    if config.train.compile and config.plan.tp > 1:
        teacher.seams.stay_out_of_graphs()
    if config.train.compile and by_layers:
        layers = teacher.compiled_regions().layers
    elif config.train.compile:
        predictions = torch.compile(predictions)
    return lambda tokens_BT, last: TeacherLesson(predictions(tokens_BT, last, layers), config.distill)
