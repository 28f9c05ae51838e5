"""Changed config.json files: every family, every key that any family knows, values that a file may legally have.

A case is a family, one of its bases, and changes of one or two keys. The oracle is transformers: a model made from the
very file, with weights in which every parameter matters. What tilemesh computes from the same folder, and what
transformers computes from the folder that tilemesh writes of it, are those logits; or one of the two refuses the file.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MISSING = "(missing)"
"""In changes: the key is taken out of the file."""
TOLERANCE = 2.0**-24 * 128
"""Of the logits' relative error: float32 sums of at most 48 terms, a dozen of them one after the other, in two programs
that add up in another order. Another meaning of a key is thousands of times that."""
PAIRS = 40
"""Cases of a base that change two keys at once, drawn with the base's name as the seed."""

_GPT2: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 31, "n_positions": 16, "n_embd": 24, "n_layer": 2,
                         "n_head": 3, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
_LLAMA: dict[str, Any] = {"vocab_size": 31, "max_position_embeddings": 16, "hidden_size": 24, "intermediate_size": 40,
                          "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
                          "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
           "original_max_position_embeddings": 20}  # fmt: skip
_MIXED = ["sliding_attention", "full_attention"]
BASES: Mapping[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "gpt2-untied": _GPT2 | {"n_inner": 40, "tie_word_embeddings": False, "activation_function": "gelu"},
    "llama": {"model_type": "llama", **_LLAMA},
    "llama-scaled": {"model_type": "llama", **_LLAMA, "rope_parameters": _LLAMA3, "head_dim": 6, "mlp_bias": True},
    "mistral": {"model_type": "mistral", **_LLAMA, "sliding_window": None},
    "mistral-window": {"model_type": "mistral", **_LLAMA, "sliding_window": 4, "head_dim": 8},
    "qwen2": {"model_type": "qwen2", **_LLAMA},
    "qwen2-window": {"model_type": "qwen2", **_LLAMA, "use_sliding_window": True, "sliding_window": 3,
                     "max_window_layers": 1, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_LLAMA, "head_dim": 6},
    "qwen3-window": {"model_type": "qwen3", **_LLAMA, "head_dim": 8, "use_sliding_window": True, "sliding_window": 3,
                     "layer_types": _MIXED, "attention_bias": True},
    "gemma2": {"model_type": "gemma2", **_LLAMA, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 20,
               "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3": {"model_type": "gemma3_text", **_LLAMA, "head_dim": 8, "sliding_window": 4, "layer_types": _MIXED,
               "query_pre_attn_scalar": 20},
    "gemma3-pattern": {"model_type": "gemma3_text", **_LLAMA, "head_dim": 4, "sliding_window": 3,
                       "sliding_window_pattern": 2, "num_hidden_layers": 3, "rope_theta": 500.0},
    "phi3": {"model_type": "phi3", **_LLAMA},
    "phi3-window": {"model_type": "phi3", **_LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3,
                    "sliding_window": 5, "partial_rotary_factor": 0.75},
    "gpt_neox": {"model_type": "gpt_neox", **_LLAMA, "num_attention_heads": 3},
    "gpt_neox-serial": {"model_type": "gpt_neox", **_LLAMA, "num_attention_heads": 3, "rotary_pct": 0.75,
                        "use_parallel_residual": False, "attention_bias": False, "rotary_emb_base": 300},
    "olmo2": {"model_type": "olmo2", **_LLAMA},
    "olmo2-biased": {"model_type": "olmo2", **_LLAMA, "attention_bias": True, "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", **_LLAMA, "num_local_experts": 4},
    "qwen3_moe": {"model_type": "qwen3_moe", **_LLAMA, "num_experts": 5, "num_experts_per_tok": 2, "head_dim": 6,
                  "moe_intermediate_size": 20},
    "qwen2_moe": {"model_type": "qwen2_moe", **_LLAMA, "num_experts": 5, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 20, "shared_expert_intermediate_size": 12, "mlp_only_layers": [1]},
    "qwen3_moe-window": {"model_type": "qwen3_moe", **_LLAMA, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 4,
                         "moe_intermediate_size": 20, "use_sliding_window": True, "sliding_window": 3,
                         "max_window_layers": 1},
    "qwen2_moe-window": {"model_type": "qwen2_moe", **_LLAMA, "num_experts": 3, "num_experts_per_tok": 2,
                         "moe_intermediate_size": 20, "shared_expert_intermediate_size": 12,
                         "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "mixtral-window": {"model_type": "mixtral", **_LLAMA, "num_local_experts": 4, "sliding_window": 4},
    "olmoe": {"model_type": "olmoe", **_LLAMA, "num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {"model_type": "deepseek_v2", **_LLAMA, "num_key_value_heads": None, "kv_lora_rank": 10,
                    "q_lora_rank": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3,
                    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
                    "moe_intermediate_size": 20, "first_k_dense_replace": 1},
    "gpt_oss": {"model_type": "gpt_oss", **_LLAMA, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": 4},
}  # fmt: skip

_PLAIN = {"rope_type": "default", "rope_theta": 500.0}
_LINEAR = {"rope_type": "linear", "factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10.0, "factor": 4.0, "original_max_position_embeddings": 64}
_ROPES: tuple[Any, ...] = (
    None, {}, _PLAIN, {"rope_theta": 70.0}, {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
    _LINEAR, {**_LINEAR, "rope_theta": 70.0}, _LLAMA3, {"type": "linear", "factor": 2.0},
    *({"rope_type": kind, "rope_theta": 50.0, "factor": 2.0} for kind in ("dynamic", "yarn")),
    _YARN, {**_YARN, "truncate": False, "beta_fast": 4.0},
    {**_YARN, "mscale": 0.5, "mscale_all_dim": 2.0}, {**_YARN, "attention_factor": 0.8, "beta_fast": 2.0},
    {"rope_type": "longrope", "rope_theta": 50.0, "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0],
     "factor": 2.0, "original_max_position_embeddings": 8},
    {"rope_type": "proportional", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
    *({"full_attention": full, "sliding_attention": sliding} for full, sliding in itertools.product(
        (_PLAIN, {**_LINEAR, "rope_theta": 500.0}, _LLAMA3, None),
        (_PLAIN, {"rope_type": "default", "rope_theta": 30.0}, {**_LINEAR, "rope_theta": 500.0},
         {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}, None))),
)  # fmt: skip
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "relu", "relu2", "silu", "swish",
                "tanh", "sigmoid")  # fmt: skip
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LAYERS = (None, [_FULL] * 2, [_SLIDING] * 2, [_FULL, _SLIDING], [_SLIDING, _FULL], [_FULL] * 3, [_FULL],
           [_SLIDING, _FULL, _SLIDING], ["chunked_attention", _FULL])  # fmt: skip
VALUES: Mapping[str, tuple[Any, ...]] = {
    # Sizes.
    **dict.fromkeys(("hidden_size", "n_embd"), (12, 48)),
    **dict.fromkeys(("intermediate_size", "n_inner"), (24, 48, None)),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (1, 3)),
    **dict.fromkeys(("num_attention_heads", "n_head"), (2, 4)),
    "num_key_value_heads": (1, 2, 3, 6, None), "head_dim": (2, 4, 8, 16, None), "vocab_size": (32, 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), (12, 64)),
    "original_max_position_embeddings": (4, 64), "max_sequence_length": (8,),
    # Norms, activations, biases, ties.
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), (0.3, 1e-9)),
    **dict.fromkeys(("hidden_act", "activation_function", "hidden_activation"), (*_ACTIVATIONS, None)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "use_qk_norm", "use_bias", "bias"), (True, False, None)),
    "tie_word_embeddings": (True, False, None), "use_parallel_residual": (True, False),
    # Positions.
    "rope_parameters": _ROPES, "rope_scaling": _ROPES[:24], "rope_theta": (30.0, 500, None),
    "rope_local_base_freq": (30.0, 500.0, 1e6), "partial_rotary_factor": (0.25, 0.5, 1.0), "rotary_pct": (0.5, 1.0),
    "rotary_emb_base": (30, 500.0), "rotary_dim": (4,), "position_embedding_type": ("relative_key",),
    # What a token attends to.
    "sliding_window": (1, 3, 20, 0, None), "use_sliding_window": (True, False, None), "max_window_layers": (0, 1, 2, 9),
    "sliding_window_pattern": (1, 2, 3), "layer_types": _LAYERS, "is_causal": (False, True, None),
    "use_bidirectional_attention": (True, False, None), "is_decoder": (True, False),
    # What is multiplied, capped or dropped.
    "query_pre_attn_scalar": (4, 64, None),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), (0.5, 30.0, None)),
    "scale_attn_weights": (False, True), "scale_attn_by_inverse_layer_idx": (True, False),
    "reorder_and_upcast_attn": (True,), "add_cross_attention": (True,), "attention_multiplier": (0.1,),
    "logits_scaling": (4.0,), "residual_multiplier": (0.5,), "embedding_multiplier": (3.0,), "clip_qkv": (0.1,),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout"), (0.0, 0.5)),
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts"), (1, 3, 6, 0, None)), "num_experts_per_tok": (1, 3, 7, None),
    "moe_intermediate_size": (12, 24, None), "norm_topk_prob": (True, False, None), "decoder_sparse_step": (1, 2),
    "mlp_only_layers": ([], [0], None), "shared_expert_intermediate_size": (16,), "router_jitter_noise": (0.1,),
    "swiglu_limit": (1.0, 7.0, None), "swiglu_alpha": (1.702, 1.0),
    "router_aux_loss_coef": (0.5,), "output_router_logits": (True,), "n_shared_experts": (1,),
    # What no logit depends on.
    "initializer_range": (0.5,), "use_cache": (False,), "torch_dtype": ("float32",), "dtype": ("float32",),
    "bos_token_id": (None, 3), "eos_token_id": (None, 3, [1, 3]), "pad_token_id": (None, 0),
    "chunk_size_feed_forward": (1,), "pretraining_tp": (1, 2), "architectures": (None, ["Other"]),
    "_name_or_path": ("elsewhere",), "transformers_version": ("4.0.0",), "auto_map": ({},),
}  # fmt: skip
"""Their key: values beside the base's own. Each family meets every key, also those of other families."""


class ConfigCase(NamedTuple):
    base: str
    changes: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return "; ".join([self.base, *(f"{key} = {json.dumps(value)}" for key, value in self.changes)])

    @property
    def told(self) -> dict[str, Any]:
        told = BASES[self.base] | dict(self.changes)
        return {key: value for key, value in told.items() if value != MISSING}


def config_cases() -> Iterator[ConfigCase]:
    """All of them: each base as it is, every change of a key, every key taken out, and pairs of changes."""
    for base, told in BASES.items():
        yield ConfigCase(base, ())
        single = [(key, value) for key, values in VALUES.items() for value in values if told.get(key, MISSING) != value]
        single += [(key, MISSING) for key in told if key != "model_type"]
        yield from (ConfigCase(base, (change,)) for change in single)
        draw = random.Random(base)
        for _ in range(PAIRS):
            one, other = draw.sample(single, 2)
            if one[0] != other[0]:
                yield ConfigCase(base, (one, other))


def judge_config(case: ConfigCase) -> tuple[str, str]:
    """(verdict, words): equal, refused by transformers, refused by tilemesh, or wrong."""
    with tempfile.TemporaryDirectory() as folder:
        return _judge(case, Path(folder))


def _judge(case: ConfigCase, root: Path) -> tuple[str, str]:
    import torch
    import transformers

    from tilemesh.core.errors import UsageError
    from tilemesh.model import huggingface

    transformers.logging.set_verbosity_error()
    tokens_BT = torch.randint(31, (2, 11), generator=torch.Generator().manual_seed(1))

    def logits_of(model: Any) -> torch.Tensor:
        with torch.no_grad():
            output = model.eval()(tokens_BT)
        logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
        return logits

    folder, copy = root / "theirs", root / "ours"
    folder.mkdir()
    text = json.dumps(case.told)
    (folder / "config.json").write_text(text)
    try:
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(folder)
        attention = "eager" if config.model_type in ("gemma2", "gpt_oss") else "sdpa"  # no soft caps, no sinks
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).float()
        _enliven(model)
        expected = logits_of(model)
        model.save_pretrained(folder)
    except Exception as error:  # of any kind: they refuse by failing, too
        return "refused by transformers", _line(error)
    (folder / "config.json").write_text(text)
    try:
        ours = huggingface.load(folder)
    except UsageError as error:
        return "refused by tilemesh", _line(error)
    wrong = _difference(logits_of(ours), expected)
    if wrong:
        return "wrong", f"tilemesh reads it: {wrong}"
    try:
        huggingface.save(ours, copy)
    except UsageError as error:
        return "wrong", f"tilemesh reads it and cannot write it: {_line(error)}"
    back = transformers.AutoModelForCausalLM.from_pretrained(copy, local_files_only=True, attn_implementation=attention)
    wrong = _difference(logits_of(back), expected)
    return ("wrong", f"tilemesh writes it: {wrong}") if wrong else ("equal", "")


def _enliven(model: Any) -> None:
    """Every parameter matters: biases are not 0, norms not 1, attention not flat; tied ones stay tied."""
    import torch

    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)


def _difference(ours: Any, theirs: Any) -> str:
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)}, transformers' {tuple(theirs.shape)}"
    error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
    return "" if error <= TOLERANCE else f"relative error {error:.1e}"


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
