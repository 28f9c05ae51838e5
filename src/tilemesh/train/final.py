"""The last checkpoint of a run: its weights are what the run was for, so they are not given up at the first failure.

The one idea: a checkpoint that fails between steps is followed by another, the last one by none. So it is written into
a second folder where one was named (`checkpoint.fallback_dir`), which then is a run's folder of its own; else the run
asks for room and tries again for a while (`checkpoint.retry_s`). What was saved in the end, and where, is the result.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tilemesh.core.errors import RunError
from tilemesh.core.units import format_bytes
from tilemesh.parallel.agree import tell
from tilemesh.runs.checkpoint import Writer
from tilemesh.runs.folder import copy_run
from tilemesh.runs.names import CHECKPOINTS
from tilemesh.train.result import Saved

if TYPE_CHECKING:
    from tilemesh.train.loop import Interrupt, Loop

RETRY_EVERY_S = 2.0


def save_last(loop: Loop, interrupt: Interrupt) -> Saved:
    """See to it that the weights of the step that a run ended with are on the disk (a collective call)."""
    options, step = loop.config.checkpoint, loop.progress.step
    if _is_saved(loop, loop.writer):
        return Saved(step, loop.folder)
    # From now on a signal says that whoever asked for the end does not want to wait for this.
    interrupt.stop_requested = False
    end_at = time.monotonic() + options.retry_s
    second: Writer | None = None
    is_first = True
    while True:
        if options.fallback_dir is not None:
            second = second or _second_writer(loop, options.fallback_dir)
            if second is not None and _write(loop, second):
                if loop.mesh.comm.rank == 0:
                    loop.writer.say(f"THE WEIGHTS OF STEP {step} ARE IN {second.folder.parent}, not in {loop.folder}")
                return Saved(step, second.folder.parent)
        if not _agree_to_go_on(loop, interrupt, end_at):
            break
        if is_first and loop.mesh.comm.rank == 0:
            loop.writer.say(
                f"THE WEIGHTS OF STEP {step} ARE NOT SAVED: make room for {format_bytes(loop.writer.nbytes)} per rank "
                f"in {loop.writer.folder}; trying again for {options.retry_s:.0f} s"
            )
        is_first = False
        loop.recorder.at("waiting for room for the last checkpoint")
        time.sleep(RETRY_EVERY_S)
        if _write(loop, loop.writer):
            return Saved(step, loop.folder)
    newest = tell(loop.mesh.comm, "" if loop.writer.last is None else str(loop.writer.last))
    saved = int(newest) if newest else None
    if loop.mesh.comm.rank == 0:
        kept = f"the newest that are saved are of step {saved}" if saved is not None else "none are saved"
        loop.writer.say(f"THE WEIGHTS OF STEP {step} ARE LOST: {kept}")
    return Saved(saved, loop.folder)


def _write(loop: Loop, writer: Writer) -> bool:
    """Whether a checkpoint of now could be written, on every rank."""
    loop.checkpoint(writer)
    return _is_saved(loop, writer)


def _is_saved(loop: Loop, writer: Writer) -> bool:
    """What rank 0 knows, on every rank: it is the one that makes a checkpoint of what all have written."""
    comm = loop.mesh.comm
    mine = comm.rank == 0 and writer.last == loop.progress.step
    return bool(comm.all_reduce(np.array([mine], np.float64))[0] > 0)


def _agree_to_go_on(loop: Loop, interrupt: Interrupt, end_at: float) -> bool:
    """Rank 0's clock decides, and any rank that was asked to stop."""
    comm = loop.mesh.comm
    is_over = interrupt.stop_requested or (comm.rank == 0 and time.monotonic() + RETRY_EVERY_S > end_at)
    return not comm.all_reduce(np.array([is_over], np.float64))[0] > 0


def _second_writer(loop: Loop, base: Path) -> Writer | None:
    """Into a copy of the run's folder without its checkpoints; None where that cannot be made."""
    copied = ""
    if loop.mesh.comm.rank == 0:
        try:
            copied = str(copy_run(loop.folder, base))
        except RunError as error:
            loop.writer.say(f"CHECKPOINT.FALLBACK_DIR CANNOT BE USED: {error}")
    folder = tell(loop.mesh.comm, copied)
    return loop.writer.into(Path(folder) / CHECKPOINTS) if folder else None
