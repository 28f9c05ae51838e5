"""What lies beside the weights in a Hugging Face folder and stays: tokenizer, special tokens, chat template.

Training changes weights alone, so these files are carried from the folder that a model came from to every folder that
it is exported to. No torch: they are copied before a rank starts.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilemesh.core.files import ensure_folder, read_json_object, replacing
from tilemesh.model.families.book import CONFIG

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_FILES = (
    TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "decoder_start_token_id")


def carried_files(folder: str | Path) -> list[Path]:
    """The files of a Hugging Face folder that go wherever its model goes."""
    files = [path for name in _FILES if (path := Path(folder) / name).is_file()]
    return files + sorted((Path(folder) / _TEMPLATES).glob("*.jinja"))


def copy_carried(source: str | Path, target: str | Path, with_config: bool = False) -> None:
    """Copy them; `with_config`: and config.json, which says the ids of the special tokens."""
    target = Path(target)
    files = carried_files(source) + ([Path(source) / CONFIG] if with_config else [])
    ensure_folder(target)
    for path in files:
        copied = target / path.relative_to(source)
        ensure_folder(copied.parent)
        with replacing(copied) as part:
            shutil.copyfile(path, part)


def special_ids(folder: str | Path) -> dict[str, Any]:
    """The ids of special tokens that a folder's config.json names."""
    path = Path(folder) / CONFIG
    settings: Mapping[str, Any] = read_json_object(path) if path.is_file() else {}
    return {name: settings[name] for name in _IDS if settings.get(name) is not None}
