"""What `tilemesh train` does: make a configuration of what was typed, call `train.fit`, and show what it came to."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tilemesh.cli import report_run
from tilemesh.compress.recipe import is_file_text
from tilemesh.core.context import Membership, membership
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.units import format_bytes, format_seconds, parse_seconds
from tilemesh.launch.rank import INTERRUPTED_CODE, run_command
from tilemesh.measure.machine import stamp, usable_gpus
from tilemesh.measure.row import write_rows
from tilemesh.measure.table import print_rows, print_words, wrapped
from tilemesh.runs import folder as folders
from tilemesh.runs.names import CHECKPOINTS, CONFIG, METRICS, SAMPLE, SUMMARY, TRACE
from tilemesh.train.check import check_job
from tilemesh.train.config import DEFAULT_PRESET, TrainConfig, of_run
from tilemesh.train.job import fit
from tilemesh.train.load import load
from tilemesh.train.preview import preview
from tilemesh.train.progress import Shown
from tilemesh.train.result import RanksFailedError, Result, WeightsLostError
from tilemesh.train.rows import run_mfu_words

WIDTH = 100
"""Columns that text for people takes at most."""
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
    recipe: str | None = None
    run: str | None = None
    restarts: int = 0
    transport: str = "auto"
    max_time: str | None = None
    stop_after: int | None = None
    fallback_dir: str | None = None
    json: str | None = None
    typed: str = ""
    """The command, where ranks are started with another."""


def run(asked: Asked) -> int:
    """Train as asked; the exit code."""
    member = membership()
    config = configuration(asked, member)
    if member is not None:
        return _as_rank(asked, config, member)
    console = Console(stderr=asked.json == "-", highlight=False, markup=False)
    shown = Shown(console)
    lost = ""
    try:
        result = fit_asked(asked, config, shown)
    except WeightsLostError as error:
        result, lost = error.result, f"tilemesh: {error}"
    except RanksFailedError as error:
        shown.close()
        write_page(error.folder)
        if error.interrupted:
            return _stopped(error.folder, str(error))
        _hint(error.folder, console)
        print(f"tilemesh: {error}", file=sys.stderr)
        return 1
    finally:
        shown.close()
    page = write_page(result.folder)
    if result.by_signal:
        if lost:
            print(lost, file=sys.stderr)
        return _stopped(result.saved_in or result.folder, result.by_signal)
    return show(result, console, asked.json, page, lost)


def show_preview(asked: Asked) -> int:
    """Print what would run; the exit code."""
    member = membership()
    config = with_fallback(configuration(asked, member), asked)
    seen = preview(config, **_job(asked))
    if member is not None and member.rank:
        return 0
    if asked.json is not None:  # before the text, which a reader may not take whole
        write_rows(seen.rows(), asked.json)
    console = Console(stderr=asked.json == "-", highlight=False, markup=False)
    width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    for subject, words in seen.lines():
        start = f"{subject + ':':9}"
        console.print(wrapped(words, width, start, " " * len(start)), soft_wrap=True)
    console.print("nothing was started: leave --dry-run out to train", soft_wrap=True)
    return 0


def with_fallback(config: TrainConfig, asked: Asked) -> TrainConfig:
    """The configuration with the second place for the last checkpoint that the command line names."""
    if asked.fallback_dir is None:
        return config
    kept = dataclasses.replace(config.checkpoint, fallback_dir=Path(asked.fallback_dir))
    return dataclasses.replace(config, checkpoint=kept)


def _job(asked: Asked) -> dict[str, Any]:
    """What `fit` and `preview` are both told beside the configuration."""
    return {
        "run": asked.run,
        "name": Path(asked.config or DEFAULT_PRESET).stem,
        "resume": asked.resume,
        "init": asked.init,
        "transport": asked.transport,
        "restarts": asked.restarts,
        "stop_after": asked.stop_after,
    }


def fit_asked(asked: Asked, config: TrainConfig, shown: Shown) -> Result:
    return fit(
        with_fallback(config, asked),
        **_job(asked),
        in_process=False,
        command=asked.typed or None,
        on_event=shown,
    )


def configuration(asked: Asked, member: Membership | None) -> TrainConfig:
    """The run that is asked for: a preset or file, or a run's own configuration with changes."""
    ranks = asked.ranks
    if member is not None:
        if ranks is not None and ranks != member.size:
            raise UsageError(f"--ranks {ranks} inside a job of {member.size} ranks: leave --ranks out here")
        ranks = member.size if asked.mesh is None and asked.plan is None and asked.resume is None else None
    limit: tuple[str, ...] = ()
    if asked.max_time is not None:
        seconds = parse_seconds(asked.max_time)
        if not seconds:  # train.max_time_s = 0 is a run without a limit, which no one asks for by a time
            raise UsageError(f"--max-time is {asked.max_time}: expected more than nothing; leave it out for no limit")
        limit = (f"train.max_time_s={seconds}",)
    return load(
        asked.config,
        sets=(*asked.sets, *limit),
        mesh=asked.mesh,
        plan=asked.plan,
        ranks=ranks,
        gpus=len(usable_gpus()),
        init=asked.init,
        resume=asked.resume,
        recipe=asked.recipe,
    )


def _as_rank(asked: Asked, config: TrainConfig, member: Membership) -> int:
    """Inside mpiexec, srun or torchrun: this process is the rank it already is."""
    check_job(
        config,
        run=asked.run,
        resume=asked.resume,
        init=asked.init,
        transport=asked.transport,
        restarts=asked.restarts,
        stop_after=asked.stop_after,
    )
    typed = f"{member.starter}, {member.size} ranks: {stamp()['command']}"
    command = ["-m", "tilemesh.cli.train_rank", json.dumps(dataclasses.asdict(dataclasses.replace(asked, typed=typed)))]
    run_command(command, member)


# ---- afterwards ------------------------------------------------------------------------------------------------


def show(result: Result, console: Console, json_file: str | None, page: str, lost: str) -> int:
    """What a run came to and where everything is; the exit code. `lost`: the last line, where weights are."""
    if json_file is not None:  # before the text, which a reader may not take whole
        write_rows(result.rows, json_file)
    summary = folders.read_small(result.folder, SUMMARY)
    if summary.get("step") == result.step:
        _show_summary(result, summary, console)
    else:
        lost = lost or f"tilemesh: {result.folder} has no {SUMMARY} of step {result.step}: was the disk full?"
    console.print(page, soft_wrap=True)
    if not lost:
        return 0
    console.file.flush()
    print(lost, file=sys.stderr, flush=True)
    return 1


def _show_summary(result: Result, summary: Mapping[str, Any], console: Console) -> None:
    """The sample, the rows, where the time went, and how to go on."""
    folder, made = result.folder, result.rows
    sample = folder / SAMPLE
    if sample.exists() and not summary["interrupted"]:
        console.print(f"\n--- sample\n{sample.read_text(errors='replace')}\n---\n", soft_wrap=True)
    print_rows(made, console)
    share = summary["shares"]
    words = ", ".join(f"{name} {share[key]:.0%}".replace("%", " %") for key, name in _SHARES)
    if summary["step_time_s"] is None:
        print_words("\na step: too few were timed to say where the time goes", console)
    else:
        print_words(f"\na step: {words}\nto improve: {summary['improve']}", console)
    if counted := run_mfu_words(summary, made):
        print_words(counted, console)
    baseline = max(summary["memory_baseline_bytes"])
    if baseline:
        print_words(f"memory: beside the model's, the process itself takes {format_bytes(baseline)} per rank", console)
    held = "" if summary["held_out"] is None else f", held-out {summary['held_out']:.3f}"
    first = summary["seconds_to_first_step"]
    asked = of_run(folder)
    taught = " (with the teacher's part)" if asked.distill.teacher is not None else ""
    words = f"training loss {summary['loss']:.3f}{taught}{held} nats per token after {summary['step']} steps, "
    words += f"{format_seconds(summary['seconds'])} in all"
    if summary.get("bits_per_byte") is not None:
        words += f", {summary['bits_per_byte']:.3f} bits per byte held out"
    words += f", first step after {format_seconds(first)}" if first is not None else "; there was nothing left to do"
    print_words(words, console)
    more = f"train.steps={2 * summary['step']}"
    if summary["step"] < asked.train.steps:  # early stopping ended it
        more = f"evaluate.patience={2 * asked.evaluate.patience}"
    further = "" if summary["interrupted"] else f" --set {more}"
    print_words(f"written: {folder} ({CONFIG}, {METRICS}, {TRACE} for ui.perfetto.dev, {SUMMARY})", console)
    if result.saved_step is None:
        return
    weights, step = result.saved_in or folder, result.saved_step
    again = further if step == result.step else ""
    console.print(
        f"weights: step {step}, {weights / CHECKPOINTS}\n"
        f"go on:   {program()} train --resume {weights}{again}\n"
        f"write:   {program()} generate {weights} --prompt 'import '",
        soft_wrap=True,
    )
    if asked.compress.recipe:
        recipe = "FILE" if is_file_text(asked.compress.recipe) else asked.compress.recipe
        console.print(f"shrink:  {program()} compress {weights} --recipe {recipe} --out FOLDER", soft_wrap=True)


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


def _stopped(folder: Path, sentence: str) -> int:
    step = folders.newest_checkpoint(folder)
    if step is None:
        print(f"tilemesh: {sentence}; there was no checkpoint yet", file=sys.stderr)
    else:
        print(f"tilemesh: {sentence}; checkpoint of step {step} written, go on with:", file=sys.stderr)
        print(f"{program()} train --resume {folder}", file=sys.stderr)
    return INTERRUPTED_CODE


def _hint(folder: Path, console: Console) -> None:
    step = folders.newest_whole_checkpoint(folder)
    if step is not None:
        console.print(f"the last good checkpoint is of step {step}; go on with: {program()} train --resume {folder}")
