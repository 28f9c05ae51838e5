"""What a checkpoint consists of, as data: which files, with which digests, hold which part of which tensor.

The one idea: a tensor is a list of boxes. Each rank writes the boxes it owns into a file of its own; the manifest says
where every box lies in the whole. So a checkpoint can be read by any layout: a reader asks for a box and gets it from
whichever boxes overlap it. A checkpoint counts only once its manifest stands in a folder with its final name.

A manifest holds a SHA-256 of itself beside those of the files, so that whatever was changed since it was written is
found. Manifests of schema 1 had none; they are not read.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tilemesh.core.errors import RunError
from tilemesh.core.shard import Box

SCHEMA = 2
WEIGHT = "weight"
"""Before the name of a parameter (`weight:NAME`); the optimizer's states are stored under their own words."""
MODEL = "model"
"""Under this name `written_by` has the model's configuration, which decides what the weights mean."""
STATE = "state"
"""Under this name `written_by` has, of a module of the user's, under which name each entry of its state is kept."""
BEST_KEPT = "best_kept"
"""Under this name `values` has the step of the best checkpoint that was written and is kept; None: there is none."""
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
    """One checkpoint. `values` are the numbers that are not tensors: the position in the data, the loss scale."""

    step: int
    values: Mapping[str, Any]
    files: Sequence[StoredFile]
    pieces: Sequence[Piece]
    written_by: Mapping[str, Any] = field(default_factory=dict)
    """The model, to be compared with the run's configuration; layout and versions, for people."""

    def tensors(self) -> dict[str, list[Piece]]:
        by_name: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            by_name.setdefault(piece.name, []).append(piece)
        return by_name

    def to_json(self) -> str:
        fields = {"schema": SCHEMA, **asdict(self)}
        return json.dumps({**fields, "digest": _digest_of(fields)}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint; `DamagedError` says what is wrong with it."""
        path = folder / MANIFEST_FILE
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(fields, dict):
                raise DamagedError(f"{path} is damaged: expected a JSON object")
            digest = fields.pop("digest", None)
            if fields.get("schema") != SCHEMA:
                raise DamagedError(f"{path} has schema {fields.get('schema')!r}, this version reads {SCHEMA}")
            if digest != _digest_of(fields):
                raise DamagedError(f"{path} is not what was written: its SHA-256 differs from the one in it")
            manifest = _manifest(fields)
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{path} is damaged: {error}") from None
        if step_of(folder.name) not in (None, manifest.step):
            raise DamagedError(f"{path} is of step {manifest.step}, and its folder's name says another")
        return manifest


class DamagedError(RunError):
    """A checkpoint that is not what was written."""


def _digest_of(fields: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest's contents, whatever the spaces and the order of its keys."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# ---- what makes sense ------------------------------------------------------------------------------------------
# The digest finds what was changed. These find what no writer of this version writes, with a ValueError.


def _manifest(body: Mapping[str, Any]) -> Manifest:
    _expect_keys(body, ("schema", *(field.name for field in fields(Manifest))), "the manifest")
    step, values, written_by = body["step"], body["values"], body["written_by"]
    if not _is_count(step) or not isinstance(values, dict) or not isinstance(written_by, dict):
        raise ValueError("expected a number as step and objects as values and written_by")
    files = [_stored_file(entry) for entry in _list(body["files"])]
    pieces = [_piece(entry) for entry in _list(body["pieces"])]
    manifest = Manifest(step, values, files, pieces, written_by)
    missing = {piece.file for piece in pieces} - {entry.file for entry in files}
    if missing:
        raise ValueError(f"pieces are said to be in {min(missing)}, and there is no such file")
    for name, parts in manifest.tensors().items():
        first = parts[0]
        if any((part.whole, part.dtype) != (first.whole, first.dtype) for part in parts):
            raise ValueError(f"the pieces of {name} are of different tensors")
        # Boxes inside the whole that begin at different places and have its size together are the whole.
        rest = math.prod(first.whole) - sum(part.box.size for part in parts)
        if rest or len({part.begin for part in parts if part.box.size}) < sum(part.box.size > 0 for part in parts):
            raise ValueError(f"{name} is not all there, or stored twice: {rest} values are missing")
    return manifest


def _stored_file(entry: Any) -> StoredFile:
    _expect_keys(entry, [field.name for field in fields(StoredFile)], "a file")
    stored = StoredFile(**entry)
    if not _is_name(stored.file) or not _is_count(stored.nbytes) or not isinstance(stored.sha256, str):
        raise ValueError(f"expected a file's name, bytes and digest, not {entry}")
    return stored


def _piece(entry: Any) -> Piece:
    _expect_keys(entry, [field.name for field in fields(Piece)], "a piece")
    begin, shape, whole = (tuple(_list(entry[key])) for key in ("begin", "shape", "whole"))
    piece = Piece(entry["name"], entry["file"], entry["key"], begin, shape, whole, entry["dtype"])
    are_words = all(isinstance(word, str) for word in (piece.name, piece.key, piece.dtype)) and _is_name(piece.file)
    if not are_words or not all(_is_count(number) for number in (*begin, *shape, *whole)):
        raise ValueError(f"expected names and numbers as a piece, not {entry}")
    dims = zip(begin, shape, whole, strict=True)
    if any(first + length > all_of_it for first, length, all_of_it in dims):
        raise ValueError(f"a piece of {piece.name} lies outside of it")
    return piece


def _expect_keys(fields: Any, keys: Sequence[str], what: str) -> None:
    if not isinstance(fields, dict) or set(fields) != set(keys):
        raise ValueError(f"expected {what} with {', '.join(keys)}")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, not {value!r}")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_name(value: Any) -> bool:
    """Of a file in the checkpoint's own folder."""
    return isinstance(value, str) and Path(value).name == value and "\0" not in value


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
    finished = [(step, path) for path in folder.iterdir() if (step := step_of(path.name)) is not None]
    return sorted(finished, reverse=True)


def left_over(folder: Path) -> list[Path]:
    """What a run that died in the middle of writing or removing has left."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.name.startswith((WRITING, REMOVING))]


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            hashed.update(block)
    return hashed.hexdigest()


def damage(folder: Path, files: Sequence[StoredFile]) -> Iterator[str]:
    """A sentence for every file that is not as the manifest says."""
    for stored in files:
        path = folder / stored.file
        try:
            size = path.stat().st_size
            if size != stored.nbytes:
                yield f"{path} has {size} bytes, {stored.nbytes} were written"
            elif digest(path) != stored.sha256:
                yield f"{path} is not what was written: its SHA-256 differs from the manifest's"
        except OSError as error:
            yield f"{path} cannot be read: {error.strerror}"
