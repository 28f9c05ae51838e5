"""What a user would quantise with instead: the same weights, rounded by other libraries, for their loss.

Each peer gives back what its codes mean, so that all are judged by one model and one text; methods that look at text
see the same calibration text as ours. A library that is not installed, or has no such scheme or method, says so.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tilemesh.compress.calibrate import ROWS
from tilemesh.compress.recipe import Recipe, chosen_schemes
from tilemesh.core.errors import RunError
from tilemesh.kernels.lowbit.formats import Scheme
from tilemesh.model.kinds import matrix_shapes
from tilemesh.model.transformer import Transformer

PEERS = ("torchao", "bitsandbytes")


def why_not(peer: str, recipe: Recipe) -> str:
    """Why a peer has no value beside a recipe; empty where it has one."""
    weights = recipe.weights
    if not weights.scheme or weights.bits or recipe.prune.structure != "none":
        return f"{peer} is compared on weights in few bits"
    if recipe.activations.scheme:
        return f"{peer}'s activations in few bits need kernels and a form of model of its own"
    if weights.method == "gptq":
        return f"{peer} has none" if peer != "torchao" else "torchao's GPTQ runs on CUDA alone, and on int4 with mslk"
    if weights.method != "nearest" and peer != "torchao":
        return f"{peer} has no {weights.method}"
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
def peer_model(peer: str, model: Transformer, recipe: Recipe, tokens: Tensor) -> Transformer:
    """A copy of the model with the weights that the peer's codes mean. `tokens`: to calibrate with."""
    quantized = copy.deepcopy(model)
    shapes = matrix_shapes(quantized)
    rounding: Callable[[Tensor, Scheme], Tensor] = _torchao if peer == "torchao" else _bitsandbytes
    if recipe.weights.method == "clip":
        rounding = _torchao_hqq
    schemes = chosen_schemes(recipe, shapes)
    inputs = _inputs(model, tokens, schemes) if recipe.weights.method == "awq" else {}
    for name, scheme in schemes.items():
        weight = quantized.get_parameter(f"{name}.weight")
        try:
            plain = weight.detach().float()
            weight.copy_(_torchao_awq(plain, scheme, inputs[name]) if inputs else rounding(plain, scheme))
        except Exception as error:  # a library of another version
            raise RunError(f"{type(error).__name__}: {error}") from error
    return quantized


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


def _intx(scheme: Scheme, **more: Any) -> Any:
    """torchao's configuration of whole numbers of few bits."""
    from torchao.quantization import IntxWeightOnlyConfig  # type: ignore[import-not-found, unused-ignore]
    from torchao.quantization.granularity import (  # type: ignore[import-not-found, unused-ignore]
        PerAxis,
        PerGroup,
    )

    granularity = PerGroup(scheme.group) if scheme.granularity == "group" else PerAxis(0)
    return IntxWeightOnlyConfig(weight_dtype=getattr(torch, scheme.format), granularity=granularity, **more)


def _by_config(weight: Tensor, config: Any) -> Tensor:
    from torchao.quantization import quantize_  # type: ignore[import-not-found, unused-ignore]

    holder = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    holder[0].weight = nn.Parameter(weight.clone(), requires_grad=False)
    quantize_(holder, config)
    dense: Tensor = holder[0].weight.dequantize()
    return dense


def _torchao_hqq(weight: Tensor, scheme: Scheme) -> Tensor:
    """Scales found by error: what torchao has beside round-to-nearest, in the place of clipping."""
    from torchao.quantization.quantize_.workflows import (  # type: ignore[import-not-found, unused-ignore]
        IntxChooseQParamsAlgorithm,
    )

    return _by_config(weight, _intx(scheme, intx_choose_qparams_algorithm=IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY))


def _torchao_awq(weight: Tensor, scheme: Scheme, inputs: Tensor) -> Tensor:
    """By torchao's own search of scales on these inputs."""
    from torchao.prototype.awq.core import AWQObserver  # type: ignore[import-not-found, unused-ignore]

    observer = AWQObserver(weight, None, _intx(scheme))
    observer(inputs, None)
    scales = observer.calculate_qparams()
    dense: Tensor = _by_config(weight * scales, _intx(scheme)) / scales
    return dense


def _inputs(model: Transformer, tokens: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """What enters the matrices of the plain model, as torchao's observers see it."""
    inputs: dict[str, list[Tensor]] = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, arguments, name=name: inputs[name].append(arguments[0].detach().flatten(0, -2))
        )
        for name in inputs
    ]
    for piece in torch.split(tokens, ROWS):
        model(piece)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in inputs.items()}


def _bitsandbytes(weight: Tensor, scheme: Scheme) -> Tensor:
    from bitsandbytes import functional  # type: ignore[import-not-found, unused-ignore]

    packed, state = functional.quantize_4bit(weight.contiguous(), blocksize=scheme.group, quant_type="nf4")
    dense: Tensor = functional.dequantize_4bit(packed, state).reshape(weight.shape)
    return dense
