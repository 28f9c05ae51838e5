"""The door: `fit(config)` trains, wherever it is called.

Inside a job (mpiexec, srun, torchrun, `tilemesh launch`) it is that job's rank; alone, a plan of one rank trains in
this process and a plan of several starts them on this machine, watches them, and names who failed.
"""

from __future__ import annotations

from pathlib import Path

from tilemesh.comm.connection import connect
from tilemesh.core.context import membership
from tilemesh.core.errors import RunError, UsageError
from tilemesh.parallel.agree import tell
from tilemesh.runs.folder import new_run, read_small
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.metrics import STEP, latest
from tilemesh.runs.names import SUMMARY
from tilemesh.train.config import TrainConfig, check_resumed, of_run, settled
from tilemesh.train.progress import Shown
from tilemesh.train.rank import Result, train_here
from tilemesh.train.start import start


def fit(
    config: TrainConfig | None = None,
    *,
    run: str | Path | None = None,
    resume: str | Path | None = None,
    init: str | Path | None = None,
    transport: str = "auto",
    restarts: int = 0,
    stop_after: int | None = None,
) -> Result:
    """Train and return what it came to.

    `run`: the folder to write (default: a new one under runs/). `resume`: a run's folder to go on with, from its newest
    sound checkpoint; `config` then changes what it says. `init`: a Hugging Face folder to take the weights from.
    `restarts`: how often a failed job of several ranks is started again. `stop_after`: stop after this step.
    """
    if resume is not None and (run is not None or init is not None):
        raise UsageError("resume goes on in its own folder with its own weights: leave run and init out")
    if config is None:
        if resume is None:
            raise UsageError("fit needs a config, or a run to resume")
        config = of_run(resume)
    config = settled(config)
    if resume is not None:
        check_resumed(of_run(resume), config)
    member = membership()
    if member is not None or config.plan.world == 1:
        size = 1 if member is None else member.size
        if size != config.plan.world:
            raise UsageError(f"a plan of {config.plan.world} ranks ({config.plan.describe()}) in a job of {size}")
        comm = connect(timeout_s=config.train.timeout_s)
        made = new_run(TRAIN, config.to_toml(), run) if resume is None and comm.rank == 0 else resume
        folder = Path(tell(comm, str(made)))
        return train_here(config, folder, comm, resume=resume is not None, init=init, stop_after=stop_after)
    folder = Path(resume) if resume is not None else new_run(TRAIN, config.to_toml(), run)
    shown = Shown()
    outcome = start(
        folder,
        config,
        resume=resume is not None,
        init=init,
        transport=transport,
        restarts=restarts,
        stop_after=stop_after,
        sink=shown.line,
    )
    shown.close()
    if outcome.failure is not None:
        raise RunError(outcome.sentence(config.plan.world))
    return result_of(folder)


def result_of(folder: Path) -> Result:
    """What a finished run's files say it came to."""
    found = read_small(folder, SUMMARY)
    steps = [line for line in latest(folder) if line["kind"] == STEP]
    if not found or not steps:
        raise RunError(f"{folder} has no {SUMMARY}: the run has not come to its end")
    return Result(folder, int(found["step"]), float(found["loss"]), found["held_out"], bool(found["interrupted"]))
