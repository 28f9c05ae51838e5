"""Search an operator's configurations and keep the fastest. Finalists are timed beside the built-ins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilemesh.cli.operators import problem_settings
from tilemesh.cli.output import Block, Output, console_beside
from tilemesh.core.advice import NextCommand
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.options import OutFile, argument, option
from tilemesh.core.units import format_seconds

_RANKED = 10  # configurations that are shown of a GPU that is not here


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    shapes: tuple[str, ...] = argument(
        ..., "Shapes to tune; of matmul unless an operator is named first.", "[OPERATOR] SHAPE…"
    )
    dtype: str | None = option(None, "float16 or bfloat16.")
    c: str | None = option(None, "What C is: full, row, column or none.")
    activation: str | None = option(None, "none, relu, gelu, gelu_tanh, silu, squared_relu.")
    layout: str | None = option(None, "nn, nt, tn or tt: A and B as written (n) or transposed; FusedLinear is nt.")
    settings: tuple[str, ...] = option((), "Any setting of the operator's problems.", "NAME=VALUE", flag="--set")
    on: str | None = option(None, "Time nothing: rank configurations for this GPU by the cost model.", "GPU")
    save: bool = option(True, "Remember the winners for `auto`.")
    json: OutFile | None = option(None, "Write all that was tried.", "FILE")
    html: OutFile | None = option(None, "A heat map of what was tried.", "FILE")


def tune(options: TuneOptions) -> Output:
    import torch
    from rich.status import Status

    from tilemesh.kernels import registry
    from tilemesh.kernels.launch.gpu import gpu_of
    from tilemesh.kernels.tuning.compiler import Compiler
    from tilemesh.kernels.tuning.table import versions
    from tilemesh.kernels.tuning.tuner import tune as tune_one
    from tilemesh.report.kernel_page import TimedConfig, render, trial_object

    console = console_beside(options.json, options.html)
    is_named = options.shapes[0].isidentifier()
    operator, shapes = (options.shapes[0], options.shapes[1:]) if is_named else ("matmul", options.shapes)
    entry = registry.find(operator)
    tuning, form = entry.load("tuner"), entry.load("form")
    if not shapes:
        raise UsageError(f"no shapes to tune {operator} for: write {form.sizes}, as in {form.suite[0]}")
    settings = problem_settings(options, "dtype", "c", "activation", "layout")
    problems = [form.problem(shape, settings) for shape in shapes]
    for problem in problems:
        if reason := tuning.refusal(problem):
            raise UsageError(f"{problem.key}: {reason}")
    if options.on is not None:
        return _ranked(tuning, problems, options.on)
    if not torch.cuda.is_available():
        raise UsageError("tuning times on an NVIDIA GPU, and torch sees none here: --on h200 ranks by the cost model")
    device = torch.device("cuda", torch.cuda.current_device())
    entries = {}
    trials: list[TimedConfig] = []
    with Compiler(device) as compiler:
        for problem in problems:
            with console.status(problem.key) as status:

                def show(done: int, total: int, words: str, status: Status = status, key: str = problem.key) -> None:
                    status.update(f"{key} [{done}/{total}] {words}")

                tuned = tune_one(tuning, problem, device, compiler=compiler, progress=show)
            entries[problem.key] = tuned.entry
            trials += [
                TimedConfig(problem.key, tuning.tables.encode(trial.config), trial.seconds) for trial in tuned.trials
            ]
            console.print(f"{problem.key}: {tuned.config.label}; tried {tuned.tried} of {tuned.grid}", soft_wrap=True)
            for label, sample in sorted(tuned.finals.items(), key=lambda pair: pair[1].median):
                console.print(f"  {format_seconds(sample.median):>10}  {label}", soft_wrap=True)
    if options.save:
        try:
            path = tuning.tables.add(gpu_of(device.index).name, versions(), entries)
        except OSError as error:
            raise RunError(f"the winners could not be remembered: {error}") from None
        console.print(f"remembered in {path}", soft_wrap=True)
    files = {"html": lambda: render([], [], trials)}
    return Output(json=[trial_object(trial) for trial in trials], files=files, next=NextCommand("bench kernel matmul"))


def _ranked(tuning: Any, problems: Sequence[Any], on: str) -> Output:
    """Configurations for a GPU that is not here, best first: by a model learnt from trials on it, or by the formula."""
    from tilemesh.kernels.launch.gpu import described_gpu

    gpu = described_gpu(on)
    text: list[Block] = []
    objects = []
    for problem in problems:
        predict_s, grid = tuning.predict_s(problem, gpu), tuning.grid(problem, gpu)
        likely = tuning.shortlist(problem, gpu)
        best = likely or sorted(grid, key=predict_s)[:_RANKED]
        how = f"a model learnt from trials on {gpu.name}" if likely else "the cost model"
        text.append(f"{problem.key} on {gpu.name}: {len(best)} of {len(grid)}, ranked by {how}; not measured")
        text.append([f"  {format_seconds(predict_s(config)):>10}  {config.label}" for config in best])
        objects += [
            {"problem": problem.key, "on": on, "place": place, "config": config.label, "predicted": predict_s(config)}
            for place, config in enumerate(best, 1)
        ]
    return Output(text, objects, next=NextCommand(f"bench kernel matmul --on {on}"))
