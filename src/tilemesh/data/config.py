"""Where text comes from, as a value that configurations hold. No numpy here: the command line reads it early.

The value refuses what no source could be; `check_source` refuses what is not there, before anybody goes to read it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tilemesh.core.config import check_fields
from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import Range, shown
from tilemesh.data.file_formats import JSON, JSONL, PARQUET, binary_words, is_records, packed_words
from tilemesh.data.records import check_records

STDLIB = "stdlib"
"""The source that every Python has: its own library."""

SHARD_SUFFIX = ".bin"
PREPARING_FILE = "preparing.json"
"""In a folder whose shards are not all written: how far `data prepare` has come."""


@dataclass(frozen=True)
class DataConfig:
    """The text that is trained on, and how it becomes tokens."""

    source: str = STDLIB
    """`stdlib` (the source code of this Python's standard library), a text, JSONL, JSON or Parquet file (all but the
    last also as .gz, .bz2 or .xz), a folder of these, or a folder of `.bin` token shards as `tilemesh data prepare`
    writes them."""
    mixture: tuple[str, ...] = ()
    """Several sources with weights instead of one, each SOURCE=WEIGHT, such as ["books=0.7", "code.jsonl=0.3"]: weights
    are the shares of sequences that come from each source; a small source is repeated."""
    field: str = ""
    """The field of a JSONL, JSON or Parquet record that is read; empty: `text`, or `messages` with data.chat."""
    chat: bool = False
    """Whether records are conversations: a list of messages with role and content, written out by the chat template
    beside data.tokenizer (a plain one where there is none), with the tools of a record. Only answers, of role
    assistant, count in the loss."""
    packing: Literal["stream", "documents", "none"] = "stream"
    """How documents become sequences of train.context tokens: stream, one after the other; documents, the same, but
    attention and positions begin anew with each document; none, one document (or a part of it) per sequence, the rest
    padded and not counted."""
    tokenizer: Path | None = None
    """A tokenizer.json file of the Hugging Face tokenizers library; none: every byte is a token."""
    held_out: Annotated[float, Range(0, 1, below=True)] = 0.02
    """The fraction of the text that is kept for evaluation and never trained on: whole documents where there are
    enough, else the end of the text."""
    pattern: str = "*"
    """Which files of a folder of text are read: a name pattern such as *.py."""

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source.strip():
            raise UsageError("data.source", f" is {shown(self.source)}: expected {_EXPECTED}")
        check_fields(self, "data.")
        if not isinstance(self.pattern, str) or not _is_pattern(self.pattern):
            pattern = shown(self.pattern)
            raise UsageError("data.pattern", f" is {pattern}: expected a pattern of file names, such as *.py")
        if not isinstance(self.field, str):
            raise UsageError("data.field", f" is {shown(self.field)}: expected the name of a field")
        for source, weight in mixture_of(self):
            _WEIGHT.check(f"data.mixture: weight of {source}", weight)
        if self.tokenizer is not None and not isinstance(self.tokenizer, Path):
            raise UsageError("data.tokenizer", f" is {shown(self.tokenizer)}: expected a path (pathlib.Path)")

    @property
    def field_name(self) -> str:
        """The field of a record that is read."""
        return self.field or ("messages" if self.chat else "text")

    @property
    def parts(self) -> list[tuple[DataConfig, float]]:
        """Every source by itself, with its weight; of one alone that is 1."""
        if not self.mixture:
            return [(self, 1.0)]
        return [(replace(self, source=source, mixture=()), weight) for source, weight in mixture_of(self)]


_WEIGHT = Range(0, above=True)
_EXPECTED = f"{STDLIB}, a text, JSONL, JSON or Parquet file, a folder of these, or a folder of {SHARD_SUFFIX} shards"


def mixture_of(data: DataConfig) -> list[tuple[str, float]]:
    """`data.mixture` as pairs."""
    weighted = []
    for text in data.mixture:
        source, equals, number = text.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not equals or not source.strip() or math.isnan(weight):
            raise UsageError("data.mixture", f" has '{text}': expected SOURCE=WEIGHT, such as books=0.7")
        weighted.append((source, weight))
    return weighted


def source_path(source: str) -> Path:
    """Where a source lies that is not the library; `~` is the user's home."""
    try:
        return Path(source).expanduser()
    except RuntimeError:  # `~name` of somebody who has no home here
        raise no_source(source) from None


def lies_in_source(path: str | Path, source: str) -> bool:
    """Whether a folder to write is a source's, or below it, so that its files would be read as text the next time."""
    return source != STDLIB and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(source_path(source)))


def has_shards(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*" + SHARD_SUFFIX))


def check_complete(folder: Path) -> None:
    """Refuse a folder that `data prepare` has begun and not finished, with or without shards in it."""
    if (folder / PREPARING_FILE).exists():
        raise UsageError(
            f"{folder} is not complete: `tilemesh data prepare` was stopped; run it again with the same arguments, and "
            "it goes on where it was"
        )


def check_tokenizer(path: Path) -> None:
    """Refuse what is not a file; of a folder, say whether it has one."""
    if path.is_dir():
        name = "tokenizer.json"
        hint = f"give {path / name}" if (path / name).is_file() else f"it has no {name}"
        raise UsageError("data.tokenizer", f" {shown(str(path))} is a folder: expected a {name} file; {hint}")
    if not path.is_file():
        raise UsageError("data.tokenizer", f" {shown(str(path))} does not exist: expected a tokenizer.json file")


def check_source(data: DataConfig) -> None:
    """Refuse a source, or a tokenizer, that is not there or that cannot be read as text."""
    if data.tokenizer is not None:
        check_tokenizer(data.tokenizer)
    for part, _ in data.parts:
        with blaming_mixture(data):
            _check_part(part)


@contextmanager
def blaming_mixture(data: DataConfig) -> Iterator[None]:
    """What is wrong with a source of a mixture stands in `data.mixture`, not in `data.source`."""
    try:
        yield
    except UsageError as error:
        if not data.mixture:
            raise
        raise UsageError(*("data.mixture" if piece == "data.source" else piece for piece in error.args)) from None


def _check_part(data: DataConfig) -> None:
    if data.source == STDLIB:
        if data.chat:
            raise UsageError("data.chat", f" and {STDLIB}, which has no conversations: name a JSONL or Parquet file")
        return
    path = source_path(data.source)
    try:
        is_there = path.exists()
    except OSError as error:  # a name that is too long
        raise UsageError("data.source", f" {shown(data.source)}: {error.strerror}") from None
    if not is_there:
        raise no_source(data.source)
    check_complete(path)
    if path.is_file():
        require_readable(path, data)
        if is_records(path):
            check_records(path, data.field_name, data.chat)
        elif path.suffix == SHARD_SUFFIX:
            raise UsageError("data.source", f" {shown(data.source)} is a shard: name the folder that it is in")
        elif words := binary_words(path):
            raise UsageError("data.source", f" {shown(data.source)} is {words}")
    elif not has_shards(path):
        files = sorted(files_like(path, data.pattern))
        for file in files:
            require_readable(file, data)
        if all(is_left_out(file) for file in files):
            raise no_files(data.source, data.pattern)
        for file in [file for file in files if is_records(file)][:LOOKED_AT]:
            check_records(file, data.field_name, data.chat)


def is_left_out(path: Path) -> bool:
    """Whether a file of a folder is not read: an image beside text. A run says how many there are."""
    return not is_records(path) and binary_words(path) is not None


LOOKED_AT = 8
"""Files whose first lines are looked at before anything begins; others are read when their turn comes."""


def require_readable(path: Path, data: DataConfig) -> None:
    """Refuse an archive, and a file without records where conversations were asked for."""
    if words := packed_words(path):
        is_inside = path != source_path(data.source)
        also = ("; or leave it out with ", "data.pattern") if is_inside else ()
        raise UsageError(
            "data.source",
            f"{' has' if is_inside else ''} {shown(str(path))}{',' if is_inside else ' is'} {words}",
            *also,
        )
    if data.chat and not is_records(path):
        kinds = ", ".join((*JSONL, *JSON, *PARQUET))
        words = f" has {path}: conversations are read from {kinds} files; leave others out with "
        raise UsageError("data.source", words, "data.pattern")


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
    sentence = f" {shown(source)} has no text file named like {shown(pattern)}: set "
    return UsageError("data.source", sentence, "data.pattern")
