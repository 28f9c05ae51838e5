"""gpt-oss: sinks of attention, layers with and without a window in turn, biases everywhere, and experts with a clipped
gate, whose matrices are one tensor for all experts of a layer.

In it a matrix stands with its inputs first, and rows of gate and first projection alternate; published files hold these
matrices in four bits (`model/mxfp4.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tilemesh.model.config import ModelConfig
from tilemesh.model.families.family import ANY, layer_types, read_rotary, read_window
from tilemesh.model.families.llama import LLAMA, read_count, write_common

_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
         "original_max_position_embeddings": 4096}  # fmt: skip
"""Where a file says nothing of rotary positions."""


def _read(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    layers = settings["num_hidden_layers"]
    if settings.get("rope_parameters") is None and not settings.get("rope_scaling"):
        settings = {**settings, "rope_scaling": _YARN}
    window = read_window({"sliding_window": 128, **settings}, layers, list(range(1, layers, 2)), source)
    count = read_count(settings, 128, source)
    return {**read_rotary(settings, source, base=150_000.0), **window, **count, "biases": True}


def _write(config: ModelConfig) -> dict[str, Any]:
    """With a window even where no layer has one: transformers makes the mask of it all the same."""
    return {
        **write_common(config), "attention_bias": True, "num_local_experts": config.experts, "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0, "sliding_window": config.window or 128, "layer_types": layer_types(config),
    }  # fmt: skip


GPT_OSS = dataclasses.replace(
    LLAMA,
    architecture="GptOssForCausalLM",
    may={
        **LLAMA.may, "activation": ("swiglu-clipped",), "biases": (True,), "window": ANY, "full_layers": ANY,
        "score_sink": (True,), "experts": ANY, "experts_per_token": ANY, "router_bias": ("scores",),
    },
    keys={
        **LLAMA.keys, "kv_heads": ("num_key_value_heads", 8), "head_width": ("head_dim", 64),
        "norm_epsilon": ("rms_norm_eps", 1e-5), "experts_per_token": ("num_experts_per_tok", 4),
    },
    modules={
        **{theirs: ours for theirs, ours in LLAMA.modules.items() if not theirs.startswith("mlp.")},
        "self_attn.sinks": ("attention.sinks",), "mlp.router": ("mlp.router",),
        "mlp.router.shift": ("mlp.router.shift",),
        "mlp.experts.gate_up_proj": ("mlp.experts.{}.fc_gate", "mlp.experts.{}.fc_in"),
        "mlp.experts.down_proj": ("mlp.experts.{}.fc_out",),
    },
    transposed=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    renamed=lambda config: {
        "self_attn.sinks.weight": "self_attn.sinks", "mlp.router.shift.weight": "mlp.router.bias",
        **{f"mlp.experts.{name}.{part}": f"mlp.experts.{name}{end}"
           for name in ("gate_up_proj", "down_proj") for part, end in (("weight", ""), ("bias", "_bias"))},
    },
    expects={
        "hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
        "partial_rotary_factor": 1.0,
    },
    read=_read,
    write=_write,
)  # fmt: skip
