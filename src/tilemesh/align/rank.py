"""A rank of a run that learns from feedback: `python -m tilemesh.align.rank RUN`, or `train_here`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilemesh.align.lessons import lessons_of
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.train import rank
from tilemesh.train.config import TrainConfig
from tilemesh.train.result import Result


def main(argv: Sequence[str]) -> int:
    return rank.main(argv, lessons=lessons_of(Path(argv[0])))


def train_here(config: TrainConfig, folder: Path, comm: Communicator, **options: Any) -> Result:
    """As one rank of `comm`."""
    return rank.train_here(config, folder, comm, lessons=lessons_of(folder), **options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
