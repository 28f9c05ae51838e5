"""What a checkpoint consists of, as data: which files, with which digests, hold which part of which tensor.

The one idea: a tensor is a list of boxes. Each rank writes the boxes it owns into a file of its own; the manifest says
where every box lies in the whole. So a checkpoint can be read by any layout: a reader asks for a box and gets it from
whichever boxes overlap it. A checkpoint counts only once its manifest stands in a folder with its final name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tilemesh.core.errors import RunError
from tilemesh.core.shard import Box

SCHEMA = 1
WEIGHT = "weight"
"""Before the name of a parameter (`weight:NAME`); the optimizer's states are stored under their own words."""
MANIFEST_FILE = "manifest.json"
WRITING, REMOVING = ".writing-", ".removing-"  # a leading dot: not yet, or no longer, a checkpoint
_STEP = re.compile(r"step-(\d{8,})")
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Piece:
    """One box of one tensor, in one file under one key."""

    name: str
    file: str
    key: str
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    """Shape of the tensor it is a part of."""
    dtype: str

    @property
    def box(self) -> Box:
        return Box(self.begin, self.shape)


@dataclass(frozen=True)
class StoredFile:
    file: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """One checkpoint. `values` are the numbers that are no tensors: the position in the data, the loss scale."""

    step: int
    values: Mapping[str, Any]
    files: Sequence[StoredFile]
    pieces: Sequence[Piece]
    written_by: Mapping[str, Any] = field(default_factory=dict)
    """Layout and versions, for people."""

    def tensors(self) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.name, []).append(piece)
        return found

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint; `DamagedError` says what is wrong with it."""
        path = folder / MANIFEST_FILE
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("schema") != SCHEMA:
                raise DamagedError(f"{path} was written by another version")
            files = [StoredFile(**one) for one in found.pop("files")]
            pieces = [_piece(one) for one in found.pop("pieces")]
            return cls(files=files, pieces=pieces, **found)
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{path} is damaged: {error!r}") from None


class DamagedError(RunError):
    """A checkpoint that is not what was written."""


def _piece(one: Mapping[str, Any]) -> Piece:
    boxes = {key: tuple(one[key]) for key in ("begin", "shape", "whole")}
    return Piece(**{**one, **boxes})


# ---- folders ---------------------------------------------------------------------------------------------------


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder by its name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every finished checkpoint, newest first; whether they are sound is another question."""
    if not folder.is_dir():
        return []
    found = [(step, path) for path in folder.iterdir() if (step := step_of(path.name)) is not None]
    return sorted(found, reverse=True)


def left_over(folder: Path) -> list[Path]:
    """What a run that died in the middle of writing or removing has left."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.name.startswith((WRITING, REMOVING))]


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    made = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            made.update(block)
    return made.hexdigest()


def damage(folder: Path, files: Sequence[StoredFile]) -> Iterator[str]:
    """A sentence for every file that is not as the manifest says."""
    for one in files:
        path = folder / one.file
        try:
            size = path.stat().st_size
            if size != one.nbytes:
                yield f"{path} has {size} bytes, {one.nbytes} were written"
            elif digest(path) != one.sha256:
                yield f"{path} is not what was written: its SHA-256 differs from the manifest's"
        except OSError as error:
            yield f"{path} cannot be read: {error.strerror}"
