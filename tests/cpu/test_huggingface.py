"""Hugging Face's folders: the same logits as `transformers` both ways, and everything that does not fit is named."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tilemesh.core.errors import UsageError
from tilemesh.model import huggingface, mxfp4
from tilemesh.model.config import PRESETS, ModelConfig, preset
from tilemesh.model.families import book as families
from tilemesh.model.rotary import rotary_angles
from tilemesh.model.transformer import Transformer

TOKENS_BT = torch.randint(31, (2, 11), generator=torch.Generator().manual_seed(1))
GPT2: dict[str, Any] = {"vocab_size": 31, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3,
                        "bos_token_id": None, "eos_token_id": None}  # fmt: skip
LLAMA: dict[str, Any] = {"vocab_size": 31, "max_position_embeddings": 16, "hidden_size": 24, "intermediate_size": 40,
                         "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
          "original_max_position_embeddings": 20}  # fmt: skip
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10.0, "factor": 4.0, "original_max_position_embeddings": 64}
NEOX: dict[str, Any] = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {
    "num_attention_heads": 3, "attention_dropout": 0.0,
}  # fmt: skip
SLIDING = ["full_attention", "sliding_attention"]
GEMMA = LLAMA | {
    "head_dim": 8, "sliding_window": 4, "layer_types": SLIDING[::-1], "pad_token_id": None, "query_pre_attn_scalar": 20,
    "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 30.0}},
}  # fmt: skip
GEMMA2 = LLAMA | {
    "head_dim": 8,
    "sliding_window": 4,
    "layer_types": SLIDING,
    "pad_token_id": None,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
DEEPSEEK = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"} | {
    "kv_lora_rank": 14, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}  # fmt: skip
GPT_OSS = LLAMA | {
    "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 4, "head_dim": 8, "eos_token_id": None,
    "rope_parameters": YARN | {"truncate": False, "beta_fast": 3.0},
}  # fmt: skip
KERNELS = {"gemma2": "eager", "gpt_oss": "eager"}  # sdpa knows of no soft cap and no sinks
CASES = {
    "gpt2": ("gpt2", GPT2),
    "gpt2-relu-untied": ("gpt2", GPT2 | {"activation_function": "relu", "n_inner": 40, "tie_word_embeddings": False}),
    "llama": ("llama", LLAMA | {"rms_norm_eps": 1e-3}),
    "llama-3": ("llama", LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-3.1": ("llama", LLAMA | {"rope_parameters": LLAMA3, "head_dim": 6}),
    "llama-tied-biased": ("llama", LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-yarn": ("llama", LLAMA | {"rope_parameters": YARN, "head_dim": 8}),
    "llama-yarn-factor": ("llama", LLAMA | {"rope_parameters": YARN | {"attention_factor": 0.7, "beta_fast": 2.0,
                                                                       "beta_slow": 0.5}, "head_dim": 12}),
    "qwen2-yarn-mscale": ("qwen2", LLAMA | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 2.0},
                                            "head_dim": 10}),
    "neox-yarn": ("gpt_neox", NEOX | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    "mistral": ("mistral", LLAMA | {"sliding_window": 4}),
    "mistral-full": ("mistral", LLAMA | {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("qwen2", LLAMA | {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", LLAMA | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "qwen3": ("qwen3", LLAMA | {"head_dim": 6}),
    "qwen3-window": ("qwen3", LLAMA | {"use_sliding_window": True, "sliding_window": 3, "layer_types": SLIDING,
                                       "head_dim": 8, "attention_bias": True}),
    "gemma3": ("gemma3_text", GEMMA),
    "gemma3-plain": ("gemma3_text", GEMMA | {"layer_types": None, "query_pre_attn_scalar": 8, "attention_bias": True}),
    "gemma3-equal-bases": ("gemma3_text", GEMMA | {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2-plain": ("gemma2", GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None,
                                         "layer_types": None, "query_pre_attn_scalar": 8, "attention_bias": True}),
    "phi3": ("phi3", LLAMA | {"pad_token_id": None}),
    "phi3-types": ("phi3", LLAMA | {"pad_token_id": None, "sliding_window": 4, "layer_types": ["full_attention"] * 2}),
    "phi3-partial": ("phi3", LLAMA | {"pad_token_id": None, "num_attention_heads": 3, "num_key_value_heads": 3,
                                      "sliding_window": 5, "tie_word_embeddings": True,
                                      "rope_parameters": {"rope_type": "default", "rope_theta": 50.0,
                                                          "partial_rotary_factor": 0.75}}),
    "pythia": ("gpt_neox", NEOX | {"rotary_pct": 0.25}),
    "neox-serial": ("gpt_neox", NEOX | {"use_parallel_residual": False, "rotary_pct": 0.75, "rotary_emb_base": 300,
                                        "attention_bias": False}),
    "olmo2": ("olmo2", LLAMA | {"pad_token_id": None}),
    "olmo2-biased": ("olmo2", LLAMA | {"pad_token_id": None, "attention_bias": True, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", LLAMA | {"num_local_experts": 5, "sliding_window": 4}),
    "mixtral-one": ("mixtral", LLAMA | {"num_local_experts": 3, "num_experts_per_tok": 1, "head_dim": 8}),
    "qwen3-moe": ("qwen3_moe", LLAMA | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
                                        "head_dim": 8, "norm_topk_prob": True}),
    "qwen3-moe-plain": ("qwen3_moe", LLAMA | {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 20,
                                              "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-moe-mixed": ("qwen3_moe", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
                                              "intermediate_size": 28, "mlp_only_layers": [1], "head_dim": 4}),
    "qwen3-moe-window": ("qwen3_moe", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
                                               "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1,
                                               "head_dim": 4}),
    "mixtral-types": ("mixtral", LLAMA | {"num_local_experts": 3, "sliding_window": 4,
                                          "layer_types": ["full_attention"] * 2}),
    "qwen2-moe": ("qwen2_moe", LLAMA | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
                                        "shared_expert_intermediate_size": 28, "intermediate_size": 16,
                                        "decoder_sparse_step": 2}),
    "deepseek-v2": ("deepseek_v2", DEEPSEEK),
    "deepseek-v2-equal": ("deepseek_v2", DEEPSEEK | {"first_k_dense_replace": 0, "v_head_dim": 12,
                                                     "n_shared_experts": 1, "rms_norm_eps": 1e-3,
                                                     "tie_word_embeddings": True}),
    "deepseek-v2-groups": ("deepseek_v2", DEEPSEEK | {"q_lora_rank": 10, "topk_method": "group_limited_greedy",
                                                      "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7}),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK | {"q_lora_rank": 10, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
                                               "n_shared_experts": 1, "num_key_value_heads": 6}),
    "deepseek-v3-plain": ("deepseek_v3", DEEPSEEK | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False,
                                                     "routed_scaling_factor": 1.0, "num_key_value_heads": 6}),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "gpt-oss-full": ("gpt_oss", GPT_OSS | {"layer_types": ["full_attention"] * 2, "head_dim": 4, "hidden_size": 20,
                                           "num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": YARN}),
    "olmoe": ("olmoe", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None,
                                "eos_token_id": None}),
}  # fmt: skip
_LLAMA: dict[str, Any] = {"layers": 2, "width": 24, "heads": 6, "vocabulary": 31, "context": 16, "norm": "rmsnorm",
                          "positions": "rotary", "activation": "swiglu", "biases": False, "tied": False}  # fmt: skip
OURS = {
    "gpt2": ModelConfig(layers=2, width=24, heads=3, vocabulary=31, context=16, dropout=0.2),
    "gpt2-untied": ModelConfig(layers=2, width=24, heads=3, vocabulary=31, context=16, mlp_width=40, tied=False,
                               activation="relu", norm_epsilon=1e-3),
    "llama": ModelConfig(**_LLAMA, kv_heads=2, rotary_base=500.0),
    "llama-tied": ModelConfig(**_LLAMA | {"tied": True, "biases": True}, dropout=0.2, norm_epsilon=1e-3),
    "llama-3.1": ModelConfig(**_LLAMA, rotary_scaling="llama3", rotary_factor=8.0, rotary_trained=12),
    "llama-yarn": ModelConfig(**_LLAMA, rotary_base=50.0, rotary_scaling="yarn", rotary_factor=8.0, rotary_trained=200,
                              rotary_high=32.0, head_width=12),
    "qwen2-yarn": ModelConfig(**_LLAMA | {"biases": "qkv"}, rotary_scaling="yarn", rotary_factor=4.0, rotary_trained=40,
                              rotary_base=30.0, rotary_gain=0.8, head_width=12),
    "mistral": ModelConfig(**_LLAMA, window=3, head_width=8),
    "mistral-named": ModelConfig(**_LLAMA, family="mistral"),
    "qwen2": ModelConfig(**_LLAMA | {"biases": "qkv"}, kv_heads=3, window=5, full_layers=(1,)),
    "qwen3": ModelConfig(**_LLAMA, qk_norm="head", head_width=10, kv_heads=1),
    "gemma3": ModelConfig(**_LLAMA | {"activation": "geglu", "tied": True}, head_width=6, kv_heads=2, qk_norm="head",
                          norm_place="sandwich", norm_offset=True, scaled_embedding=True, window=4, full_layers=(0,),
                          rotary_local_base=20.0, score_width=11, rotary_scaling="linear", rotary_factor=8.0),
    "gemma2": ModelConfig(**_LLAMA | {"activation": "geglu", "tied": True}, head_width=6, kv_heads=2,
                          norm_place="sandwich", norm_offset=True, scaled_embedding=True, window=4, full_layers=(1,),
                          score_width=11, score_cap=1.5, logit_cap=2.5),
    "phi3": ModelConfig(**_LLAMA | {"heads": 3}, rotary_fraction=0.5, dropout=0.1, window=4),
    "gpt_neox": ModelConfig(layers=2, width=24, heads=3, vocabulary=31, context=16, positions="rotary", tied=False,
                            rotary_fraction=0.25, parallel_residual=True, activation="gelu-erf", dropout=0.1),
    "olmo2": ModelConfig(**_LLAMA, qk_norm="full", norm_place="branch", kv_heads=2),
    "mixtral": ModelConfig(**_LLAMA, experts=3, window=5),
    "qwen3_moe": ModelConfig(**_LLAMA, experts=5, experts_per_token=3, qk_norm="head", head_width=6, mlp_width=20,
                             router_renormalized=False),
    "qwen3_moe-window": ModelConfig(**_LLAMA, experts=3, qk_norm="head", mlp_width=20, window=3),
    "qwen2_moe": ModelConfig(**_LLAMA | {"biases": "qkv"}, experts=4, shared_width=12, shared_gate=True,
                             dense_layers=(0,), dense_width=20),
    "olmoe": ModelConfig(**_LLAMA, experts=4, experts_per_token=1, qk_norm="full"),
    "deepseek_v2": ModelConfig(**_LLAMA, head_width=6, rotary_fraction=1 / 3, latent_width=10, value_width=5,
                               experts=4, mlp_width=12, shared_width=24, router_renormalized=False),
    "deepseek_v2-groups": ModelConfig(**_LLAMA, head_width=6, rotary_fraction=1 / 3, latent_width=10, value_width=5,
                                      query_latent_width=8, experts=6, router_groups=3, router_groups_per_token=1,
                                      router_scale=2.0, mlp_width=12, shared_width=24, router_renormalized=False),
    "deepseek_v3": ModelConfig(**_LLAMA, head_width=6, rotary_fraction=1 / 3, latent_width=10, value_width=5,
                               query_latent_width=8, experts=8, router_groups=4, router_groups_per_token=2,
                               router_scale=1.5, router_scores="sigmoid", router_bias=True, mlp_width=12,
                               shared_width=12, dense_layers=(0,), dense_width=20),
    "gpt_oss": ModelConfig(**_LLAMA | {"biases": True, "activation": "swiglu-clipped"}, kv_heads=3, experts=5,
                           experts_per_token=2, mlp_width=10, router_bias="scores", score_sink=True, window=3,
                           full_layers=(0,), rotary_scaling="yarn", rotary_rounded=False, rotary_base=20.0,
                           rotary_factor=4.0, rotary_trained=50, rotary_high=5.0, head_width=12),
    "gpt_oss-full": ModelConfig(**_LLAMA | {"biases": True, "activation": "swiglu-clipped"}, kv_heads=3, experts=5,
                                mlp_width=10, router_bias="scores", score_sink=True),
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Imported here: it takes seconds, and only some of the tests need it."""
    return pytest.importorskip("transformers", minversion="4.50")


def theirs(transformers: Any, case: str) -> nn.Module:
    kind, settings = CASES[case]
    config = transformers.AutoConfig.for_model(kind, **settings)
    return lively(transformers.AutoModelForCausalLM.from_config(config, attn_implementation=KERNELS.get(kind, "sdpa")))


def lively(model: nn.Module) -> nn.Module:
    """Every parameter matters: biases are not 0, norms not 1, attention not flat."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        of_routers = [each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for parameter in (*model.parameters(), *of_routers):
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model.eval()


class Rotary64(nn.Module):
    """Their table of angles in float64; `transformers` makes it in float32 whatever the model's dtype."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.rotary, self.is_complex = config.rope_parameters, config.model_type == "deepseek_v2"
        self.is_half = config.model_type == "gpt_oss"
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.width = int(width * self.rotary.get("partial_rotary_factor", 1.0))

    def frequencies(self, rotary: Mapping[str, Any]) -> Tensor:
        """By their documentation of rope_type: default, linear, llama3, yarn."""
        pair = torch.arange(0, self.width, 2, dtype=torch.float64)
        made = 1 / rotary["rope_theta"] ** (pair / self.width)
        if rotary["rope_type"] == "linear":
            made = made / rotary["factor"]
        if rotary["rope_type"] == "llama3":
            for index, frequency in enumerate(made.tolist()):
                length = 2 * math.pi / frequency
                first = rotary["original_max_position_embeddings"]
                if length > first / rotary["low_freq_factor"]:
                    made[index] = frequency / rotary["factor"]
                elif length >= first / rotary["high_freq_factor"]:
                    low, high = rotary["low_freq_factor"], rotary["high_freq_factor"]
                    smooth = (first / length - low) / (high - low)
                    made[index] = (1 - smooth) * frequency / rotary["factor"] + smooth * frequency
        if rotary["rope_type"] == "yarn":
            first = rotary["original_max_position_embeddings"]
            ends = [
                self.width * math.log(first / (turns * 2 * math.pi)) / (2 * math.log(rotary["rope_theta"]))
                for turns in (rotary.get("beta_fast", 32), rotary.get("beta_slow", 1))
            ]
            if rotary.get("truncate", True):
                ends = [math.floor(ends[0]), math.ceil(ends[1])]
            low, high = max(ends[0], 0), min(ends[1], self.width - 1)
            for index, frequency in enumerate(made.tolist()):
                ramp = min(max((index - low) / (high - low), 0), 1)
                made[index] = frequency / rotary["factor"] * ramp + frequency * (1 - ramp)
        return made

    def attention_factor(self, rotary: Mapping[str, Any]) -> float:
        """By the same: only yarn has one."""
        if rotary["rope_type"] != "yarn":
            return 1.0
        if rotary.get("attention_factor"):
            return float(rotary["attention_factor"])
        log = 0.1 * math.log(rotary["factor"])
        if rotary.get("mscale") and rotary.get("mscale_all_dim"):
            return float((rotary["mscale"] * log + 1) / (rotary["mscale_all_dim"] * log + 1))
        return log + 1

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        rotary = self.rotary if layer_type is None else self.rotary[layer_type]
        angle = position_ids[..., None].double() * self.frequencies(rotary)
        both, factor = torch.cat((angle, angle), dim=-1), self.attention_factor(rotary)
        if self.is_half:
            both = angle
        if self.is_complex:
            return torch.polar(torch.full_like(angle, factor), angle)
        return both.cos() * factor, both.sin() * factor


class Norm64(nn.Module):
    """Their RMSNorm in float64; Gemma's weights are stored less 1."""

    def __init__(self, norm: Any, is_offset: bool) -> None:
        super().__init__()
        self.weight, self.is_offset = norm.weight, is_offset
        self.epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        root = (x.pow(2).mean(-1, keepdim=True) + self.epsilon).sqrt()
        return x / root * (self.weight + 1 if self.is_offset else self.weight)


class Router64(nn.Module):
    """Their router in float64: scores, weights of the likeliest experts, and which these are."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        kind = type(router).__name__
        self.weight, self.picked = router.weight, router.top_k
        self.renormalizes = getattr(router, "norm_topk_prob", "Deepseek" not in kind)  # Mixtral always
        self.bias = getattr(router, "e_score_correction_bias", None)
        self.scale = getattr(router, "routed_scaling_factor", 1.0)
        self.shift = getattr(router, "bias", 0.0)
        is_limited = self.bias is not None or getattr(router, "topk_method", "") == "group_limited_greedy"
        self.groups = (router.num_group, router.topk_group) if is_limited else (1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = x.reshape(-1, x.shape[-1]) @ self.weight.T + self.shift
        each = torch.softmax(scores, -1) if self.bias is None else torch.sigmoid(scores)
        chosen = []
        for token in each if self.bias is None else each + self.bias:
            groups = token.view(self.groups[0], -1)
            strength = [float(group.sort().values[-1 if self.bias is None else -2 :].sum()) for group in groups]
            best = sorted(range(len(groups)), key=lambda place: -strength[place])[: self.groups[1]]
            inside = [place * groups.shape[1] + at for place in best for at in range(groups.shape[1])]
            chosen.append(sorted(inside, key=lambda expert: -float(token[expert]))[: self.picked])
        which = torch.tensor(chosen)
        weights = each.gather(-1, which)
        return scores, self.scale * (weights / weights.sum(-1, keepdim=True) if self.renormalizes else weights), which


def attend64(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scaling: float, softcap: float | None, **_: Any
) -> tuple[Tensor, None]:
    """Gemma 2's attention in float64, head by head; their softmax is in float32."""
    heads = []
    for head in range(q.shape[1]):
        shared = head // (q.shape[1] // k.shape[1])
        scores = q[:, head] @ k[:, shared].mT * scaling
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        heads.append(torch.softmax(scores + mask[:, 0], -1) @ v[:, shared])
    return torch.stack(heads, 2), None


def turned64(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
    """DeepSeek's rotary pairs, of neighbours, as wide as they come; their code turns them in float32."""
    pairs = (torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2).contiguous()) for x in (q, k))
    return tuple(torch.view_as_real(x * angles[:, None]).flatten(3).to(q.dtype) for x in pairs)


def widened(model: Any) -> Any:
    """Their model in float64 throughout: norms, angles, routers, Gemma 2's softmax and Gemma's factor, which are
    float32 by their code."""
    model.double()
    if model.config.model_type == "gemma2":
        code: Any = sys.modules[type(model).__module__]
        theirs = code.eager_attention_forward
        code.eager_attention_forward = lambda module, q, *rest, **options: (
            attend64 if q.dtype is torch.float64 else theirs
        )(module, q, *rest, **options)
        model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products know no float64
    if model.config.model_type == "deepseek_v2":
        sys.modules[type(model).__module__].apply_rotary_emb = turned64  # type: ignore[attr-defined]
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            kind = type(child).__name__
            if kind.endswith("RMSNorm"):
                setattr(module, name, Norm64(child, kind.startswith("Gemma")))
            elif kind.lower().endswith("topkrouter"):
                setattr(module, name, Router64(child))
            elif kind.endswith("RotaryEmbedding"):
                setattr(module, name, Rotary64(model.config))
        if hasattr(module, "embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
    return model


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    made = model(TOKENS_BT)
    logits: Tensor = made if isinstance(made, Tensor) else made.logits
    return logits


# ---- against transformers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_their_model_read_by_us_gives_their_logits(transformers: Any, case: str, tmp_path: Path) -> None:
    model = theirs(transformers, case)
    model.save_pretrained(tmp_path)
    ours32, ours64 = huggingface.load(tmp_path).eval(), huggingface.load(tmp_path, dtype=torch.float64).eval()
    assert {parameter.dtype for parameter in ours32.parameters()} == {torch.float32}
    theirs32, theirs64 = logits_of(model), logits_of(widened(model))
    torch.testing.assert_close(logits_of(ours64), theirs64, rtol=1e-10, atol=1e-10)
    # In float32 their own code, norms and angles included: no further from float64 than twice what they are, or than
    # rounding the logits to float32, should theirs happen to be nearer than that on some machine.
    assert (logits_of(ours32) - theirs64).norm() <= 2 * max((theirs32 - theirs64).norm(), 2**-24 * theirs64.norm())


@pytest.mark.parametrize("case", OURS)
def test_our_model_read_by_them_gives_our_logits(transformers: Any, case: str, tmp_path: Path) -> None:
    model = lively(Transformer(OURS[case], seed=2, dtype=torch.float64))
    assert isinstance(model, Transformer)
    huggingface.save(model, tmp_path)
    read, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True, local_files_only=True
    )
    assert not any(report.values()), report
    torch.testing.assert_close(logits_of(model), logits_of(widened(read.eval())), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_shards_are_read_through_their_index(transformers: Any, case: str, tmp_path: Path) -> None:
    model = theirs(transformers, case)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards = (huggingface.load(tmp_path / name).state_dict() for name in ("whole", "shards"))
    assert all(torch.equal(value, shards[key]) for key, value in whole.items())


@pytest.mark.parametrize("case", ["gpt2", "llama-tied-biased"])
def test_a_model_saved_without_its_head_is_read(transformers: Any, case: str, tmp_path: Path) -> None:
    model: Any = theirs(transformers, case)
    getattr(model, model.base_model_prefix).save_pretrained(tmp_path)
    assert not any(name.startswith(("model.", "transformer.")) for name in load_file(tmp_path / "model.safetensors"))
    model.double()
    ours = huggingface.load(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(logits_of(ours), logits_of(widened(model)), rtol=1e-12, atol=1e-12)


def test_deepseek_scales_scores_where_yarn_stretched_them(transformers: Any, tmp_path: Path) -> None:
    """As the published Lite: two factors, of which one multiplies scores; and they come back out as they went in."""
    code = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")
    if not hasattr(code, "yarn_apply_mscale"):
        pytest.skip("this version of transformers leaves mscale_all_dim out")
    scales = {"mscale": 0.9, "mscale_all_dim": 0.7}
    settings = DEEPSEEK | {"rope_parameters": YARN | scales}
    model: Any = lively(transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**settings)))
    model.save_pretrained(tmp_path)
    ours = huggingface.load(tmp_path).eval()
    assert ours.config.score_gain > 1
    torch.testing.assert_close(logits_of(ours), logits_of(model), rtol=1e-5, atol=1e-5)
    written = families.to_json(ours.config, "float32")["rope_parameters"]
    assert {key: written[key] for key in scales} == scales


def test_matrices_in_four_bits_are_what_they_mean_to_transformers(transformers: Any, tmp_path: Path) -> None:
    """Any bytes, any scales; and a folder as published: read, and written again in 16 bits."""
    code = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(256, (3, 256, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(3, 256, 2).contiguous()
    theirs_made = code.convert_moe_packed_tensors(blocks, scales)
    assert (theirs_made.isfinite() & (theirs_made != 0)).sum() > theirs_made.numel() / 2
    torch.testing.assert_close(mxfp4.decoded(blocks, scales).mT, theirs_made, rtol=0, atol=0, equal_nan=True)
    settings = GPT_OSS | {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model: Any = lively(transformers.GptOssForCausalLM(transformers.GptOssConfig(**settings))).bfloat16()
    model.save_pretrained(tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        dict(model.named_parameters())[name].data = code.convert_moe_packed_tensors(blocks, scales)
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    model.save_pretrained(tmp_path / "decoded")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    published = config | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (tmp_path / "plain" / "config.json").write_text(json.dumps(published))
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    ours, same = (huggingface.load(tmp_path / name) for name in ("plain", "decoded"))
    assert all(torch.equal(value, same.state_dict()[name]) for name, value in ours.state_dict().items())
    huggingface.save(ours, tmp_path / "written")
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert all(torch.equal(value, written[name]) for name, value in model.state_dict().items())
    assert "quantization_config" not in json.loads((tmp_path / "written" / "config.json").read_text())
    save_file({k: v for k, v in tensors.items() if not k.endswith("_scales")}, tmp_path / "plain" / "model.safetensors")
    with pytest.raises(UsageError, match=r"unexpected: model\.layers\.0\.mlp\.experts\.down_proj_blocks"):
        huggingface.load(tmp_path / "plain")


@pytest.mark.parametrize("name", families.FAMILIES)
def test_their_defaults_are_ours(transformers: Any, name: str) -> None:
    """A key that config.json leaves out means what it means to them."""
    said = {"num_experts_per_tok": 6} if name == "deepseek_v2" else {}  # else they have none
    written = transformers.AutoConfig.for_model(name, **said).to_dict()
    sizes = {"model_type", "tie_word_embeddings", *families.FAMILIES[name].sizes.values()}
    short = {key: value for key, value in written.items() if key in sizes | set(said)}
    assert families.from_json(short) == families.from_json(written)


# ---- alone -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", OURS)
def test_what_is_saved_is_read_back_bit_for_bit(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = Transformer(OURS[case], seed=2, dtype=dtype)
    huggingface.save(model, tmp_path)
    read = huggingface.load(tmp_path)
    assert read.config == model.config
    for key, value in model.state_dict().items():
        kept = torch.promote_types(dtype, torch.float32) if key.endswith("router.bias") else dtype
        assert (read.state_dict()[key].dtype, read.state_dict()[key].is_contiguous()) == (kept, True)
        assert torch.equal(read.state_dict()[key], value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    streamed = dict(huggingface.read_parameters(tmp_path))
    assert all(torch.equal(streamed[key], value) for key, value in model.named_parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_config_json(name: str) -> None:
    config = preset(name)
    if name == "deepseek-moe-16b":  # shared experts without a gate, and no latent: no family of theirs
        with pytest.raises(UsageError, match="deepseek_v2 has no attention without a latent"):
            families.to_json(config, "bfloat16")
        return
    written = json.loads(json.dumps(families.to_json(config, "bfloat16")))
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    assert families.from_json(written) == config


def test_rotary_settings_of_older_files_are_read() -> None:
    new = families.to_json(OURS["llama"], "float32")
    old = {key: value for key, value in new.items() if key != "rope_parameters"} | {"rope_scaling": None}
    assert families.from_json(old).rotary_base == 500.0


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("gpt2", {"model_type": "gpt3"}, "unknown model_type 'gpt3': did you mean 'gpt2'"),
        ("gpt2", {"model_type": "foo"}, "unknown model_type 'foo': there is no table of its keys and tensors here"),
        ("gpt2", {"model_type": "wholly_new"}, "there is no table of its keys and tensors here; known are gpt2, llama"),
        (
            "qwen3_moe",
            {"mlp_only_layers": [0, 1]},
            "dense_layers names 2 of 2 layers, up to 1: expected some",
        ),
        ("qwen2_moe", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all': expected numbers of layers"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0: expected every how many layers has"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias is False: only true is supported"),
        ("qwen3_moe", {"num_local_experts": 3}, "num_experts is 5 and num_local_experts 3: leave one away"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0: only None"),
        ("llama", {"model_type": "smollm3"}, "the nearest is llama; missing here: layers without rotary positions"),
        ("llama", {"model_type": "qwen2_5_vl"}, "the nearest is qwen2; missing here: images"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "score_cap is -1.0: expected"),
        ("gpt2", {"activation_function": "gelu_fast"}, "unknown activation_function in config.json 'gelu_fast'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "only False is supported"),
        ("gpt2", {"embd_pdrop": 0.3}, "embd_pdrop is 0.3 and resid_pdrop 0.2"),
        ("gpt2", {"n_layer": None}, "n_layer is None: expected a whole number"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0: expected"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}}, "rotary_factor is None: expected a"),
        ("gemma3", {"rope_parameters": {"full_attention": YARN | {"truncate": False}}}, "truncate is False, which"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0: only 7.0"),
        ("llama", {"rope_parameters": YARN | {"mscale": "1", "mscale_all_dim": 1}}, "mscale_all_dim: expected numbers"),
        ("llama", {"rope_parameters": YARN, "original_max_position_embeddings": 9}, "is 64 here and 9 outside"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2}}, "scaled by 'dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "rotary_factor is None: expected a number"),
        ("llama", {"head_dim": "8"}, "head_dim is '8': expected a whole number"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "scaled by 'longrope': only default can be"),
        ("phi3", {"embd_pdrop": 0.3}, "embd_pdrop is 0.3 and resid_pdrop 0.1"),
        ("qwen2", {"layer_types": ["chunked_attention", "full_attention"]}, "layer_types is"),
        ("qwen2", {"layer_types": None, "max_window_layers": "all"}, "max_window_layers is 'all'"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0: only None"),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu'"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "say different things: leave one away"),
        ("llama-3.1", {"original_max_position_embeddings": 7}, "is 12 here and 7 outside: leave one away"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "has full_attention: expected one object for all"),
        ("gemma3", {"rope_parameters": {"rope_theta": 5.0}}, "expected full_attention and sliding_attention in it"),
        ("gpt2", {"num_attention_heads": 2}, "num_attention_heads is 2 and n_head 3: set one value"),
        ("gpt_neox", {"head_dim": 4}, "head_dim is 4 and hidden_size / num_attention_heads 8: set one value"),
        *(
            (case, {"is_causal": wrong}, f"is_causal is {wrong}: only True is supported")
            for case, wrong in zip(
                (
                    "gpt2",
                    "llama",
                    "mistral",
                    "qwen2",
                    "qwen3",
                    "gemma3",
                    "phi3",
                    "gpt_neox",
                    "olmo2",
                    "mixtral",
                    "qwen3_moe",
                    "olmoe",
                    "qwen2_moe",
                ),
                (False, None, *[False] * 11),
                strict=True,
            )
        ),
    ],
)
def test_a_config_that_means_another_model_is_refused(case: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        families.from_json(families.to_json(OURS[case], "float32") | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_place": "post"}, "gpt2 has no norm_place=post; gpt_neox has no norm_place=post, positions=learned"),
        ({"family": "llama"}, "llama has no norm=layernorm, positions=learned, activation=gelu"),
        ({"family": "lama"}, "unknown model.family 'lama': did you mean 'llama'"),
        ({"heads": 4, "kv_heads": 2}, "gpt2 has no kv_heads=2"),
        ({"norm": "rmsnorm"}, "gpt2 has no norm=rmsnorm"),
    ],
)
def test_a_model_that_no_layout_expresses_is_not_saved(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        huggingface.save(Transformer(OURS["gpt2"].replace(**changes)), tmp_path / "out")
    with pytest.raises(UsageError, match="meta device"):
        huggingface.save(Transformer(OURS["gpt2"], device="meta"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_scaling_in_layers_with_a_window_is_not_lost_on_the_way_to_gemma3() -> None:
    config = OURS["gemma3"].replace(rotary_local_base=0.0)
    with pytest.raises(UsageError, match="no rotary_scaling linear in layers with a window"):
        families.to_json(config, "float32")
    for same in (config.replace(rotary_scaling="none", rotary_factor=1.0), config.replace(full_layers=(0, 1))):
        back = families.from_json(families.to_json(same, "float32"))
        assert torch.equal(angles_of(back), angles_of(same))


def angles_of(config: ModelConfig) -> Tensor:
    """Cosines of every layer's turning."""
    own, local = rotary_angles(torch.arange(9), config, torch.float64)
    return torch.stack([(local if config.window_of(layer) else own)[0] for layer in range(config.layers)])


def test_windows_of_some_layers_or_none() -> None:
    with pytest.raises(UsageError, match=r"qwen3_moe has no full_layers=\(0,\)"):
        families.to_json(OURS["qwen3_moe"].replace(window=3, full_layers=(0,)), "float32")
    config = OURS["qwen2"].replace(full_layers=(0, 1))
    assert families.from_json(families.to_json(config, "float32")) == config.replace(window=0, full_layers=())


# ---- files that are not as they should be ----------------------------------------------------------------------


def spoilt(folder: Path, case: str = "gpt2", **changes: Tensor | None) -> Path:
    """A saved model with tensors added or replaced (a tensor) or taken away (None); dots are written `__`."""
    huggingface.save(Transformer(OURS[case]), folder)
    tensors: dict[str, Tensor | None] = {**load_file(folder / "model.safetensors")}
    tensors |= {key.replace("__", "."): value for key, value in changes.items()}
    save_file({key: value for key, value in tensors.items() if value is not None}, folder / "model.safetensors")
    return folder


def test_each_tensor_that_does_not_fit_gets_a_line(tmp_path: Path) -> None:
    spoilt(
        tmp_path,
        transformer__wte__weight=torch.zeros(32, 24),
        transformer__h__0__attn__c_attn__weight=torch.zeros(72, 24),
        transformer__h__1__ln_2__bias=None,
        transformer__h__2__ln_1__bias=torch.zeros(24),
        wpe__weight=torch.zeros(16, 24),
        transformer__ln_f__bias=torch.zeros(24, dtype=torch.int8),
    )
    with pytest.raises(UsageError) as caught:
        huggingface.load(tmp_path)
    first, *lines = str(caught.value).splitlines()
    assert first == f"{tmp_path}: tensors do not fit config.json"
    told = {line.strip() for line in lines}
    twice = {line for line in told if "wpe.weight" in line}  # both names of one tensor: one of them is too many
    assert told - twice == {
        "mis-shaped: transformer.wte.weight, shape (32, 24), expected (31, 24)",
        "mis-shaped: transformer.h.0.attn.c_attn.weight, shape (72, 24), expected (24, 72)",
        "missing: transformer.h.1.ln_2.bias, expected shape (24,)",
        "unexpected: transformer.h.2.ln_1.bias, shape (24,)",
        "not floating point: transformer.ln_f.bias, I8, expected one of F64, F32, F16, BF16",
    }
    assert len(twice) == 1
    assert "unexpected" in twice.pop()


def test_a_folder_of_another_model_does_not_fill_the_screen(tmp_path: Path) -> None:
    spoilt(tmp_path, "llama")
    (tmp_path / "config.json").write_text(json.dumps(families.to_json(OURS["gpt2"], "float32")))
    with pytest.raises(UsageError) as caught:
        huggingface.load(tmp_path)
    (line,) = str(caught.value).splitlines()
    assert "such as transformer.wte.weight; there is model.embed_tokens.weight" in line
    spoilt(tmp_path / "deeper")
    (tmp_path / "deeper" / "config.json").write_text(
        json.dumps(families.to_json(OURS["gpt2"].replace(layers=9), "float32"))
    )
    with pytest.raises(UsageError) as caught:
        huggingface.load(tmp_path / "deeper")
    lines = str(caught.value).splitlines()
    assert len(lines) == 22
    missing = (9 - OURS["gpt2"].layers) * 12  # of each layer, none of which is there
    assert lines[-1].strip() == f"and {missing - 20} more"


def test_leftovers_of_old_versions_and_a_tied_output_are_passed_over(tmp_path: Path) -> None:
    table = Transformer(OURS["gpt2"]).token_embedding.weight.detach().clone()
    mask = {"transformer__h__0__attn__bias": torch.ones(1, 1, 16, 16, dtype=torch.uint8)}
    huggingface.load(spoilt(tmp_path / "gpt2", **mask, lm_head__weight=table))
    huggingface.load(
        spoilt(tmp_path / "llama", "llama", model__layers__1__self_attn__rotary_emb__inv_freq=torch.ones(2))
    )
    with pytest.raises(UsageError, match=r"lm_head\.weight differs from transformer\.wte\.weight"):
        huggingface.load(spoilt(tmp_path / "other", lm_head__weight=table + 1))
    with pytest.raises(UsageError, match=r"mis-shaped: lm_head.weight, shape \(2, 24\)"):
        huggingface.load(spoilt(tmp_path / "short", lm_head__weight=table[:2].clone()))


def test_mixed_dtypes_want_a_decision(tmp_path: Path) -> None:
    spoilt(tmp_path, transformer__ln_f__bias=torch.zeros(24, dtype=torch.bfloat16))
    with pytest.raises(UsageError, match="tensors of BF16 and F32: say which"):
        huggingface.load(tmp_path)
    read = huggingface.load(tmp_path, dtype=torch.float32)
    assert {parameter.dtype for parameter in read.parameters()} == {torch.float32}


def test_files_that_are_not_there_or_not_whole_are_named(tmp_path: Path) -> None:
    spoilt(tmp_path)
    weights, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(UsageError, match=r"model.safetensors is not a whole safetensors file"):
        huggingface.load(tmp_path)
    weights.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UsageError, match=r"neither .* pytorch_model.bin is pickled and never opened"):
        huggingface.load(tmp_path)
    for text, words in (
        ('{"weight_map": {"wte.weight": "a-1.safetensors"}}', "a-1.safetensors does not exist"),
        ('{"weight_map": {"wte.weight": "../x.safetensors"}}', "expected files of this folder"),
        ('{"weights": {}}', "not an index"),
        ("[", "not JSON"),
    ):
        index.write_text(text)
        with pytest.raises(UsageError, match=words):
            huggingface.load(tmp_path)
    for text, words in (("{", "is not JSON"), ("[]", "holds a list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match=words):
            huggingface.load(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        families.read_config(tmp_path / "nowhere")
