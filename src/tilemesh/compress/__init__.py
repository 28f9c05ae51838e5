"""Smaller models: quantise, prune, factorise, distil. Names here load when first used.

`quantize(model, recipe, tokens)`, `prune` and `factorize` return a smaller copy of a model; `distill` makes the loss
that a student learns from a teacher by; `read_recipe("int4-g128")` or of a TOML file makes a recipe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilemesh.core.packages import names_on_use

if TYPE_CHECKING:
    from tilemesh.compress.distill import distill
    from tilemesh.compress.factorize import factorize
    from tilemesh.compress.prune import prune
    from tilemesh.compress.quantize import quantize
    from tilemesh.compress.recipe import Recipe, read_recipe
    from tilemesh.compress.shrink import shrink

_WHERE = {
    "Recipe": "recipe", "distill": "distill", "factorize": "factorize", "prune": "prune", "quantize": "quantize",
    "read_recipe": "recipe", "shrink": "shrink",
}  # fmt: skip

__getattr__ = names_on_use(__name__, _WHERE)
__all__ = ["Recipe", "distill", "factorize", "prune", "quantize", "read_recipe", "shrink"]
