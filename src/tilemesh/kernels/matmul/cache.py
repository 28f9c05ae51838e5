"""Tuned configurations on disk: one readable JSON file per GPU and versions, which a user may edit or delete.

The tuner writes under the user's cache folder; tables measured by the authors travel with the package. A file that
cannot be read is an error that names it, never silently ignored.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from tilemesh.core.errors import UsageError
from tilemesh.kernels.matmul.config import Config, from_dict, to_dict

FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """A tuned choice and what was measured when it was made, in seconds of kernel time."""

    config: Config
    measured_s: float
    library_s: float | None = None


@dataclass
class Table:
    """Tuned choices by `Problem.key`."""

    gpu: str
    versions: Mapping[str, str]
    entries: dict[str, Entry] = field(default_factory=dict)

    def to_json(self) -> str:
        entries = {
            key: {"config": to_dict(entry.config), "measured_s": entry.measured_s, "library_s": entry.library_s}
            for key, entry in sorted(self.entries.items())
        }
        head = {"format": FORMAT, "gpu": self.gpu, "versions": dict(self.versions)}
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
        return f'{json.dumps(head)[:-1]}, "entries": {{\n{lines}\n}}}}\n'

    @classmethod
    def from_json(cls, text: str, source: str) -> Table:
        try:
            body = json.loads(text)
            if body.get("format") != FORMAT:
                raise UsageError(f"format {body.get('format')}, expected {FORMAT}")
            entries = {key: _entry(value) for key, value in body["entries"].items()}
            return cls(body["gpu"], body["versions"], entries)
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise UsageError(
                f"{source} is not a table of tuned configurations ({error}): delete it and tune again"
            ) from None


def _entry(value: Mapping[str, Any]) -> Entry:
    library = value.get("library_s")
    return Entry(
        from_dict(dict(value["config"])), float(value["measured_s"]), None if library is None else float(library)
    )


def cache_folder() -> Path:
    """The user's cache folder by the XDG convention."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tilemesh" / "matmul"


def cache_path(gpu: str, versions: Mapping[str, str]) -> Path:
    """The file for this GPU and these versions: another version compiles other code, so it starts afresh."""
    words = [gpu, *(f"{name}-{version}" for name, version in sorted(versions.items()))]
    return cache_folder() / (_slug("-".join(words)) + ".json")


def load(gpu: str, versions: Mapping[str, str]) -> Table:
    """The user's table, empty when nothing was tuned yet."""
    path = cache_path(gpu, versions)
    if not path.exists():
        return Table(gpu, versions)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}): delete it and tune again") from None
    return Table.from_json(text, str(path))


def store(gpu: str, versions: Mapping[str, str], entries: Mapping[str, Entry]) -> Path:
    """Add entries to the user's table; written beside and renamed, so that a reader never sees half a file."""
    path = cache_path(gpu, versions)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        table = load(gpu, versions)
        table.entries.update(entries)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False
        ) as beside:
            beside.write(table.to_json())
        Path(beside.name).replace(path)
    return path


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One writer of a table at a time, of all processes and threads; without file locks (Windows), the last wins."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # let go when the file is closed
        yield


@functools.cache
def shipped(gpu: str) -> Table | None:
    """The table that travels with the package for this GPU, whatever versions it was made with; None without one."""
    file = resources.files("tilemesh.kernels.matmul").joinpath("tables", _slug(gpu) + ".json")
    if not file.is_file():
        return None
    return Table.from_json(file.read_text(encoding="utf-8"), str(file))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
