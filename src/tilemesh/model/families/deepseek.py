"""DeepSeek-V2 and V3: latent attention, experts beside shared ones, the first layers dense; and V3's routers: sigmoids,
with a bias that selects.

A head of theirs is a part that is not turned, then one that is, in pairs of neighbours; ours begins with the turned
part, in halves: rows change places on their way in and out. Scores of a context stretched by yarn are multiplied by the
square of a factor, `mscale_all_dim`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import shown
from tilemesh.model.config import ModelConfig
from tilemesh.model.families.family import ANY, one_of
from tilemesh.model.families.llama import LLAMA, QWEN2_MOE, QWEN3_MOE, read_attention_biases, write_common

_WIDTHS = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 0, "intermediate_size": 11008,
    "n_group": None, "topk_group": None,
}  # fmt: skip
_WIDTHS_V3 = {
    **_WIDTHS, "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3, "intermediate_size": 18432,
    "n_group": 8, "topk_group": 4,
}  # fmt: skip
"""Their keys, and what each is where a file leaves it out."""
SELECTING = "e_score_correction_bias"
"""The end of the name of the bias that selects experts."""
_GROUPS = "group_limited_greedy"
_MAY_BE_0 = ("first_k_dense_replace", "q_lora_rank", "n_group", "topk_group")


def _read(settings: Mapping[str, Any], source: str, usual: Mapping[str, int | None] = _WIDTHS) -> dict[str, Any]:
    sizes = {key: settings.get(key, value) for key, value in usual.items()}
    sizes |= {key: 0 for key in _MAY_BE_0 if sizes[key] is None}
    for key, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < (key not in _MAY_BE_0):
            raise UsageError(f"{source}: {key} is {shown(value)}: expected a whole number")
    heads = settings["num_attention_heads"]
    if settings.get("num_key_value_heads") not in (None, heads):
        raise UsageError(f"{source}: num_key_value_heads is {shown(settings['num_key_value_heads'])}: expected {heads}")
    plain, turned = sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"]
    fields = {
        **read_attention_biases(settings, source), "head_width": plain + turned,
        "rotary_fraction": turned / (plain + turned), "latent_width": sizes["kv_lora_rank"],
        "query_latent_width": sizes["q_lora_rank"],
        "value_width": 0 if sizes["v_head_dim"] == plain + turned else sizes["v_head_dim"],
        "experts": sizes["n_routed_experts"],
        "shared_width": sizes["n_shared_experts"] * settings["moe_intermediate_size"],
    }  # fmt: skip
    if dense := min(sizes["first_k_dense_replace"], settings["num_hidden_layers"]):
        fields |= {"dense_layers": tuple(range(dense)), "dense_width": sizes["intermediate_size"]}
    if usual is _WIDTHS_V3 or settings.get("topk_method", "greedy") != "greedy":
        fields |= {"router_groups": sizes["n_group"] or 1, "router_groups_per_token": sizes["topk_group"] or 1}
    return fields | {"score_gain": _stretched(settings) ** 2}


def _read_v2(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    one_of(settings, "topk_method", {word: word for word in ("greedy", _GROUPS)}, "greedy", source)
    return _read(settings, source)


def _read_v3(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    return _read(settings, source, _WIDTHS_V3)


def _stretched(settings: Mapping[str, Any]) -> float:
    """What yarn multiplies scores by, once for queries and once for keys."""
    rotary = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    times, factor = rotary.get("mscale_all_dim") or 0, rotary.get("factor") or 1
    is_plain = rotary.get("rope_type", rotary.get("type", "default")) == "default" or factor <= 1
    return 1.0 if is_plain else 1 + times * math.log(factor) / 10


def _write(config: ModelConfig) -> dict[str, Any]:
    kind = "deepseek_v3" if config.router_scores == "sigmoid" else "deepseek_v2"
    dense, shared = len(config.dense_layers), config.shared_width // config.mlp_width
    if config.dense_layers != tuple(range(dense)) or shared * config.mlp_width != config.shared_width or not shared:
        raise UsageError(
            f"{kind} has dense layers at the beginning and whole shared experts: dense_layers is "
            f"{config.dense_layers}, shared_width {config.shared_width} of {config.mlp_width}"
        )
    settings = write_common(config)
    if config.rotary_scaling == "yarn":
        log, gain = math.log(config.rotary_factor) / 10, math.sqrt(config.score_gain)
        both = {"mscale": config.turned_factor * gain, "mscale_all_dim": gain}
        scales = {key: round((value - 1) / log, 12) for key, value in both.items()} if log else {}
        for key in ("rope_parameters", "rope_scaling"):
            settings[key] = {**settings[key], **scales}
    return {
        **settings, "attention_bias": False, "num_key_value_heads": config.heads, "kv_lora_rank": config.latent_width,
        "q_lora_rank": config.query_latent_width or None, "qk_nope_head_dim": config.plain_width,
        "qk_rope_head_dim": config.rotary_width, "v_head_dim": config.value_head_width,
        "n_routed_experts": config.experts, "n_shared_experts": shared, "first_k_dense_replace": dense,
        "intermediate_size": config.dense_width or config.mlp_width, "norm_topk_prob": config.router_renormalized,
        **_write_groups(config),
    }  # fmt: skip


def _write_groups(config: ModelConfig) -> dict[str, Any]:
    groups = {"n_group": config.router_groups, "topk_group": config.router_groups_per_token}
    if config.router_scores == "sigmoid":
        return {**groups, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_interleave": True,
                "num_nextn_predict_layers": 0}  # fmt: skip
    is_limited = config.router_groups > 1
    return {"topk_method": _GROUPS, **groups} if is_limited else {"topk_method": "greedy", **dict.fromkeys(groups)}


def _neighbours(first: int, width: int) -> Iterator[int]:
    """Rows of a turned part as they have them: of two halves one after the other."""
    for pair in range(width // 2):
        yield first + pair
        yield first + width // 2 + pair


def _orders(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    turned, width, latent = config.rotary_width, config.head_width, config.latent_width
    queries = [
        row
        for begin in range(0, config.query_width, width)
        for row in (*range(begin + turned, begin + width), *_neighbours(begin, turned))
    ]
    return {
        "self_attn.q_proj": tuple(queries),
        "self_attn.kv_a_proj_with_mqa": (*range(latent), *_neighbours(latent, turned)),
    }


def _renamed(config: ModelConfig) -> dict[str, str]:
    queries = {"self_attn.q_proj.weight": "self_attn.q_b_proj.weight"} if config.query_latent_width else {}
    return {"mlp.gate.bias": f"mlp.gate.{SELECTING}", **queries}


DEEPSEEK_V2 = dataclasses.replace(
    LLAMA,
    architecture="DeepseekV2ForCausalLM",
    sizes=QWEN3_MOE.sizes,
    may={
        **LLAMA.may, "biases": (False,), "kv_heads": ANY, "rotary_fraction": ANY, "score_gain": ANY,
        "latent_width": ANY, "value_width": ANY, "experts": ANY, "experts_per_token": ANY,
        "router_renormalized": (False,), "shared_width": ANY, "dense_layers": ANY, "dense_width": ANY,
        "query_latent_width": ANY, "router_groups": ANY, "router_groups_per_token": ANY, "router_scale": ANY,
    },
    keys={
        "router_scale": ("routed_scaling_factor", 1.0), "norm_epsilon": ("rms_norm_eps", 1e-6),
        "dropout": ("resid_pdrop", 0.0),
        "tied": ("tie_word_embeddings", False), "experts_per_token": ("num_experts_per_tok", 0),
    },
    modules={
        "input_layernorm": ("attention_norm",), "self_attn.q_a_proj": ("attention.fc_query_latent",),
        "self_attn.q_a_layernorm": ("attention.query_latent_norm",), "self_attn.q_proj": ("attention.fc_q",),
        "self_attn.kv_a_proj_with_mqa": ("attention.fc_latent",),
        "self_attn.kv_a_layernorm": ("attention.latent_norm",),
        "self_attn.kv_b_proj": ("attention.fc_k", "attention.fc_v"), "self_attn.o_proj": ("attention.fc_o",),
        **{theirs.replace("shared_expert.", "shared_experts."): ours for theirs, ours in QWEN2_MOE.modules.items()
           if theirs.startswith(("mlp.", "post_")) and "shared_expert_gate" not in theirs},
    },
    by_heads=("self_attn.kv_b_proj",),
    orders=_orders,
    renamed=_renamed,
    expects={**LLAMA.expects, "attention_bias": False},
    read=_read_v2,
    write=_write,
)  # fmt: skip
DEEPSEEK_V3 = dataclasses.replace(
    DEEPSEEK_V2,
    architecture="DeepseekV3ForCausalLM",
    may={**DEEPSEEK_V2.may, "router_renormalized": ANY, "router_scores": ("sigmoid",), "router_bias": (True,)},
    keys={
        **DEEPSEEK_V2.keys, "router_scale": ("routed_scaling_factor", 2.5),
        "router_renormalized": ("norm_topk_prob", True), "experts_per_token": ("num_experts_per_tok", 8),
    },
    expects={
        **DEEPSEEK_V2.expects, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_interleave": True,
    },
    leftovers=LLAMA.leftovers + r"|layers\.61\..*",  # of the published one: what predicts a token further
    read=_read_v3,
)  # fmt: skip
