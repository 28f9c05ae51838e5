"""Hugging Face folders from a run: its configuration and a checkpoint, read into one process, and its tokenizer.

`AutoTokenizer` and `AutoModelForCausalLM` of `transformers` load what is written. A run that began with a Hugging Face
folder carries that one's tokenizer, special tokens and chat template along; one that was trained with a tokenizer.json
gets that; text that was read as bytes gets a tokenizer whose tokens are the 256 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilemesh.core.errors import Argument, RunError, UsageError
from tilemesh.core.files import check_new_folder, filling, write_text
from tilemesh.data.corpus import tokenizer_of
from tilemesh.data.tokenizer import FileTokenizer, Tokenizer, Unknown
from tilemesh.model.adapter import A, B, adapted_modules
from tilemesh.model.config import check_written_model
from tilemesh.model.families.carried import TOKENIZER, TOKENIZER_CONFIG, copy_carried, special_ids
from tilemesh.model.read import Weights, read_weights
from tilemesh.runs.base import check_base
from tilemesh.runs.manifest import MODEL, STATE, WEIGHT
from tilemesh.runs.names import CARRIED, CHECKPOINTS, CONFIG
from tilemesh.runs.reader import Reader, open_checkpoint
from tilemesh.runs.tensors import write_tensors
from tilemesh.train.config import TrainConfig, of_run

STATE_FILE = "model.safetensors"
"""Of a module that is no Transformer of ours: all its weights and buffers, by name."""


def export(
    run: str | Path,
    folder: str | Path,
    step: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    *,
    adapter: bool = False,
    distributed: bool = False,
) -> int:
    """Write a run's checkpoint as a Hugging Face folder, with its tokenizer; returns its step.

    Adapters (LoRA) are merged into the weights; with `adapter` they alone are written, as a folder of PEFT; with
    `distributed` weights are a distributed checkpoint of torch, beside config.json.
    `say` hears which step is used, where that is not the run's last one.
    """
    from tilemesh.model import huggingface

    config = of_run(run)
    _check_target(folder)
    reader = open_checkpoint(run, step, say)
    if config.trains_module:  # what its own `load_state_dict` takes
        kept = [name.partition(":")[2] for name in reader.names if name.startswith(f"{WEIGHT}:")]
        names = reader.manifest.written_by.get(STATE) or {name: name for name in kept}
        with filling(Path(folder)):
            write_tensors(Path(folder) / STATE_FILE, {name: reader.weight(of) for name, of in names.items()})
        return reader.manifest.step
    manifest = reader.manifest
    check_written_model(manifest.written_by.get(MODEL), manifest.step, config.model, Path(run) / CONFIG)
    lora = config.lora
    if adapter:
        with filling(Path(folder)):
            _save_adapter(config, reader, folder)
        return reader.manifest.step
    carried = Path(run) / CARRIED
    tokenizer = None if carried.is_dir() else _tokenizer(config, say)
    special = special_ids(carried) if tokenizer is None else _end_of(tokenizer)
    weights: Weights = reader
    if lora.rank:
        from tilemesh.model.lora import MergedWeights

        check_base(run, lora.base)
        weights = MergedWeights(lora, reader, adapted_modules(config.model, lora))
    with filling(Path(folder)):
        if carried.is_dir():
            copy_carried(carried, folder)
        elif tokenizer is not None:
            _write_tokenizer(tokenizer, config.model.context, Path(folder))
        parameters = read_weights(config.model, weights)
        huggingface.save_parameters(config.model, parameters, folder, special, distributed=distributed)
    return reader.manifest.step


def _check_target(folder: str | Path) -> None:
    """Refuse to write over anything: a model, which may be the one that training began with, or a run."""
    target = Path(folder)
    if (target / CONFIG).exists() or (target / CHECKPOINTS).exists():
        raise UsageError(f"{folder} is the folder of a run: name another one for the exported model")
    check_new_folder(target)


def _save_adapter(config: TrainConfig, reader: Reader, folder: str | Path) -> None:
    from tilemesh.model.lora import save_adapter

    if not config.lora.rank:
        raise UsageError("this run trained all weights and has no adapter: leave ", Argument("adapter"), " out")
    names = [f"{module}.{part}" for module in adapted_modules(config.model, config.lora) for part in (A, B)]
    save_adapter({name: reader.weight(name) for name in names}, config.model, config.lora, folder)


def _tokenizer(config: TrainConfig, say: Callable[[str], None]) -> Tokenizer | None:
    """What the run's tokens mean; None, which is said, where that cannot be found out any more."""
    try:
        tokenizer = tokenizer_of(config.data)
    except (UsageError, RunError) as error:
        say(f"no tokenizer is written beside the weights: {error}")
        return None
    return None if isinstance(tokenizer, Unknown) else tokenizer


def _end_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """What ends a document, for a model that was trained here."""
    is_known = not isinstance(tokenizer, FileTokenizer) or tokenizer.end_token is not None
    return {"eos_token_id": tokenizer.end} if is_known else {}


def _write_tokenizer(tokenizer: Tokenizer, context: int, folder: Path) -> None:
    """The tokenizer of a run that did not begin with a Hugging Face folder."""
    if isinstance(tokenizer, FileTokenizer):
        tokenizer.write(folder, model_max_length=context)
        return
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    text = json.dumps(byte_tokenizer(), ensure_ascii=False)
    for name, content in ((TOKENIZER, text), (TOKENIZER_CONFIG, json.dumps(tokenizer_config, indent=2) + "\n")):
        write_text(content, folder / name)


def byte_tokenizer() -> dict[str, Any]:
    """A tokenizer.json whose tokens are the 256 bytes, each under its own number.

    `tokenizers` writes a byte as a character that can be seen: itself where it can be, else one from 256 on.
    """
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in seen]
    character = {byte: chr(byte) for byte in seen} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "merges": [],
        "vocab": {character[byte]: byte for byte in range(256)},
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model,
    }  # fmt: skip
