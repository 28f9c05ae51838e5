"""Files that a command writes at its end: whether they can be written is found out before its work begins."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tilemesh.core.errors import UsageError
from tilemesh.core.files import check_new_folder


def check_targets(**targets: str | Path | None) -> None:
    """Refuse `json="/proc/x"` and the like, by the option's name; `-` is standard output. Leaves nothing behind."""
    for option, given in targets.items():
        if given is not None and str(given) != "-":
            why = _why_not(Path(given))
            if why:
                said = "''" if str(given) in ("", ".") else str(given)
                raise UsageError(f"--{option.replace('_', '-')} {said} cannot be written: {why}")


def check_folder(option: str, given: str | Path) -> None:
    """Refuse a new folder that cannot be made, or one that is there and not empty."""
    target = Path(given)
    check_new_folder(target, f"--{option}")
    why = _why_not(target / "in it")
    if why:
        raise UsageError(f"--{option} {target} cannot be made: {why}")


def _why_not(target: Path) -> str:
    """Why this file cannot be written; empty where it can. Tried out, as root has every right and /proc takes none."""
    try:
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
