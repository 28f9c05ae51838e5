"""Documents as (name, content): this Python's own library, a file, or a folder of text files."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tilemesh.core.errors import RunError, UsageError
from tilemesh.data.config import STDLIB, no_source

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


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
