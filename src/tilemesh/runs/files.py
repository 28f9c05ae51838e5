"""Single files of a folder: written whole or not at all, read as they are now, with a reason where that fails.

Reading takes only plain files: a link is not followed, a pipe is not waited for, and a file that is still being written
gives what is whole in it. So a page can be made of a folder in any state, and serving one reaches nothing outside it.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilemesh.core.files import replacing
from tilemesh.runs.jsontext import from_text, to_text

MOST_BYTES = 512 << 20


class Unread(Exception):  # noqa: N818  not an error of ours: the reason goes on the page
    """Why a file gave nothing, in words for the page."""


class NotThere(Unread):
    """There is no such file."""


def read_text(path: Path) -> str:
    """The file's text, bytes that are no UTF-8 replaced; `Unread` says why there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotThere("not there") from None
    except OSError as error:
        is_link = path.is_symlink()
        raise Unread("a link, which is not followed" if is_link else error.strerror or "unreadable") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):  # before it becomes a file of Python's, which a folder cannot
        os.close(descriptor)
        raise Unread("not a plain file")
    with os.fdopen(descriptor, "rb") as file:
        if status.st_size > MOST_BYTES:
            raise Unread(f"{status.st_size >> 20} MiB, more than the {MOST_BYTES >> 20} MiB a page is made of")
        try:
            return file.read().decode("utf-8", errors="replace")
        except OSError as error:
            raise Unread(error.strerror or "unreadable") from None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object."""
    text = read_text(path)
    try:
        value = from_text(text)
    except (ValueError, RecursionError):
        raise Unread("damaged, or cut short while it was written") from None
    if not isinstance(value, dict):
        raise Unread("not a JSON object")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unread(f"not TOML: {error}") from None


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """JSON objects a line, and how many lines were none; a last line without its end is still being written."""
    objects: list[dict[str, Any]] = []
    damaged = 0
    lines = read_text(path).split("\n")
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            value = from_text(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            objects.append(value)
        elif number < len(lines) - 1:
            damaged += 1
    return objects, damaged


def names_in(folder: Path) -> list[str]:
    """What lies in a folder that is not a link; nothing where there is none."""
    if folder.is_symlink():
        return []
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


# ---- writing ---------------------------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never half of one."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_object(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON object."""
    write_text(path, to_text(value, path.name, indent=1) + "\n")
