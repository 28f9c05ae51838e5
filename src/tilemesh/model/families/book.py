"""All families of models by their name in config.json: from a file to our configuration, back, and the tensors.

The one idea: a family is a value (`family.py`), and the tables of the families (`gpt.py`, `llama.py`) are the only
places that know their names. A new family is a table, two functions for config.json and a line in `FAMILIES`. No torch
here, and no weights: those are read and written by `huggingface`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilemesh.core.config import field_ranges
from tilemesh.core.errors import UsageError, nearest, unknown
from tilemesh.core.files import check_finished, read_json_object
from tilemesh.core.ranges import shown
from tilemesh.model.config import ModelConfig
from tilemesh.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from tilemesh.model.families.family import ANY, Entry, Family
from tilemesh.model.families.gpt import GPT2, GPT_NEOX
from tilemesh.model.families.gpt_oss import GPT_OSS
from tilemesh.model.families.llama import (
    GEMMA2,
    GEMMA3,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    OLMOE,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
)

CONFIG = "config.json"
DISTRIBUTED_INDEX = ".metadata"  # of a distributed checkpoint of torch
QUANTIZATION = "quantization_config"
MXFP4 = "mxfp4"
QUANTIZERS = ("compressed-tensors", "tilemesh")
"""Ways in which matrices of a folder may be compressed (`model/lowbit_files.py`), and another (`model/mxfp4.py`)."""

FAMILIES: Mapping[str, Family] = {
    "gpt2": GPT2, "llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3, "gemma2": GEMMA2,
    "gemma3_text": GEMMA3, "phi3": PHI3, "gpt_neox": GPT_NEOX, "olmo2": OLMO2, "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE, "olmoe": OLMOE, "qwen2_moe": QWEN2_MOE, "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3, "gpt_oss": GPT_OSS,
}  # fmt: skip
"""By config.json's `model_type`. A model that several can express is written as the first of them."""

_UNSERVED: Mapping[str, tuple[str, str]] = {
    "gemma": ("gemma3_text", "norms before the blocks alone, together with its offset norms"),
    "gemma3": ("gemma3_text", "images; save the language model alone"),
    "qwen3_next": ("qwen3", "linear attention and mixture-of-experts layers"),
    "llama4": ("llama", "mixture-of-experts layers and images"),
    "mllama": ("llama", "images and cross-attention"),
    "phi": ("phi3", "one LayerNorm for attention and MLP together"),
    "olmo": ("olmo2", "LayerNorm without weights"),
    "gptj": ("gpt_neox", "one LayerNorm for attention and MLP together, and interleaved rotary pairs"),
    "falcon": ("gpt_neox", "one LayerNorm for attention and MLP together"),
    "gemma3n": ("gemma3_text", "embeddings of every layer and its alternating updates"),
    "phimoe": ("phi3", "mixture-of-experts layers and LayerNorm"),
    "smollm3": ("llama", "layers without rotary positions"),
    "granite": ("llama", "factors of embeddings, scores, residuals and logits"),
    "stablelm": ("llama", "LayerNorm, and positions that turn a part of each head"),
    "nemotron": ("llama", "LayerNorm with an offset, squared ReLU, and positions that turn a part of each head"),
    "cohere": ("llama", "one LayerNorm for attention and MLP together, and scaled logits"),
    "cohere2": ("llama", "one LayerNorm for attention and MLP together, and scaled logits"),
    "glm4": ("llama", "norms before and after the blocks, and positions that turn a part of each head"),
    "internlm2": ("llama", "its names of tensors, with queries, keys and values in one"),
    "olmo3": ("olmo2", "sliding windows in some layers"),
    "ministral": ("mistral", "sliding windows in some layers"),
    "mistral3": ("mistral", "images; save the language model alone"),
    "qwen2_vl": ("qwen2", "images; save the language model alone"),
    "qwen2_5_vl": ("qwen2", "images; save the language model alone"),
    "qwen3_vl": ("qwen3", "images; save the language model alone"),
    "llava": ("llama", "images; save the language model alone"),
    "gpt_neo": ("gpt2", "local attention in some layers, and scores that are not scaled"),
    "gpt_bigcode": ("gpt2", "one head of keys and values for all queries"),
    "starcoder2": ("gpt_neox", "heads of keys and values shared by several queries"),
    "mpt": ("gpt2", "positions by ALiBi"),
    "bloom": ("gpt2", "positions by ALiBi"),
    "opt": ("gpt2", "positions that begin at 2"),
    "mamba": ("llama", "state-space layers in place of attention"),
    "mamba2": ("llama", "state-space layers in place of attention"),
    "bert": ("gpt2", "attention in both directions: it is an encoder"),
    "t5": ("gpt2", "an encoder beside the decoder"),
}
"""Families that people have and that are not read: the nearest that is, and what is missing."""

_EXPECTS: dict[str, Any] = {"is_causal": True}
"""As `Family.expects`, of every family."""

_COMMON = ("dropout", "norm_epsilon", "tied", "family", "balance_loss", "router_z_loss", "expert_capacity")
"""Our fields that every family expresses; what is of training alone is not written."""


def read_config(folder: str | Path) -> ModelConfig:
    """The model that a folder's config.json describes."""
    path = Path(folder) / CONFIG
    try:
        settings = read_json_object(path)
    except (FileNotFoundError, NotADirectoryError):
        check_finished(folder)
        raise UsageError(f"{path} does not exist: {expected_folder(folder)}") from None
    return from_json(settings, str(path))


def expected_folder(folder: str | Path, usual: str = "a folder as `save_pretrained` writes it") -> str:
    """What to say of a folder without config.json."""
    if (Path(folder) / DISTRIBUTED_INDEX).is_file():
        return f"put {CONFIG} beside this distributed checkpoint, whose names of tensors must be Hugging Face's"
    return f"expected {usual}"


def from_json(settings: Mapping[str, Any], source: str = CONFIG) -> ModelConfig:
    """A config.json's content as `ModelConfig`; what our model would compute differently is refused."""
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise _unserved(kind)
    family = FAMILIES[kind]
    for key, value in (_EXPECTS | family.expects).items():
        if settings.get(key, value) not in (value, None if value is False else value):  # null is as good as false
            raise UsageError(f"{source}: {key} is {shown(settings[key])}: only {value!r} is supported")
    quantized = settings.get(QUANTIZATION)
    if quantized is not None and (
        not isinstance(quantized, Mapping) or quantized.get("quant_method") not in (*QUANTIZERS, MXFP4)
    ):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise unknown(f"quant_method of {QUANTIZATION} in {source}", method, (*QUANTIZERS, MXFP4))
    allowed = field_ranges(ModelConfig)
    for ours, key in family.sizes.items():
        allowed[ours].check(f"{source}: {key}", settings.get(key), whole=True)
    if settings.get("head_dim") is not None:
        allowed["head_width"].check(f"{source}: head_dim", settings["head_dim"], whole=True)
    sizes = {ours: settings[theirs] for ours, theirs in family.sizes.items()}
    try:
        config = ModelConfig(**sizes, **family.fields(settings, source))
    except UsageError as error:
        raise UsageError(str(error) if str(error).startswith(source) else f"{source}: {error}") from None
    return config if family_of(config) == kind else config.replace(family=kind)


def to_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """What config.json says of this model; enough for `transformers` 4.50 and later, whose keys moved in 5."""
    kind = family_of(config)
    family = FAMILIES[kind]
    settings = {theirs: getattr(config, ours) for ours, theirs in family.sizes.items()}
    settings |= {
        "model_type": kind, "architectures": [family.architecture], "torch_dtype": dtype, "dtype": dtype,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "resid_pdrop": config.dropout,
    }  # fmt: skip
    settings |= {theirs: getattr(config, ours) for ours, (theirs, _) in family.keys.items()}
    return settings | family.write(config)


def family_of(config: ModelConfig) -> str:
    """The name of the family that a model is written as: its own, or the first that can express it."""
    if config.family and config.family not in FAMILIES:
        raise unknown("model.family", config.family, FAMILIES)
    names = [config.family] if config.family else list(FAMILIES)
    lacking = {name: _lacking(config, FAMILIES[name]) for name in names}
    for name, wrong in lacking.items():
        if not wrong:
            return name
    closest = sorted(lacking, key=lambda name: len(lacking[name]))[:2]
    reasons = [f"{name} has no {', '.join(lacking[name])}" for name in closest]
    raise UsageError(f"no Hugging Face layout fits this model: {'; '.join(reasons)}")


def entries(config: ModelConfig) -> list[Entry]:
    """Every tensor of a model, in the order of computation."""
    return list(FAMILIES[family_of(config)].entries(config))


def _lacking(config: ModelConfig, family: Family) -> list[str]:
    """What of a model a family cannot express."""
    derived = {"kv_heads": config.heads, "head_width": config.width / config.heads}
    wrong = []
    for field in dataclasses.fields(ModelConfig):
        name, value = field.name, getattr(config, field.name)
        if name in family.sizes or name in _COMMON:
            continue
        may = family.may.get(name, (derived.get(name, field.default),))
        if may is not ANY and value not in may:
            wrong.append(f"{name}={value}")
    if "experts" in family.may and not config.experts:
        wrong.append("layers without experts")
    if "latent_width" in family.may and not config.latent_width:
        wrong.append("attention without a latent")
    return wrong


def _unserved(kind: object) -> UsageError:
    """For a family that is not read: its name, the nearest, and what is missing."""
    known = ", ".join(FAMILIES)
    if isinstance(kind, str) and kind in _UNSERVED:
        near, missing = _UNSERVED[kind]
        return UsageError(
            f"model_type '{kind}' cannot be read: the nearest is {near}; missing here: {missing} (known are {known})"
        )
    # Names are short: "foo" is no slip of the pen for "olmo2", though they share half their letters.
    close = nearest(str(kind), FAMILIES, least=0.7)
    hint = f"did you mean '{close}'? " if close else "there is no table of its keys and tensors here; "
    return UsageError(f"unknown model_type {shown(kind)}: {hint}known are {known}")
