"""GPT-2 and GPT-NeoX (Pythia): LayerNorm, biases, an MLP without a gate.

GPT-2 keeps its matrices transposed (inputs first) and q, k, v in one. GPT-NeoX has q, k, v in one as well, head by
head, rotates a part of each head, and adds attention and MLP at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import shown
from tilemesh.model.config import ModelConfig
from tilemesh.model.families.family import ANY, Family, one_dropout, one_of, read_rotary, rotary_parameters

_GPT2_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu", "gelu": "gelu-erf"}
_NEOX_ACTIVATIONS = {"gelu": "gelu-erf", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
_WIDTH = "hidden_size / num_attention_heads"
_THEIRS = {"gelu": "gelu_new", "gelu-erf": "gelu", "relu": "relu"}


_GPT2_ALIASES = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}  # fmt: skip
"""Names by which transformers also reads GPT-2's sizes."""


def _read_gpt2(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    _check_same(settings, _GPT2_ALIASES, source)
    return {
        "activation": one_of(settings, "activation_function", _GPT2_ACTIVATIONS, "gelu_new", source),
        "dropout": one_dropout(settings, "embd_pdrop", "resid_pdrop", 0.1, source),
    }


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    return {"activation_function": _THEIRS[config.activation], "attn_pdrop": 0.0, "embd_pdrop": config.dropout}


def _check_same(settings: Mapping[str, Any], aliases: Mapping[str, str], source: str) -> None:
    """Refuse two names of one setting with two values."""
    for alias, key in aliases.items():
        if None not in (settings.get(alias), settings.get(key)) and settings[alias] != settings[key]:
            raise UsageError(
                f"{source}: {alias} is {shown(settings[alias])} and {key} {shown(settings[key])}: set one value"
            )


def _read_neox(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    width = settings["hidden_size"] // settings["num_attention_heads"]
    _check_same({_WIDTH: width, **settings}, {"head_dim": _WIDTH}, source)
    _check_same(settings, {"rope_theta": "rotary_emb_base"}, source)
    rotary = read_rotary(settings, source, base=settings.get("rotary_emb_base", 10_000.0))
    return {
        "activation": one_of(settings, "hidden_act", _NEOX_ACTIVATIONS, "gelu", source),
        "biases": True if settings.get("attention_bias", True) else "mlp",
        **rotary,
    }


def _write_neox(config: ModelConfig) -> dict[str, Any]:
    rotary = {**rotary_parameters(config), "partial_rotary_factor": config.rotary_fraction}
    return {
        "hidden_act": _THEIRS[config.activation], "attention_bias": config.biases is True, "attention_dropout": 0.0,
        "rope_parameters": rotary,
    }  # fmt: skip


GPT2 = Family(
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    sizes={
        "layers": "n_layer", "width": "n_embd", "heads": "n_head", "vocabulary": "vocab_size", "context": "n_positions",
    },
    may={"activation": ("gelu", "gelu-erf", "relu"), "mlp_width": ANY},
    keys={
        "mlp_width": ("n_inner", 0), "norm_epsilon": ("layer_norm_epsilon", 1e-5),
        "tied": ("tie_word_embeddings", True),
    },
    outside={"wte": "token_embedding", "wpe": "position_embedding", "ln_f": "final_norm"},
    layer="h.{}.",
    modules={
        "ln_1": ("attention_norm",), "attn.c_attn": ("attention.fc_q", "attention.fc_k", "attention.fc_v"),
        "attn.c_proj": ("attention.fc_o",), "ln_2": ("mlp_norm",), "mlp.c_fc": ("mlp.fc_in",),
        "mlp.c_proj": ("mlp.fc_out",),
    },
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    expects={
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
    },
    leftovers=r"h\.\d+\.attn\.(bias|masked_bias)",
    read=_read_gpt2,
    write=_write_gpt2,
)  # fmt: skip

GPT_NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    sizes={
        "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
        "vocabulary": "vocab_size", "context": "max_position_embeddings", "mlp_width": "intermediate_size",
    },
    may={
        "positions": ("rotary",), "activation": ("gelu", "gelu-erf", "relu"), "biases": (True, "mlp"),
        "parallel_residual": ANY, "rotary_base": ANY, "rotary_fraction": ANY, "rotary_scaling": ANY,
        "rotary_factor": ANY, "rotary_low": ANY, "rotary_high": ANY, "rotary_trained": ANY, "rotary_gain": ANY,
    },
    keys={
        "parallel_residual": ("use_parallel_residual", True), "dropout": ("hidden_dropout", 0.0),
        "norm_epsilon": ("layer_norm_eps", 1e-5), "rotary_base": ("rotary_emb_base", 10_000.0),
        "rotary_fraction": ("rotary_pct", 0.25), "tied": ("tie_word_embeddings", False),
    },
    outside={"embed_in": "token_embedding", "final_layer_norm": "final_norm"},
    layer="layers.{}.",
    modules={
        "input_layernorm": ("attention_norm",),
        "attention.query_key_value": ("attention.fc_q", "attention.fc_k", "attention.fc_v"),
        "attention.dense": ("attention.fc_o",), "post_attention_layernorm": ("mlp_norm",),
        "mlp.dense_h_to_4h": ("mlp.fc_in",), "mlp.dense_4h_to_h": ("mlp.fc_out",),
    },
    head="embed_out.weight",
    by_heads=("attention.query_key_value",),
    leftovers=r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)|rotary_emb\.inv_freq",
    read=_read_neox,
    write=_write_neox,
)  # fmt: skip
