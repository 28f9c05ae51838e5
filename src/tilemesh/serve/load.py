"""What is served: a model with its tokenizer, from a training run's folder or a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilemesh.core.config import section
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.files import read_json_object
from tilemesh.core.ranges import shown
from tilemesh.data.config import DataConfig
from tilemesh.data.corpus import chat_template_of, tokenizer_of
from tilemesh.data.tokenizer import FileTokenizer, Tokenizer, Unknown
from tilemesh.data.tokenizer_files import DEFAULT, TOKENIZER, read_beside
from tilemesh.model import huggingface
from tilemesh.model.adapter import A, B, LoraConfig, adapted_modules
from tilemesh.model.config import ModelConfig, check_written_model
from tilemesh.model.families.book import CONFIG as MODEL_FILE
from tilemesh.model.families.book import QUANTIZATION, read_config
from tilemesh.model.kinds import Adapted, few_bits_of, projections
from tilemesh.model.lora import MergedWeights
from tilemesh.model.lowbit_files import CompressedFolder
from tilemesh.model.read import Weights, read_model, read_weights
from tilemesh.model.transformer import Transformer
from tilemesh.runs import folder as folders
from tilemesh.runs.base import check_base
from tilemesh.runs.kind import TRAINED
from tilemesh.runs.manifest import MODEL, WEIGHT
from tilemesh.runs.names import CARRIED, CONFIG
from tilemesh.runs.reader import Reader, open_checkpoint
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
    origin: WeightOrigin | None = None
    """Where its weights were read."""


class WeightOrigin(NamedTuple):
    """Where weights can be read again: a folder, and the step of a run's."""

    folder: Path
    step: int | None


@dataclass(frozen=True)
class WeightSource:
    """Weights that a served model may be given: what they are, known before any is read, and they themselves."""

    forms: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and type of each, by our names; all floating-point types are one."""
    tensors: Iterator[tuple[str, Tensor]]
    """One after the other; headers of files have been checked."""
    config: ModelConfig | None = None
    schemes: Mapping[str, object] | None = None
    """How matrices of few bits are coded, by name. None, like no configuration: whoever brings the tensors knows."""
    origin: WeightOrigin | None = None


class _RunFolder(NamedTuple):
    """A run's model, data and checkpoint."""

    path: Path
    model: ModelConfig
    data: DataConfig
    lora: LoraConfig
    reader: Reader

    def weights(self) -> Weights:
        """With adapters merged, if it has any."""
        if not self.lora.rank:
            return self.reader
        check_base(self.path, self.lora.base)
        return MergedWeights(self.lora, self.reader, adapted_modules(self.model, self.lora))


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
    foresee: Callable[[Transformer], None] = lambda model: None,
) -> ServedModel:
    """Read a run (its newest sound checkpoint, or that of a step) or a Hugging Face folder.

    In the dtype of its weights, unless another is asked for. `say` hears which step is used, if it is not the last.
    Without weights the model is on the meta device: others compute it. `foresee`: as `huggingface.load` takes it.
    """
    path = Path(source)
    if (path / MODEL_FILE).is_file():
        if step is not None:
            raise UsageError(f"step is {step} and {path} is a Hugging Face folder, which has no steps: leave it out")
        return _of_huggingface(path, dtype, device, with_weights, foresee)
    run = _open_run(path, step, say)
    model = read_model(run.model, run.weights(), device) if with_weights else Transformer(run.model, device="meta")
    tokenizer = tokenizer_of(run.data)
    ends = end_tokens(path / CARRIED, run.model.vocabulary, tokenizer)
    chat = chat_template_of(run.data, tokenizer)
    origin = WeightOrigin(path, run.reader.manifest.step)
    return ServedModel(path.resolve().name, _converted(model, dtype), tokenizer, ends, *chat, origin)


def _open_run(path: Path, step: int | None, say: Callable[[str], None]) -> _RunFolder:
    text, where = folders.read_config(path, *TRAINED)
    config, data = section(ModelConfig, "model", text, where), section(DataConfig, "data", text, where)
    reader = open_checkpoint(path, step, say)
    check_written_model(reader.manifest.written_by.get(MODEL), reader.manifest.step, config, path / CONFIG)
    return _RunFolder(path, config, data, section(LoraConfig, "lora", text, where), reader)


NewWeights = str | Path | Transformer | Mapping[str, Tensor]
"""What an engine may be given in place of its weights: a folder, a model, or all tensors by our names."""


def open_weights(
    source: NewWeights, step: int | None = None, say: Callable[[str], None] = lambda text: None
) -> WeightSource:
    """Weights of a run's or a Hugging Face folder, of another model, or tensors by our names."""
    if isinstance(source, Transformer):
        return WeightSource(_forms(source), source.named_parameters(), source.config, _schemes(source))
    if isinstance(source, Mapping):
        for name, tensor in source.items():
            if not isinstance(tensor, Tensor) or tensor.is_meta:
                what = f"{type(tensor).__name__}{' on the meta device' if isinstance(tensor, Tensor) else ''}"
                raise UsageError(f"{name} is {what}: expected a tensor that has values; nothing was changed")
        forms = {name: _form(tensor) for name, tensor in source.items()}
        return WeightSource(forms, iter(source.items()))
    path = Path(source)
    if (path / MODEL_FILE).is_file():
        if step is not None:
            raise UsageError(f"step is {step} and {path} is a Hugging Face folder, which has no steps: leave it out")
        read = huggingface.read_parameters(path, as_stored=True)
        first = next(read)  # which checks the headers of all
        model = _without_weights(path, None)
        tensors = itertools.chain([first], read)
        return WeightSource(_forms(model), tensors, model.config, _schemes(model), WeightOrigin(path, None))
    run = _open_run(path, step, say)
    forms, weights = _forms(Transformer(run.model, device="meta")), run.weights()
    if run.lora.rank:
        merged = read_weights(run.model, weights)
        return WeightSource(forms, iter(merged.items()), run.model, {}, WeightOrigin(path, run.reader.manifest.step))
    for name, (shape, _) in forms.items():
        if run.reader.shape(f"{WEIGHT}:{name}") != shape:
            raise RunError(f"{run.reader.folder} has no {name} of shape {shape}: it is another model's")
    each = ((name, weights.weight(name)) for name in forms)
    return WeightSource(forms, each, run.model, {}, WeightOrigin(path, run.reader.manifest.step))


def check_weights(source: WeightSource, model: Transformer) -> None:
    """Refuse weights that are not all of this model's, and nothing else's, in one line."""
    expected = _forms(model)
    wrong = [f"{name} is missing" for name in expected if name not in source.forms]
    wrong += [f"{name} is no parameter of this model" for name in source.forms if name not in expected]
    for name, (shape, kind) in source.forms.items():
        if name in expected and (shape, kind) != expected[name]:
            wrong.append(f"{name} is {kind} of shape {shape}, expected {expected[name][1]} of {expected[name][0]}")
    if source.config is not None:
        for name, ours in dataclasses.asdict(model.config).items():
            theirs = getattr(source.config, name)
            if theirs != ours and name not in ("context", "dropout", "family"):  # which change no weight
                wrong.append(f"{name} is {theirs}, expected {ours}")
    if source.schemes is not None and source.schemes != _schemes(model):
        wrong.append("matrices are coded in other ways")
    if wrong:
        more = f", and {len(wrong) - 1} more do not fit" if len(wrong) > 1 else ""
        raise UsageError(f"these weights are not of the model that is served: {wrong[0]}{more}; nothing was changed")


def _forms(model: nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    """Of its weights; adapters that an engine holds beside them are none."""
    slots = {
        f"{name}.{part}"
        for name, layer in projections(model)
        if isinstance(layer.kind, Adapted) and layer.kind.rows is not None
        for part in (A, B)
    }
    return {name: _form(parameter) for name, parameter in model.named_parameters() if name not in slots}


def _form(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    kind = "floating point" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    return tuple(tensor.shape), kind


def _schemes(model: nn.Module) -> dict[str, object]:
    return {name: kind.scheme for name, layer in projections(model) if (kind := few_bits_of(layer)) is not None}


def _of_huggingface(
    path: Path,
    dtype: torch.dtype | None,
    device: torch.device | str,
    with_weights: bool,
    foresee: Callable[[Transformer], None],
) -> ServedModel:
    if with_weights:
        model = huggingface.load(path, device=device, dtype=dtype, foresee=foresee).eval().requires_grad_(False)
    else:
        model = _without_weights(path, dtype)
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
    origin = WeightOrigin(path, None)
    return ServedModel(path.resolve().name, model, tokenizer, ends, template, special, origin)


def _without_weights(path: Path, dtype: torch.dtype | None) -> Transformer:
    model = Transformer(read_config(path), device="meta", dtype=dtype)
    if isinstance(told := read_json_object(path / MODEL_FILE).get(QUANTIZATION), Mapping):
        CompressedFolder(model, told, str(path / MODEL_FILE))  # puts in modules of that kind
    return model


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


def end_tokens(carried: Path, vocabulary: int, tokenizer: Tokenizer) -> frozenset[int]:
    """What ends an answer of a run's model: what the folder that it began with says, and the end of a document."""
    return _ends(carried, vocabulary) | _end(tokenizer)


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
