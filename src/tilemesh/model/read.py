"""A whole model in one process, for reading, from weights that lie anywhere: a run's checkpoint is one such place.

Training and serving both read models, and neither may know the other: they bring the configuration and the weights
together. A Hugging Face folder has both, and `huggingface.load` reads it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tilemesh.core.errors import RunError
from tilemesh.model.config import ModelConfig
from tilemesh.model.fresh import give_memory
from tilemesh.model.transformer import Transformer


class Weights(Protocol):
    """Where whole parameters are found by their names; `runs.reader.Reader`, for one."""

    def weight(self, name: str) -> Tensor: ...


def read_model(config: ModelConfig, weights: Weights, device: torch.device | str = "cpu") -> Transformer:
    """The model with these weights, in their dtype: no dropout, no gradients."""
    weights_read = read_weights(config, weights)
    model = Transformer(config, device="meta", dtype=next(iter(weights_read.values())).dtype)
    give_memory(model, device, together=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights_read[name])
    return model.eval().requires_grad_(False)


def read_weights(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """Every parameter that a model of this configuration has, by name; weights of another shape are refused."""
    weights_read = {}
    for name, parameter in Transformer(config, device="meta").named_parameters():
        weights_read[name] = weights.weight(name)
        if weights_read[name].shape != parameter.shape:
            there, here = tuple(weights_read[name].shape), tuple(parameter.shape)
            raise RunError(
                f"the weights of {name} have shape {there} and this model's {here}: they are another model's"
            )
    return weights_read
