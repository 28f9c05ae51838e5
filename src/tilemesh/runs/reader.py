"""Reading checkpoints: a checkpoint that is sound, and any box of any tensor in it, whatever layout wrote it."""

from __future__ import annotations

from pathlib import Path

from tilemesh.core.errors import RunError, UsageError
from tilemesh.runs.manifest import (
    WEIGHT,
    Box,
    DamagedError,
    Manifest,
    Piece,
    Shard,
    checkpoints,
    damage,
    folder_name,
    overlap,
    within,
)
from tilemesh.runs.names import CHECKPOINTS
from tilemesh.runs.tensors import Tensor, empty, read_tensors


def open_checkpoint(run: str | Path, step: int | None = None) -> Reader:
    """The newest checkpoint of a run's folder whose files are what was written, or that of a step."""
    folder = Path(run) / CHECKPOINTS
    found = checkpoints(folder)
    if step is not None:
        found = [(number, path) for number, path in found if number == step]
        if not found:
            known = ", ".join(str(number) for number, _ in reversed(checkpoints(folder))) or "none"
            raise UsageError(f"{run} has no checkpoint of step {step} ({folder_name(step)}): there are {known}")
    problems: list[str] = []
    for _, path in found:
        try:
            reader = Reader(path)
        except RunError as error:
            problems.append(str(error))
            continue
        bad = list(damage(path, reader.manifest.files))
        if not bad:
            return reader
        problems += bad
    if problems:
        raise RunError(f"no checkpoint of {run} is whole: {'; '.join(problems)}")
    raise RunError(f"{run} has no checkpoint yet: nothing was written under {folder}")


class Reader:
    """A checkpoint, read box by box by any layout. Files are opened when first needed."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.folder = folder
        self.manifest = manifest or Manifest.read(folder)
        self._tensors = self.manifest.tensors()
        self._open: dict[str, dict[str, Tensor]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def local(self, name: str, mine: Shard) -> Tensor:
        """This rank's part of a tensor in its own layout; zeros where there is padding."""
        found = self._pieces(name)
        if found[0].whole != mine.whole:
            raise RunError(
                f"{name} in {self.folder} has shape {found[0].whole} and this model's has {mine.whole}: "
                "it is another model's checkpoint"
            )
        boxes = mine.pieces()
        whole_box = len(boxes) == 1 and not mine.padding
        local = None if whole_box else empty(mine.shape, found[0].dtype).zero_()
        for here, there in boxes:
            box = tuple(one.start for one in there), tuple(one.stop - one.start for one in there)
            value = self.box(name, box)
            if local is None:
                local = value
            else:
                local[here] = value
        assert local is not None
        return local

    def whole(self, name: str) -> Tensor:
        shape = self._pieces(name)[0].whole
        return self.box(name, (tuple(0 for _ in shape), shape))

    def weight(self, name: str) -> Tensor:
        """A whole parameter by its name in the model."""
        return self.whole(f"{WEIGHT}:{name}")

    def box(self, name: str, box: Box) -> Tensor:
        """The values in a box of the whole tensor, from whichever stored boxes overlap it."""
        pieces = self._pieces(name)
        out = empty(box[1], pieces[0].dtype)
        filled = 0
        for piece in pieces:
            stored = (piece.begin, piece.shape)
            shared = overlap(box, stored)
            if shared is not None:
                out[within(shared, box)] = self._stored(piece)[within(shared, stored)]
                filled += _size(shared)
        if filled != out.numel():
            raise DamagedError(f"{self.folder}: {name} is not all there, {out.numel() - filled} values are missing")
        return out

    def _pieces(self, name: str) -> list[Piece]:
        if name not in self._tensors:
            raise DamagedError(f"{self.folder} has no {name}: it is another model's or optimizer's checkpoint")
        return self._tensors[name]

    def _stored(self, piece: Piece) -> Tensor:
        if piece.file not in self._open:
            try:
                self._open[piece.file] = read_tensors(self.folder / piece.file)
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                raise DamagedError(f"{self.folder / piece.file} is damaged: {error!r}") from None
        if piece.key not in self._open[piece.file]:
            raise DamagedError(f"{self.folder / piece.file} has no {piece.key}, and the manifest says so")
        return self._open[piece.file][piece.key]


def _size(box: Box) -> int:
    size = 1
    for length in box[1]:
        size *= length
    return size
