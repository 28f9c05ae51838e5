"""Documents in an order that is the same on every machine with the same files: this Python's own library, a file, or a
folder. A document is a text file, or a record of a file of records: text, or with `data.chat` a conversation."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tilemesh.data.chat import Conversation
from tilemesh.data.config import (
    LOOKED_AT,
    STDLIB,
    DataConfig,
    files_like,
    has_shards,
    is_left_out,
    no_files,
    no_source,
    require_readable,
    source_path,
)
from tilemesh.data.file_formats import is_records, opened
from tilemesh.data.records import looks_like_jsonl, read_records, record_content, record_place

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"})


class Document(NamedTuple):
    name: str
    content: bytes | Conversation
    read_bytes: int
    """Of the source's files, up to the end of this document."""


def documents(data: DataConfig) -> Iterator[Document]:
    """Every document of a source."""
    read = 0
    for name, path in source_files(data):
        size = path.stat().st_size
        if is_records(path) and data.source != STDLIB:
            for record in read_records(path, data.field_name):
                content = record_content(record, data.field_name, data.chat, record_place(path, record))
                yield Document(f"{name}:{record.number}", content, read + record.read_bytes)
        else:
            with opened(path) as file:
                content = file.content.read()
            yield Document(name, content, read + size)
        read += size


def source_bytes(data: DataConfig) -> int:
    """Of all files of a source."""
    return sum(path.stat().st_size for _, path in source_files(data))


def left_out_files(data: DataConfig) -> list[str]:
    """The names of a folder's files that are not read, because they are not text."""
    path = source_path(data.source)
    if data.source == STDLIB or not path.is_dir():
        return []
    return [name for name, file in _named(path, data.pattern) if is_left_out(file)]


def misnamed_words(data: DataConfig) -> str:
    """For people: the first text file of a source that looks like JSON lines, and what to do; empty: there is none."""
    for part, _ in data.parts:
        if part.source == STDLIB or has_shards(source_path(part.source)):
            continue
        texts = [(name, path) for name, path in source_files(part) if not is_records(path)]
        for name, path in texts[:LOOKED_AT]:
            if looks_like_jsonl(path):
                return (
                    f"{name} looks like JSON lines and is read as text, braces and all: let its name end in .jsonl to "
                    f"train on a field of each line (data.field, now {part.field_name!r})"
                )
    return ""


def source_files(data: DataConfig) -> list[tuple[str, Path]]:
    """(name, path) of the files of a source that are read, sorted by their names below it."""
    if data.source == STDLIB:
        return _named(Path(sysconfig.get_path("stdlib")), "*.py", _NOT_LIBRARY)
    path = source_path(data.source)
    if path.is_file():
        require_readable(path, data)
        return [(path.name, path)]
    if not path.is_dir():
        raise no_source(data.source)
    named = _named(path, data.pattern)
    for _, file in named:
        require_readable(file, data)
    files = [(name, file) for name, file in named if not is_left_out(file)]
    if not files:
        raise no_files(data.source, data.pattern)
    return files


def _named(root: Path, pattern: str, skip: frozenset[str] = frozenset()) -> list[tuple[str, Path]]:
    return sorted((path.relative_to(root).as_posix(), path) for path in files_like(root, pattern, skip))
