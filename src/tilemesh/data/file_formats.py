"""What a file of a source holds, by its name and its first bytes, and opening it through its compression.

The one idea: a file is read as what it is, or refused with what to do; it is never trained on as bytes that nobody
meant. No numpy here: the command line reads it early.
"""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.ranges import shown

JSONL, JSON, PARQUET = (".jsonl", ".ndjson"), (".json",), (".parquet",)
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}
"""Endings of compressed files that are read as they are, and the standard library's module for each."""
_ARCHIVE = "an archive: unpack it into a folder and name the folder"
_PACKED = {
    ".zst": "compressed by zstd: decompress it first (zstd -d)",
    ".lz4": "compressed by lz4: decompress it first (lz4 -d)",
    ".br": "compressed by brotli: decompress it first (brotli -d)",
    ".z": "compressed: decompress it first (uncompress)",
    **dict.fromkeys((".tar", ".tgz", ".zip", ".7z", ".rar"), _ARCHIVE),
}
"""Endings of files that are refused although they may hold text, and what to do."""
_MAGIC = {
    b"\x1f\x8b": "compressed by gzip: let its name end in .gz",
    b"BZh": "compressed by bzip2: let its name end in .bz2",
    b"\xfd7zXZ\0": "compressed by xz: let its name end in .xz",
    b"\x28\xb5\x2f\xfd": _PACKED[".zst"],
    b"PK\x03\x04": _ARCHIVE,
    b"7z\xbc\xaf\x27\x1c": _ARCHIVE,
    b"PAR1": "Parquet: let its name end in .parquet",
    b"%PDF-": "a PDF: turn it into text first (pdftotext)",
}  # fmt: skip
"""The first bytes of files that are not text, whatever their name says."""
_HEAD_BYTES = 4096


class FileFormat(NamedTuple):
    kind: Literal["text", "jsonl", "json", "parquet"]
    module: str = ""
    """Of the standard library, through which the file is read; empty: as it lies."""


def file_format(path: Path) -> FileFormat:
    """How a file is read, by its name."""
    inner, module = _endings(path)
    if inner in PARQUET:
        return FileFormat("parquet")
    return FileFormat("jsonl" if inner in JSONL else "json" if inner in JSON else "text", module)


def is_records(path: Path) -> bool:
    """Whether a file holds records, by its name."""
    return file_format(path).kind != "text"


def packed_words(path: Path) -> str | None:
    """What a file is that cannot be read as it is, by its name, and what to do; None: it can."""
    inner, module = _endings(path)
    return _PACKED.get(inner) or ("compressed Parquet: decompress it first" if inner in PARQUET and module else None)


def binary_words(path: Path) -> str | None:
    """What a file that is read as text is instead, by its first bytes (decompressed); None: it is text."""
    with opened(path) as file:
        head = file.content.read(_HEAD_BYTES)
    for magic, words in _MAGIC.items():
        if head.startswith(magic):
            return words
    return "not text (it has zero bytes): expected text in UTF-8" if b"\0" in head else None


def _endings(path: Path) -> tuple[str, str]:
    """The ending that says what a file holds, and the module that decompresses it."""
    endings = [ending.lower() for ending in path.suffixes[-2:]]
    module = COMPRESSED.get(endings[-1], "") if endings else ""
    if module:
        endings.pop()
    return endings[-1] if endings else "", module


class OpenedFile(NamedTuple):
    content: IO[bytes]
    """Decompressed."""
    stored: IO[bytes]
    """As it lies on the disk: its `tell` says how much of the file was read."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[OpenedFile]:
    """A file opened through its compression; what cannot be read is one line, now and while it is read."""
    module = file_format(path).module
    library: Any = _loaded(path, module) if module else None
    damaged = (EOFError, zlib.error, getattr(library, "LZMAError", EOFError))
    try:
        with path.open("rb") as stored:
            if library is None:
                yield OpenedFile(stored, stored)
                return
            with library.open(stored) as content:
                yield OpenedFile(content, stored)
    except OSError as error:
        if library is not None and error.errno is None:  # of the decompressor, not of the system
            raise _damaged(path, error) from None
        raise RunError(f"data: {path} cannot be read: {error.strerror}") from None
    except damaged as error:
        raise _damaged(path, error) from None


def _loaded(path: Path, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise RunError(
            f"data: {path} needs the module {module}, which this Python lacks: decompress it first"
        ) from None


def _damaged(path: Path, error: Exception) -> UsageError:
    return UsageError("data.source", f" {shown(str(path))} cannot be decompressed: {error}")
