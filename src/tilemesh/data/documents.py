"""Documents as (name, content): this Python's own library, a file, or a folder of text files."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tilemesh.core.errors import RunError
from tilemesh.data.config import STDLIB, files_like, no_files, no_source, require_text, source_path

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"})


def documents(source: str, pattern: str = "*") -> Iterator[tuple[str, bytes]]:
    """(name, content) of each document, in an order that is the same on every machine with the same files."""
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        yield from _files(root, "*.py", skip=_NOT_LIBRARY)
        return
    path = source_path(source)
    if path.is_file():
        require_text(path)
        yield path.name, _read(path)
        return
    if not path.is_dir():
        raise no_source(source)
    found = False
    for document in _files(path, pattern):
        found = True
        yield document
    if not found:
        raise no_files(source, pattern)


def _files(root: Path, pattern: str, skip: frozenset[str] = frozenset()) -> Iterator[tuple[str, bytes]]:
    """Text files below a folder by relative name; binary ones (a zero byte at the beginning) are passed over."""
    for path in sorted(files_like(root, pattern, skip), key=lambda path: path.relative_to(root).as_posix()):
        require_text(path)
        content = _read(path)
        if b"\0" not in content[:4096]:
            yield path.relative_to(root).as_posix(), content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"data: {path} cannot be read: {error.strerror}") from None
