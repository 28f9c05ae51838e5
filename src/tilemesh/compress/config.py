"""What a training configuration says of compression. No torch: the command line reads it on the way to `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tilemesh.compress.recipe import Recipe, read_recipe
from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import Range

RANGES = {"share": Range(0, 1), "temperature": Range(0, above=True), "hidden": Range(0)}


@dataclass(frozen=True)
class DistillConfig:
    """Distillation: a smaller student learns from a teacher's predictions as well as from the text."""

    teacher: Path | None = None
    """A Hugging Face folder with the teacher; none: no distillation."""
    share: float = 0.5
    """How much of the loss is the divergence from the teacher's predictions; the rest is that of the text."""
    temperature: float = 2.0
    """Both models' logits are divided by it for the divergence, which is multiplied by its square (Hinton et al.
    2015)."""
    hidden: float = 0.0
    """Weight of the squared distance between the last activations, after the norm, of student and teacher, which must
    have the same width; 0: they are not compared."""

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            allowed.check(f"distill.{name}", getattr(self, name))


@dataclass(frozen=True)
class CompressConfig:
    """Training for compression: quantisation-aware training and gradual pruning."""

    recipe: str = ""
    """A recipe's name, such as int4-g64, or the text of its TOML file; `--recipe` sets it. Weights are rounded, or the
    smallest left out, in every pass, while they are trained in full; `tilemesh compress` with the same recipe then
    makes the small model. Empty: weights are trained as they are."""


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
                "nearest and prunes the smallest weights; leave it out"
            )
    if recipe.is_empty:
        raise UsageError("compress.recipe changes nothing: set weights.scheme or prune.structure")
    if recipe.weights.scheme and recipe.prune.structure != "none":
        raise UsageError("compress.recipe both rounds and prunes: train with one after the other")
    return recipe
