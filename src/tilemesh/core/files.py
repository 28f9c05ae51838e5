"""Reading and writing single files such that an error names the file, whichever system call it comes from."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilemesh.core.errors import RunError, UsageError

PART = ".part"
"""How the name of a file ends that is being written (`replacing`), or was when its process was killed."""


_UNFINISHED = f".unfinished{PART}"
"""In a folder that is being written (`filling`), or was when its process was killed."""


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/tilemesh`, or the same under `~/.cache`; the XDG specification has relative paths ignored."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "tilemesh"


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file that a user named."""
    try:
        with naming(path):
            value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise UsageError(f"{path} is not JSON that can be read: nested too deeply") from None
    except ValueError as error:  # no UTF-8, no JSON, or a number with thousands of digits
        raise UsageError(f"{path} is not JSON: {str(error).partition(';')[0]}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds a {type(value).__name__}: expected a JSON object")
    return value


def check_new_folder(folder: Path, called: str = "the folder") -> None:
    """Refuse a folder that holds anything, or is none: nothing that others made is ever written over."""
    if not str(folder).strip() or str(folder) == ".":
        raise UsageError(f"{called} is empty, or the one you stand in: name a new folder")
    if os.path.lexists(folder) and not folder.is_dir():
        raise UsageError(f"{called} {folder} is a file: expected a new folder")
    # A file that was being written when a process was killed has no name of its own yet.
    if folder.exists() and any(path.suffix != PART for path in folder.iterdir()):
        if (folder / _UNFINISHED).exists():
            raise UsageError(
                f"{called} {folder} is what a command left that was killed: remove it, or name a new folder"
            )
        raise UsageError(f"{called} {folder} is there already and not empty: name a new folder")


def check_finished(folder: Path | str) -> None:
    """Refuse a folder without what makes it whole, where that is because the command that wrote it was killed."""
    if os.path.lexists(Path(folder) / _UNFINISHED):
        raise UsageError(
            f"{folder} is half-written: the command that wrote it was killed; remove it and write it again"
        )


def ensure_folder(folder: Path) -> None:
    """Make a folder that a user named, where there is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"{folder} is a file, or lies below one: expected a folder to write to") from None


def write_text(text: str, path: Path | str) -> None:
    """Write a file whole or not at all, making its folder; RunError where that cannot be. What is not a plain file (a
    pipe, a device, a link) is written as it is: a user may well have put it there."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        is_plain = not os.path.lexists(target) or (target.is_file() and not target.is_symlink())
        with replacing(target) if is_plain else contextlib.nullcontext(target) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"'{path}' cannot be written: {error.strerror}") from None


def write_output(text: str, path: Path | str) -> None:
    """The same, and to standard output where the path is `-`."""
    if str(path) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_text(text, path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write into: it takes that name once it is complete, and goes where that fails. It is
    hidden: what a process that was killed leaves is not read as one of the texts of a folder."""
    # The number of this thread, which no other on this machine has now: two writers do not meet in one file.
    part = path.with_name(f".{path.name}.{threading.get_native_id()}{PART}")
    try:
        with naming(path):
            yield part
            os.replace(part, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == str(part):
            error.filename = str(path)
        with contextlib.suppress(OSError):
            part.unlink()
        raise


@contextlib.contextmanager
def filling(folder: Path) -> Iterator[None]:
    """Around the writing of a new folder (`check_new_folder`): where that fails or is interrupted, nothing stays."""
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        ensure_folder(folder)
        with naming(folder / _UNFINISHED):
            (folder / _UNFINISHED).touch()
        yield
        (folder / _UNFINISHED).unlink()
    except BaseException as error:
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            for path in new_folders:
                path.rmdir()
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"{folder} was not written") from None
        raise


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Let an OSError from inside name this file: a full disk is noticed by a write, which knows only a descriptor."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, (str, bytes)) or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
