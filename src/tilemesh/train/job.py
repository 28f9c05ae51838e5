"""`fit(config)` trains, wherever it is called, and writes everything a run's folder holds except the page.

In order: refuse what cannot begin, make the folder, predict, write the environment, train, write the rows. Inside a job
(mpiexec, srun, torchrun, `tilemesh launch`) this process is that job's rank. Else a plan of one rank trains in this
process, and a plan of several starts them on this machine, watches them, and names who failed. `tilemesh train` is
this function with flags before it and a page after it. No torch where ranks are started: who waits needs none.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilemesh.core.context import membership
from tilemesh.core.errors import RunError, UsageError
from tilemesh.measure.busy import OtherWork
from tilemesh.measure.machine import usable_gpus
from tilemesh.measure.row import Row, write_rows
from tilemesh.model.families.carried import copy_carried
from tilemesh.runs import folder as folders
from tilemesh.runs.base import write_base
from tilemesh.runs.journal import Journal
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.lock import RunLock
from tilemesh.runs.metrics import FAILED, STARTED, STOPPED, last_line, last_step
from tilemesh.runs.names import CARRIED, PREDICTED, ROWS, SUMMARY
from tilemesh.train.check import check_init, check_job
from tilemesh.train.config import TrainConfig, of_run
from tilemesh.train.events import Listener, ignore, sink_to
from tilemesh.train.load import settled
from tilemesh.train.predict import predict_run
from tilemesh.train.result import RanksFailedError, Result, WeightsLostError
from tilemesh.train.rows import rows
from tilemesh.train.start import start

if TYPE_CHECKING:
    from tilemesh.comm.runtime.communicator import Communicator


@dataclasses.dataclass(frozen=True)
class FitRequest:
    """What `fit` was asked for, besides the configuration."""

    run: str | Path | None = None
    name: str = "run"
    resume: str | Path | None = None
    init: str | Path | None = None
    transport: str = "auto"
    restarts: int = 0
    stop_after: int | None = None
    command: str | None = None
    listener: Listener = ignore


def fit(
    config: TrainConfig | None = None,
    *,
    run: str | Path | None = None,
    name: str = "run",
    resume: str | Path | None = None,
    init: str | Path | None = None,
    transport: str = "auto",
    restarts: int = 0,
    stop_after: int | None = None,
    in_process: bool | None = None,
    command: str | None = None,
    on_event: Listener | None = None,
) -> Result:
    """Train and return what it came to.

    `run`: the folder to write (default: a new one under runs/, with `name` in its name). `resume`: a run's folder to go
    on with, from its newest sound checkpoint; `config` then changes what it says. `init`: a Hugging Face folder to take
    the weights from. `restarts`: how often failed ranks are started again. `stop_after`: stop after this step.
    `in_process`: whether a plan of one rank trains in this process; by default it does, unless there are restarts.
    `command`: what environment.json says was typed; by default this process's command line.
    Raises `WeightsLostError` where the run came to its end and its last weights could not be saved anywhere.
    `on_event` hears what happens (`train/events.py`); `fit` itself prints nothing. `Shown()` is one that prints.
    """
    if config is None:
        if resume is None:
            raise UsageError("fit needs a config, or a run to resume")
        config = of_run(resume)
    config = settled(config.with_base(init) if isinstance(config, TrainConfig) else config)
    check_job(
        config,
        run=run,
        name=name,
        resume=resume,
        init=init,
        transport=transport,
        restarts=restarts,
        stop_after=stop_after,
    )
    if resume is not None and folders.newest_checkpoint(resume) is None:
        check_init(init := folders.first_weights(resume))
    asked = FitRequest(run, name, resume, init, transport, restarts, stop_after, command, on_event or ignore)
    if in_process is None:
        in_process = config.ranks == 1 and not restarts
    elif in_process and config.ranks > 1 and membership() is None:
        raise UsageError(f"in_process and a plan of {config.ranks} ranks: one process is one rank")
    with contextlib.ExitStack() as held:
        is_rank = membership() is not None or in_process
        result = _train_here(config, asked, held) if is_rank else _start_ranks(config, asked, held)
    if result.saved_step != result.step:
        raise WeightsLostError(result)
    return result


def _train_here(config: TrainConfig, asked: FitRequest, held: contextlib.ExitStack) -> Result:
    """As the rank that this process is, or as the only one."""
    from tilemesh.comm.connection import connect  # late: numpy, MPI and torch, which a process that waits does not need
    from tilemesh.train.rank import told, train_here

    comm = connect(asked.transport, timeout_s=config.train.timeout_s)
    comm.watch.process.tell_waits(told)
    folder = _agreed_folder(config, asked, held, comm)
    others = OtherWork() if comm.size == 1 else None  # one rank of several does not know what is theirs
    try:
        result = train_here(
            config,
            folder,
            comm,
            resume=asked.resume is not None,
            init=asked.init,
            stop_after=asked.stop_after,
            emit=asked.listener if comm.rank == 0 else ignore,
        )
    except Exception as error:
        # As the process that starts ranks does; a run that stopped itself has said why.
        if comm.rank == 0 and last_line(folder).get("kind") != STOPPED:
            Journal(folder).add(FAILED, last_step(folder), why=f"{type(error).__name__}: {error}")
        raise
    if others is not None:
        _note(folder, others)
    return dataclasses.replace(result, rows=_rows(folder)) if comm.rank == 0 else result


def _agreed_folder(config: TrainConfig, asked: FitRequest, held: contextlib.ExitStack, comm: Communicator) -> Path:
    """The folder that rank 0 has made, on every rank."""
    if comm.size == 1:
        return _prepared(config, asked, held)
    from tilemesh.parallel.agree import tell

    return Path(tell(comm, str(_prepared(config, asked, held).resolve()) if comm.rank == 0 else ""))


def _start_ranks(config: TrainConfig, asked: FitRequest, held: contextlib.ExitStack) -> Result:
    folder = _prepared(config, asked, held)
    ended: dict[str, Any] = {}

    def hear(event: Mapping[str, Any]) -> None:
        if event["kind"] == "end":
            ended.update(event)
        asked.listener(event)

    transport = asked.transport
    if transport == "auto" and usable_gpus() and config.train.device != "cpu":
        transport = "torch"  # GPUs exchange over NCCL
    others = OtherWork()
    outcome = start(
        folder,
        config,
        resume=asked.resume is not None,
        init=asked.init,
        transport=transport,
        restarts=asked.restarts,
        stop_after=asked.stop_after,
        sink=sink_to(hear),
        say=lambda text: asked.listener({"kind": "launcher", "text": text}),
    )
    _note(folder, others)
    sentence = outcome.sentence(config.ranks)
    # A rank that is interrupted before the loop ends well and has nothing to tell.
    if outcome.failure is not None or not ended:
        raise RanksFailedError(sentence, folder, outcome.interrupted)
    return Result(
        folder,
        int(ended["step"]),
        float(ended["loss"]),
        ended["held_out"],
        bool(ended["interrupted"]),
        _rows(folder),
        sentence if outcome.interrupted else "",
        ended["saved_step"],
        Path(ended["saved_in"]),
    )


# ---- what is written before and after --------------------------------------------------------------------------


def _prepared(config: TrainConfig, asked: FitRequest, held: contextlib.ExitStack) -> Path:
    """The run's folder with what is known before it begins; one under `checkpoint.fallback_dir`, where that was named
    and the run's own cannot be written into. Its lock is held until `held` ends: nobody else may train in it."""
    try:
        own = folders.make_folder(asked.run, asked.name) if asked.resume is None else Path(asked.resume)
        return _begin(own, config, asked, held)
    except (OSError, RunError) as error:
        base = config.checkpoint.fallback_dir
        if base is None:
            raise
        if asked.resume is None:
            second = folders.fresh_folder(base, Path(asked.run or asked.name).resolve().name)
        else:
            own = Path(asked.resume)
            second = folders.copy_run(own, base, folders.newest_whole_checkpoint(own))
        asked.listener({"kind": "launcher", "text": f"THE RUN IS IN {second}: {error}"})
        return _begin(second, config, asked, held)


def _begin(folder: Path, config: TrainConfig, asked: FitRequest, held: contextlib.ExitStack) -> Path:
    """Lock a run's folder and write what is known before it begins: configuration, prediction, environment."""
    held.enter_context(RunLock(folder, lambda text: asked.listener({"kind": "launcher", "text": text})))
    if asked.resume is None:
        folders.new_run(TRAIN, config.to_toml(), folder, init=asked.init)
    elif of_run(folder) != config:
        folders.change_config(folder, config.to_toml())
    if folders.newest_checkpoint(folder) is None:  # new, or ended before it had one
        if asked.init is not None or config.lora.rank:
            copy_carried(asked.init or config.lora.base or "", folder / CARRIED, with_config=True)
        if config.lora.rank and config.lora.base is not None:
            write_base(folder, config.lora.base)
    folders.write_prediction(folder, predict_run(config, usable_gpus()))
    folders.write_environment(folder, asked.command)
    if asked.resume is None:
        Journal(folder).add(STARTED, 0)
    asked.listener({"kind": "run", "folder": str(folder)})
    return folder


def _note(folder: Path, others: OtherWork) -> None:
    """How much else the machine had to do meanwhile, in the run's folder: the page says so where it was too much."""
    with contextlib.suppress(OSError, RunError):  # the disk may be full
        folders.write_busyness(folder, others.busyness())


def _rows(folder: Path) -> list[Row]:
    """Made of the summary and the prediction, and written beside them; none where there is no summary."""
    summary = folders.read_small(folder, SUMMARY)
    made = rows(summary, folders.read_small(folder, PREDICTED)) if summary else []
    with contextlib.suppress(RunError):  # the disk may be full; what is returned was measured all the same
        write_rows(made, folder / ROWS)
    return made
