"""Improve a model by what its answers are worth. A function scores them, a reward model does, or pairs say which is
better.

tilemesh align RUN --task sort --algorithm grpo

RUN is a run's folder or a Hugging Face folder. With checkpoints, restarts and a report, as `tilemesh train`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tilemesh.cli.jobs import run_job, show_job
from tilemesh.cli.output import Output, console_beside, program, tell
from tilemesh.core.errors import UsageError
from tilemesh.core.options import ROWS, OutFile, OutFolder, argument, option
from tilemesh.runs.names import CHECKPOINTS, SAMPLES, SUMMARY

if TYPE_CHECKING:
    from tilemesh.align.config import AlignConfig
    from tilemesh.train.result import Result


@dataclass(frozen=True, kw_only=True)
class AlignOptions:
    start: str | None = argument(None, "What to begin with.", "[RUN|FOLDER]")
    task: str | None = option(None, "A built-in task, or a function that scores answers.", "NAME|FILE.py:FUNCTION")
    algorithm: str | None = option(None, "grpo, ppo, rloo, dpo, reward, ...; see docs/align.", "NAME")
    prompts_file: str | None = option(None, "Prompts for a function of yours, one JSON object per line.", "FILE")
    preferences: str | None = option(None, "Pairs with prompt, chosen and rejected, one JSON object per line.", "FILE")
    mesh: str | None = option(None, "How the ranks are laid out.", "dp=2,tp=2")
    plan: str | None = option(None, "Instead: a plan of `tilemesh plan align --out`.", "PLAN.toml")
    placement: Literal["auto", "colocated", "split", "one-step-off", "asynchronous"] | None = option(
        None, "Which ranks draw answers; auto: the best for as many ranks as the mesh has."
    )
    sets: tuple[str, ...] = option((), "align.answers=16,train.steps=200,...", "A=B,...", flag="--set")
    resume: str | None = option(None, "Go on with a run.", "RUN")
    run: OutFolder | None = option(None, "Where to write; by default under runs/.", "FOLDER", flag="--out --run")
    restarts: int = option(0, "How often a failed job goes on by itself.", "N")
    transport: str = option("auto", "mpi, torch or auto.")
    stop_after: int | None = option(None, "Stop there, with a checkpoint.", "STEP")
    dry_run: bool = option(False, "Show what would run: model, layout, memory, time, files.")
    json: OutFile | None = option(None, ROWS, "FILE")

    @property
    def settings(self) -> list[str]:
        """Flags are settings too."""
        names = ("task", "algorithm", "prompts_file", "preferences", *["placement"] * (self.placement != "auto"))
        return [f"align.{name}={getattr(self, name)}" for name in names if getattr(self, name) is not None] + [
            *self.sets
        ]


def align(options: AlignOptions) -> Output | int:
    from tilemesh.align.config import load, of_run
    from tilemesh.align.job import fit

    if (options.start is None) == (options.resume is None):
        raise UsageError("name a run or a Hugging Face folder to begin with, or a run to go on with by --resume")
    refuse_beside_plan(options)
    if options.resume is not None:
        if options.placement == "auto":
            raise UsageError("--placement auto and --resume: the run has a placement; leave it out, or name another")
        if options.mesh is not None:
            raise UsageError("--mesh and --resume: say how ranks are laid out with --set plan.dp=2,plan.tp=2")
        config = of_run(options.resume, options.settings)
    else:
        assert options.start is not None
        config = load(options.start, sets=options.settings, mesh=options.mesh, plan=options.plan)
        if options.placement == "auto":
            config = load(options.start, sets=[*options.settings, *_best_settings(config)], mesh=options.mesh)
    job: dict[str, Any] = {name: getattr(options, name) for name in ("transport", "restarts", "stop_after")}
    if options.dry_run:
        return _preview(options, config, job)
    console = console_beside(options.json)
    job |= {"run": options.run, "resume": options.resume, "in_process": False}
    ended = run_job(lambda shown: fit(config, options.start, on_event=shown, **job), "align", console)
    return ended if isinstance(ended, int) else show_job(options, console, _words(ended[0]), *ended)


def refuse_beside_plan(options: AlignOptions) -> None:
    for name in ("resume", "placement", "mesh"):
        if options.plan is not None and getattr(options, name) is not None:
            raise UsageError(f"--{name} and --plan both say which ranks hold which models: give one of them")


def _best_settings(config: AlignConfig) -> list[str]:
    """Of the placement that is predicted to be quickest."""
    from tilemesh.align.placement import rank_placements, settings_of
    from tilemesh.measure.machine import usable_gpus

    if config.align.is_of_pairs:
        raise UsageError("--placement auto and pairs of answers, which nobody draws: leave it out")
    best = rank_placements(config, usable_gpus())[0]
    settings = settings_of(best.placement)
    tell(f"placement: {', '.join(settings)}: {best.step.seconds:.3g} s per step predicted, {best.idle:.0%} idle")
    return settings


def _preview(options: AlignOptions, config: AlignConfig, job: dict[str, Any]) -> Output:
    from tilemesh.align.inputs import check_inputs
    from tilemesh.align.job import program_of
    from tilemesh.align.placement import placement_words
    from tilemesh.train.preview import preview

    check_inputs(config)
    job |= {"run": options.run, "resume": options.resume, "name": "align"}
    seen = preview(config.training, program=program_of(config), **job)
    lines = [(subject, words) for subject, words in seen.lines() if subject not in ("data", "steps")]
    lines[1:1] = [
        ("begins", str(options.start or options.resume)),
        ("learns", config.align.words),
        ("steps", f"{config.train.steps:,} of {config.align.rows} sequences"),
        ("placement", placement_words(config)),
    ]
    text = [f"{subject + ':':11}{words}" for subject, words in lines]
    return Output([*text, "nothing was started: leave --dry-run out to begin"], seen.rows())


def _words(result: Result) -> list[list[str]]:
    """What the run came to, and how to go on."""
    from tilemesh.runs.folder import read_small
    from tilemesh.runs.metrics import STEP, latest

    folder = result.saved_in or result.folder
    steps = [line for line in latest(result.folder) if line["kind"] == STEP]
    last = steps[-1] if steps else {}
    figures = [
        f"{name.replace('_', ' ')} {last[name]:.3f}" for name in ("reward", "accuracy", "kl", "entropy") if name in last
    ]
    has_samples = (result.folder / SAMPLES).is_file()
    seconds = read_small(result.folder, SUMMARY).get("seconds", 0.0)
    return [
        [f"\nafter {result.step} steps and {seconds:.0f} s: {', '.join(figures)}"],
        [
            f"weights: step {result.saved_step}, {folder / CHECKPOINTS}"
            + f"; answers over time: {SAMPLES}" * has_samples,
            f"go on:   {program()} align --resume {folder} --set train.steps={2 * result.step}",
            f"serve:   {program()} serve {folder}",
        ],
    ]
