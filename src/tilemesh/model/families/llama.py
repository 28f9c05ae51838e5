"""Llama and the families that differ from it in a setting or two: Mistral, Qwen 2 and 3, Phi-3, OLMo 2, Gemma 2 and
3; and those of them with experts: Mixtral, Qwen 2 and 3 MoE, OLMoE.

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
    "rotary_trained": ANY, "rotary_gain": ANY, "rotary_rounded": ANY,
}  # fmt: skip
_PROJECTIONS = {
    "self_attn.q_proj": ("attention.fc_q",), "self_attn.k_proj": ("attention.fc_k",),
    "self_attn.v_proj": ("attention.fc_v",), "self_attn.o_proj": ("attention.fc_o",),
}  # fmt: skip
_NORMED = {"self_attn.q_norm": ("attention.q_norm",), "self_attn.k_norm": ("attention.k_norm",)}
_MLP = {"mlp.gate_proj": ("mlp.fc_gate",), "mlp.up_proj": ("mlp.fc_in",), "mlp.down_proj": ("mlp.fc_out",)}
_BEFORE, _AFTER = {"input_layernorm": ("attention_norm",)}, {"post_attention_layernorm": ("mlp_norm",)}


_KEYS = {
    "kv_heads": ("num_key_value_heads", 0), "head_width": ("head_dim", 0), "norm_epsilon": ("rms_norm_eps", 1e-6),
    "dropout": ("resid_pdrop", 0.0), "tied": ("tie_word_embeddings", False),
}  # fmt: skip


def write_common(config: ModelConfig) -> dict[str, Any]:
    return {"hidden_act": "silu", "attention_dropout": 0.0, **write_rotary(config)}


def read_attention_biases(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    """For those whose MLP never has any."""
    biases = "attention" if settings.get("attention_bias", False) else False
    return {"biases": biases, **read_rotary(settings, source)}


def _read_one_window(settings: Mapping[str, Any], source: str, absent: int | None = None) -> dict[str, Any]:
    """The window that all layers have, whatever layer_types and max_window_layers say; `absent`: without the key."""
    window = {"sliding_window": settings.get("sliding_window", absent)}
    return read_window(window, settings["num_hidden_layers"], [], source)


def _write_attention_biases(config: ModelConfig) -> dict[str, Any]:
    return {**write_common(config), "attention_bias": config.has_biases("output")}


# ---- Llama and Mistral -------------------------------------------------------------------------------------------


def _read_llama(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    attention, mlp = settings.get("attention_bias", False), settings.get("mlp_bias", False)
    biases = attention if attention == mlp else "attention" if attention else "mlp"
    return {"biases": biases, **read_rotary(settings, source)}


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return {**_write_attention_biases(config), "mlp_bias": config.has_biases("mlp")}


def _read_mistral(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    window = read_window({"sliding_window": 4096, **settings}, settings["num_hidden_layers"], [], source)
    return {**read_rotary(settings, source), **window}


def _write_mistral(config: ModelConfig) -> dict[str, Any]:
    return {**write_common(config), "sliding_window": config.window or None}


LLAMA = Family(
    architecture="LlamaForCausalLM",
    prefix="model.",
    sizes=_SIZES,
    may={
        "norm": ("rmsnorm",), "positions": ("rotary",), "activation": ("swiglu",), "kv_heads": ANY, "head_width": ANY,
        "biases": (True, False, "attention", "mlp"), **_ROTARY,
    },
    keys=_KEYS,
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
    keys={**_KEYS, "kv_heads": ("num_key_value_heads", 8)},
    read=_read_mistral,
    write=_write_mistral,
)


# ---- Qwen --------------------------------------------------------------------------------------------------------


def _read_qwen2(settings: Mapping[str, Any], source: str, alternates: bool = False) -> dict[str, Any]:
    """`alternates`: without layer_types, every second layer before max_window_layers has the window."""
    layers = settings["num_hidden_layers"]
    first = settings.get("max_window_layers", 28)
    if not isinstance(first, int) or first < 0:
        raise UsageError(f"{source}: max_window_layers is {first!r}: expected a number of layers")
    full = [layer for layer in range(layers) if (layer % 2 or layer >= first if alternates else layer < first)]
    window: dict[str, Any] = {}
    if settings.get("use_sliding_window", False):
        window = read_window({"sliding_window": 4096, **settings}, layers, full, source)
    return {**read_rotary(settings, source), **window}


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    types = layer_types(config)
    first = [*types, "sliding_attention"].index("sliding_attention")
    return {
        **write_common(config), "use_sliding_window": bool(config.window), "sliding_window": config.window or None,
        "max_window_layers": first, "layer_types": types,
    }  # fmt: skip


def _read_qwen3(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    return {**_read_qwen2(settings, source), **read_attention_biases(settings, source)}


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {**_write_qwen2(config), **_write_attention_biases(config)}


QWEN2 = dataclasses.replace(
    LLAMA,
    architecture="Qwen2ForCausalLM",
    may={**LLAMA.may, "biases": ("qkv",), "window": ANY, "full_layers": ANY},
    keys={**_KEYS, "kv_heads": ("num_key_value_heads", 32)},
    read=_read_qwen2,
    write=_write_qwen2,
)
QWEN3 = dataclasses.replace(
    QWEN2,
    architecture="Qwen3ForCausalLM",
    may={**QWEN2.may, "biases": (False, "attention"), "qk_norm": ("head",)},
    keys={**QWEN2.keys, "head_width": ("head_dim", 128)},
    modules={**_BEFORE, **_PROJECTIONS, **_NORMED, **_AFTER, **_MLP},
    read=_read_qwen3,
    write=_write_qwen3,
)


# ---- Phi-3 -------------------------------------------------------------------------------------------------------


def _read_phi3(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    rotary = read_rotary(settings, source, scalings=("default",))
    dropout = one_dropout(settings, "embd_pdrop", "resid_pdrop", 0.0, source)
    return {**rotary, **_read_one_window(settings, source), "dropout": dropout}


def _write_phi3(config: ModelConfig) -> dict[str, Any]:
    rotary = {**rotary_parameters(config), "partial_rotary_factor": config.rotary_fraction}
    return {
        **write_common(config), "rope_parameters": rotary, "embd_pdrop": config.dropout,
        "sliding_window": config.window or None, "original_max_position_embeddings": config.context,
    }  # fmt: skip


PHI3 = dataclasses.replace(
    LLAMA,
    architecture="Phi3ForCausalLM",
    may={
        **{name: values for name, values in LLAMA.may.items() if name not in _ROTARY},
        "biases": (False,), "window": ANY, "rotary_base": ANY, "rotary_fraction": ANY,
    },
    keys={
        **_KEYS, "norm_epsilon": ("rms_norm_eps", 1e-5), "rotary_fraction": ("partial_rotary_factor", 1.0),
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


OLMO2 = dataclasses.replace(
    LLAMA,
    architecture="Olmo2ForCausalLM",
    may={**LLAMA.may, "biases": (False, "attention"), "qk_norm": ("full",), "norm_place": ("branch",)},
    keys={**_KEYS, "norm_epsilon": ("rms_norm_eps", 1e-5)},
    modules={
        **_PROJECTIONS, **_NORMED, "post_attention_layernorm": ("attention_norm",), **_MLP,
        "post_feedforward_layernorm": ("mlp_norm",),
    },
    read=read_attention_biases,
    write=_write_attention_biases,
)  # fmt: skip


# ---- Gemma 2 and 3 -----------------------------------------------------------------------------------------------


def _read_scores(settings: Mapping[str, Any]) -> dict[str, Any]:
    head_width, scored = settings.get("head_dim", 256), settings.get("query_pre_attn_scalar", 256)
    return {"score_width": 0 if scored == head_width else scored}


def _read_gemma2(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    completed, layers = {"sliding_window": 4096, **settings}, settings["num_hidden_layers"]
    window = read_window(completed, layers, list(range(1, layers, 2)), source)
    return {**read_attention_biases(settings, source), **window, **_read_scores(settings)}


def _write_gemma2(config: ModelConfig) -> dict[str, Any]:
    common = {key: value for key, value in _write_attention_biases(config).items() if key != "hidden_act"}
    return {
        **common, "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": config.window or 4096, "layer_types": layer_types(config),
        "query_pre_attn_scalar": config.score_width or config.head_width,
        "final_logit_softcapping": config.logit_cap or None, "attn_logit_softcapping": config.score_cap or None,
        "use_bidirectional_attention": False,
    }  # fmt: skip


def _read_gemma3(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    completed = {"sliding_window": 4096, "rope_theta": 1e6, **settings}
    layers, every = settings["num_hidden_layers"], settings.get("sliding_window_pattern", 6)
    if not isinstance(every, int) or every < 1:
        raise UsageError(f"{source}: sliding_window_pattern is {every!r}: expected every how many layers there is none")
    full = [index for index in range(layers) if (index + 1) % every == 0]
    rotary = _layer_rotary(completed, source)
    common = read_attention_biases({**completed, "rope_parameters": rotary["full_attention"]}, source)
    local = {
        "rope_theta": settings.get("rope_local_base_freq", 10_000.0),
        "rope_parameters": rotary["sliding_attention"],
    }
    return {
        **common, **read_window(completed, layers, full, source), **_read_scores(settings),
        "rotary_local_base": read_rotary(local, source, scalings=("default",))["rotary_base"],
    }  # fmt: skip


def _layer_rotary(settings: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """What rope_parameters says of each kind of layer; rope_scaling is of those without a window."""
    rotary = settings.get("rope_parameters") or dict.fromkeys(LAYER_TYPES)
    if not isinstance(rotary, Mapping) or not set(rotary) <= set(LAYER_TYPES):
        raise UsageError(f"{source}: rope_parameters is {shown(rotary)}: expected {' and '.join(LAYER_TYPES)} in it")
    scaling = settings.get("rope_scaling") or {}
    if isinstance(scaling, Mapping) and "rope_type" not in scaling and "type" in scaling:
        raise UsageError(f"{source}: rope_scaling has type, which is passed over in this family: call it rope_type")
    layers = [("rope_parameters", rotary.get(kind) or {}) for kind in LAYER_TYPES]
    for key, value in (*layers, ("rope_scaling", scaling)):
        if isinstance(value, Mapping) and value.get("partial_rotary_factor", 1.0) != 1.0:
            raise UsageError(f"{source}: {key}: partial_rotary_factor is {value['partial_rotary_factor']}: only 1 is")
        if isinstance(value, Mapping) and value.get("truncate", True) is not True:
            raise UsageError(f"{source}: {key}: truncate is {shown(value['truncate'])}, which this family passes over")
    return {**dict.fromkeys(LAYER_TYPES), **rotary}


def _write_gemma3(config: ModelConfig) -> dict[str, Any]:
    if config.rotary_scaling != "none" and not config.rotary_local_base and "sliding_attention" in layer_types(config):
        raise UsageError(
            f"gemma3_text has no rotary_scaling {config.rotary_scaling} in layers with a window, and this model has it "
            "there too: train it with model.rotary_local_base, their own base without scaling"
        )
    local = config.rotary_local_base or config.rotary_base
    sliding = {"rope_type": "default", "rope_theta": local}
    return {
        **_write_gemma2(config),
        "rope_local_base_freq": local,
        "rope_parameters": {"full_attention": rotary_parameters(config), "sliding_attention": sliding},
    }


_GEMMA_MAY = {
    **LLAMA.may, "activation": ("geglu",), "biases": (False, "attention"), "window": ANY, "full_layers": ANY,
    "norm_place": ("sandwich",), "norm_offset": (True,), "scaled_embedding": (True,), "score_width": ANY,
}  # fmt: skip
_GEMMA_KEYS = {
    **_KEYS, "head_width": ("head_dim", 256), "kv_heads": ("num_key_value_heads", 4),
    "tied": ("tie_word_embeddings", True),
}  # fmt: skip
_GEMMA_NORMS = {
    "post_attention_layernorm": ("attention_out_norm",), "pre_feedforward_layernorm": ("mlp_norm",), **_MLP,
    "post_feedforward_layernorm": ("mlp_out_norm",),
}  # fmt: skip
_GEMMA_EXPECTS = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False}

GEMMA2 = dataclasses.replace(
    LLAMA,
    architecture="Gemma2ForCausalLM",
    may={**_GEMMA_MAY, "score_cap": ANY, "logit_cap": ANY},
    keys={
        **_GEMMA_KEYS, "score_cap": ("attn_logit_softcapping", 50.0), "logit_cap": ("final_logit_softcapping", 30.0),
    },
    modules={**_BEFORE, **_PROJECTIONS, **_GEMMA_NORMS},
    expects=_GEMMA_EXPECTS,
    read=_read_gemma2,
    write=_write_gemma2,
)  # fmt: skip
GEMMA3 = dataclasses.replace(
    LLAMA,
    architecture="Gemma3ForCausalLM",
    may={**_GEMMA_MAY, "qk_norm": ("head",), "rotary_local_base": ANY, "rotary_rounded": (True,)},
    keys=_GEMMA_KEYS,
    modules={**_BEFORE, **_PROJECTIONS, **_NORMED, **_GEMMA_NORMS},
    expects={**_GEMMA_EXPECTS, "final_logit_softcapping": None, "attn_logit_softcapping": None},
    read=_read_gemma3,
    write=_write_gemma3,
)


# ---- With experts ------------------------------------------------------------------------------------------------


def _experts(block: str, gate: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    """Tensors of a router and its experts."""
    names = ((gate, "fc_gate"), (up, "fc_in"), (down, "fc_out"))
    experts = {f"{block}.experts.{{}}.{theirs}": (f"mlp.experts.{{}}.{ours}",) for theirs, ours in names}
    return {f"{block}.gate": ("mlp.router",), **experts}


_MAY_ROUTE = {"experts": ANY, "experts_per_token": ANY}
_MAY_MIX = {"router_renormalized": ANY, "dense_layers": ANY, "dense_width": ANY}
_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")


def read_count(settings: Mapping[str, Any], default: int, source: str) -> dict[str, Any]:
    """How many experts there are: transformers 5 writes num_local_experts where files had num_experts."""
    keys = [key for key in ("num_experts", "num_local_experts") if key in settings]
    counts = [settings[key] for key in keys]
    if len(set(map(str, counts))) > 1:
        raise UsageError(f"{source}: num_experts is {counts[0]} and num_local_experts {counts[1]}: leave one away")
    if counts and (isinstance(counts[0], bool) or not isinstance(counts[0], int) or counts[0] < 1):
        raise UsageError(f"{source}: {keys[0]} is {shown(counts[0])}: expected a number of experts")
    return {"experts": counts[0] if counts else default}


def _read_mixtral(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    window = _read_one_window(settings, source)
    return {**read_rotary(settings, source, base=1e6), **window, **read_count(settings, 8, source)}


def _read_dense(settings: Mapping[str, Any], width: int, source: str) -> dict[str, Any]:
    """Which layers have no experts, and how wide their MLP is; `width`: where a file leaves that out."""
    layers, every = settings["num_hidden_layers"], settings.get("decoder_sparse_step", 1)
    named = settings.get("mlp_only_layers") or []
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f"{source}: decoder_sparse_step is {shown(every)}: expected every how many layers has experts")
    if not isinstance(named, list) or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in named):
        raise UsageError(f"{source}: mlp_only_layers is {shown(named)}: expected numbers of layers")
    dense = tuple(layer for layer in range(layers) if layer in named or (layer + 1) % every)
    return {"dense_layers": dense, "dense_width": settings.get("intermediate_size", width)} if dense else {}


def _write_dense(config: ModelConfig) -> dict[str, Any]:
    width = config.dense_width or config.mlp_width
    return {"intermediate_size": width, "decoder_sparse_step": 1, "mlp_only_layers": [*config.dense_layers]}


def _read_qwen3_moe(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    window = _read_one_window(settings, source, 4096) if settings.get("use_sliding_window", False) else {}
    experts = {**read_count(settings, 128, source), **_read_dense(settings, 6144, source)}
    return {**read_attention_biases(settings, source), **window, **experts}


def _read_qwen2_moe(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    if settings.get("qkv_bias", True) is not True:
        raise UsageError(f"{source}: qkv_bias is {shown(settings['qkv_bias'])}: only true is supported")
    dense = _read_dense(settings, 5632, source)
    return {**_read_qwen2(settings, source, alternates=True), **read_count(settings, 60, source), **dense}


def _read_olmoe(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    return {**read_attention_biases(settings, source), **read_count(settings, 64, source)}


def _write_mixtral(config: ModelConfig) -> dict[str, Any]:
    return {**_write_mistral(config), "num_local_experts": config.experts}


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    return {**_write_qwen3(config), **_write_dense(config), "num_experts": config.experts}


def _write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    return {**_write_qwen2(config), **_write_dense(config), "num_experts": config.experts, "qkv_bias": True}


def _write_olmoe(config: ModelConfig) -> dict[str, Any]:
    return {**_write_attention_biases(config), "num_experts": config.experts, "clip_qkv": None}


MIXTRAL = dataclasses.replace(
    MISTRAL,
    architecture="MixtralForCausalLM",
    may={**MISTRAL.may, **_MAY_ROUTE},
    keys={
        **MISTRAL.keys, "norm_epsilon": ("rms_norm_eps", 1e-5), "experts_per_token": ("num_experts_per_tok", 2),
    },
    modules={**_BEFORE, **_PROJECTIONS, **_AFTER, **_experts("block_sparse_moe", "w1", "w3", "w2")},
    read=_read_mixtral,
    write=_write_mixtral,
)  # fmt: skip
QWEN3_MOE = dataclasses.replace(
    QWEN3,
    architecture="Qwen3MoeForCausalLM",
    sizes={**_SIZES, "mlp_width": "moe_intermediate_size"},
    may={**QWEN3.may, "full_layers": ((),), **_MAY_ROUTE, **_MAY_MIX},
    keys={
        **_KEYS, "kv_heads": ("num_key_value_heads", 4), "experts_per_token": ("num_experts_per_tok", 8),
        "router_renormalized": ("norm_topk_prob", False),
    },
    modules={**_BEFORE, **_PROJECTIONS, **_NORMED, **_AFTER, **_EXPERTS, **_MLP},
    read=_read_qwen3_moe,
    write=_write_qwen3_moe,
)  # fmt: skip
QWEN2_MOE = dataclasses.replace(
    QWEN2,
    architecture="Qwen2MoeForCausalLM",
    sizes=QWEN3_MOE.sizes,
    may={**QWEN2.may, **_MAY_ROUTE, **_MAY_MIX, "shared_width": ANY, "shared_gate": (True,)},
    keys={
        **_KEYS, "kv_heads": ("num_key_value_heads", 16), "experts_per_token": ("num_experts_per_tok", 4),
        "router_renormalized": ("norm_topk_prob", False), "shared_width": ("shared_expert_intermediate_size", 5632),
    },
    modules={
        **_BEFORE, **_PROJECTIONS, **_AFTER, **_EXPERTS, **_MLP,
        **{theirs.replace("mlp.", "mlp.shared_expert."): (ours.replace("mlp.", "mlp.shared."),)
           for theirs, (ours,) in _MLP.items()},
        "mlp.shared_expert_gate": ("mlp.shared_gate",),
    },
    read=_read_qwen2_moe,
    write=_write_qwen2_moe,
)  # fmt: skip
OLMOE = dataclasses.replace(
    LLAMA,
    architecture="OlmoeForCausalLM",
    may={
        **LLAMA.may, **_MAY_ROUTE, "router_renormalized": ANY, "biases": (False, "attention"), "qk_norm": ("full",),
    },
    keys={
        **_KEYS, "norm_epsilon": ("rms_norm_eps", 1e-5), "experts_per_token": ("num_experts_per_tok", 8),
        "router_renormalized": ("norm_topk_prob", False),
    },
    modules={**_BEFORE, **_PROJECTIONS, **_NORMED, **_AFTER, **_EXPERTS},
    expects={**LLAMA.expects, "clip_qkv": None},
    read=_read_olmoe,
    write=_write_olmoe,
)  # fmt: skip
