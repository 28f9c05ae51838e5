"""Families of models as Hugging Face writes them: what config.json says of a model, and what its tensors are called.

The one idea: a family is a value. It knows its keys, its tensors (`Entry`: one of theirs, made of parameters of ours)
and what it cannot express; whatever is the same for all families is written once, over that value. A new
family is two functions for config.json, one for the tensors and a line in `FAMILIES`. No torch here, and no weights:
those are read and written by `huggingface`.

GPT-2 keeps its matrices transposed (inputs first) and q, k, v in one. Llama's agree with ours as they stand, since
`transformer.rotate` pairs a head's elements as Hugging Face does; Meta's own files pair them otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.files import read_json_object
from tilemesh.core.ranges import shown
from tilemesh.model.config import SIZES, ModelConfig

CONFIG = "config.json"


@dataclass(frozen=True)
class Entry:
    """One tensor of theirs: our parameters one below the other, then transposed or not."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Family:
    """What is special about one kind of model on their side."""

    architecture: str
    prefix: str
    """Of every name but the output projection's; a model saved without its head has none."""
    sizes: Mapping[str, str]
    """Our field: their key."""
    requires: Mapping[str, tuple[Any, ...]]
    """Our field: the values that the family can express."""
    grouped: bool
    """Whether several query heads may share a key head."""
    expects: Mapping[str, Any]
    """Their key: the only value that our model computes. Absent is as good."""
    leftovers: str
    """Tensors that old versions wrote and nobody reads (a pattern): causal masks, rotary frequencies."""
    read: Callable[[Mapping[str, Any], str], dict[str, Any]]
    """Our fields beside the sizes, from the content of a config.json; its path is for refusals."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """The way back."""
    body: Callable[[ModelConfig], list[Entry]]
    """Every tensor but the output projection in the order of computation, without the prefix."""


# ---- GPT-2 -----------------------------------------------------------------------------------------------------

_GPT2_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}


def _read_gpt2(found: Mapping[str, Any], source: str) -> dict[str, Any]:
    activation = found.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _GPT2_ACTIVATIONS:
        raise unknown(f"activation_function in {source}", activation, _GPT2_ACTIVATIONS)
    dropout = found.get("resid_pdrop", 0.1)
    if found.get("embd_pdrop", 0.1) != dropout:
        raise UsageError(
            f"{source}: embd_pdrop is {found.get('embd_pdrop', 0.1)} and resid_pdrop {dropout}: set one value"
        )
    return {
        "mlp_width": found.get("n_inner") or 0, "activation": _GPT2_ACTIVATIONS[activation], "dropout": dropout,
        "norm_epsilon": found.get("layer_norm_epsilon", 1e-5), "tied": found.get("tie_word_embeddings", True),
    }  # fmt: skip


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    activation = "gelu_new" if config.activation == "gelu" else config.activation
    return {
        "n_inner": config.mlp_width, "activation_function": activation, "layer_norm_epsilon": config.norm_epsilon,
        "embd_pdrop": config.dropout, "attn_pdrop": 0.0,
    }  # fmt: skip


def _gpt2_body(config: ModelConfig) -> list[Entry]:
    modules = {
        "ln_1": ("attention_norm",), "attn.c_attn": ("attention.fc_q", "attention.fc_k", "attention.fc_v"),
        "attn.c_proj": ("attention.fc_o",), "ln_2": ("mlp_norm",), "mlp.c_fc": ("mlp.fc_in",),
        "mlp.c_proj": ("mlp.fc_out",),
    }  # fmt: skip
    made = [Entry("wte.weight", ("token_embedding.weight",)), Entry("wpe.weight", ("position_embedding.weight",))]
    for index in range(config.layers):
        for theirs, ours in modules.items():
            for part in ("weight", "bias"):
                names = tuple(f"layers.{index}.{name}.{part}" for name in ours)
                made.append(Entry(f"h.{index}.{theirs}.{part}", names, part == "weight" and "c_" in theirs))
    return made + [Entry(f"ln_f.{part}", (f"final_norm.{part}",)) for part in ("weight", "bias")]


# ---- Llama -----------------------------------------------------------------------------------------------------


def _read_llama(found: Mapping[str, Any], source: str) -> dict[str, Any]:
    base = found.get("rope_theta", 10_000.0)
    # transformers 4 wrote rope_theta and rope_scaling, 5 writes rope_parameters with both; a file may have all three.
    for key in ("rope_scaling", "rope_parameters"):
        rotary = found.get(key) or {}
        if not isinstance(rotary, Mapping):
            raise UsageError(f"{source}: {key} is {shown(rotary)}: expected an object")
        scaling = rotary.get("rope_type", rotary.get("type", "default"))
        if scaling != "default":
            raise UsageError(f"{source}: {key}: positions scaled by {shown(scaling)}: only unscaled are read")
        base = rotary.get("rope_theta", base)
    heads, width = found["num_attention_heads"], found["hidden_size"]
    head_width = found.get("head_dim") or width // heads
    if not isinstance(head_width, int) or head_width * heads != width:
        raise UsageError(
            f"{source}: head_dim is {shown(head_width)}: expected hidden_size / num_attention_heads = {width / heads}"
        )
    biases = found.get("attention_bias", False)
    if found.get("mlp_bias", False) != biases:
        raise UsageError(f"{source}: attention_bias is {biases} and mlp_bias is not: only both or none are supported")
    return {
        "kv_heads": found.get("num_key_value_heads") or 0, "norm": "rmsnorm", "positions": "rotary",
        "activation": "swiglu", "biases": biases, "tied": found.get("tie_word_embeddings", False),
        "dropout": found.get("resid_pdrop", 0.0), "norm_epsilon": found.get("rms_norm_eps", 1e-6),
        "rotary_base": base,
    }  # fmt: skip


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_width, "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon, "attention_bias": config.biases, "mlp_bias": config.biases,
        "rope_theta": config.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
    }  # fmt: skip


def _llama_body(config: ModelConfig) -> list[Entry]:
    modules = {
        "input_layernorm": "attention_norm", "self_attn.q_proj": "attention.fc_q", "self_attn.k_proj": "attention.fc_k",
        "self_attn.v_proj": "attention.fc_v", "self_attn.o_proj": "attention.fc_o",
        "post_attention_layernorm": "mlp_norm", "mlp.gate_proj": "mlp.fc_gate", "mlp.up_proj": "mlp.fc_in",
        "mlp.down_proj": "mlp.fc_out",
    }  # fmt: skip
    made = [Entry("embed_tokens.weight", ("token_embedding.weight",))]
    for index in range(config.layers):
        for theirs, ours in modules.items():
            for part in ("weight", "bias") if config.biases and "norm" not in theirs else ("weight",):
                made.append(Entry(f"layers.{index}.{theirs}.{part}", (f"layers.{index}.{ours}.{part}",)))
    return [*made, Entry("norm.weight", ("final_norm.weight",))]


# ---- all of them -----------------------------------------------------------------------------------------------

FAMILIES = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        prefix="transformer.",
        sizes={
            "layers": "n_layer", "width": "n_embd", "heads": "n_head", "vocabulary": "vocab_size",
            "context": "n_positions",
        },
        requires={
            "norm": ("layernorm",), "norm_place": ("pre",), "positions": ("learned",), "biases": (True,),
            "activation": ("gelu", "relu"),
        },
        grouped=False,
        expects={
            "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
            "quantization_config": None,
        },
        leftovers=r"h\.\d+\.attn\.(bias|masked_bias)",
        read=_read_gpt2,
        write=_write_gpt2,
        body=_gpt2_body,
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        prefix="model.",
        sizes={
            "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
            "vocabulary": "vocab_size", "context": "max_position_embeddings", "mlp_width": "intermediate_size",
        },
        requires={
            "norm": ("rmsnorm",), "norm_place": ("pre",), "positions": ("rotary",), "activation": ("swiglu",),
        },
        grouped=True,
        expects={"hidden_act": "silu", "quantization_config": None},
        leftovers=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        read=_read_llama,
        write=_write_llama,
        body=_llama_body,
    ),
}  # fmt: skip
"""By config.json's `model_type`."""


def read_config(folder: str | Path) -> ModelConfig:
    """The model that a folder's config.json describes."""
    path = Path(folder) / CONFIG
    try:
        found = read_json_object(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{path} does not exist: expected a folder as `save_pretrained` writes it") from None
    return from_json(found, str(path))


def from_json(found: Mapping[str, Any], source: str = CONFIG) -> ModelConfig:
    """A config.json's content as `ModelConfig`; what our model would compute differently is refused."""
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise unknown("model_type", kind, FAMILIES)
    family = FAMILIES[kind]
    for key, value in family.expects.items():
        if found.get(key, value) != value:
            raise UsageError(f"{source}: {key} is {shown(found[key])}: only {value!r} is supported")
    for ours, key in family.sizes.items():
        SIZES[ours].check(f"{source}: {key}", found.get(key), whole=True)
    sizes = {ours: found[theirs] for ours, theirs in family.sizes.items()}
    try:
        return ModelConfig(**sizes, **family.read(found, source))
    except UsageError as error:
        raise UsageError(str(error) if str(error).startswith(source) else f"{source}: {error}") from None


def to_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """What config.json says of this model; enough for `transformers` 4.50 and later, whose keys moved in 5."""
    kind = family_of(config)
    family = FAMILIES[kind]
    found = {theirs: getattr(config, ours) for ours, theirs in family.sizes.items()}
    found |= {
        "model_type": kind, "architectures": [family.architecture], "torch_dtype": dtype, "dtype": dtype,
        "tie_word_embeddings": config.tied, "bos_token_id": None, "eos_token_id": None, "resid_pdrop": config.dropout,
    }  # fmt: skip
    return found | family.write(config)


def family_of(config: ModelConfig) -> str:
    """The name of the family that can express a model."""
    reasons = []
    for name, family in FAMILIES.items():
        wrong = [
            f"{key}={getattr(config, key)}" for key, may in family.requires.items() if getattr(config, key) not in may
        ]
        if not family.grouped and config.kv_heads != config.heads:
            wrong.append(f"kv_heads={config.kv_heads}")
        if not wrong:
            return name
        reasons.append(f"{name} has no {', '.join(wrong)}")
    raise UsageError(f"no Hugging Face layout fits this model: {'; '.join(reasons)}")


def entries(config: ModelConfig) -> list[Entry]:
    """Every tensor of a model, in the order of computation."""
    family = FAMILIES[family_of(config)]
    made = [Entry(family.prefix + entry.theirs, entry.ours, entry.transposed) for entry in family.body(config)]
    return made if config.tied else [*made, Entry("lm_head.weight", ("output.weight",))]
