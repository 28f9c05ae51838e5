"""`fit(config)` trains, wherever it is called, and writes everything a run's folder holds except the page.

In order: refuse what cannot begin, make the folder, predict, write the environment, train, write the rows. Inside a job
(mpiexec, srun, torchrun, `tilemesh launch`) this process is that job's rank. Else a plan of one rank trains in this
process, and a plan of several starts them on this machine, watches them, and names who failed. `tilemesh train` is
this function with flags before it and a page after it. No torch where ranks are started: who waits needs none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilemesh.core.context import membership
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.launch.blame import Failure
from tilemesh.launch.job import Outcome, launch
from tilemesh.launch.output import Sink
from tilemesh.measure.busy import OtherWork
from tilemesh.measure.machine import count_gpus, usable_gpus
from tilemesh.measure.row import Row, write_rows
from tilemesh.model.families.carried import copy_carried
from tilemesh.runs import folder as folders
from tilemesh.runs.base import write_base
from tilemesh.runs.files import write_text
from tilemesh.runs.journal import Journal
from tilemesh.runs.lock import RunLock
from tilemesh.runs.metrics import FAILED, MESH, RESTART, STARTED, STOPPED, last_line, last_step
from tilemesh.runs.names import CARRIED, CONFIG, PREDICTED, ROWS, SUMMARY
from tilemesh.train.check import TRAINING, JobRequest, RankProgram, check_init, check_job, program_for
from tilemesh.train.config import TrainConfig, of_run
from tilemesh.train.elastic import LostRanks, change_words, check_min_ranks, fit_to_ranks
from tilemesh.train.events import Listener, ignore, sink_to
from tilemesh.train.load import settled
from tilemesh.train.result import RanksFailedError, Result, WeightsLostError

if TYPE_CHECKING:
    from tilemesh.comm.runtime.communicator import Communicator


INTERRUPT_GRACE_S = 120.0  # after Ctrl-C: a step has to end and a checkpoint to be written


@dataclasses.dataclass(frozen=True)
class FitRequest(JobRequest):
    """What `fit` was called with, besides the configuration."""

    command: str | None = None
    listener: Listener = ignore

    def say(self, text: str) -> None:
        """A line of the process that starts ranks."""
        self.listener({"kind": "launcher", "text": text})


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
    program: RankProgram = TRAINING,
    min_ranks: int | None = None,
) -> Result:
    """Train and return the result.

    `run`: the folder to write (default: a new one under runs/, with `name` in its name). `resume`: a run's folder to go
    on with, from its newest sound checkpoint; `config` then changes what it says. `init`: a Hugging Face folder to take
    the weights from. `restarts`: how often failed ranks are started again. `stop_after`: stop after this step.
    `in_process`: whether a plan of one rank trains in this process; by default it does, unless there are restarts.
    `command`: what environment.json says was typed; by default this process's command line.
    Raises `WeightsLostError` where the run came to its end and its last weights could not be saved anywhere.
    `on_event` hears what happens (`train/events.py`); `fit` itself prints nothing. `Shown()` is one that prints.
    `program`: what ranks do, where that is not to train on text.
    `min_ranks`: with how few ranks the run may go on where some are lost, laid out anew, until they are back. A run
    that another launcher starts again then goes on in its folder `run`.
    """
    if config is None:
        if resume is None:
            raise UsageError("fit needs a config, or a run to resume")
        config = of_run(resume)
    config = settled(config.with_base(init) if isinstance(config, TrainConfig) else config)
    program = program_for(config, program)
    job = (run, name, resume, init, transport, restarts, stop_after, program, min_ranks)
    request = FitRequest(*job, command, on_event or ignore)
    member = membership()
    if min_ranks is not None:
        check_min_ranks(config, min_ranks)
        config = config if member is None else fit_to_ranks(config, member.size, min_ranks, usable_gpus())
    check_job(config, request)
    if resume is not None and folders.newest_checkpoint(resume) is None:
        request = dataclasses.replace(request, init=folders.first_weights(resume))
        check_init(request.init)
    ranks = config.ranks + program.beside
    if in_process is None:
        in_process = ranks == 1 and not restarts
    elif in_process and ranks > 1 and member is None:
        raise UsageError(f"in_process and a plan of {ranks} ranks: one process is one rank")
    with contextlib.ExitStack() as locks:
        is_rank = member is not None or in_process
        result = _train_here(config, request, locks) if is_rank else _start_ranks(config, request, locks)
    if result.saved_step != result.step:
        raise WeightsLostError(result)
    return result


def _train_here(config: TrainConfig, request: FitRequest, locks: contextlib.ExitStack) -> Result:
    """As the rank that this process is, or as the only one."""
    from tilemesh.comm.connection import connect  # late: numpy, MPI and torch, which a process that waits does not need
    from tilemesh.train.rank import print_line

    comm = connect(request.transport, timeout_s=config.train.timeout_s)
    comm.watch.process.tell_waits(print_line)
    folder, is_resumed = _agreed_folder(config, request, locks, comm)
    others = OtherWork() if comm.size == 1 else None  # one rank of several does not know what is theirs
    program: Any = importlib.import_module(request.program.module)
    try:
        result: Result = program.train_here(
            config,
            folder,
            comm,
            resume=is_resumed,
            init=request.init,
            stop_after=request.stop_after,
            emit=request.listener if comm.rank == 0 else ignore,
        )
    except Exception as error:
        # As the process that starts ranks does; a run that stopped itself has said why.
        if comm.rank == 0 and last_line(folder).get("kind") != STOPPED:
            Journal(folder).add(FAILED, last_step(folder), why=f"{type(error).__name__}: {error}")
        raise
    if others is not None:
        _note(folder, others)
    return dataclasses.replace(result, rows=_rows(folder, request.program)) if comm.rank == 0 else result


def _agreed_folder(
    config: TrainConfig, request: FitRequest, locks: contextlib.ExitStack, comm: Communicator
) -> tuple[Path, bool]:
    """The folder that rank 0 has made, on every rank, and whether there is a run in it to go on with."""
    from tilemesh.parallel.agree import tell

    message = "[]"
    if comm.rank == 0:
        request = _gone_on(config, request)
        message = json.dumps([str(_prepared(config, request, locks).resolve()), request.resume is not None])
    folder, is_resumed = json.loads(message if comm.size == 1 else tell(comm, message))
    return Path(folder), is_resumed


def _gone_on(config: TrainConfig, request: FitRequest) -> FitRequest:
    """What is asked of a rank that somebody starts again with the same command: to go on where there is a run."""
    run = request.run
    if request.min_ranks is None or run is None or not (Path(run) / CONFIG).exists():
        return request
    request = dataclasses.replace(request, run=None, init=None, resume=run)
    check_job(config, request)
    if folders.newest_checkpoint(run) is None:
        request = dataclasses.replace(request, init=folders.first_weights(run))
    return request


def _start_ranks(config: TrainConfig, request: FitRequest, locks: contextlib.ExitStack) -> Result:
    folder = _prepared(config, request, locks)
    ended: dict[str, Any] = {}

    def hear(event: Mapping[str, Any]) -> None:
        if event["kind"] == "end":
            ended.update(event)
        request.listener(event)

    others = OtherWork()
    outcome = launch_ranks(config, folder, request, sink_to(hear), request.say)
    _note(folder, others)
    sentence = outcome.sentence(config.ranks + request.program.beside)
    # A rank that is interrupted before the loop ends well and has nothing to tell.
    if outcome.failure is not None or not ended:
        raise RanksFailedError(sentence, folder, outcome.interrupted)
    by_signal = sentence if outcome.interrupted else ""
    return Result.of_event(ended, folder, rows=_rows(folder, request.program), by_signal=by_signal)


def launch_ranks(
    config: TrainConfig, folder: Path, request: JobRequest, sink: Sink, say: Callable[[str], None]
) -> Outcome:
    """Start the ranks of a run on this machine and wait for them.

    Why ranks died is known here alone, so it is this process that writes it into the run's metrics.
    """
    command = ["-m", request.program.module, str(folder), "--resume", "yes" if request.resume is not None else "no"]
    if request.init is not None:
        command += ["--init", str(request.init)]
    if request.stop_after is not None:
        command += ["--stop-after", str(request.stop_after)]
    transport = request.transport
    if transport == "auto" and usable_gpus() and config.train.device != "cpu":
        transport = "torch"  # GPUs exchange over NCCL

    lost = None if request.min_ranks is None else LostRanks(folder, config, request.min_ranks, count_gpus)

    def note(kind: str, why: str) -> None:
        Journal(folder, True, say).add(kind, last_step(folder), why=why)

    def again(failure: Failure) -> int | None:
        note(RESTART, failure.sentence())
        if lost is None:
            return None
        after = lost.after(failure)
        _change_layout(folder, after, request, say)
        return after.ranks

    outcome = launch(
        command,
        ranks=config.ranks + request.program.beside,
        transport=transport,
        restarts=request.restarts,
        sink=sink,
        interrupt_grace_s=INTERRUPT_GRACE_S,
        say=say,
        again=again,
    )
    # A run that stopped itself has said why.
    if outcome.failure is not None and not outcome.interrupted and last_line(folder).get("kind") != STOPPED:
        note(FAILED, outcome.failure.sentence())
    return outcome


# ---- what is written before and after --------------------------------------------------------------------------


def _prepared(config: TrainConfig, request: FitRequest, locks: contextlib.ExitStack) -> Path:
    """The run's folder with what is known before it begins; one under `checkpoint.fallback_dir`, where that was named
    and the run's own cannot be written into. Its lock is locks until `locks` ends: nobody else may train in it."""
    try:
        own = folders.make_folder(request.run, request.name) if request.resume is None else Path(request.resume)
        return _begin(own, config, request, locks)
    except (OSError, RunError) as error:
        base = config.checkpoint.fallback_dir
        if base is None:
            raise
        if request.resume is None:
            second = folders.fresh_folder(base, Path(request.run or request.name).resolve().name)
        else:
            own = Path(request.resume)
            second = folders.copy_run(own, base, folders.newest_whole_checkpoint(own))
        request.say(f"THE RUN IS IN {second}: {error}")
        return _begin(second, config, request, locks)


def _begin(folder: Path, config: TrainConfig, request: FitRequest, locks: contextlib.ExitStack) -> Path:
    """Lock a run's folder and write what is known before it begins: configuration, prediction, environment."""
    locks.enter_context(RunLock(folder, request.say))
    if request.resume is None:
        folders.new_run(request.program.kind, config.to_toml(), folder, init=request.init)
    elif (before := of_run(folder)) != config:
        folders.change_config(folder, config.to_toml())
    for name, text in request.program.files.items():
        write_text(folder / name, text)
    if folders.newest_checkpoint(folder) is None:  # new, or ended before it had one
        if request.init is not None or config.lora.rank:
            copy_carried(request.init or config.lora.base or "", folder / CARRIED, with_config=True)
        if config.lora.rank and config.lora.base is not None:
            write_base(folder, config.lora.base)
    folders.write_prediction(folder, request.program.predict(config, usable_gpus()))
    folders.write_environment(folder, request.command)
    if request.resume is None:
        Journal(folder).add(STARTED, 0)
    elif request.min_ranks is not None and before.plan != config.plan:
        _say_layout(folder, before.plan, config.plan, request.say)
    request.listener({"kind": "run", "folder": str(folder)})
    return folder


def _change_layout(folder: Path, config: TrainConfig, request: JobRequest, say: Callable[[str], None]) -> None:
    """Let the next attempt find another mesh in the run's folder, and say so."""
    before = of_run(folder)
    if before.plan == config.plan:
        return
    folders.change_config(folder, config.to_toml())
    folders.write_prediction(folder, request.program.predict(config, usable_gpus()))
    _say_layout(folder, before.plan, config.plan, say)


def _say_layout(folder: Path, before: ParallelPlan, after: ParallelPlan, say: Callable[[str], None]) -> None:
    words = change_words(before, after, folders.read_small(folder, PREDICTED).get("step_time_s"))
    Journal(folder, True, say).add(MESH, last_step(folder), text=words)
    say(words)


def _note(folder: Path, others: OtherWork) -> None:
    """How much else the machine had to do meanwhile, in the run's folder: the page says so where it was too much."""
    with contextlib.suppress(OSError, RunError):  # the disk may be full
        folders.write_busyness(folder, others.busyness())


def _rows(folder: Path, program: RankProgram) -> list[Row]:
    """Made of the summary and the prediction, and written beside them; none where there is no summary."""
    summary = folders.read_small(folder, SUMMARY)
    measured = program.rows(summary, folders.read_small(folder, PREDICTED)) if summary else []
    with contextlib.suppress(RunError):  # the disk may be full; what is returned was measured all the same
        write_rows(measured, folder / ROWS)
    return measured
