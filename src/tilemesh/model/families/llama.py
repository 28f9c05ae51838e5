"""Llama and the families that differ from it in a setting or two: Mistral, Qwen 2 and 3, Phi-3, OLMo 2, Gemma 3.

RMSNorm, rotary positions, grouped queries and an MLP with a gate. Their weights agree with ours as they stand, since
`model.rotary.rotate` pairs a head's elements as Hugging Face does; Meta's own files pair them otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import shown
from tilemesh.model.config import ModelConfig
from tilemesh.model.families.family import (
    ANY,
    LAYER_TYPES,
    Family,
    layer_types,
    one_dropout,
    read_rotary,
    read_window,
    rotary_parameters,
    write_rotary,
)

_SIZES = {
    "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads", "vocabulary": "vocab_size",
    "context": "max_position_embeddings", "mlp_width": "intermediate_size",
}  # fmt: skip
_ROTARY = {
    "rotary_base": ANY, "rotary_scaling": ANY, "rotary_factor": ANY, "rotary_low": ANY, "rotary_high": ANY,
    "rotary_trained": ANY,
}  # fmt: skip
_PROJECTIONS = {
    "self_attn.q_proj": ("attention.fc_q",), "self_attn.k_proj": ("attention.fc_k",),
    "self_attn.v_proj": ("attention.fc_v",), "self_attn.o_proj": ("attention.fc_o",),
}  # fmt: skip
_NORMED = {"self_attn.q_norm": ("attention.q_norm",), "self_attn.k_norm": ("attention.k_norm",)}
_MLP = {"mlp.gate_proj": ("mlp.fc_gate",), "mlp.up_proj": ("mlp.fc_in",), "mlp.down_proj": ("mlp.fc_out",)}
_BEFORE, _AFTER = {"input_layernorm": ("attention_norm",)}, {"post_attention_layernorm": ("mlp_norm",)}


def _read_common(told: Mapping[str, Any], source: str, epsilon: float = 1e-6) -> dict[str, Any]:
    """What all of them say in the same words."""
    heads, width = told["num_attention_heads"], told["hidden_size"]
    head_width = told.get("head_dim") or 0
    return {
        "kv_heads": told.get("num_key_value_heads") or 0, "norm": "rmsnorm", "positions": "rotary",
        "activation": "swiglu", "biases": False, "tied": told.get("tie_word_embeddings", False),
        "dropout": told.get("resid_pdrop", 0.0), "norm_epsilon": told.get("rms_norm_eps", epsilon),
        "head_width": 0 if head_width * heads == width else head_width, **read_rotary(told, source),
    }  # fmt: skip


def _write_common(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_width, "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon, "attention_dropout": 0.0, **write_rotary(config),
    }  # fmt: skip


# ---- Llama and Mistral -------------------------------------------------------------------------------------------


def _read_llama(told: Mapping[str, Any], source: str) -> dict[str, Any]:
    attention, mlp = told.get("attention_bias", False), told.get("mlp_bias", False)
    biases = attention if attention == mlp else "attention" if attention else "mlp"
    return {**_read_common(told, source), "biases": biases}


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    biases = {"attention_bias": config.has_biases("output"), "mlp_bias": config.has_biases("mlp")}
    return {**_write_common(config), **biases}


def _read_mistral(told: Mapping[str, Any], source: str) -> dict[str, Any]:
    window = read_window({"sliding_window": 4096, **told}, told["num_hidden_layers"], [], source)
    return {**_read_common(told, source), "kv_heads": told.get("num_key_value_heads", 8) or 0, **window}


def _write_mistral(config: ModelConfig) -> dict[str, Any]:
    return {**_write_common(config), "sliding_window": config.window or None}


LLAMA = Family(
    architecture="LlamaForCausalLM",
    prefix="model.",
    sizes=_SIZES,
    may={
        "norm": ("rmsnorm",), "positions": ("rotary",), "activation": ("swiglu",), "kv_heads": ANY, "head_width": ANY,
        "biases": (True, False, "attention", "mlp"), **_ROTARY,
    },
    outside={"embed_tokens": "token_embedding", "norm": "final_norm"},
    layer="layers.{}.",
    modules={**_BEFORE, **_PROJECTIONS, **_AFTER, **_MLP},
    expects={"hidden_act": "silu"},
    leftovers=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    read=_read_llama,
    write=_write_llama,
)  # fmt: skip

MISTRAL = dataclasses.replace(
    LLAMA,
    architecture="MistralForCausalLM",
    may={**LLAMA.may, "biases": (False,), "window": ANY},
    read=_read_mistral,
    write=_write_mistral,
)


# ---- Qwen --------------------------------------------------------------------------------------------------------


def _read_qwen2(told: Mapping[str, Any], source: str) -> dict[str, Any]:
    layers = told["num_hidden_layers"]
    first = told.get("max_window_layers", 28)
    if not isinstance(first, int) or first < 0:
        raise UsageError(f"{source}: max_window_layers is {first!r}: expected a number of layers")
    window: dict[str, Any] = {}
    if told.get("use_sliding_window", False):
        window = read_window({"sliding_window": 4096, **told}, layers, list(range(min(first, layers))), source)
    common = _read_common(told, source)
    return {**common, "kv_heads": told.get("num_key_value_heads", 32) or 0, "biases": "qkv", **window}


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    types = layer_types(config)
    first = types.index("sliding_attention") if config.window else config.layers
    return {
        **_write_common(config), "use_sliding_window": bool(config.window), "sliding_window": config.window or None,
        "max_window_layers": first, "layer_types": types,
    }  # fmt: skip


def _read_qwen3(told: Mapping[str, Any], source: str) -> dict[str, Any]:
    given = {"head_dim": 128, **told}
    biases = "attention" if told.get("attention_bias", False) else False
    return {**_read_qwen2(given, source), "biases": biases, "qk_norm": "head"}


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {**_write_qwen2(config), "attention_bias": config.has_biases("output")}


QWEN2 = dataclasses.replace(
    LLAMA,
    architecture="Qwen2ForCausalLM",
    may={**LLAMA.may, "biases": ("qkv",), "window": ANY, "full_layers": ANY},
    read=_read_qwen2,
    write=_write_qwen2,
)
QWEN3 = dataclasses.replace(
    QWEN2,
    architecture="Qwen3ForCausalLM",
    may={**QWEN2.may, "biases": (False, "attention"), "qk_norm": ("head",)},
    modules={**_BEFORE, **_PROJECTIONS, **_NORMED, **_AFTER, **_MLP},
    read=_read_qwen3,
    write=_write_qwen3,
)


# ---- Phi-3 -------------------------------------------------------------------------------------------------------


def _read_phi3(told: Mapping[str, Any], source: str) -> dict[str, Any]:
    window = {"window": told.get("sliding_window") or 0}  # in every layer, whatever layer_types says
    fraction = {"rotary_fraction": told.get("partial_rotary_factor", 1.0)}
    fraction |= read_rotary(told, source, scalings=("default",))
    return {
        **_read_common(told, source, epsilon=1e-5), **fraction,
        "dropout": one_dropout(told, "embd_pdrop", "resid_pdrop", 0.0, source), **window,
    }  # fmt: skip


def _write_phi3(config: ModelConfig) -> dict[str, Any]:
    common = _write_common(config)
    rotary = {**rotary_parameters(config), "partial_rotary_factor": config.rotary_fraction}
    return {
        **common, "rope_parameters": rotary, "partial_rotary_factor": config.rotary_fraction,
        "embd_pdrop": config.dropout, "sliding_window": config.window or None,
        "original_max_position_embeddings": config.context,
    }  # fmt: skip


PHI3 = dataclasses.replace(
    LLAMA,
    architecture="Phi3ForCausalLM",
    may={
        **{name: values for name, values in LLAMA.may.items() if name not in _ROTARY},
        "biases": (False,), "window": ANY, "rotary_base": ANY, "rotary_fraction": ANY,
    },
    modules={
        **_BEFORE, "self_attn.qkv_proj": ("attention.fc_q", "attention.fc_k", "attention.fc_v"),
        "self_attn.o_proj": ("attention.fc_o",), **_AFTER, "mlp.gate_up_proj": ("mlp.fc_gate", "mlp.fc_in"),
        "mlp.down_proj": ("mlp.fc_out",),
    },
    read=_read_phi3,
    write=_write_phi3,
)  # fmt: skip


# ---- OLMo 2 ------------------------------------------------------------------------------------------------------


def _read_olmo2(told: Mapping[str, Any], source: str) -> dict[str, Any]:
    biases = "attention" if told.get("attention_bias", False) else False
    common = _read_common(told, source, epsilon=1e-5)
    return {**common, "biases": biases, "qk_norm": "full", "norm_place": "branch"}


def _write_olmo2(config: ModelConfig) -> dict[str, Any]:
    return {**_write_common(config), "attention_bias": config.has_biases("output")}


OLMO2 = dataclasses.replace(
    LLAMA,
    architecture="Olmo2ForCausalLM",
    may={**LLAMA.may, "biases": (False, "attention"), "qk_norm": ("full",), "norm_place": ("branch",)},
    modules={
        **_PROJECTIONS, **_NORMED, "post_attention_layernorm": ("attention_norm",), **_MLP,
        "post_feedforward_layernorm": ("mlp_norm",),
    },
    read=_read_olmo2,
    write=_write_olmo2,
)  # fmt: skip


# ---- Gemma 3 -----------------------------------------------------------------------------------------------------


def _read_gemma3(told: Mapping[str, Any], source: str) -> dict[str, Any]:
    given = {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "rope_theta": 1e6, **told}
    layers, every = told["num_hidden_layers"], told.get("sliding_window_pattern", 6)
    if not isinstance(every, int) or every < 1:
        raise UsageError(f"{source}: sliding_window_pattern is {every!r}: expected every how many layers there is none")
    full = [index for index in range(layers) if (index + 1) % every == 0]
    rotary = _layer_rotary(given, source)
    head_width, scored = given["head_dim"], told.get("query_pre_attn_scalar", 256)
    common = _read_common({**given, "rope_parameters": rotary["full_attention"]}, source)
    local = {"rope_theta": told.get("rope_local_base_freq", 10_000.0), "rope_parameters": rotary["sliding_attention"]}
    return {
        **common, **read_window(given, layers, full, source), "activation": "geglu", "qk_norm": "head",
        "biases": "attention" if told.get("attention_bias", False) else False, "norm_place": "sandwich",
        "norm_offset": True, "scaled_embedding": True, "score_width": 0 if scored == head_width else scored,
        "rotary_local_base": read_rotary(local, source, scalings=("default",))["rotary_base"],
        "tied": told.get("tie_word_embeddings", True),
    }  # fmt: skip


def _layer_rotary(told: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """What rope_parameters says of each kind of layer; rope_scaling is of those without a window."""
    rotary = told.get("rope_parameters") or dict.fromkeys(LAYER_TYPES)
    if not isinstance(rotary, Mapping) or not set(rotary) <= set(LAYER_TYPES):
        raise UsageError(f"{source}: rope_parameters is {shown(rotary)}: expected {' and '.join(LAYER_TYPES)} in it")
    scaling = told.get("rope_scaling") or {}
    if isinstance(scaling, Mapping) and "rope_type" not in scaling and "type" in scaling:
        raise UsageError(f"{source}: rope_scaling has type, which is passed over in this family: call it rope_type")
    for key, value in (("rope_parameters", rotary.get("sliding_attention") or {}), ("rope_scaling", scaling)):
        if isinstance(value, Mapping) and value.get("partial_rotary_factor", 1.0) != 1.0:
            raise UsageError(f"{source}: {key}: partial_rotary_factor is {value['partial_rotary_factor']}: only 1 is")
    return {**dict.fromkeys(LAYER_TYPES), **rotary}


def _write_gemma3(config: ModelConfig) -> dict[str, Any]:
    common = {key: value for key, value in _write_common(config).items() if key != "hidden_act"}
    local = config.rotary_local_base or config.rotary_base
    sliding = {"rope_type": "default", "rope_theta": local}
    return {
        **common, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": config.has_biases("output"),
        "sliding_window": config.window or 4096, "layer_types": layer_types(config), "rope_local_base_freq": local,
        "rope_parameters": {"full_attention": rotary_parameters(config), "sliding_attention": sliding},
        "query_pre_attn_scalar": config.score_width or config.head_width, "final_logit_softcapping": None,
        "attn_logit_softcapping": None, "use_bidirectional_attention": False,
    }  # fmt: skip


GEMMA3 = dataclasses.replace(
    LLAMA,
    architecture="Gemma3ForCausalLM",
    may={
        **LLAMA.may, "activation": ("geglu",), "biases": (False, "attention"), "qk_norm": ("head",), "window": ANY,
        "full_layers": ANY, "norm_place": ("sandwich",), "norm_offset": (True,), "scaled_embedding": (True,),
        "score_width": ANY, "rotary_local_base": ANY,
    },
    modules={
        **_BEFORE, **_PROJECTIONS, **_NORMED, "post_attention_layernorm": ("attention_out_norm",),
        "pre_feedforward_layernorm": ("mlp_norm",), **_MLP, "post_feedforward_layernorm": ("mlp_out_norm",),
    },
    expects={
        "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": None,
        "attn_logit_softcapping": None, "use_bidirectional_attention": False,
    },
    read=_read_gemma3,
    write=_write_gemma3,
)  # fmt: skip
