"""What `train.fit` runs of a recipe: projections that round or mask in every pass, and what changes between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from tilemesh.compress.prune import BLOCK, sparsity_at
from tilemesh.compress.recipe import Recipe, chosen_schemes
from tilemesh.model.kinds import Masked, Rounded, matrix_shapes, projections, put_kinds
from tilemesh.model.transformer import Transformer


def prepare(model: Transformer, recipe: Recipe) -> None:
    """Let the recipe's projections be ones that round or mask in every pass, in place."""
    shapes = matrix_shapes(model)
    if recipe.weights.scheme:
        schemes = chosen_schemes(recipe, shapes)
        put_kinds(model, {name: Rounded(False, scheme, recipe.inputs_of(name)) for name, scheme in schemes.items()})
        return
    mask = Masked(block=BLOCK if recipe.prune.structure == "2:4" else None)
    put_kinds(model, dict.fromkeys((name for name in shapes if name.startswith("layers.")), mask))


def between_steps(module: nn.Module, recipe: Recipe, steps: int) -> Callable[[int], None] | None:
    """What is called with a step's number before it; None where nothing changes."""
    masked = [(layer, layer.kind) for _, layer in projections(module) if isinstance(layer.kind, Masked)]
    if not masked:
        return None

    def before(step: int) -> None:
        share = sparsity_at(recipe.prune, step / max(1, steps))
        for layer, mask in masked:
            layer.become(replace(mask, sparsity=share))

    return before
