"""What programs a model that trains is prepared for, and which of its weights may be 16-bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from tilemesh.compress.config import training_recipe
from tilemesh.compress.prepare import prepare as train_for
from tilemesh.model.eight_bits import multiply_in_8_bits, require_fp8
from tilemesh.model.huggingface import stored_kinds
from tilemesh.model.kinds import put_kinds
from tilemesh.model.lora import attach
from tilemesh.model.programs.prepare import Prepared, prepare
from tilemesh.model.programs.program import TRAINING, Use
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.apply import planned_use
from tilemesh.train.config import TrainConfig
from tilemesh.train.optimizer import stored_dtype


def training_use(config: TrainConfig, device: torch.device) -> Use:
    """What a run's model is prepared for."""
    is_whole = device.type == "cuda" and config.plan.tp == 1 and config.plan.precision != "fp64"
    use = gpu_use(compiled=bool(config.train.compile)) if is_whole else TRAINING
    return replace(use, marked=config.data.packing == "documents")


def gpu_use(*, compiled: bool) -> Use:
    """Of a whole model that trains on a GPU, in 16 bits but for its weights."""
    return Use(trains=True, compiled=compiled, casts=True, aligns_vocabulary=True)


def trained_model(
    config: TrainConfig, device: torch.device, extend: Callable[[Transformer], None] = lambda model: None, *,
    empty: bool,
) -> Transformer:  # fmt: skip
    """A run's whole model as it is trained; `extend` adds what is trained beside it. `empty`: without memory."""
    dtype, kernels = stored_dtype(config.plan.precision), config.kernels_on(device.type)
    where = torch.device("meta") if empty else device
    model = Transformer(config.model, seed=config.train.seed, device=where, dtype=dtype, kernels=kernels)
    if config.lora.base is not None and config.lora.rank:
        put_kinds(model, stored_kinds(config.lora.base))
    if config.plan.precision == "fp8":
        require_fp8(device)
        multiply_in_8_bits(model, config.plan.fp8_scales, device)
    if config.lora.rank:
        attach(model, config.lora, config.train.seed)
    extend(model)
    recipe = training_recipe(config.compress.recipe)
    if recipe is not None:
        train_for(model, recipe)
    return model


def planned_programs(config: TrainConfig, device: torch.device) -> Prepared:
    """What a run's whole model would be computed by: no weight is read or computed."""
    use = planned_use(training_use(config, device), config.plan, config.model.layers)
    return prepare(trained_model(config, device, empty=True), use, device)


def product_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that products alone read: autocast computes with their 16-bit values and no others.

    A table that is looked up is none of them, also where it is the output projection; nor are those of norms.
    """
    return {
        f"{module_name}.{name}"
        for module_name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        for name, parameter in module.named_parameters(recurse=False)
        if name in ("weight", "bias") and parameter.requires_grad
    }
