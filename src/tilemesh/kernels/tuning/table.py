"""Tuned configurations on disk: one readable JSON file per operator, GPU and versions, which a user may edit or delete.

The tuner writes under the user's cache folder; tables measured by the authors travel with the package. A file that
cannot be read is an error that names it, never silently ignored.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Generic, TypeVar

from tilemesh.core.errors import UsageError
from tilemesh.core.files import cache_folder, replacing

FORMAT = 1

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True)
class TunedEntry(Generic[ConfigT]):
    """A tuned choice and what was measured when it was made, in seconds of kernel time."""

    config: ConfigT
    measured_s: float
    library_s: float | None = None


@dataclass
class TunedTable(Generic[ConfigT]):
    """Tuned choices by the problem's key."""

    gpu: str
    versions: Mapping[str, str]
    entries: dict[str, TunedEntry[ConfigT]] = field(default_factory=dict)


class Tables(Generic[ConfigT]):
    """Where one operator's tables are, and how its configurations are written. Keeps none: `kernels.context` does."""

    def __init__(
        self,
        operator: str,
        package: str,
        encode: Callable[[ConfigT], dict[str, Any]],
        decode: Callable[[dict[str, Any]], ConfigT],
    ) -> None:
        self.operator, self.package = operator, package
        self.encode, self.decode = encode, decode

    def path(self, gpu: str, versions: Mapping[str, str]) -> Path:
        """The user's file for this GPU and these versions: another version compiles other code, so it starts afresh."""
        words = [gpu, *(f"{name}-{version}" for name, version in sorted(versions.items()))]
        return cache_folder() / self.operator / (slug("-".join(words)) + ".json")

    def load(self, gpu: str, versions: Mapping[str, str]) -> TunedTable[ConfigT]:
        """The user's table, empty when nothing was tuned yet."""
        path = self.path(gpu, versions)
        if not path.exists():
            return TunedTable(gpu, versions)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} cannot be read ({error}): delete it and tune again") from None
        return self.from_json(text, str(path))

    def add(self, gpu: str, versions: Mapping[str, str], entries: Mapping[str, TunedEntry[ConfigT]]) -> Path:
        """Add entries to the user's table; written beside and renamed, so that a reader never sees half a file."""
        path = self.path(gpu, versions)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path):
            table = self.load(gpu, versions)
            table.entries.update(entries)
            with replacing(path) as part:
                part.write_text(self.to_json(table), encoding="utf-8")
        return path

    def shipped(self, gpu: str) -> TunedTable[ConfigT] | None:
        """The table that travels with the package for this GPU, whatever versions made it; None without one."""
        file = resources.files(self.package).joinpath("tables", slug(gpu) + ".json")
        return self.from_json(file.read_text(encoding="utf-8"), str(file)) if file.is_file() else None

    def to_json(self, table: TunedTable[ConfigT]) -> str:
        entries = {
            key: {"config": self.encode(entry.config), "measured_s": entry.measured_s, "library_s": entry.library_s}
            for key, entry in sorted(table.entries.items())
        }
        head = {"format": FORMAT, "gpu": table.gpu, "versions": dict(table.versions)}
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
        return f'{json.dumps(head)[:-1]}, "entries": {{\n{lines}\n}}}}\n'

    def from_json(self, text: str, source: str) -> TunedTable[ConfigT]:
        try:
            body = json.loads(text)
            if body.get("format") != FORMAT:
                raise UsageError(f"format {body.get('format')}, expected {FORMAT}")
            entries = {key: self._entry(value) for key, value in body["entries"].items()}
            return TunedTable(body["gpu"], body["versions"], entries)
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(
                f"{source} is not a table of tuned configurations ({error}): delete it and tune again"
            ) from None

    def _entry(self, value: Mapping[str, Any]) -> TunedEntry[ConfigT]:
        library = value.get("library_s")
        config = self.decode(dict(value["config"]))
        return TunedEntry(config, float(value["measured_s"]), None if library is None else float(library))


def versions() -> dict[str, str]:
    """What a tuned choice depends on besides the GPU."""
    import torch
    import triton

    return {"torch": torch.__version__.split("+")[0], "triton": triton.__version__}


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


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
