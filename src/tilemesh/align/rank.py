"""A rank of a run that learns from feedback: `python -m tilemesh.align.rank RUN`, or `train_here`.

Ranks beyond those of the plan only draw answers. The first rank that trains is linked with them.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilemesh.align.config import of_run
from tilemesh.align.lessons import lessons_of
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError
from tilemesh.launch.board import my_status
from tilemesh.train import rank
from tilemesh.train.config import TrainConfig
from tilemesh.train.loop import Interrupt
from tilemesh.train.result import Result


def main(argv: Sequence[str]) -> int:
    return rank.main(argv, train_here)


def train_here(config: TrainConfig, folder: Path, comm: Communicator, **options: Any) -> Result:
    """As one rank of `comm`."""
    beside = of_run(folder).align.ranks_beside
    if not beside:
        return rank.train_here(config, folder, comm, lessons=lessons_of(folder), **options)
    if comm.size != config.plan.world + beside:
        raise UsageError(
            f"{comm.size} ranks: expected {config.plan.world} that train and {beside} that draw answers "
            "(align.rollout_ranks)"
        )
    trains = comm.rank < config.plan.world
    mine = comm.split(0 if trains else 1)
    link = comm.split(0 if comm.rank == 0 or not trains else None)
    assert mine is not None
    if trains:
        return rank.train_here(config, folder, mine, lessons=lessons_of(folder, link), **options)
    assert link is not None
    _draw(config, folder, comm, link, **options)
    return Result(folder, 0, math.nan, None, False, saved_step=0, saved_in=folder)


def _draw(config: TrainConfig, folder: Path, comm: Communicator, link: Communicator, **options: Any) -> None:
    """Answers for the others, until they need no more. Who trains decides when a run stops."""
    task, lessons = rank.RankTask(config, folder, **options), lessons_of(folder)(config)
    with contextlib.closing(Interrupt((signal.SIGINT,))), contextlib.closing(lessons):
        lessons.open()
        recorder = task.recorder(comm.rank, my_status().at)
        lessons.serve_answers(link, rank.choose_device(config, comm), recorder)
        recorder.trace.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
