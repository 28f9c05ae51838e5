"""What `tilemesh train` does: make the run, predict it, start it (or be its rank), and show what it came to."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tilemesh.cli import report_run
from tilemesh.cli.train_rows import predict_run, rows
from tilemesh.core import config as reading
from tilemesh.core.context import Membership, membership
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.data.config import check_source
from tilemesh.launch.job import Outcome
from tilemesh.launch.rank import run_command
from tilemesh.launch.start import check_restarts, choose_transport
from tilemesh.measure.machine import gpu_names, stamp
from tilemesh.measure.row import write_rows
from tilemesh.measure.table import print_rows
from tilemesh.runs import folder as folders
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.names import PREDICTED, ROWS, SAMPLE, SUMMARY
from tilemesh.train import config as configs
from tilemesh.train.config import TrainConfig
from tilemesh.train.progress import Shown
from tilemesh.train.start import start

_SHARES = (
    ("compute", "compute"),
    ("exchange", "exchanges"),
    ("data", "waiting for data"),
    ("idle", "waiting for ranks"),
)


@dataclass(frozen=True)
class Asked:
    """What the command line said, as it was said."""

    config: str | None = None
    ranks: int | None = None
    mesh: str | None = None
    plan: str | None = None
    sets: tuple[str, ...] = ()
    resume: str | None = None
    init: str | None = None
    run: str | None = None
    restarts: int = 0
    transport: str = "auto"
    stop_after: int | None = None
    json: str | None = None
    typed: str = ""
    """The command, where ranks are started with another."""


def run(asked: Asked) -> int:
    """Train as asked; the exit code."""
    member = membership()
    config = configuration(asked, member)
    if member is not None:
        return _as_rank(asked, config, member)
    _check(asked, config)
    console = Console(stderr=asked.json == "-", highlight=False, markup=False)
    folder = _folder(asked, config)
    predicted = predict_run(config, gpu_names())
    folders.write_prediction(folder, predicted)
    folders.write_environment(folder)
    console.print(f"run: {folder}", soft_wrap=True)
    shown = Shown(console)
    try:
        outcome = _started(asked, config, folder, shown)
    finally:
        shown.close()
    page = write_page(folder)
    if outcome.failure is not None and not outcome.interrupted:
        _hint(folder, console)
        print(f"tilemesh: {outcome.sentence(config.plan.world)}", file=sys.stderr)
        return outcome.exit_code
    if outcome.interrupted:
        _stopped(folder, console, outcome.sentence(config.plan.world))
        return outcome.exit_code
    show(folder, console, asked.json)
    console.print(page, soft_wrap=True)
    return 0


def configuration(asked: Asked, member: Membership | None) -> TrainConfig:
    """The run that is asked for: a preset or file, or a run's own configuration with changes."""
    ranks = asked.ranks
    if member is not None:
        if ranks is not None and ranks != member.size:
            raise UsageError(f"--ranks {ranks} inside a job of {member.size} ranks: leave --ranks out here")
        ranks = member.size if asked.mesh is None and asked.plan is None and asked.resume is None else None
    gpus = 0 if "train.device=cpu" in ",".join(asked.sets) else len(gpu_names())
    if asked.resume is None:
        return configs.load(
            asked.config, sets=asked.sets, mesh=asked.mesh, plan=asked.plan, ranks=ranks, gpus=gpus, init=asked.init
        )
    for name in ("config", "run", "init"):
        if getattr(asked, name) is not None:
            raise UsageError(f"--resume goes on with a run as it is: leave {name} out")
    before = configs.of_run(asked.resume)
    made = before
    if asked.sets:
        # The run's own values as a preset: settings over them are checked and converted as anywhere.
        made = reading.load(TrainConfig, preset="run", presets={"run": before}, sets=asked.sets)
        configs.check_resumed(before, made)
    if asked.mesh is not None or asked.plan is not None:
        axes = configs.load(mesh=asked.mesh, plan=asked.plan).plan
        plan = dataclasses.replace(
            made.plan, dp=axes.dp, tp=axes.tp, pp=axes.pp, sequence_parallel=made.plan.sequence_parallel and axes.tp > 1
        )
        made = configs.replace(made, plan=plan)
    return configs.settled(made)


def _check(asked: Asked, config: TrainConfig) -> None:
    """Refuse what no rank could do anything with, before there is a folder or a rank."""
    choose_transport(asked.transport)
    check_restarts(asked.restarts)
    done = (folders.newest_checkpoint(asked.resume) or 0) if asked.resume is not None else 0
    if asked.stop_after is not None and not done < asked.stop_after <= config.train.steps:
        raise UsageError(f"--stop-after {asked.stop_after}: expected a step from {done + 1} to {config.train.steps}")
    check_source(config.data.source)


def _folder(asked: Asked, config: TrainConfig) -> Path:
    if asked.resume is None:
        return folders.new_run(TRAIN, config.to_toml(), asked.run, Path(asked.config or configs.DEFAULT_PRESET).stem)
    folder = Path(asked.resume)
    if configs.of_run(folder) != config:
        folders.change_config(folder, config.to_toml())
    return folder


def _started(asked: Asked, config: TrainConfig, folder: Path, shown: Shown) -> Outcome:
    transport = asked.transport
    if transport == "auto" and gpu_names() and config.train.device != "cpu":
        transport = "torch"  # GPUs talk over nccl
    return start(
        folder,
        config,
        resume=asked.resume is not None,
        init=asked.init,
        transport=transport,
        restarts=asked.restarts,
        stop_after=asked.stop_after,
        sink=shown.line,
    )


def _as_rank(asked: Asked, config: TrainConfig, member: Membership) -> int:
    """Inside mpiexec, srun or torchrun: this process is the rank it already is."""
    if asked.restarts:
        raise UsageError(f"--restarts inside a job that {member.starter} started: ask {member.starter} to restart it")
    if config.plan.world != member.size:
        raise UsageError(f"a mesh of {config.plan.world} ranks in a job of {member.size}: make --mesh agree")
    typed = f"{member.starter}, {member.size} ranks: {stamp()['command']}"
    command = ["-m", "tilemesh.cli.train_rank", json.dumps(dataclasses.asdict(dataclasses.replace(asked, typed=typed)))]
    run_command(command, member)


# ---- afterwards ------------------------------------------------------------------------------------------------


def show(folder: Path, console: Console, json_file: str | None) -> None:
    """The sample, the rows, where the time went, and where everything is."""
    found = folders.read_small(folder, SUMMARY)
    if not found:
        raise RunError(f"{folder} has no {SUMMARY}: was the disk full?")
    sample = folder / SAMPLE
    if sample.exists() and not found["interrupted"]:
        console.print(f"\n--- sample\n{sample.read_text(errors='replace')}\n---\n", soft_wrap=True)
    made = rows(found, folders.read_small(folder, PREDICTED))
    print_rows(made, console)
    with contextlib.suppress(RunError):  # the disk may be full; what is shown was measured all the same
        write_rows(made, folder / ROWS)
    share = found["shares"]
    words = ", ".join(f"{name} {share[key]:.0%}".replace("%", " %") for key, name in _SHARES)
    if found["step_time_s"] is None:
        console.print("\na step: too few were timed to say where the time goes", soft_wrap=True)
    else:
        console.print(f"\na step: {words}\nto improve: {found['improve']}", soft_wrap=True)
    baseline = max(found["memory_baseline_bytes"])
    if baseline:
        console.print(f"memory: beside the model's, the process itself takes {format_bytes(baseline)} a rank")
    held = "" if found["held_out"] is None else f", held-out {found['held_out']:.3f}"
    first = found["seconds_to_first_step"]
    words = f"training loss {found['loss']:.3f}{held} nats a token after {found['step']} steps, "
    words += f"{format_seconds(found['seconds'])} in all"
    words += f", first step after {format_seconds(first)}" if first is not None else "; there was nothing left to do"
    console.print(words, soft_wrap=True)
    further = "" if found["interrupted"] else f" --set train.steps={2 * found['step']}"
    console.print(
        f"written: {folder} (config, metrics.jsonl, checkpoints/, trace.json for ui.perfetto.dev, summary.json)\n"
        f"go on:   {program()} train --resume {folder}{further}\n"
        f"write:   {program()} generate {folder} --prompt 'import '",
        soft_wrap=True,
    )
    if json_file is not None:
        write_rows(made, json_file)


def program() -> str:
    """How to call this command again from here: by its name, or where a shell does not find that, by where it lies."""
    if shutil.which("tilemesh"):
        return "tilemesh"
    script = Path(sys.executable).with_name("tilemesh")
    words = str(script) if script.exists() else sys.executable
    near = os.path.relpath(words)
    return (words if near.startswith("..") else near) + ("" if script.exists() else " -m tilemesh")


def write_page(folder: Path) -> str:
    """Make the run's page, finished or not; a line that says where, or why there is none. Never ends a run."""
    try:
        return f"look:    {report_run.make([str(folder)], None)[0]}"
    except (OSError, RunError, UsageError) as error:
        return f"no page: {error}"


def _stopped(folder: Path, console: Console, sentence: str) -> None:
    step = folders.newest_checkpoint(folder)
    if step is None:
        print(f"tilemesh: {sentence}; there was no checkpoint yet", file=sys.stderr)
    else:
        print(f"tilemesh: {sentence}; checkpoint of step {step} written, go on with:", file=sys.stderr)
        print(f"{program()} train --resume {folder}", file=sys.stderr)


def _hint(folder: Path, console: Console) -> None:
    step = folders.newest_checkpoint(folder)
    if step is not None:
        console.print(f"the last good checkpoint is of step {step}; go on with: {program()} train --resume {folder}")
