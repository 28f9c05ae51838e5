"""Writing checkpoints: each rank writes its own boxes from a snapshot, in the background; none counts until all have.

The one idea: three steps that a crash may fall between without harm. Each rank copies its tensors and a thread writes
them into a folder whose name says "being written", flushed to the disk, with a digest made on the way. When all ranks
have (the loop asks them each step; a thread never communicates), rank 0 adds the manifest and renames the folder. Only
then may an older one go. A write that fails is said, its folder removed, and training goes on with the last good one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilemesh.core.errors import RunError
from tilemesh.runs.manifest import (
    BEST_KEPT,
    MANIFEST_FILE,
    REMOVING,
    WRITING,
    Manifest,
    Piece,
    StoredFile,
    checkpoints,
    folder_name,
    left_over,
)
from tilemesh.runs.metrics import CHECKPOINT
from tilemesh.runs.tensors import DTYPES, Part, Tensor, snapshot, write_tensors

IDLE, WRITTEN, FAILED, BUSY = "idle", "written", "failed", "busy"


class Writer:
    """One rank's side of writing checkpoints into a run's folder. All calls come from the rank's main thread."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        ranks: int,
        keep: int,
        background: bool = True,
        written_by: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = print,
        note: Callable[..., None] = lambda **values: None,
    ) -> None:
        self.folder, self.rank, self.ranks, self.keep = folder, rank, ranks, keep
        self.note = note
        self.background = background
        self.written_by = dict(written_by or {})
        self.say = say
        self.step: int | None = None  # of the checkpoint under way
        self.best: int | None = None  # of the one that is kept however many newer ones there are
        self.last: int | None = None  # of the newest that rank 0 has finished
        self.nbytes = 0  # of this rank's part of the newest one begun
        self.failures = 0
        self._values: dict[str, Any] = {}
        self._is_best = False
        self._began = 0.0
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self._ending: threading.Thread | None = None

    def into(self, folder: Path) -> Writer:
        """One like this that writes into another folder."""
        return Writer(
            folder,
            self.rank,
            ranks=self.ranks,
            keep=self.keep,
            background=self.background,
            written_by=self.written_by,
            say=self.say,
            note=self.note,
        )

    @property
    def state(self) -> str:
        """Of this rank's part of the checkpoint under way."""
        if self.step is None:
            return IDLE
        if self._thread is not None and self._thread.is_alive():
            return BUSY
        return FAILED if self._error else WRITTEN

    def begin(self, step: int, parts: Iterable[Part], values: Mapping[str, Any], *, is_best: bool = False) -> None:
        """Copy the tensors and begin to write them; the last checkpoint must have been settled. Once it is written,
        the best one takes the place of the best before it."""
        if self.step is not None:
            raise RunError(f"checkpoint of step {step} while that of step {self.step} is under way")
        self._wait_ending()
        self.step, self._error, self._is_best = step, None, is_best
        self._values = {**values, BEST_KEPT: step if is_best else self.best}
        self._began = time.monotonic()
        copies = snapshot(parts)
        self.nbytes = sum(copy.numel() * copy.element_size() for _, copy in copies)
        self._thread = threading.Thread(target=self._write, args=(step, copies), name="checkpoint", daemon=True)
        self._thread.start()
        if not self.background:
            self._thread.join()

    def settle(self, failed: bool) -> None:
        """All ranks have written their part, or some could not: make it a checkpoint, or remove it."""
        assert self.step is not None
        step, self.step, self._thread = self.step, None, None
        if self._error is not None:
            self.say(f"CHECKPOINT OF STEP {step} FAILED on rank {self.rank}: {self._error}")
        self.failures += failed
        if self.rank != 0:
            return
        if failed:
            kept = f"the last good one is of step {self.last}" if self.last is not None else "there is none yet"
            self.say(f"CHECKPOINT OF STEP {step} FAILED: training goes on, {kept}")
        # On a thread of its own: fsync and the removal of old files may take longer than a step.
        self._ending = threading.Thread(target=self._end, args=(step, failed), name="checkpoint", daemon=True)
        self._ending.start()
        if not self.background:
            self._wait_ending()

    def close(self) -> None:
        """Wait for what rank 0 still has to do."""
        self._wait_ending()

    def _wait_ending(self) -> None:
        if self._ending is not None:
            self._ending.join()
            self._ending = None

    def _place(self, step: int) -> Path:
        return self.folder / (WRITING + folder_name(step))

    def _write(self, step: int, copies: Sequence[tuple[Part, Tensor]]) -> None:
        try:
            place = self._place(step)
            place.mkdir(parents=True, exist_ok=True)
            stem = f"shard-{self.rank:05d}"
            record: dict[str, Any] = {"files": [], "pieces": []}
            if copies:
                stored = write_tensors(place / f"{stem}.safetensors", {part.key: copy for part, copy in copies})
                record["files"] = [asdict(stored)]
                for part, copy in copies:
                    shape, dtype = tuple(copy.shape), DTYPES[copy.dtype]
                    piece = Piece(part.name, stored.file, part.key, part.begin, shape, part.whole, dtype)
                    record["pieces"].append(asdict(piece))
            _write_text(place / f"{stem}.json", json.dumps(record))
        except OSError as error:
            self._error = f"{error.filename or self._place(step)}: {error.strerror or error}"
        except Exception as error:  # whatever it was, the run must hear of it rather than lose its thread in silence
            self._error = f"{type(error).__name__}: {error}"

    def _end(self, step: int, failed: bool) -> None:
        place = self._place(step)
        if failed:
            shutil.rmtree(place, ignore_errors=True)
            self.note(kind=CHECKPOINT, step=step, ok=False, why=self._error or "another rank could not write its part")
            return
        try:
            nbytes = self._commit(step, place)
            self.last = step
            self.best = step if self._is_best else self.best
        except OSError as error:
            self.failures += 1
            why = f"{error.filename or place}: {error.strerror or error}"
            self.say(f"CHECKPOINT OF STEP {step} FAILED: {why}")
            shutil.rmtree(place, ignore_errors=True)
            self.note(kind=CHECKPOINT, step=step, ok=False, why=why)
            return
        self.note(kind=CHECKPOINT, step=step, ok=True, bytes=nbytes, seconds=time.monotonic() - self._began)
        for old_step, old in checkpoints(self.folder)[self.keep :]:
            if old_step != self.best:
                _remove(old)

    def _commit(self, step: int, place: Path) -> int:
        """Make it a checkpoint; its bytes."""
        records = [json.loads(path.read_text()) for path in sorted(place.glob("shard-*.json"))]
        if len(records) < self.ranks:
            words = f"rank 0 sees files of {len(records)} of {self.ranks} ranks: name a folder that all hosts share"
            raise OSError(errno.ENOENT, words, str(place))
        manifest = Manifest(
            step=step,
            values=self._values,
            files=[StoredFile(**fields) for record in records for fields in record["files"]],
            pieces=[Piece(**fields) for record in records for fields in record["pieces"]],
            written_by=self.written_by,
        )
        _write_text(place / MANIFEST_FILE, manifest.to_json())
        for path in place.glob("shard-*.json"):
            path.unlink()
        _flush_folder(place)
        final = self.folder / folder_name(step)
        if final.exists():  # a run that went back has come here again: what is there is whole, and stays
            shutil.rmtree(place, ignore_errors=True)
            return 0
        os.rename(place, final)
        _flush_folder(self.folder)
        return sum(file.nbytes for file in manifest.files)


def _remove(folder: Path) -> None:
    """Remove a checkpoint: under another name first, so that half of one is never taken for one."""
    gone = folder.with_name(REMOVING + folder.name)
    with contextlib.suppress(OSError):
        os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what a run that died has left half done."""
    for path in left_over(folder):
        shutil.rmtree(path, ignore_errors=True)


# ---- files -----------------------------------------------------------------------------------------------------


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
