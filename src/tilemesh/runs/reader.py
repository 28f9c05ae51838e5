"""Reading checkpoints: a checkpoint that is sound, and any box of any tensor in it, whatever layout wrote it."""

from __future__ import annotations

from pathlib import Path

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.shard import Box, Shard
from tilemesh.runs.manifest import (
    WEIGHT,
    DamagedError,
    Manifest,
    Piece,
    checkpoints,
    damage,
    folder_name,
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
        """This rank's part of a tensor in its own layout."""
        found = self._pieces(name)
        if found[0].whole != mine.whole:
            raise RunError(
                f"{name} in {self.folder} has shape {found[0].whole} and this model's has {mine.whole}: "
                "it is another model's checkpoint"
            )
        if len(mine.boxes) == 1:
            return self.box(name, mine.boxes[0][1])
        local = empty(mine.shape, found[0].dtype)
        for here, there in mine.boxes:
            local[here.slices] = self.box(name, there)
        return local

    def whole(self, name: str) -> Tensor:
        shape = self._pieces(name)[0].whole
        return self.box(name, Box(tuple(0 for _ in shape), shape))

    def weight(self, name: str) -> Tensor:
        """A whole parameter by its name in the model."""
        return self.whole(f"{WEIGHT}:{name}")

    def box(self, name: str, box: Box) -> Tensor:
        """The values in a box of the whole tensor, from whichever stored boxes overlap it."""
        pieces = self._pieces(name)
        out = empty(box.shape, pieces[0].dtype)
        filled = 0
        for piece in pieces:
            shared = box.overlap(piece.box)
            if shared is not None:
                out[shared.within(box)] = self._stored(piece)[shared.within(piece.box)]
                filled += shared.size
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
