"""Matrices as products of two thin ones, by the singular value decomposition.

The one idea: the best W' of rank r for all inputs alike keeps W's r largest singular values; the best for inputs with
the Gram matrix H = S S^T keeps those of W S, and is that times S^-1.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from tilemesh.compress.calibrate import (
    InputStatistics,
    Statistics,
    Trial,
    check_tokens,
    layer_by_layer,
    require_calibration,
    require_mlps,
)
from tilemesh.compress.methods import DAMPING
from tilemesh.compress.recipe import Recipe, read_recipe
from tilemesh.core.errors import UsageError
from tilemesh.model.kinds import LEFT, RIGHT, Factored, projections, put, require_plain
from tilemesh.model.linear import as_kind
from tilemesh.model.transformer import Layer, Transformer


def rank_of(outputs: int, inputs: int, keep: float) -> int:
    """The largest rank whose two factors have at most this share of the matrix's numbers."""
    return int(keep * outputs * inputs / (outputs + inputs))


def factors(weight: Tensor, rank: int, inputs: InputStatistics | None = None) -> tuple[Tensor, Tensor]:
    """left (N, r) and right (r, K), whose product is close to the weight; in balance, each has the roots of the
    singular values."""
    wide = weight.detach().double()
    if inputs is None:
        root = None
        left, values, right = torch.linalg.svd(wide, full_matrices=False)
    else:
        gram = inputs.gram.double()
        gram = gram + DAMPING * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        root = torch.linalg.cholesky(gram)
        left, values, right = torch.linalg.svd(wide @ root, full_matrices=False)
    size = values[:rank].sqrt()
    thin = size[:, None] * right[:rank]
    if root is not None:
        thin = torch.linalg.solve_triangular(root.t(), thin.t(), upper=True).t()
    return (left[:, :rank] * size).to(weight.dtype).contiguous(), thin.to(weight.dtype).contiguous()


def factorize(model: Transformer, recipe: str | Path | Recipe, tokens: Tensor | None = None) -> Transformer:
    """A copy whose matrices in the layers are products of thin ones. `tokens`: text, for `rank.aware`."""
    wanted = read_recipe(recipe).rank
    (require_calibration if wanted.aware else require_mlps)(model, "factorise")
    require_plain(model, "factorisation")
    if not wanted.keep:
        raise UsageError("the recipe keeps matrices whole: set rank.keep to a share, such as 0.5")
    thin = copy.deepcopy(model).eval().requires_grad_(False)
    ranks = {}
    for name, module in projections(thin):
        if name.startswith("layers."):
            ranks[name] = rank_of(module.out_features, module.in_features, wanted.keep)
            if ranks[name] < 1:
                raise UsageError(
                    f"{name}: {wanted.keep:.2g} of {module.out_features} x {module.in_features} leaves rank 0: set "
                    "rank.keep higher"
                )

    def change(name: str, inputs: InputStatistics | None) -> None:
        plain = thin.get_submodule(name)
        assert isinstance(plain, nn.Linear)
        left, right = factors(plain.weight, ranks[name], inputs)
        put(thin, name, as_kind(plain, Factored(left.shape[1]), **{LEFT: left, RIGHT: right}))

    if not wanted.aware:
        for name in ranks:
            change(name, None)
        return thin

    def change_layer(prefix: str, layer: Layer, statistics: Statistics, _: Trial) -> None:
        for name, inputs in statistics.items():
            change(prefix + name, inputs)

    layer_by_layer(thin, check_tokens(tokens, thin, "this recipe"), change_layer)
    return thin
