"""What `train.fit` runs of a recipe: projections that round or mask in every pass, and what changes between steps."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tilemesh.compress.prune import BLOCK, sparsity_at
from tilemesh.compress.recipe import Recipe, chosen_schemes
from tilemesh.model.lowbit import MaskedLinear, RoundedLinear, projections, put
from tilemesh.model.transformer import Transformer


def prepare(model: Transformer, recipe: Recipe) -> None:
    """Replace the recipe's projections by ones that round or mask in every pass, in place."""
    shapes = {name: (module.out_features, module.in_features) for name, module in projections(model)}
    if recipe.weights.scheme:
        for name, scheme in chosen_schemes(recipe, shapes).items():
            put(model, name, RoundedLinear(_plain(model, name), scheme, recipe.inputs_of(name)))
        return
    block = BLOCK if recipe.prune.structure == "2:4" else None
    for name in [name for name in shapes if name.startswith("layers.")]:
        put(model, name, MaskedLinear(_plain(model, name), block))


def between_steps(module: nn.Module, recipe: Recipe, steps: int) -> Callable[[int], None] | None:
    """What is called with a step's number before it; None where nothing changes."""
    masked = [part for part in module.modules() if isinstance(part, MaskedLinear)]
    if not masked:
        return None

    def before(step: int) -> None:
        share = sparsity_at(recipe.prune, step / max(1, steps))
        for part in masked:
            part.sparsity = share

    return before


def _plain(model: Transformer, name: str) -> nn.Linear:
    module = model.get_submodule(name)
    assert isinstance(module, nn.Linear)
    return module
