"""Files that a command writes at its end: whether they can be written is found out before its work begins."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tilemesh.core.errors import UsageError
from tilemesh.core.files import check_new_folder
from tilemesh.core.ranges import shown
from tilemesh.runs import names

_WRITTEN_BY_A_RUN = {names.CONFIG, names.ENVIRONMENT, names.PREDICTED, names.CHOICES, names.METRICS, names.SUMMARY}
_READ = _WRITTEN_BY_A_RUN | {names.ABOUT, names.LOCK, names.BASE, "config.json"}
"""Files by whose names runs and folders of models are read."""


def check_targets(written: Sequence[tuple[str, str]]) -> None:
    """Refuse ("--json", "/proc/x") and the like; `-` is standard output. Leaves nothing behind."""
    for flag, word in written:
        if word != "-" and (why := _why_not(Path(word))):
            raise UsageError(f"{flag} {word} cannot be written: {why}")


def check_apart(written: Sequence[tuple[str, str]], read: Sequence[tuple[str, str]]) -> None:
    """Refuse two outputs that are one file, and an output that is an input, or a file in a folder among them by which a
    run or model there is read; both as (option, word) pairs."""
    for number, (option, word) in enumerate(written):
        for other, same in written[:number]:
            if _is_same(word, same):
                raise UsageError(f"{other} and {option} are both {shown(word)}: give two paths")
        for other, text in read:
            if any(os.path.lexists(path) and _is_same(word, path) for path in _paths_in(text)):
                raise UsageError(f"{option} {shown(word)} would write over what {other} names: give another path")
        others = [(other, path) for other, text in (*written, *read) for path in _paths_in(text) if path != word]
        for other, folder in others:
            if _is_part_of(word, folder):
                raise UsageError(
                    f"{option} {shown(word)} would write over a file of what {other} names: give another path"
                )


def _paths_in(text: str) -> list[str]:
    """What a word may name: itself, the file of `FILE.py:FUNCTION`, the values of `A=B,...`."""
    return [text, text.partition(":")[0], *(piece.partition("=")[2] for piece in text.split(","))]


def _is_part_of(word: str, folder: str) -> bool:
    """Whether a path is a file in a folder that whoever reads the folder looks for."""
    try:
        inside = os.path.relpath(os.path.realpath(word), os.path.realpath(folder)) if folder else ".."
    except (OSError, ValueError):  # a loop of links, a NUL
        return False
    first, name = inside.partition(os.sep)[0], os.path.basename(inside)
    is_weights = name.endswith(".safetensors") or first == names.CHECKPOINTS
    return first not in ("..", ".") and (is_weights or name in _READ or name.startswith("tokenizer"))


def _is_same(one: str, other: str) -> bool:
    """Of files and folders; what is not a file, such as a terminal, may be written to as often as one likes."""
    try:
        is_special = os.path.exists(one) and not (os.path.isfile(one) or os.path.isdir(one))
        return "-" not in (one, other) and not is_special and os.path.realpath(one) == os.path.realpath(other)
    except (OSError, ValueError):  # a loop of links, a NUL
        return False


def check_filled(flag: str, folder: str) -> None:
    """Refuse a folder that files cannot be put into; one with files in it is as good as a new one."""
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise UsageError(f"{flag} {folder}: expected a folder, and this is a file")
    if why := _why_not(Path(folder, "in it")):
        raise UsageError(f"{flag} {shown(folder)} cannot be written: {why}")


def check_folder(flag: str, folder: Path) -> None:
    """Refuse a new folder that cannot be made, or one that is there and not empty."""
    check_new_folder(folder, flag)
    if why := _why_not(folder / "in it"):
        raise UsageError(f"{flag} {folder} cannot be made: {why}")


def _why_not(target: Path) -> str:
    """Why this file cannot be written; empty where it can. Tried out, as root has every right and /proc takes none."""
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(target)  # names that are too long, wherever on the way
        if target.is_dir():
            return "it is a folder, expected a file"
        if os.path.lexists(target):
            with target.open("ab"):
                return ""
        # Folders that are missing on the way are made when the file is written.
        place = next(folder for folder in target.absolute().parents if os.path.lexists(folder))
        if place == target.absolute().parent:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            target.unlink()
        else:
            with tempfile.TemporaryFile(dir=place):
                pass
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a NUL in the name
        return str(error)
    return ""
