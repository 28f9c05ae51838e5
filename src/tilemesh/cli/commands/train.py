"""Train a Transformer, or your own module, on several processes. With checkpoints, restarts and a report."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tilemesh.cli.jobs import fit_or_lost, run_job, show_job, write_page
from tilemesh.cli.output import Block, Output, console_beside, program, tell
from tilemesh.core.errors import UsageError
from tilemesh.core.options import ROWS, Known, OutFile, OutFolder, argument, option
from tilemesh.core.units import format_bytes, format_seconds, parse_seconds
from tilemesh.runs.names import CHECKPOINTS, CONFIG, METRICS, SAMPLE, SUMMARY, TRACE

if TYPE_CHECKING:
    from rich.console import Console

    from tilemesh.core.context import Membership
    from tilemesh.train.config import TrainConfig
    from tilemesh.train.progress import Shown
    from tilemesh.train.result import Result

_SHARES = (
    ("compute", "compute"),
    ("exchange", "exchanges"),
    ("data", "waiting for data"),
    ("idle", "waiting for ranks"),
)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    config: str | None = argument(None, "What to train.", "[CONFIG.toml|PRESET|FILE.py:FUNCTION]")
    ranks: int | None = option(None, "How many; by default what the mesh needs.", "N")
    mesh: str | None = option(None, "How the ranks are laid out.", "dp=2,tp=2")
    plan: str | None = option(None, "A plan of `tilemesh plan --out`.", "PLAN.toml")
    sets: tuple[str, ...] = option((), "train.steps=200,...", "A=B,...", flag="--set")
    pin: tuple[str, ...] = option(
        (), "Of a module of yours: where a tensor lies, as x=dp:S0; again for more.", "NAME=PLACE"
    )
    choose: Annotated[str | None, Known("chooser", "tilemesh.parallel.choose:CHOOSERS")] = option(
        None, "Of a module of yours: who places what is not pinned.", "NAME"
    )
    resume: str | None = option(None, "Go on with a run.", "RUN")
    init: str | None = option(None, "Begin with Hugging Face weights.", "FOLDER")
    recipe: str | None = option(None, "Train for compression: round or prune in every pass.", "NAME|FILE")
    run: OutFolder | None = option(None, "Where to write; by default under runs/.", "FOLDER", flag="--out --run")
    restarts: int = option(0, "How often a failed job goes on by itself.", "N")
    min_ranks: int | None = option(
        None, "Where ranks are lost, go on with at least so many, laid out anew, until they are back.", "N"
    )
    transport: str = option("auto", "mpi, torch or auto.")
    max_time: str | None = option(None, "Stop after 90s, 30m, 2h or 1h30m, with a checkpoint.", "TIME")
    stop_after: int | None = option(None, "Stop there, with a checkpoint.", "STEP")
    fallback_dir: OutFolder | None = option(
        None, "For the last checkpoint, or the run, where its folder is full.", "FOLDER"
    )
    dry_run: bool = option(False, "Show what would run: model, layout, memory, time, files.")
    one_rank_of: str | None = option(
        None, "Run one rank of that cluster here: its computing and memory. Nothing is sent or saved.", "8x8xh200"
    )
    explain: bool = option(False, "Say which programs compute the model, and why not others.")
    json: OutFile | None = option(None, ROWS, "FILE")
    typed: str = ""
    """The command, where ranks are started with another."""

    @property
    def job(self) -> dict[str, Any]:
        """What `fit` and `preview` are told beside the configuration."""
        names = ("run", "resume", "init", "transport", "restarts", "stop_after", "min_ranks")
        return {name: getattr(self, name) for name in names}

    @property
    def name(self) -> str:
        """What the run's folder is named after."""
        from tilemesh.train.config import DEFAULT_PRESET

        return Path((self.config or DEFAULT_PRESET).partition(".py:")[0]).stem


def train(options: TrainOptions) -> Output | int:
    """Make a configuration of what was typed, call `train.fit`, and show the result."""
    from tilemesh.core.context import membership

    member = membership()
    config = configuration(options, member)
    if config.trains_module:
        _require_text(options)
    if options.explain and (member is None or member.rank == 0):
        _explain(config)
    if options.dry_run:
        return _preview(options, config, member)
    if options.one_rank_of is not None:
        return _one_rank(options, config)
    if member is not None:
        return _become_rank(options, config, member)
    console = console_beside(options.json)
    ended = run_job(_fitting(options, config), "train", console)
    return ended if isinstance(ended, int) else _show(options, console, *ended)


def _require_text(options: TrainOptions) -> None:
    """Refuse what is said of a Transformer's run alone."""
    for name, value in (("--explain", options.explain), ("--one-rank-of", options.one_rank_of)):
        if value:
            raise UsageError(f"{name} is of Transformers: leave it out where a module of yours is trained")
    if options.dry_run:
        raise UsageError(
            "--dry-run is of Transformers: `tilemesh graph explain FILE.py:FUNCTION --mesh … --pin … --train` shows "
            "where tensors of a module would lie and what ranks would exchange"
        )


def _explain(config: TrainConfig) -> None:
    """Print what computes the model."""
    import torch

    from tilemesh.measure.machine import usable_gpus
    from tilemesh.model.programs.explain import explain
    from tilemesh.train.plain import planned_programs

    device = "cuda" if config.train.device != "cpu" and usable_gpus() else "cpu"
    for line in explain(planned_programs(config, torch.device(device))):
        tell(line)


def _preview(options: TrainOptions, config: TrainConfig, member: Membership | None) -> Output | int:
    """What would run."""
    from tilemesh.train.preview import preview

    seen = preview(config, **options.job, name=options.name)
    if member is not None and member.rank:
        return 0
    lines = [f"{subject + ':':10}{words}" for subject, words in seen.lines()]
    return Output([*lines, "nothing was started: leave --dry-run out to train"], seen.rows())


def _one_rank(options: TrainOptions, config: TrainConfig) -> Output:
    """What one rank computes and holds, the others being copies of it."""
    from tilemesh.core.heap import keep_freed_memory
    from tilemesh.train.one_rank import STEPS, rank_of_many, run_one_rank

    keep_freed_memory()  # as ranks do
    if options.resume is not None or options.init is not None:
        raise UsageError("--one-rank-of begins with weights of its own and keeps none: leave --resume and --init out")
    job = rank_of_many(config, str(options.one_rank_of))
    tell(f"rank {job.rank} of {config.plan.describe(config.servers)}; the others are taken for copies of it")
    rows = run_one_rank(job, tell, options.stop_after or STEPS)
    return Output([rows, "nothing was sent, and no weights were kept: their values mean nothing"], rows)


def _fitting(options: TrainOptions, config: TrainConfig) -> Callable[[Shown], Result]:
    from tilemesh.train.job import fit

    job = options.job | {"name": options.name, "command": options.typed or None}
    return lambda shown: fit(config, **job, in_process=False, on_event=shown)


def configuration(options: TrainOptions, member: Membership | None) -> TrainConfig:
    """The run that is asked for: a preset or file, or a run's own configuration with changes."""
    from tilemesh.measure.machine import usable_gpus
    from tilemesh.train.load import load

    ranks = options.ranks
    if member is not None:
        if ranks is not None and ranks != member.size:
            raise UsageError(f"--ranks {ranks} inside a job of {member.size} ranks: leave --ranks out here")
        is_open = {options.mesh, options.plan, options.resume, options.min_ranks} == {None}
        ranks = member.size if is_open else None
    limit: tuple[str, ...] = ()
    if options.max_time is not None:
        seconds = parse_seconds(options.max_time)
        if not seconds:  # train.max_time_s = 0 is a run without a limit, which no one asks for by a time
            raise UsageError(f"--max-time is {options.max_time}: expected more than nothing; leave it out for no limit")
        limit = (f"train.max_time_s={seconds}",)
    config = load(
        options.config, sets=(*options.sets, *limit), mesh=options.mesh, plan=options.plan, ranks=ranks,
        gpus=len(usable_gpus()), init=options.init, resume=options.resume, recipe=options.recipe, pins=options.pin,
        choose=options.choose,
    )  # fmt: skip
    if options.fallback_dir is None:
        return config
    checkpoint = dataclasses.replace(config.checkpoint, fallback_dir=Path(options.fallback_dir))
    return dataclasses.replace(config, checkpoint=checkpoint)


# ---- as a rank that mpiexec, srun or torchrun started -----------------------------------------------------------


def _become_rank(options: TrainOptions, config: TrainConfig, member: Membership) -> int:
    """This process is the rank that it already is: it goes on as `run_rank`, watched like one that we started."""
    from tilemesh.launch.rank import run_command
    from tilemesh.measure.machine import stamp
    from tilemesh.train.check import JobRequest, check_job

    if options.min_ranks is not None:
        _take_place(config, options, options.min_ranks, member)
    else:
        check_job(config, JobRequest(**options.job))
    typed = f"{member.starter}, {member.size} ranks: {stamp()['command']}"
    text = json.dumps(dataclasses.asdict(dataclasses.replace(options, typed=typed)))
    run_command(["-m", "tilemesh.cli.train_rank", text], member)


def _take_place(config: TrainConfig, options: TrainOptions, fewest: int, member: Membership) -> None:
    """Be one of those ranks that the layout for so many has a place for, or wait beside them and end."""
    from tilemesh.core.context import rank_environment
    from tilemesh.measure.machine import usable_gpus
    from tilemesh.train.check import JobRequest, check_job
    from tilemesh.train.elastic import check_min_ranks, fit_to_ranks, wait_beside

    check_min_ranks(config, fewest)
    laid = fit_to_ranks(config, member.size, fewest, usable_gpus())
    if laid.ranks < member.size and member.starter == "mpiexec":
        raise UsageError(
            f"{member.size} ranks, and the best layout takes {laid.ranks} of them: start mpiexec with -n {laid.ranks}"
        )
    if member.rank >= laid.ranks:
        wait_beside(Path(options.run or options.resume or ""))
        sys.exit(0)
    os.environ.update(rank_environment(member, laid.ranks))
    check_job(laid, JobRequest(**options.job))


def run_rank(text: str) -> int:
    """What a rank does, with the options as JSON; rank 0 shows the result of the run."""
    from rich.console import Console

    from tilemesh.core.context import membership
    from tilemesh.train.progress import Shown

    values = json.loads(text)
    options = TrainOptions(**{**values, "sets": tuple(values["sets"]), "pin": tuple(values["pin"])})
    member = membership()
    assert member is not None
    # mpiexec's pipe to a rank says it is a terminal; what comes out at its end may be a log.
    shown = Shown(Console(highlight=False, markup=False, force_terminal=False))
    result, lost = fit_or_lost(_fitting(options, configuration(options, member)), shown)
    if member.rank:
        return int(bool(lost))
    page = write_page(result.folder)
    if not result.interrupted:
        console = Console(highlight=False, markup=False, stderr=options.json == "-", force_terminal=False)
        return _show(options, console, result, page, lost)
    print(f"stopped after step {result.step}; go on with: {program()} train --resume {result.saved_in}", flush=True)
    if lost:
        tell(lost)
    return int(bool(lost))


# ---- afterwards ------------------------------------------------------------------------------------------------


def _show(options: TrainOptions, console: Console, result: Result, page: str, lost: str) -> int:
    """The summary of the run, if it is of its last step."""
    from tilemesh.runs.folder import read_small

    summary = read_small(result.folder, SUMMARY)
    is_of_step = summary.get("step") == result.step
    words = module_words if "module" in summary else summary_text
    if not is_of_step:
        lost = lost or f"{result.folder} has no {SUMMARY} of step {result.step}: was the disk full?"
    text = words(result, summary) if is_of_step else ()
    return show_job(options, console, text, result, page, lost)


def module_words(result: Result, summary: Mapping[str, Any]) -> Iterator[Block]:
    """The same of a module of the user's."""
    yield result.rows
    held_out = "" if summary["held_out"] is None else f", held-out {summary['held_out']:.4f}"
    words = f"loss {summary['loss']:.4f}{held_out} after {summary['step']} steps"
    yield f"\n{words}, {format_seconds(summary['seconds'])} in all"
    if result.saved_step is not None:
        weights, is_finished = result.saved_in or result.folder, result.saved_step == result.step
        again = f" --set train.steps={2 * summary['step']}" * (is_finished and not summary["interrupted"])
        yield [
            f"weights: step {result.saved_step}, {weights / CHECKPOINTS}",
            f"go on:   {program()} train --resume {weights}{again}",
            f"take:    {program()} export {weights} FOLDER",
        ]


def summary_text(result: Result, summary: Mapping[str, Any]) -> Iterator[Block]:
    """The sample, the rows, where the time went, and how to go on."""
    from tilemesh.compress.recipe import is_file_text
    from tilemesh.train.config import of_run
    from tilemesh.train.rows import run_mfu_words

    folder, config, sample = result.folder, of_run(result.folder), result.folder / SAMPLE
    if sample.exists() and not summary["interrupted"]:
        yield [f"\n--- sample\n{sample.read_text(errors='replace')}\n---\n"]
    yield result.rows
    share = summary["shares"]
    words = ", ".join(f"{name} {share[key]:.0%}".replace("%", " %") for key, name in _SHARES)
    if summary["step_time_s"] is None:
        yield "\na step: too few were timed to say where the time goes"
    else:
        yield f"\na step: {words}\nto improve: {summary['improve']}"
    if counted := run_mfu_words(summary, result.rows):
        yield counted
    if baseline := max(summary["memory_baseline_bytes"]):
        yield f"memory: beside the model's, the process itself takes {format_bytes(baseline)} per rank"
    held_out = "" if summary["held_out"] is None else f", held-out {summary['held_out']:.3f}"
    taught = " (with the teacher's part)" if config.distill.teacher is not None else ""
    words = f"training loss {summary['loss']:.3f}{taught}{held_out} nats per token after {summary['step']} steps, "
    words += f"{format_seconds(summary['seconds'])} {'since it went on' if summary.get('resumed') else 'in all'}"
    if summary.get("bits_per_byte") is not None:
        words += f", {summary['bits_per_byte']:.3f} bits per byte held out"
    first = summary["seconds_to_first_step"]
    yield words + ("; there was nothing left to do" if first is None else f", first step after {format_seconds(first)}")
    yield f"written: {folder} ({CONFIG}, {METRICS}, {TRACE} for ui.perfetto.dev, {SUMMARY})"
    if result.saved_step is None:
        return
    is_early = summary["step"] < config.train.steps  # ended by early stopping
    more = f"evaluate.patience={2 * config.evaluate.patience}" if is_early else f"train.steps={2 * summary['step']}"
    begin = (sample.read_text(errors="replace").split() if sample.exists() else []) or ["import"]
    is_finished = result.saved_step == result.step and not summary["interrupted"]
    weights, again = result.saved_in or folder, f" --set {more}" * is_finished
    yield [
        f"weights: step {result.saved_step}, {weights / CHECKPOINTS}",
        f"go on:   {program()} train --resume {weights}{again}",
        f"write:   {program()} generate {weights} --prompt {begin[0]!r}",
    ]
    if config.compress.recipe:
        recipe = "FILE" if is_file_text(config.compress.recipe) else config.compress.recipe
        yield [f"shrink:  {program()} compress {weights} --recipe {recipe} --out FOLDER"]
