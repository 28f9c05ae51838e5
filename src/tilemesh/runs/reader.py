"""Reading checkpoints: a checkpoint that is sound, and any box of any tensor in it, whatever layout wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.ranges import LARGEST_WHOLE, shown
from tilemesh.core.shard import Box, Shard
from tilemesh.runs.folder import read_small
from tilemesh.runs.manifest import (
    BEST_KEPT,
    WEIGHT,
    DamagedError,
    Manifest,
    Piece,
    checkpoints,
    damage,
    folder_name,
)
from tilemesh.runs.metrics import last_step
from tilemesh.runs.names import CHECKPOINTS, SUMMARY
from tilemesh.runs.tensors import DTYPES, Tensor, empty, read_tensors


def open_checkpoint(run: str | Path, step: int | None = None, say: Callable[[str], None] = lambda text: None) -> Reader:
    """The newest checkpoint of a run's folder whose files are what was written, or that of a step.

    `say` hears why it is not the run's last step, where it is not.
    """
    folder = Path(run) / CHECKPOINTS
    candidates = checkpoints(folder)
    if step is not None:
        candidates = [(number, path) for number, path in candidates if number == step]
        if not candidates:
            known = ", ".join(str(number) for number, _ in reversed(checkpoints(folder))) or "none"
            raise UsageError(f"{run} has no checkpoint of step {step} ({folder_name(step)}): there are {known}")
    problems: list[str] = []
    for _, path in candidates:
        try:
            reader = Reader(path)
        except RunError as error:
            problems.append(str(error))
            continue
        bad = list(damage(path, reader.manifest.files))
        if not bad:
            for sentence in problems or ([] if step is not None else _later(run, reader.manifest.step)):
                say(f"{sentence}; step {reader.manifest.step} is used")
            return reader
        problems += bad
    if problems:
        raise RunError(f"no checkpoint of {run} is whole: {'; '.join(problems)}")
    raise RunError(f"{run} has no checkpoint yet: nothing was written under {folder}")


def read_step(run: str | Path, text: str | None) -> int | None:
    """A step as a command line names it: a number, or `best` for the lowest held-out loss that a run knows of."""
    if text is None:
        return None
    if text.isascii() and text.isdigit() and len(text) < len(str(LARGEST_WHOLE)):
        return int(text)
    if text != "best":
        raise UsageError(f"step is {shown(text)}: expected a number, or best")
    for _, path in checkpoints(Path(run) / CHECKPOINTS):
        values = Manifest.read(path).values
        best, kept = values.get("best"), values.get(BEST_KEPT)
        if isinstance(kept, int):
            return kept
        if isinstance(best, dict) and isinstance(best.get("step"), int):
            return int(best["step"])
    raise UsageError(f"{run} knows of no best step: nothing held out was evaluated before its checkpoints were written")


def _later(run: str | Path, step: int) -> list[str]:
    """Why a run's last step is not the one that is used, if it is not."""
    summary = read_small(run, SUMMARY)
    ended = summary["step"] if isinstance(summary.get("step"), int) else 0
    last = max(ended, last_step(run))
    if last <= step:
        return []
    where = (
        f", and its last checkpoint is in {summary['saved_in']}" if last == ended and summary.get("saved_in") else ""
    )
    return [f"{run} was trained to step {last}{where}"]


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

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of the whole tensor; None where there is none of this name."""
        return self._tensors[name][0].whole if name in self._tensors else None

    def local(self, name: str, mine: Shard) -> Tensor:
        """This rank's part of a tensor in its own layout."""
        pieces = self._pieces(name)
        if pieces[0].whole != mine.whole:
            raise RunError(
                f"{name} in {self.folder} has shape {pieces[0].whole} and this model's has {mine.whole}: "
                "it is another model's checkpoint"
            )
        if len(mine.boxes) == 1:
            return self.box(name, mine.boxes[0][1])
        local = empty(mine.shape, pieces[0].dtype)
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
        try:
            out = empty(box.shape, pieces[0].dtype)
        except ValueError as error:
            raise DamagedError(f"{self.folder}: {name}: {error}") from None
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
            except (OSError, ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
                raise DamagedError(f"{self.folder / piece.file} is damaged: {error!r}") from None
        stored = self._open[piece.file].get(piece.key)
        if stored is None or (tuple(stored.shape), DTYPES[stored.dtype]) != (piece.shape, piece.dtype):
            raise DamagedError(f"{self.folder / piece.file} has no {piece.key} as the manifest says it is")
        return stored
