"""What is served: a model with its tokenizer, from a training run's folder or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilemesh.core.config import section
from tilemesh.core.errors import UsageError
from tilemesh.core.files import read_json_object
from tilemesh.core.ranges import shown
from tilemesh.data.config import DataConfig
from tilemesh.data.corpus import chat_template_of, tokenizer_of
from tilemesh.data.tokenizer import FileTokenizer, Tokenizer, Unknown
from tilemesh.data.tokenizer_files import DEFAULT, TOKENIZER, read_beside
from tilemesh.model import huggingface
from tilemesh.model.adapter import LoraConfig, adapted_modules
from tilemesh.model.config import ModelConfig, check_written_model
from tilemesh.model.families.book import CONFIG as MODEL_FILE
from tilemesh.model.families.book import QUANTIZATION, read_config
from tilemesh.model.kinds import FewBits, projections
from tilemesh.model.lora import MergedWeights
from tilemesh.model.lowbit_files import CompressedFolder
from tilemesh.model.read import read_model
from tilemesh.model.transformer import Transformer
from tilemesh.runs import folder as folders
from tilemesh.runs.base import check_base
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.manifest import MODEL
from tilemesh.runs.names import CARRIED, CONFIG
from tilemesh.runs.reader import open_checkpoint
from tilemesh.serve.request import Sampling

_GENERATION_CONFIG = "generation_config.json"
_GENERATION_FIELDS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip
"""What transformers calls it, and what `Sampling` does."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class ServedModel:
    """A model, and what turns text into its tokens and back."""

    name: str
    model: Transformer
    tokenizer: Tokenizer
    ends: frozenset[int]
    """Tokens after which an answer ends, unless a request ignores them."""
    chat_template: str | None = None
    special_tokens: Mapping[str, str] | None = None
    """Of the tokenizer's configuration, by name (`bos_token`): templates use them."""


def read_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if name not in _DTYPES:
        raise UsageError(f"dtype is '{name}': expected one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load_served(
    source: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    step: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    with_weights: bool = True,
) -> ServedModel:
    """Read a run (its newest sound checkpoint, or that of a step) or a Hugging Face folder.

    In the dtype of its weights, unless another is asked for. `say` hears which step is used, if it is not the last.
    Without weights the model is on the meta device: others compute it.
    """
    path = Path(source)
    if (path / MODEL_FILE).is_file():
        if step is not None:
            raise UsageError(f"step is {step} and {path} is a Hugging Face folder, which has no steps: leave it out")
        return _of_huggingface(path, dtype, device, with_weights)
    text, where = folders.read_config(path, TRAIN)
    config, data = section(ModelConfig, "model", text, where), section(DataConfig, "data", text, where)
    reader = open_checkpoint(path, step, say)
    check_written_model(reader.manifest.written_by.get(MODEL), reader.manifest.step, config, path / CONFIG)
    lora = section(LoraConfig, "lora", text, where)
    if lora.rank and with_weights:
        check_base(path, lora.base)
    weights = MergedWeights(lora, reader, adapted_modules(config, lora)) if lora.rank else reader
    model = read_model(config, weights, device) if with_weights else Transformer(config, device="meta")
    tokenizer = tokenizer_of(data)
    ends = _ends(path / CARRIED, config.vocabulary) | _end(tokenizer)
    chat = chat_template_of(data, tokenizer)
    return ServedModel(path.resolve().name, _converted(model, dtype), tokenizer, ends, *chat)


def check_groups(model: Transformer, ranks: int) -> None:
    """Refuse codes whose groups of inputs cannot be shared by so many ranks, where a matrix is cut by its inputs."""
    for name, layer in projections(model):
        if not isinstance(layer.kind, FewBits) or not name.endswith((".fc_o", ".fc_out")):
            continue
        scheme = layer.kind.scheme
        groups = scheme.groups(layer.in_features)
        if scheme.granularity == "group" and groups % ranks:
            most = layer.in_features // ranks
            raise UsageError(
                f"tp is {ranks}: {name} has {groups} group{'s' * (groups > 1)} of {scheme.group} inputs, which "
                f"cannot be shared evenly; compress in groups of {most} or a divisor of it, or per channel (int8)"
            )


def _of_huggingface(
    path: Path, dtype: torch.dtype | None, device: torch.device | str, with_weights: bool
) -> ServedModel:
    if with_weights:
        model = huggingface.load(path, device=device, dtype=dtype).eval().requires_grad_(False)
    else:
        model = Transformer(read_config(path), device="meta", dtype=dtype)
        if isinstance(told := read_json_object(path / MODEL_FILE).get(QUANTIZATION), Mapping):
            CompressedFolder(model, told, str(path / MODEL_FILE))  # puts in modules of that kind
    vocabulary = model.config.vocabulary
    has_tokenizer = (path / TOKENIZER).is_file()
    tokenizer: Tokenizer = FileTokenizer(path / TOKENIZER) if has_tokenizer else Unknown(vocabulary)
    if tokenizer.vocabulary > vocabulary:
        raise UsageError(
            f"{path / TOKENIZER} has {tokenizer.vocabulary} tokens and the model's vocabulary is {vocabulary}: "
            "they do not belong together"
        )
    files = read_beside(path / TOKENIZER)
    ends = _ends(path, vocabulary) or _end(tokenizer)
    template, special = files.templates.get(DEFAULT), files.special_tokens
    return ServedModel(path.resolve().name, model, tokenizer, ends, template, special)


def folder_defaults(source: str | Path) -> dict[str, Any]:
    """What a Hugging Face folder's `generation_config.json` says of sampling, as fields of `Sampling`."""
    path = Path(source) / _GENERATION_CONFIG
    if not path.is_file():
        raise UsageError(f"--generation-config was given and {path} is not there: leave it out")
    told = _optional(path)
    settings = {ours: told[theirs] for theirs, ours in _GENERATION_FIELDS.items() if told.get(theirs) is not None}
    if told.get("do_sample") is False:
        settings = {name: value for name, value in settings.items() if name in ("max_tokens", "repetition_penalty")}
        settings["temperature"] = 0.0
    try:
        Sampling(**settings)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return settings


def _ends(path: Path, vocabulary: int) -> frozenset[int]:
    """What ends an answer: generation_config.json says it, else config.json, as transformers has it."""
    for name in (_GENERATION_CONFIG, MODEL_FILE):
        ends = _optional(path / name).get("eos_token_id")
        if ends is not None:
            ids: list[Any] = ends if isinstance(ends, list) else [ends]
            if not all(isinstance(end, int) for end in ids):
                raise UsageError(f"{path / name}: eos_token_id is {shown(ends)}: expected a token's id, or several")
            return frozenset(end for end in ids if 0 <= end < vocabulary)
    return frozenset()


def _end(tokenizer: Tokenizer) -> frozenset[int]:
    """What ends a document, where that is known."""
    is_known = not isinstance(tokenizer, Unknown) and getattr(tokenizer, "end_token", "") is not None
    return frozenset({tokenizer.end}) if is_known else frozenset()


def _optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _converted(model: Transformer, dtype: torch.dtype | None) -> Transformer:
    return model if dtype is None else model.to(dtype)
