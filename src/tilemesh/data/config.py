"""Where text comes from, as a value that configurations hold. No numpy here: the command line reads it early."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tilemesh.core.errors import UsageError

STDLIB = "stdlib"
"""The source that every Python has: its own library."""


@dataclass(frozen=True)
class DataConfig:
    """What is learned from."""

    source: str = STDLIB
    """`stdlib` (this Python's own library as bytes), a text file, a folder of text, or a folder of `.bin` shards."""
    tokenizer: Path | None = None
    """A Hugging Face `tokenizers` file (tokenizer.json); without one text is read as bytes."""
    held_out: float = 0.02
    """The fraction that is never trained on: whole documents where there are enough, else the end of the text."""
    pattern: str = "*"
    """Which files of a folder of text: a name pattern such as *.py."""


def check_source(source: str) -> None:
    """Refuse a source that is not there, before anybody goes to read it."""
    if source != STDLIB and not Path(source).expanduser().exists():
        raise no_source(source)


def no_source(source: str) -> UsageError:
    return UsageError(f"data.source '{source}' does not exist: expected {STDLIB}, a file, or a folder")
