"""What a user would quantise with instead: the same weights, rounded by other libraries, for their loss.

Each peer gives back what its codes mean, so that all are judged by one model and one text. A library that is not
installed, or has no such scheme, says so.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from tilemesh.compress.recipe import Recipe, chosen_schemes
from tilemesh.core.errors import RunError
from tilemesh.kernels.lowbit.formats import Scheme
from tilemesh.model.lowbit import projections
from tilemesh.model.transformer import Transformer

PEERS = ("torchao", "bitsandbytes")


def why_not(peer: str, recipe: Recipe) -> str:
    """Why a peer has no value beside a recipe; empty where it has one."""
    weights = recipe.weights
    if not weights.scheme or weights.bits or recipe.activations.scheme or recipe.prune.structure != "none":
        return f"{peer} is compared on weights in few bits"
    if weights.method != "nearest":
        return f"{peer} has no {weights.method} for this form of model"
    scheme = next(iter(_schemes(recipe).values()))
    serves = _TORCHAO_KINDS if peer == "torchao" else ("nf4",)
    if scheme.format not in serves or scheme.levels != 1:
        return f"{peer} has no {scheme.name}"
    if peer == "bitsandbytes" and scheme.granularity != "group":
        return f"{peer} has nf4 in groups"
    if importlib.util.find_spec(peer) is None:
        return f"{peer} is not installed"
    return ""


_TORCHAO_KINDS = ("int8", "int4", "int3", "int2")


def _schemes(recipe: Recipe) -> dict[str, Scheme]:
    return chosen_schemes(recipe, {"layers.0.attention.fc_q": (8, recipe_inputs(recipe))})


def recipe_inputs(recipe: Recipe) -> int:
    """A number of inputs that every group of the recipe divides."""
    from tilemesh.kernels.lowbit.formats import parse_scheme

    return max(1, parse_scheme(recipe.weights.scheme).group) * 8


@torch.no_grad()
def peer_model(peer: str, model: Transformer, recipe: Recipe) -> Transformer:
    """A copy of the model with the weights that the peer's codes mean."""
    made = copy.deepcopy(model)
    shapes = {name: (module.out_features, module.in_features) for name, module in projections(made)}
    rounding: Callable[[Tensor, Scheme], Tensor] = _torchao if peer == "torchao" else _bitsandbytes
    for name, scheme in chosen_schemes(recipe, shapes).items():
        weight = made.get_parameter(f"{name}.weight")
        try:
            weight.copy_(rounding(weight.detach().float(), scheme))
        except Exception as error:  # a library of another version
            raise RunError(f"{type(error).__name__}: {error}") from error
    return made


def torchao_codes(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zero points of torchao's round-to-nearest under the same conventions."""
    from torchao.quantization.quant_primitives import (  # type: ignore[import-not-found, unused-ignore]
        MappingType,
        choose_qparams_affine,
        quantize_affine,
    )

    number, inputs = scheme.number, weight.shape[1]
    block = {"tensor": tuple(weight.shape), "channel": (1, inputs), "group": (1, scheme.group)}[scheme.granularity]
    mapping = MappingType.SYMMETRIC if scheme.symmetric else MappingType.ASYMMETRIC
    low, high = int(number.low), int(number.high)
    scale, zero = choose_qparams_affine(
        weight, mapping, block, torch.int8, low, high, scale_dtype=torch.float32, zero_point_dtype=torch.int32,
        eps=torch.finfo(torch.float32).tiny,
    )  # fmt: skip
    codes = quantize_affine(weight, block, scale, zero, torch.int8, low, high)
    return codes, scale, zero


def _torchao(weight: Tensor, scheme: Scheme) -> Tensor:
    codes, scale, zero = torchao_codes(weight, scheme)
    rows = 1 if scheme.granularity == "tensor" else len(weight)
    groups = scheme.groups(weight.shape[1])
    parts = codes.reshape(rows, groups, -1).float() - zero.reshape(rows, groups, 1)
    return (parts * scale.reshape(rows, groups, 1)).reshape(weight.shape)


def _bitsandbytes(weight: Tensor, scheme: Scheme) -> Tensor:
    from bitsandbytes import functional  # type: ignore[import-not-found, unused-ignore]

    packed, state = functional.quantize_4bit(weight.contiguous(), blocksize=scheme.group, quant_type="nf4")
    made: Tensor = functional.dequantize_4bit(packed, state).reshape(weight.shape)
    return made
