"""Where text comes from, as a value that configurations hold. No numpy here: the command line reads it early.

The value refuses what no source could be; `check_source` refuses what is not there, before anybody goes to read it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import Range, shown

STDLIB = "stdlib"
"""The source that every Python has: its own library."""

SHARD_SUFFIX = ".bin"
_UNREAD = (".jsonl", ".ndjson")
"""Files whose bytes are not the text in them, and yet look like text."""
RANGES = {"held_out": Range(0, 1, below=True)}


@dataclass(frozen=True)
class DataConfig:
    """The text that is trained on, and how it becomes tokens."""

    source: str = STDLIB
    """`stdlib` (the source code of this Python's standard library), a text file, a folder of text files, or a folder
    of `.bin` token shards as `tilemesh data prepare` writes them."""
    tokenizer: Path | None = None
    """A tokenizer.json file of the Hugging Face tokenizers library; none: every byte is a token."""
    held_out: float = 0.02
    """The fraction of the text that is kept for evaluation and never trained on: whole documents where there are
    enough, else the end of the text."""
    pattern: str = "*"
    """Which files of a folder of text are read: a name pattern such as *.py."""

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source.strip():
            raise UsageError("data.source", f" is {shown(self.source)}: expected {_EXPECTED}")
        for name, numbers in RANGES.items():
            numbers.check(f"data.{name}", getattr(self, name))
        if not isinstance(self.pattern, str) or not _is_pattern(self.pattern):
            given = shown(self.pattern)
            raise UsageError("data.pattern", f" is {given}: expected a pattern of file names, such as *.py")
        if self.tokenizer is not None and not isinstance(self.tokenizer, Path):
            raise UsageError("data.tokenizer", f" is {shown(self.tokenizer)}: expected a path (pathlib.Path)")


_EXPECTED = f"{STDLIB}, a text file, a folder of text, or a folder of {SHARD_SUFFIX} shards"


def source_path(source: str) -> Path:
    """Where a source lies that is not the library; `~` is the user's home."""
    try:
        return Path(source).expanduser()
    except RuntimeError:  # `~name` of somebody who has no home here
        raise no_source(source) from None


def has_shards(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*" + SHARD_SUFFIX))


def check_source(data: DataConfig) -> None:
    """Refuse a source, or a tokenizer, that is not there or that cannot be read as text."""
    if data.tokenizer is not None and not data.tokenizer.is_file():
        given = shown(str(data.tokenizer))
        raise UsageError("data.tokenizer", f" {given} does not exist: expected a tokenizer.json file")
    if data.source == STDLIB:
        return
    path = source_path(data.source)
    try:
        is_there = path.exists()
    except OSError as error:  # a name that is too long
        raise UsageError("data.source", f" {shown(data.source)}: {error.strerror}") from None
    if not is_there:
        raise no_source(data.source)
    if path.is_file():
        require_text(path)
    elif not has_shards(path):
        files = list(files_like(path, data.pattern))
        if not files:
            raise no_files(data.source, data.pattern)
        for file in files:
            require_text(file)


def require_text(path: Path) -> None:
    """Refuse a file that would be read as something else than the text in it."""
    if path.suffix.lower() in _UNREAD:
        raise UsageError(
            "data.source",
            f" has {path}: {path.suffix} would be read as raw JSON; expected plain text: write its text out first, or "
            "leave it out with ",
            "data.pattern",
        )


def files_like(root: Path, pattern: str, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files below a folder whose names match, except hidden ones; `skip` names folders to leave out."""
    for folder, inner, files in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in skip and not name.startswith("."))
        yield from (Path(folder, name) for name in files if Path(name).match(pattern) and not name.startswith("."))


def _is_pattern(pattern: str) -> bool:
    try:
        Path("name").match(pattern)
    except ValueError:  # the empty one, and "."
        return False
    return "/" not in pattern and "\0" not in pattern


def no_source(source: str) -> UsageError:
    return UsageError("data.source", f" {shown(source)} does not exist: expected {_EXPECTED}")


def no_files(source: str, pattern: str) -> UsageError:
    found = f" {shown(source)} has no text file named like {shown(pattern)}: set "
    return UsageError("data.source", found, "data.pattern")
