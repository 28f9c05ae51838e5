"""What a training configuration says of compression. No torch: the command line reads it on the way to `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tilemesh.compress.recipe import Recipe, is_file_text, read_recipe
from tilemesh.core.config import check_fields
from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import Range
from tilemesh.model.config import ModelConfig


@dataclass(frozen=True)
class DistillConfig:
    """Distillation: a smaller student learns from a teacher's predictions as well as from the text."""

    teacher: Path | None = None
    """A Hugging Face folder with the teacher; none: no distillation. It works on every layout: beside the model, each
    rank that has its head holds the teacher's weights, or under tp its part of them."""
    share: Annotated[float, Range(0, 1)] = 0.5
    """How much of the loss is the divergence from the teacher's predictions; the rest is that of the text."""
    temperature: Annotated[float, Range(0, above=True)] = 2.0
    """Both models' logits are divided by it for the divergence, which is multiplied by its square (Hinton et al.
    2015)."""
    hidden: Annotated[float, Range(0)] = 0.0
    """Weight of the squared distance between the last activations, after the norm, of student and teacher, which must
    have the same width; 0: they are not compared."""

    def __post_init__(self) -> None:
        check_fields(self, "distill.")


@dataclass(frozen=True)
class CompressConfig:
    """Training for compression: quantisation-aware training and gradual pruning."""

    recipe: str = ""
    """A recipe's name, such as int4-g64, or the text of its TOML file; `--recipe` sets it. Weights are rounded, or the
    smallest left out, in every pass, while they are trained in full; `tilemesh compress` with the same recipe then
    makes the small model. Empty: weights are trained as they are."""


def check_teacher(student: ModelConfig, teacher: ModelConfig, config: DistillConfig) -> None:
    """Refuse a teacher whose predictions cannot be compared with the student's."""
    if teacher.vocabulary != student.vocabulary:
        raise UsageError(
            f"the teacher has {teacher.vocabulary} tokens and the student {student.vocabulary}: they must share a "
            "tokenizer"
        )
    if teacher.context < student.context:
        raise UsageError(
            f"the teacher's context is {teacher.context} and the student's {student.context}: set model.context to at "
            "most the teacher's"
        )
    if config.hidden and teacher.width != student.width:
        raise UsageError(
            f"distill.hidden compares activations, and the teacher is {teacher.width} wide, the student "
            f"{student.width}: set distill.hidden to 0"
        )


def aims(compress: CompressConfig, distill: DistillConfig) -> list[tuple[str, str]]:
    """What is trained for beside the text's loss, each with a word for the subject; none, as a rule."""
    described = []
    recipe = training_recipe(compress.recipe)
    if recipe is not None:
        name = "of a file" if is_file_text(compress.recipe) else compress.recipe
        how = "rounded" if recipe.weights.scheme else "pruned"
        described.append(("recipe", f"{name}: weights are {how} in every pass, and trained and written in full"))
    if distill.teacher is not None:
        part = f"{distill.share:g} of the loss is the divergence from its predictions"
        described.append(("teacher", f"{distill.teacher}: {part}"))
    return described


def training_recipe(text: str) -> Recipe | None:
    """The recipe of a training run, checked for what training can do; None where there is none."""
    if not text:
        return None
    recipe = read_recipe(text)
    wrong = {
        "weights.method": recipe.weights.method != "nearest", "weights.bits": recipe.weights.bits > 0,
        "weights.correct_bias": recipe.weights.correct_bias, "activations.static": recipe.activations.static,
        "activations.smooth": recipe.activations.smooth > 0, "rank.keep": recipe.rank.keep > 0,
        "prune.structure": recipe.prune.structure not in ("none", "unstructured", "2:4"),
        "prune.score": recipe.prune.score != "magnitude" and recipe.prune.structure != "none",
    }  # fmt: skip
    for key, is_so in wrong.items():
        if is_so:
            raise UsageError(
                f"compress.recipe sets {key}, which is done after training by `tilemesh compress`: training rounds to "
                "nearest and prunes the smallest weights; leave it out, or compress first and train the result with "
                "--init"
            )
    if recipe.is_empty:
        raise UsageError("compress.recipe changes nothing: set weights.scheme or prune.structure")
    if recipe.weights.scheme and recipe.prune.structure != "none":
        raise UsageError("compress.recipe both rounds and prunes: train with one after the other")
    return recipe
