"""The description of a layer is what the model does: FLOPs counted by torch, parameters by their shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tilemesh.model.config import ModelConfig
from tilemesh.model.kernels import PLAIN
from tilemesh.model.loss import loss_sum
from tilemesh.model.part import cut_parts, whole_part
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.operations import forward_flops, model_flops

SIZES: dict[str, Any] = {"layers": 3, "width": 32, "heads": 4, "vocabulary": 40, "context": 16}
LLAMA: dict[str, Any] = {
    "kv_heads": 2, "mlp_width": 48, "norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "biases": False,
    "tied": False,
}  # fmt: skip
MODELS = {"gpt": ModelConfig(**SIZES), "llama": ModelConfig(**SIZES, **LLAMA)}
TOKENS = torch.zeros(2, 16, dtype=torch.int64)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_flops_are_those_that_torch_counts(config: ModelConfig) -> None:
    model = Transformer(config, kernels=PLAIN)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):  # torch counts no other attention of a CPU
        total, _ = loss_sum(model(TOKENS), TOKENS)
        assert counter.get_total_flops() == forward_flops(config, *TOKENS.shape).total
        total.backward()
    assert counter.get_total_flops() == model_flops(config, *TOKENS.shape)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_every_parameter_has_the_shape_that_is_described(config: ModelConfig) -> None:
    for part in (whole_part(config), *cut_parts(config, (1, 2))):
        shapes = {name: tuple(value.shape) for name, value in Transformer(config, part=part).named_parameters()}
        described = {}
        for weight in part.weights(config):
            is_vector = weight.inputs == 1
            described[f"{weight.name}.weight"] = (weight.outputs,) if is_vector else (weight.outputs, weight.inputs)
            if weight.bias:
                described[f"{weight.name}.bias"] = (weight.outputs,)
        assert shapes == described
