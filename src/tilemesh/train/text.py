"""Documents and what turns them into tokens: this Python's library, a file, a folder; bytes or a `tokenizers` file.

A document ends with one token that no text contains, so that a model learns where one stops. Bytes need no library;
a tokenizer file needs the optional package `tokenizers`, which is asked for by name when it is missing.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tilemesh.core.errors import RunError, UsageError
from tilemesh.train.config import STDLIB, no_source

END_BYTE = 0  # never part of a text file
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
_END_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def end(self) -> int:
        """What stands after a document."""
        ...

    def encode(self, text: bytes) -> NDArray[Any]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Bytes:
    """A byte is a token."""

    vocabulary: int = 256
    name: str = "bytes"
    end: int = END_BYTE

    def encode(self, text: bytes) -> NDArray[Any]:
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(int(token) & 0xFF for token in tokens).decode(errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizers` file."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError:
            raise RunError(
                f"data.tokenizer is {path} and the package `tokenizers` is not installed: pip install tokenizers, "
                "or leave data.tokenizer out to read text as bytes"
            ) from None
        if not path.is_file():
            raise UsageError(f"data.tokenizer {path} does not exist: expected a tokenizer.json file")
        try:
            self._inner = Loaded.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise UsageError(f"data.tokenizer {path} is not a tokenizers file: {error}") from None
        self.name = str(path)
        self.vocabulary = int(self._inner.get_vocab_size())
        ends = [self._inner.token_to_id(name) for name in _END_NAMES]
        self.end = next((end for end in ends if end is not None), self.vocabulary - 1)

    def encode(self, text: bytes) -> NDArray[Any]:
        ids = self._inner.encode(text.decode(errors="replace"), add_special_tokens=False).ids
        return np.asarray(ids, np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._inner.decode([int(token) for token in tokens], skip_special_tokens=False))


def open_tokenizer(path: Path | None) -> Tokenizer:
    return Bytes() if path is None else FileTokenizer(path)


def documents(source: str, pattern: str = "*") -> Iterator[tuple[str, bytes]]:
    """(name, content) of each document, in an order that is the same on every machine with the same files."""
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        yield from _files(root, "*.py", skip=_NOT_LIBRARY)
        return
    path = Path(source).expanduser()
    if path.is_file():
        yield path.name, _read(path)
        return
    if not path.is_dir():
        raise no_source(source)
    found = False
    for one in _files(path, pattern, skip=set()):
        found = True
        yield one
    if not found:
        raise UsageError(f"data.source '{source}' has no text file named like '{pattern}': set data.pattern")


def _files(root: Path, pattern: str, skip: set[str]) -> Iterator[tuple[str, bytes]]:
    """Text files below a folder by relative name; binary ones (a zero byte at the beginning) are passed over."""
    names = []
    for folder, inner, files in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in skip and not name.startswith("."))
        names += [Path(folder, name) for name in files if Path(name).match(pattern) and not name.startswith(".")]
    for path in sorted(names, key=lambda one: one.relative_to(root).as_posix()):
        content = _read(path)
        if b"\0" not in content[:4096]:
            yield path.relative_to(root).as_posix(), content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"data: {path} cannot be read: {error.strerror}") from None
