"""Models to serve in a benchmark: two small Llama shapes, and random weights for any shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilemesh.data.tokenizer import Unknown
from tilemesh.model.config import ModelConfig
from tilemesh.model.fresh import INIT_STD, give_memory
from tilemesh.model.transformer import Transformer
from tilemesh.serve.load import ServedModel

_LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "positions": "rotary",
    "activation": "swiglu",
    "biases": False,
    "tied": False,
}
SHAPES: Mapping[str, ModelConfig] = {
    "llama-27m": ModelConfig(
        layers=8, width=512, heads=8, kv_heads=4, mlp_width=1024, vocabulary=8192, context=2048, **_LLAMA,
    ),
    "llama-110m": ModelConfig(
        layers=12, width=768, heads=12, kv_heads=4, mlp_width=2048, vocabulary=22016, context=2048, **_LLAMA,
    ),
}  # fmt: skip
"""27.3 and 109.3 million parameters: small enough for two cores."""


def random_served(
    name: str, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> ServedModel:
    """Weights drawn on the device, as fresh ones are; rounded to 16 bits, so that every peer can have the same."""
    model = Transformer(config, device="meta", dtype=dtype).eval().requires_grad_(False)
    give_memory(model, device, together=True)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, INIT_STD, generator=generator)
                parameter.copy_(parameter.to(torch.float16))
            else:
                parameter.fill_(0.0 if parameter_name.endswith("bias") else 1.0)
    return ServedModel(name, model, Unknown(config.vocabulary), frozenset())
