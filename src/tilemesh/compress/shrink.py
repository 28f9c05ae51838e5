"""All that a recipe says, done to one model: pruned, then factorised, then quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from tilemesh.compress.factorize import factorize
from tilemesh.compress.prune import prune, smaller_config
from tilemesh.compress.quantize import Moved, quantize
from tilemesh.compress.recipe import Recipe, check_blocks, chosen_schemes, read_recipe
from tilemesh.core.errors import UsageError
from tilemesh.model.kinds import matrix_shapes
from tilemesh.model.transformer import Transformer


def check_recipe(model: Transformer, recipe: str | Path | Recipe) -> None:
    """Refuse what a recipe's schemes and blocks cannot do with the shapes of this model, before anything is done."""
    wanted = read_recipe(recipe)
    shapes = matrix_shapes(model)
    chosen_schemes(wanted, shapes)
    if wanted.prune.structure in ("heads", "mlp", "layers"):
        smaller_config(model.config, wanted.prune)
    check_blocks(wanted, shapes)


def shrink(
    model: Transformer,
    recipe: str | Path | Recipe,
    tokens: Tensor | None = None,
    say: Callable[[str], None] = lambda text: None,
    moved: dict[str, Moved] | None = None,
) -> Transformer:
    """A smaller copy. `tokens`: (sequences, tokens + 1) of text, for recipes that look at it; `moved`: as `quantize`
    fills it."""
    recipe = read_recipe(recipe)
    if recipe.is_empty:
        raise UsageError("the recipe changes nothing: set weights.scheme, prune.structure or rank.keep")
    inputs = None if tokens is None else tokens[:, :-1].contiguous()
    if recipe.prune.structure != "none":
        model = prune(model, recipe, tokens)
    if recipe.rank.keep:
        model = factorize(model, recipe, inputs)
    if recipe.weights.scheme:
        model = quantize(model, recipe, inputs, say=say, moved=moved)
    return model
