"""What autograd saves of a forward pass is what the planner counts, to the byte, for every key of a model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import ModelConfig
from tilemesh.model.loss import loss_sum
from tilemesh.model.transformer import Transformer
from tilemesh.plan.memory import Room

ROWS, TOKENS = 3, 32
GPT: dict[str, Any] = {"layers": 3, "width": 48, "heads": 4, "vocabulary": 248, "context": TOKENS}
LLAMA: dict[str, Any] = GPT | {
    "kv_heads": 2, "mlp_width": 104, "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "biases": False,
    "tied": False,
}  # fmt: skip
LOCAL: dict[str, Any] = {"window": 8, "full_layers": (2,), "rotary_local_base": 100.0}
GEMMA: dict[str, Any] = LLAMA | LOCAL | {
    "norm_place": "sandwich", "activation": "geglu", "qk_norm": "head", "head_width": 16, "norm_offset": True,
    "scaled_embedding": True, "score_width": 9, "tied": True, "family": "gemma3_text",
}  # fmt: skip
SHARED: dict[str, Any] = {
    "experts": 5, "experts_per_token": 3, "router_renormalized": False, "shared_width": 24, "shared_gate": True,
    "biases": "qkv",
}  # fmt: skip
LATENT: dict[str, Any] = {
    "kv_heads": 4, "head_width": 12, "rotary_fraction": 1 / 3, "latent_width": 10, "value_width": 5, "score_gain": 1.2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": GPT | {"dropout": 0.1},
    "gpt_neox": GPT | {"parallel_residual": True, "positions": "rotary", "rotary_fraction": 0.5, "tied": False},
    "opt": GPT | {"activation": "relu"},
    "llama": LLAMA,
    "qwen2": LLAMA | {"biases": "qkv"},
    "qwen3": LLAMA | {"qk_norm": "head", "head_width": 16},
    "olmo2": LLAMA | {"qk_norm": "full", "norm_place": "branch"},
    "mistral": LLAMA | {"window": 8},
    "gemma3": GEMMA,
    "mixtral": LLAMA | {"experts": 4},
    "gpt_oss": LLAMA
    | {
        "experts": 4,
        "activation": "swiglu-clipped",
        "biases": True,
        "score_sink": True,
        "router_bias": "scores",
        "window": 8,
        "full_layers": (1,),
    },
    "latent": LLAMA | LATENT,
    "queries' latent": LLAMA | LATENT | {"query_latent_width": 14},
    "sigmoids": LLAMA | SHARED | {"router_scores": "sigmoid", "router_bias": True},
    "groups": LLAMA
    | {"experts": 6, "router_scores": "sigmoid", "router_scale": 2.5, "router_groups": 3, "router_groups_per_token": 2},
    "qwen2_moe": LLAMA | SHARED,
    "capacity for all": LLAMA | SHARED | {"expert_capacity": 8.0},
    "some layers without experts": LLAMA | SHARED | {"dense_layers": (0, 2), "dense_width": 40},
    "shared alone": LLAMA | SHARED | {"shared_gate": False, "experts_per_token": 1, "router_renormalized": True},
}
NORMS = ("layernorm", "rmsnorm")
KEYS: list[dict[str, Any]] = [
    *({"activation": name} for name in ("relu", "gelu", "gelu-erf", "swiglu", "geglu", "swiglu-clipped")),
    {"score_sink": True}, {"score_sink": True, "window": 8, "score_cap": 2.0},
    *({"norm_place": place, "norm": norm} for place in ("post", "branch", "sandwich") for norm in NORMS),
    *({"qk_norm": kind} for kind in ("head", "full")),
    *({"parallel_residual": True, "norm": norm} for norm in NORMS),
    *({"biases": which} for which in (True, False, "qkv", "attention", "mlp")),
    *({"kv_heads": heads} for heads in (1, 4)),
    *({"tied": is_tied} for is_tied in (True, False)),
    {"dropout": 0.1}, {"window": 8}, {"window": TOKENS}, LOCAL, LOCAL | {"full_layers": ()}, {"mlp_width": 40},
    {"score_cap": 2.0}, {"score_cap": 2.0, "window": 8, "positions": "learned"}, {"logit_cap": 3.0},
    {"head_width": 16}, {"head_width": 8, "score_width": 9}, {"scaled_embedding": True}, {"vocabulary": 20},
    {"norm": "rmsnorm", "norm_offset": True}, {"norm": "rmsnorm", "norm_offset": True, "parallel_residual": True},
    {"layers": 1, "width": 32, "heads": 2, "kv_heads": 2, "vocabulary": 97, "context": 64, "mlp_width": 80},
    {"positions": "rotary", "rotary_scaling": "llama3", "rotary_factor": 2.0, "rotary_low": 2.0, "rotary_high": 5.0,
     "rotary_trained": 16, "rotary_base": 500.0, "rotary_fraction": 0.5, "norm_epsilon": 1e-6},
    {"positions": "rotary", "rotary_scaling": "yarn", "rotary_factor": 2.0, "rotary_trained": 16, "rotary_gain": 1.5,
     "rotary_rounded": False},
]  # fmt: skip
PRECISIONS = ("fp32", "bf16", "bf16-master", "fp64")


def saved_bytes(config: ModelConfig, precision: str) -> int:
    """Of one microbatch: every storage that autograd saves, but for weights and, under autocast, their 16-bit copies,
    which the planner counts among what a rank works with."""
    model = Transformer(config, dtype={"bf16-master": torch.bfloat16, "fp64": torch.float64}.get(precision)).train()
    shapes = {shape for weight in model.parameters() for shape in (tuple(weight.shape), tuple(weight.shape)[::-1])}
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        is_copy = precision == "bf16" and tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in shapes
        if not is_copy and tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(tokens, dropout_seed=1 if config.dropout else None)
        total, _ = loss_sum(logits, tokens.clone())
    assert total.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def counted_bytes(config: ModelConfig, precision: str) -> int:
    plan = ParallelPlan(microbatch=ROWS, precision=precision)
    kept = Room(config, parse_cluster("1xcpu"), TOKENS, "eager").step_bytes(plan, (config.layers,)).kept
    return round(sum(kept))


def check(fields: dict[str, Any], precision: str) -> None:
    config = ModelConfig(**fields)
    # A window's mask is counted as a mean over the layers, in whole elements.
    rounding = config.layers * 8 if config.full_layers else 0
    assert abs(counted_bytes(config, precision) - saved_bytes(config, precision)) <= rounding


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


WARNINGS = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed", "ignore:Mismatch dtype")
KEYS_OF = [(LLAMA, "fp32"), *(slow(base, name) for base in (GPT, LLAMA) for name in PRECISIONS if name != "fp32")]


@WARNINGS
@pytest.mark.parametrize("precision", ["fp32", *map(slow, PRECISIONS[1:])])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_keeps_what_the_planner_counts(family: str, precision: str) -> None:
    check(FAMILIES[family], precision)


@WARNINGS
@pytest.mark.parametrize(("base", "precision"), [*KEYS_OF, slow(GPT, "fp32")])
@pytest.mark.parametrize("keys", KEYS, ids=lambda keys: "-".join(f"{key}={value}" for key, value in keys.items()))
def test_a_key_changes_the_count_as_it_changes_what_is_kept(
    keys: dict[str, Any], base: dict[str, Any], precision: str
) -> None:
    check(base | keys, precision)


def test_every_key_of_a_model_is_varied() -> None:
    varied = {key for fields in (*FAMILIES.values(), *KEYS) for key in fields}
    varied |= {"balance_loss", "router_z_loss"}  # a few numbers a token, of training alone
    assert varied == {field.name for field in dataclasses.fields(ModelConfig)}
