"""Weights in Hugging Face's layouts of GPT-2 and Llama: a folder of safetensors and a config.json, read and written.

The one idea: a layout is a list of `Entry` values, each naming one tensor on their side and the parameters it is made
of on ours; reading, writing and every refusal follow from the list. Names, shapes and dtypes are checked in the headers
of the files before a weight is read. Nothing pickled is ever opened.

GPT-2 keeps its matrices transposed (inputs first) and q, k, v in one. Llama's agree with ours as they stand, since
`transformer.rotate` pairs a head's elements as Hugging Face does; Meta's own files pair them otherwise.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tilemesh.core.errors import UsageError, unknown
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LISTED = 20  # lines of a refusal; a folder of another model would fill the screen


@dataclass(frozen=True)
class Layout:
    """What is special about one kind of model on their side."""

    architecture: str
    prefix: str
    """Of every name but the output projection's; a model saved without its head has none."""
    sizes: Mapping[str, str]
    """Our field: their key."""
    requires: Mapping[str, tuple[Any, ...]]
    """Our field: the values the layout can express."""
    expects: Mapping[str, Any]
    """Their key: the only value that our model computes. Absent is as good."""
    leftovers: str
    """Tensors that old versions wrote and nobody reads: causal masks, rotary frequencies."""


LAYOUTS = {
    "gpt2": Layout(
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
        expects={
            "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
            "quantization_config": None,
        },
        leftovers=r"h\.\d+\.attn\.(bias|masked_bias)",
    ),
    "llama": Layout(
        architecture="LlamaForCausalLM",
        prefix="model.",
        sizes={
            "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
            "vocabulary": "vocab_size", "context": "max_position_embeddings", "mlp_width": "intermediate_size",
        },
        requires={
            "norm": ("rmsnorm",), "norm_place": ("pre",), "positions": ("rotary",), "activation": ("swiglu",),
        },
        expects={"hidden_act": "silu", "quantization_config": None},
        leftovers=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    ),
}  # fmt: skip
_GPT2_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}


# ---- the door --------------------------------------------------------------------------------------------------


def load(
    folder: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Transformer:
    """The model in a Hugging Face folder, in the dtype of its files unless another is asked for."""
    config = read_config(folder)
    with ExitStack() as files:
        stored = _checked(Path(folder), config, files)
        if dtype is None:
            dtype = _only_dtype(Path(folder), stored)
        model = Transformer(config, device="meta", dtype=dtype)
        model.to_empty(device="cpu" if device is None else device)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, tensor in _parameters(config, stored):
                parameters[name].copy_(tensor)
    return model


def save(model: Transformer, folder: str | Path) -> None:
    """Write config.json and model.safetensors such that `transformers` and `load` read the same model."""
    save_parameters(model.config, dict(model.named_parameters()), folder)


def read_parameters(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Our name and tensor, one after the other in the files' dtype: for a rank that keeps only a part of each."""
    with ExitStack() as files:
        config = read_config(folder)
        yield from _parameters(config, _checked(Path(folder), config, files))


def save_parameters(config: ModelConfig, parameters: Mapping[str, Tensor], folder: str | Path) -> None:
    """`save` for a model that lies elsewhere, as a mapping from our names to whole tensors."""
    tensors = {}
    for entry in entries(config):
        ours = [parameters[name].detach() for name in entry.ours]
        whole = ours[0] if len(ours) == 1 else torch.cat(ours)
        tensors[entry.theirs] = (whole.t() if entry.transposed else whole).contiguous()
        if whole.device.type == "meta":
            raise UsageError(f"{entry.ours[0]} is on the meta device and has no values: initialise or load the model")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # First under other names: a full disk or a crash leaves no half-written file under a name that is read.
    text = json.dumps(to_json(config, parameters["token_embedding.weight"].dtype), indent=2, sort_keys=True) + "\n"
    save_file(tensors, folder / (WEIGHTS + ".new"), metadata={"format": "pt"})
    (folder / (CONFIG + ".new")).write_text(text)
    for name in (WEIGHTS, CONFIG):
        os.replace(folder / (name + ".new"), folder / name)


# ---- config.json -----------------------------------------------------------------------------------------------


def read_config(folder: str | Path) -> ModelConfig:
    """The model that a folder's config.json describes."""
    path = Path(folder) / CONFIG
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: expected a folder as `save_pretrained` writes it") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds a {type(found).__name__}: expected a JSON object")
    return from_json(found, str(path))


def from_json(found: Mapping[str, Any], source: str = CONFIG) -> ModelConfig:
    """A config.json's content as `ModelConfig`; what our model would compute differently is refused."""
    kind = found.get("model_type")
    if kind not in LAYOUTS:
        raise unknown("model_type", str(kind), LAYOUTS)
    layout = LAYOUTS[kind]
    for key, value in layout.expects.items():
        if found.get(key, value) != value:
            raise UsageError(f"{source}: {key} is {found[key]!r}: only {value!r} is supported")
    for key in layout.sizes.values():
        if not isinstance(found.get(key), int) or found[key] < 1:
            raise UsageError(f"{source}: {key} is {found.get(key)!r}: expected a whole number of at least 1")
    sizes = {ours: found[theirs] for ours, theirs in layout.sizes.items()}
    return ModelConfig(**sizes, **(_gpt2_fields if kind == "gpt2" else _llama_fields)(found, source))


def to_json(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json says of this model; enough for `transformers` 4.50 and later, whose keys moved in 5."""
    kind = layout_of(config)
    layout, dtype_name = LAYOUTS[kind], str(dtype).removeprefix("torch.")
    found = {theirs: getattr(config, ours) for ours, theirs in layout.sizes.items()}
    found |= {
        "model_type": kind, "architectures": [layout.architecture], "torch_dtype": dtype_name, "dtype": dtype_name,
        "tie_word_embeddings": config.tied, "bos_token_id": None, "eos_token_id": None, "resid_pdrop": config.dropout,
    }  # fmt: skip
    if kind == "gpt2":
        activation = "gelu_new" if config.activation == "gelu" else config.activation
        return found | {
            "n_inner": config.mlp_width, "activation_function": activation, "layer_norm_epsilon": config.norm_epsilon,
            "embd_pdrop": config.dropout, "attn_pdrop": 0.0,
        }  # fmt: skip
    return found | {
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_width, "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon, "attention_bias": config.biases, "mlp_bias": config.biases,
        "rope_theta": config.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
    }  # fmt: skip


def layout_of(config: ModelConfig) -> str:
    """The name of the layout that can express a model."""
    reasons = []
    for name, layout in LAYOUTS.items():
        wrong = [
            f"{key}={getattr(config, key)}" for key, may in layout.requires.items() if getattr(config, key) not in may
        ]
        if name == "gpt2" and config.kv_heads != config.heads:
            wrong.append(f"kv_heads={config.kv_heads}")
        if not wrong:
            return name
        reasons.append(f"{name} has no {', '.join(wrong)}")
    raise UsageError(f"no Hugging Face layout fits this model: {'; '.join(reasons)}")


def _gpt2_fields(found: Mapping[str, Any], source: str) -> dict[str, Any]:
    activation = found.get("activation_function", "gelu_new")
    if activation not in _GPT2_ACTIVATIONS:
        raise unknown(f"activation_function in {source}", str(activation), _GPT2_ACTIVATIONS)
    dropout = found.get("resid_pdrop", 0.1)
    if found.get("embd_pdrop", 0.1) != dropout:
        raise UsageError(
            f"{source}: embd_pdrop is {found.get('embd_pdrop', 0.1)} and resid_pdrop {dropout}: set one value"
        )
    return {
        "mlp_width": found.get("n_inner") or 0, "activation": _GPT2_ACTIVATIONS[activation], "dropout": dropout,
        "norm_epsilon": found.get("layer_norm_epsilon", 1e-5), "tied": found.get("tie_word_embeddings", True),
    }  # fmt: skip


def _llama_fields(found: Mapping[str, Any], source: str) -> dict[str, Any]:
    # transformers 4 wrote rope_theta and rope_scaling, 5 writes rope_parameters with both.
    rotary = found.get("rope_parameters") or found.get("rope_scaling") or {}
    scaling = rotary.get("rope_type", rotary.get("type", "default"))
    if scaling != "default":
        raise UsageError(f"{source}: rotary positions scaled by '{scaling}': only unscaled ones are supported")
    heads, width = found["num_attention_heads"], found["hidden_size"]
    head_width = found.get("head_dim") or width // heads
    if head_width * heads != width:
        raise UsageError(
            f"{source}: head_dim is {head_width}: expected hidden_size / num_attention_heads = {width / heads}"
        )
    biases = found.get("attention_bias", False)
    if found.get("mlp_bias", False) != biases:
        raise UsageError(f"{source}: attention_bias is {biases} and mlp_bias is not: only both or none are supported")
    return {
        "kv_heads": found.get("num_key_value_heads") or 0, "norm": "rmsnorm", "positions": "rotary",
        "activation": "swiglu", "biases": biases, "tied": found.get("tie_word_embeddings", False),
        "dropout": found.get("resid_pdrop", 0.0), "norm_epsilon": found.get("rms_norm_eps", 1e-6),
        "rotary_base": rotary.get("rope_theta", found.get("rope_theta", 10_000.0)),
    }  # fmt: skip


# ---- names -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One tensor of theirs: our parameters one below the other, then transposed or not."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


def entries(config: ModelConfig) -> list[Entry]:
    """Every tensor of a model, in the order it computes."""
    return _gpt2_entries(config) if layout_of(config) == "gpt2" else _llama_entries(config)


def _gpt2_entries(config: ModelConfig) -> list[Entry]:
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
    made += [Entry(f"ln_f.{part}", (f"final_norm.{part}",)) for part in ("weight", "bias")]
    return _with_head(config, made)


def _llama_entries(config: ModelConfig) -> list[Entry]:
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
    return _with_head(config, [*made, Entry("norm.weight", ("final_norm.weight",))])


def _with_head(config: ModelConfig, body: list[Entry]) -> list[Entry]:
    prefix = LAYOUTS[layout_of(config)].prefix
    made = [Entry(prefix + entry.theirs, entry.ours, entry.transposed) for entry in body]
    return made if config.tied else [*made, Entry("lm_head.weight", ("output.weight",))]


# ---- files -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """One tensor in a file: its header, and the open file to read it from."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor


def _parameters(config: ModelConfig, stored: Mapping[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    shapes = _shapes(config)
    for entry in entries(config):
        tensor = stored[entry.theirs].read()
        parts = torch.split(tensor.t() if entry.transposed else tensor, [shapes[name][0] for name in entry.ours])
        yield from zip(entry.ours, parts, strict=True)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in Transformer(config, device="meta").named_parameters()}


def _expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Their names and shapes."""
    shapes, expected = _shapes(config), {}
    for entry in entries(config):
        rows = sum(shapes[name][0] for name in entry.ours)
        shape = (rows, *shapes[entry.ours[0]][1:])
        expected[entry.theirs] = shape[::-1] if entry.transposed else shape
    return expected


def _checked(folder: Path, config: ModelConfig, files: ExitStack) -> dict[str, Stored]:
    """Every expected tensor by its full name, or one error with a line for each that is not as expected."""
    layout, expected = LAYOUTS[layout_of(config)], _expected(config)
    head, table = "lm_head.weight", next(iter(expected))
    # A tied output may be written out as well; it then has to be the embedding.
    known = expected | {head: expected[table]} if config.tied else expected
    stored: dict[str, Stored] = {}
    lines = []
    for found in _opened(folder, files):
        name = found.name
        if re.fullmatch(layout.leftovers, name.removeprefix(layout.prefix)):
            continue
        full = name if name in known else layout.prefix + name
        if full not in known or full in stored:
            lines.append(f"unexpected: {name}, shape {found.shape}")
        elif found.shape != known[full]:
            lines.append(f"mis-shaped: {name}, shape {found.shape}, expected {known[full]}")
        elif found.dtype not in _DTYPES:
            lines.append(f"not floating point: {name}, {found.dtype}, expected one of {', '.join(_DTYPES)}")
        stored.setdefault(full, found)
    lines += [f"missing: {name}, expected shape {shape}" for name, shape in expected.items() if name not in stored]
    if not lines and config.tied and head in stored and not torch.equal(stored[head].read(), stored[table].read()):
        lines.append(f"{head} differs from {table}, and config.json says that they are tied")
    if lines:
        more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
        raise UsageError("\n  ".join([f"{folder}: tensors do not fit config.json", *lines[:_LISTED], *more]))
    return stored


def _opened(folder: Path, files: ExitStack) -> list[Stored]:
    """The headers of all tensors in a folder's files."""
    found = []
    for path in _files(folder):
        try:
            file = files.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118  (not a dict)
                header = file.get_slice(name)
                found.append(Stored(file, name, tuple(header.get_shape()), header.get_dtype()))
        except FileNotFoundError:
            raise UsageError(f"{path} does not exist, and {INDEX} names it: the folder is not complete") from None
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{path} is not a whole safetensors file: {error}") from None
    return found


def _files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except FileNotFoundError:
        pickled = [path.name for path in sorted(folder.glob("*.bin"))]
        hint = f"; {pickled[0]} is pickled and never opened: save the model again with safetensors" if pickled else ""
        raise UsageError(f"{folder} has neither {WEIGHTS} nor {INDEX}{hint}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{folder / INDEX} is not an index of safetensors files: {error!r}") from None
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise UsageError(f"{folder / INDEX} names {outside[0]!r}: expected files of this folder")
    return [folder / name for name in names]


def _only_dtype(folder: Path, stored: Mapping[str, Stored]) -> torch.dtype:
    dtypes = sorted({tensor.dtype for tensor in stored.values()})
    if len(dtypes) > 1:
        raise UsageError(f"{folder} holds tensors of {' and '.join(dtypes)}: say which to compute in with dtype=")
    return _DTYPES[dtypes[0]]
