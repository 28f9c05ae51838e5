"""What one rank of a run does from its start to its end: `python -m tilemesh.train.rank RUN`, or `train_here`.

In order: meet the others, read the data, lay the model, take up the newest sound checkpoint if there is one to go on
from, loop, write a sample, write the summary. The run's folder says what to do; nothing else is asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tilemesh.comm.connection import connect
from tilemesh.comm.runtime.choose import Choices
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.compress.config import aims, training_recipe
from tilemesh.compress.prepare import between_steps
from tilemesh.core.config import to_dict
from tilemesh.core.context import JOB_VARIABLE, membership
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.exhausted import out_of_memory
from tilemesh.core.heap import keep_freed_memory
from tilemesh.data.corpus import open_corpus
from tilemesh.data.stream import Corpus
from tilemesh.kernels.context import default_context
from tilemesh.launch.board import my_status
from tilemesh.launch.start import ATTEMPT_VARIABLE
from tilemesh.measure.machine import versions
from tilemesh.measure.trace import Trace, merge
from tilemesh.methods.compressed import Compression, compressed_gradients
from tilemesh.methods.local import LocalPeriod, LocalUpdates
from tilemesh.model.eight_bits import fp8_words
from tilemesh.model.programs.program import Use
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.agree import agree, tell
from tilemesh.parallel.apply import lay
from tilemesh.parallel.gradients import Way
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.matrices import MatrixGroup
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.pipeline import Pipeline
from tilemesh.runs import checkpoint
from tilemesh.runs.files import NotThere, Unread, read_object
from tilemesh.runs.folder import newest_checkpoint, read_small
from tilemesh.runs.journal import Journal
from tilemesh.runs.manifest import MODEL
from tilemesh.runs.metrics import STOPPED, WARNING
from tilemesh.runs.names import CHECKPOINTS, CHOICES, PREDICTED, SAMPLE, SUMMARY, TRACE, TRACE_PARTS
from tilemesh.train import summary
from tilemesh.train.asynchronous import AsynchronousStepper, PipelinedGradients
from tilemesh.train.check import memory_advice
from tilemesh.train.config import TrainConfig, of_run
from tilemesh.train.events import Listener, ignore, send
from tilemesh.train.final import save_last
from tilemesh.train.lessons import Lessons, MakeLessons
from tilemesh.train.loggers import Loggers
from tilemesh.train.loop import Interrupt, Loop
from tilemesh.train.memory import peak_bytes
from tilemesh.train.offload import HostOptimizer
from tilemesh.train.optimizer import Optimizer, warning
from tilemesh.train.plain import product_parameters, trained_model, training_use
from tilemesh.train.record import CONTROL, Recorder, observe_mesh
from tilemesh.train.result import Result
from tilemesh.train.resume import begin, load_stored
from tilemesh.train.servers import Seat, ServerOptimizer, WorkerSource, as_server, as_worker, run_server, work
from tilemesh.train.source import Objective, Source
from tilemesh.train.steps import Stepper


@dataclasses.dataclass(frozen=True)
class RankTask:
    """What a rank is to do, whichever it is. `stop_after`: stop after this step as if asked to, the schedule being that
    of the whole run."""

    config: TrainConfig
    folder: Path
    resume: bool = False
    init: str | Path | None = None
    stop_after: int | None = None
    emit: Listener = ignore
    lessons: MakeLessons = Lessons
    initialize: Callable[[Laid], None] | None = None
    """Writes the weights to begin with; none: fresh ones, drawn on the host."""

    @property
    def last_step(self) -> int:
        return min(self.config.train.steps, self.stop_after or self.config.train.steps)

    def recorder(self, rank: int, at: Callable[[str], None]) -> Recorder:
        parts = self.folder / TRACE_PARTS if self.config.train.trace_steps else None
        return Recorder(Trace(parts, rank=rank, resume=self.resume), at)


def main(argv: Sequence[str], here: Callable[..., Result] | None = None) -> int:
    """A rank as the launcher starts it. `resume` also where the launcher starts it again after a fault. `here`: what it
    then does, `train_here` if not given."""
    folder, *rest = argv
    options = dict(zip(rest[::2], rest[1::2], strict=True))
    config = of_run(folder)
    keep_freed_memory()
    my_status().at("connecting")
    comm = connect(timeout_s=config.train.timeout_s)
    comm.watch.process.tell_waits(print_line)
    gc.freeze()  # what was imported stays: no collection need look at it
    again = int(os.environ.get(ATTEMPT_VARIABLE, "0")) > 0
    (here or train_here)(
        config,
        Path(folder),
        comm,
        resume=again or options.get("--resume") == "yes",
        init=options.get("--init"),
        stop_after=int(options["--stop-after"]) if "--stop-after" in options else None,
        emit=send if comm.rank == 0 else ignore,
    )
    return 0


def print_line(text: str) -> None:
    """A rank's word to whoever started it."""
    print(f"tilemesh: {text}", file=sys.stderr, flush=True)


def train_here(config: TrainConfig, folder: Path, comm: Communicator, **options: Any) -> Result:
    """Train as one rank of `comm` and return when the run is done, or stopped with a checkpoint. `options`: those of
    `RankTask`."""
    train = _train_with_servers if config.train.method == "server" else _train_on
    try:
        return train(RankTask(config, folder, **options), comm)
    except Exception as error:
        exhausted = out_of_memory(error)
        if exhausted is None:
            raise
        traceback.clear_frames(error.__traceback__)  # the tensors in them: words need a little memory too
        raise RunError(f"{exhausted}; {memory_advice(config)}") from error


def _train_with_servers(task: RankTask, everyone: Communicator) -> Result:
    """As what this rank is among workers and servers."""
    corpus, seat = open_corpus(task.config.data), Seat(task.config, everyone)
    # The first worker decides when a run stops; from when it may train on, a signal must end none of the others.
    interrupt = Interrupt(() if seat.number == 0 else _stop_signals())
    _agree_on_run(task.config, corpus.fingerprint(), everyone)
    comm = seat.replica()
    if seat.number == 0:  # which notes signals from when it has something to save
        return _train_on(task, comm, seat)
    with contextlib.closing(interrupt):
        _help(task, seat, comm, corpus, interrupt)
    return Result(task.folder, 0, math.nan, None, False, saved_step=0, saved_in=task.folder)


def _help(task: RankTask, seat: Seat, comm: Communicator, corpus: Corpus, interrupt: Interrupt) -> None:
    """As a server, or as a rank of a worker but the first."""
    config, here = task.config, torch.device("cpu")
    baseline = peak_bytes(here)
    if seat.number is None:
        laid = lay_model(as_server(config), Mesh(comm), here, False)
        tell(seat.everyone, "")
        run_server(seat, laid.gradients.stepped, task.folder, interrupt, baseline)
        return
    recorder = task.recorder(seat.everyone.rank, my_status().at)
    mesh = Mesh(comm, **as_worker(config).plan.axes)
    earlier = earlier_choices(task.folder, task.resume, lambda text: None)
    keep_collectives(mesh, Choices(earlier.get("collectives")))
    observe_mesh(mesh, recorder)
    laid = lay_model(as_worker(config), mesh, here, False)
    if config.lora.rank and config.lora.base is not None:
        load_stored(laid, config.lora.base)
    optimizer = ServerOptimizer(seat, laid, task.last_step, recorder)
    source = WorkerSource(config, corpus, seat.axis, here)
    objective = Lessons(config).objective(laid, source)
    stepper = make_stepper(config, laid, optimizer, source, recorder, objective)
    began = json.loads(tell(seat.everyone, ""))
    source.go_on(began["step"], began["position"])
    stepper.scale.load(began["scale"])
    work(seat, stepper, interrupt, baseline)


def _stop_signals() -> tuple[signal.Signals, ...]:
    """A scheduler that wants its machine back sends SIGTERM; our own launcher sends it when a rank has failed."""
    return (signal.SIGINT,) if JOB_VARIABLE in os.environ else (signal.SIGINT, signal.SIGTERM)


def _agree_on_run(config: TrainConfig, data: str, comm: Communicator) -> None:
    """Refuse ranks that were given different configurations or texts."""
    agree(comm, {**_flat(to_dict(config)), "data": data})


def _train_on(task: RankTask, comm: Communicator, seat: Seat | None = None) -> Result:
    """By the loop. `seat`: where this rank is of a worker beside servers, whose ranks `comm` then has."""
    began, config = time.time(), task.config
    my_status().at("step 0: reading the data")
    device = choose_device(config if seat is None else as_worker(config), comm)
    if device.type == "cuda":  # what an earlier run in this process left behind is not this one's
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
    baseline = 0 if device.type == "cuda" else peak_bytes(device)
    lessons = task.lessons(config)
    lessons.open()
    _agree_on_run(config, lessons.fingerprint(), comm)
    my_status().at("step 0: laying the model")
    loop = make_loop(task, comm, seat, lessons, device)
    optimizer, say = loop.optimizer, loop.writer.say
    if comm.rank == 0:
        checkpoint.sweep(task.folder / CHECKPOINTS)
    comm.barrier()
    begin(loop, task.init, task.resume, say)
    if isinstance(optimizer, ServerOptimizer):
        assert seat is not None
        began_at = {"step": loop.progress.step, "position": loop.progress.position}
        tell(seat.everyone, json.dumps({**began_at, "scale": loop.stepper.scale.state()}))
        optimizer.begin(loop.progress.step, starts=True)
    slow = warning(config.plan.precision, device)
    if comm.rank == 0:
        say(_headline(config, loop.mesh, lessons.words(), device))
        narrow = ""
        if config.plan.precision == "fp8":
            narrow = fp8_words(config.model, config.plan.fp8_scales, device)
        for note in filter(None, (lessons.notes(), slow, narrow)):
            say(note)
    with contextlib.closing(lessons):
        _run_loop(loop, Interrupt(_stop_signals(), task.stop_after, config.train.max_time_s))
        result = _finish(loop, lessons, baseline, began)
    if isinstance(optimizer, ServerOptimizer):
        optimizer.end()
    loop.stepper.close()
    return result


def make_loop(task: RankTask, comm: Communicator, seat: Seat | None, lessons: Lessons, device: torch.device) -> Loop:
    """The laid model with its optimizer, data, writer and records."""
    config, folder = task.config, task.folder
    laying = config if seat is None else as_worker(config)

    def say(text: str) -> None:
        if comm.rank:
            print_line(text)
            return
        task.emit({"kind": "say", "text": text})
        # What is shouted is kept; a checkpoint that failed has a line of its own.
        if text.split(" ", 1)[0].isupper() and not text.startswith("CHECKPOINT"):
            journal.add(WARNING, recorder.step, text=text)

    def at(text: str) -> None:
        my_status().at(text)
        comm.watch.process.stage = text

    recorder = task.recorder(comm.rank if seat is None else seat.everyone.rank, at)
    journal = Journal(folder, comm.rank == 0, say)
    mesh = Mesh(comm, **laying.plan.axes)
    earlier = earlier_choices(folder, task.resume, say if comm.rank == 0 else lambda text: None)
    collectives = Choices(earlier.get("collectives"))
    keep_collectives(mesh, collectives)
    observe_mesh(mesh, recorder)
    default_context().keep_to("matmul", earlier["matmul"])
    # Steps are only left unwaited for where the number of targets that count is known beforehand.
    is_steady = seat is None and lessons.is_steady
    late = None if is_steady else False
    laid = lessons.lay(mesh, device)
    if laid is None:
        laid = lay_model(laying, mesh, device, late, lessons.extend, lessons.use_for, task.initialize)
    optimizer: Optimizer
    if seat is None:
        optimizer = make_optimizer(config, laid, config.optimizer_kernels_on(device.type))
    else:
        optimizer = ServerOptimizer(seat, laid, task.last_step, recorder)
    source = lessons.source(laid, recorder, seat)
    writer = checkpoint.Writer(
        folder / CHECKPOINTS,
        comm.rank,
        ranks=comm.size,
        keep=config.checkpoint.keep,
        # States that fill the host's memory have no room there for a copy of them.
        background=config.checkpoint.background and "optimizer" not in config.plan.offloads,
        written_by={MODEL: to_dict(config.model), "plan": config.plan.to_dict(), "versions": versions()}
        | lessons.written_by(),
        say=say,
        note=journal.add,
    )
    stepper = make_stepper(config, laid, optimizer, source, recorder, lessons.objective(laid, source))
    loggers = Loggers(config.log, folder, to_dict(config), say, on=comm.rank == 0)
    return Loop(config, stepper, writer, journal, folder, task.emit, earlier, collectives, loggers)


def _run_loop(loop: Loop, interrupt: Interrupt) -> None:
    """Train, save the last weights, and write down why a run ended before its last step."""
    try:
        loop.run(interrupt)
        loop.saved = save_last(loop, interrupt)
    finally:
        interrupt.close()
        loop.recorder.trace.close()
        if loop.loggers is not None:
            loop.loggers.close()
    step = loop.progress.step
    if loop.interrupted:
        why = "train.max_time_s is over" if interrupt.is_time_over and not interrupt.stop_requested else "asked to stop"
        loop.journal.add(STOPPED, step, why=why)
    if loop.ended_early:
        if loop.steps_done:  # a run that had ended before has said so
            loop.journal.add(STOPPED, step, why=loop.ended_early)
        if loop.mesh.comm.rank == 0:
            loop.writer.say(f"step {step}: {loop.ended_early}; the run ends here")


def earlier_choices(folder: Path, resume: bool, say: Callable[[str], None]) -> dict[str, dict[str, str]]:
    """What `auto` picked in an earlier part of this run; what is not a table of names is picked afresh, and said."""
    afresh = "chosen afresh, and sums may round otherwise than before"
    try:
        choices = read_object(folder / CHOICES)
    except NotThere:
        choices = {}
        if resume and newest_checkpoint(folder) is not None:  # which is written before it
            say(f"LOST CHOICES: {CHOICES} is not there: algorithms are {afresh}")
    except Unread as error:
        choices = {}
        say(f"DAMAGED CHOICES: {CHOICES} is {error}: algorithms are {afresh}")
    tables = {}
    for part in ("collectives", "matmul"):
        table = choices.get(part, {})
        is_sound = isinstance(table, dict) and all(isinstance(name, str) for name in table.values())
        if not is_sound:
            say(f"DAMAGED CHOICES: {CHOICES}: {part} is no table of names: they are {afresh}")
        tables[part] = table if is_sound else {}
    return tables


def keep_collectives(mesh: Mesh, choices: Choices) -> None:
    """Let `auto` repeat the table's picks on this mesh and note new ones: a resumed run then adds in the same order."""
    along = {axis.name: axis.comm for axis in mesh.axes.values()}
    # Without stages that is all ranks, and in a stage along one axis that axis: the later name holds.
    for name, comm in {"stage": mesh.stage, CONTROL: mesh.comm, **along}.items():
        if comm.size > 1:
            comm.keep_to(choices, name)


def lay_model(
    config: TrainConfig,
    mesh: Mesh,
    device: torch.device,
    late: bool | None = None,
    extend: Callable[[Transformer], None] = lambda model: None,
    use_for: Callable[[Use], Use] = lambda use: use,
    initialize: Callable[[Laid], None] | None = None,
) -> Laid:
    """The model of the config on this rank of the mesh, with fresh weights, or those that `initialize` writes.

    `late`: whether steps are not waited for; by default on one GPU alone, unless a loss scale has to be decided on.
    `extend` adds to the model what is trained beside it; `use_for` says what else it is prepared for.
    """
    # Where no rank is to hold the whole, or a base has matrices of few bits, nobody makes dense weights of all layers:
    # each rank draws its own, one by one.
    is_drawn_late = config.plan.has_chunks or config.lora.base is not None or initialize is not None
    model = trained_model(config, device, extend, empty=is_drawn_late)
    if late is None:
        is_alone = config.plan.world == 1 and not config.plan.has_chunks
        late = device.type == "cuda" and is_alone and config.plan.precision != "fp16"
    way = method_gradients(config) or ("local" if late else "bucketed")
    use = use_for(training_use(config, device))
    laid = lay(model, mesh, config.plan, device=device, gradients=way, tokens=config.tokens_per_step, use=use)
    if initialize is not None:
        initialize(laid)
    elif is_drawn_late:
        laid.initialize(config.train.seed)
    laid.module.train()
    return laid


def make_stepper(
    config: TrainConfig,
    laid: Laid,
    optimizer: Optimizer,
    source: Source,
    recorder: Recorder,
    objective: Objective | None = None,
) -> Stepper:
    """What every rank that trains does in a step, whoever exchanges its gradients: the objective (by default that of
    text), the order of passes, and what a recipe changes between steps."""
    objective = objective or Lessons(config).objective(laid, source)
    kind = Stepper
    if isinstance(laid.gradients, PipelinedGradients):
        assert isinstance(laid, Pipeline)
        laid.gradients.join(laid, optimizer, config.method.anneal)
        kind = AsynchronousStepper
    stepper = kind(config, laid, optimizer, source, objective, recorder)
    recipe = training_recipe(config.compress.recipe)
    if recipe is not None:
        stepper.before = between_steps(laid.module, recipe, config.train.steps)
    return stepper


def method_gradients(config: TrainConfig) -> Way | None:
    """Gradients of another method than one exchange of all of them per step; None where it is that."""
    method = config.method
    if config.train.method == "local":
        outer = (method.outer_lr, method.outer_momentum)
        return lambda parts: LocalUpdates(parts, LocalPeriod(method.period, method.start, *outer, config.train.steps))
    if config.plan.is_asynchronous:
        return PipelinedGradients
    if method.compress != "none" and config.train.method == "synchronous":
        seed, start = config.train.seed, method.start
        compression = Compression(method.compress, method.keep, method.rank, seed=seed, start=start)
        return lambda parts: compressed_gradients(parts, compression, config.plan)
    return None


def make_optimizer(config: TrainConfig, laid: Laid, kernels: str) -> Optimizer:
    """Of a laid model: a collective call. `kernels`: who does AdamW's arithmetic, as `Optimizer` takes it."""
    parameters, precision = laid.gradients.stepped, config.plan.precision
    matrices = MatrixGroup(laid.mesh, config.plan) if config.optimizer.name == "muon" else None
    # In 16 bits gradients must neither add up over microbatches nor over ranks: float32 holds what autocast's products
    # give as exactly as 16 bits do, but the sums would round.
    is_exact = precision == "bf16" and laid.gradients.is_late and config.plan.accumulation == 1
    narrowed = product_parameters(laid.module) & parameters.keys() if is_exact else set()
    if "optimizer" in config.plan.offloads:
        optimizer: Optimizer = HostOptimizer(config.optimizer, parameters, precision, kernels, matrices)
    else:
        optimizer = Optimizer(config.optimizer, parameters, precision, kernels, narrowed, matrices)
    if isinstance(laid.gradients, LocalUpdates):
        laid.gradients.average(optimizer.stepped, optimizer.settle)
    return optimizer


# ---- the end ---------------------------------------------------------------------------------------------------


def _finish(loop: Loop, lessons: Lessons, baseline: int, began: float) -> Result:
    comm, progress, config = loop.mesh.comm, loop.progress, loop.config
    recorder, journal = loop.recorder, loop.journal
    before = {} if loop.steps_done else read_small(loop.folder, SUMMARY)
    # Where nothing was left to do, what the steps came to when they were done stays as it was told then.
    stays = (before.get("step"), before.get("interrupted")) == (progress.step, loop.interrupted)
    if stays:
        progress.held_out = before.get("held_out")
        if comm.rank == 0:
            more = "it has ended early; to train on, set evaluate.patience"
            more = more if loop.ended_early else f"all {progress.step} steps are done; for more, set train.steps"
            loop.writer.say(f"nothing left to do: {more}")
    recorder.at("writing a sample")
    text = None
    takes_part = loop.mesh.dp.index == 0 or loop.laid.meets_in_passes
    if not loop.interrupted and config.sample.tokens and takes_part:
        try:
            text = lessons.sample(loop)
        except RunError as error:  # what was trained stays, whatever it can write
            loop.writer.say(f"no sample: {error}")
    recorder.at("summary")
    predicted = read_small(loop.folder, PREDICTED) if comm.rank == 0 else {}
    figures = summary.gather(loop, baseline, began, limit_s=predicted.get("limit_s")) | lessons.figures()
    comm.barrier()
    if comm.rank == 0:
        if not stays:
            journal.summarize(lessons.kind, {**figures, "predicted": predicted} if predicted else figures)
            loop.write_choices()
        if text is not None:
            journal.write(SAMPLE, text)
        if config.train.trace_steps:
            with contextlib.suppress(OSError, UsageError):
                merge(loop.folder / TRACE_PARTS, loop.folder / TRACE)
    result = Result(
        loop.folder, progress.step, progress.loss, progress.held_out, loop.interrupted, saved_step=loop.saved.step,
        saved_in=loop.saved.folder,
    )  # fmt: skip
    loop.emit({"kind": "end", **result.as_event()})
    return result


def choose_device(config: TrainConfig, comm: Communicator) -> torch.device:
    wanted = config.train.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise RunError("train.device is cuda and torch finds no GPU here: set train.device=cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if comm.size > 1 and comm.backend == "threads":
        # Backward passes of a process share one thread per GPU: ranks that meet in there would wait for ever.
        raise UsageError(
            f"{comm.size} ranks that are threads on a GPU: their backward passes would wait for one another; set "
            "train.device=cpu, or start processes with --transport torch or mpi"
        )
    member = membership()
    index = (member.local_rank if member is not None else comm.rank) % torch.cuda.device_count()
    torch.cuda.init()  # type: ignore[no-untyped-call]  # asking for memory's figures does not do it
    torch.cuda.set_device(index)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return torch.device("cuda", index)


def _headline(config: TrainConfig, mesh: Mesh, learnt: str, device: torch.device) -> str:
    threads = torch.get_num_threads()
    where = f"the CPU with {threads} thread{'s' * (threads > 1)}"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    ranks = f"{mesh.comm.backend} between ranks, each on {where}" if config.ranks > 1 else f"on {where}"
    beside = "".join(f"\n{subject} {words}" for subject, words in aims(config.compress, config.distill))
    layout = f"{config.plan.mesh_words}" if config.trains_module else config.plan.describe(config.servers)
    return f"{layout}; {ranks}\n{learnt}{beside}"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = None if isinstance(value, float) and math.isnan(value) else value
    return flat


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
