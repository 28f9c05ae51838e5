"""What `tilemesh plan` does: the arithmetic of a model, the layouts that fit a cluster, the best of them and why."""

from __future__ import annotations

import json as jsonlib
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from rich import box
from rich.console import Console
from rich.table import Table

import tilemesh
from tilemesh.cli.plan_grade import grade_objects, grade_runs, print_grades
from tilemesh.cli.targets import check_targets
from tilemesh.core import config
from tilemesh.core.calibration import Rates
from tilemesh.core.described_gpu import read_gpu
from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.core.files import write_output, write_text
from tilemesh.core.hardware import Cluster, parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.units import format_bytes, format_count, format_seconds, parse_count, parse_fraction
from tilemesh.measure.machine import this_machine
from tilemesh.measure.table import wrapped
from tilemesh.model.config import PRESETS, ModelConfig
from tilemesh.model.work.task import Code
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.choose import (
    DEFAULT_BATCH_TOKENS,
    NothingFitsError,
    SearchResult,
    choose_batch,
    plan_figures,
    search,
)
from tilemesh.plan.constants import HEADROOM
from tilemesh.plan.explain import ExplainedPart, model_sections, parameter_section, states_section, zero_section
from tilemesh.plan.explain_plan import plan_sections, roofline_section
from tilemesh.plan.local import is_local, local_machine
from tilemesh.plan.prediction import Prediction, pins_to_train, trainable
from tilemesh.plan.space import Pins
from tilemesh.plan.step import Estimator
from tilemesh.plan.why import runner_up, why
from tilemesh.report.plan_page import render

WIDTH = 100
"""Columns that the table of layouts takes at most, where its figures allow that; and all else in a pipe, which has no
width of its own."""
_NATURAL = 1000  # wider than any table: what it is measured in
REFERENCE_DEVICE = "h100"  # for the roofline when no cluster is named


@dataclass(frozen=True)
class PlanQuestion:
    """What the command line said, as it was said."""

    model: str | None
    cluster: str | None
    gpu: str | None
    batch_tokens: str | None
    batch: int | None
    context: int | None
    fix: tuple[str, ...]
    sets: tuple[str, ...]
    code: str | None
    headroom: str | None
    save: str | None
    explain: bool
    grade: tuple[str, ...]
    json: str | None
    html: str | None


def run(asked: PlanQuestion) -> None:
    """Answer: print, write, or raise."""
    # Standard output belongs to the figures when they go there; people read the other one.
    console = _console(stderr=asked.json == "-")
    check_targets(save=asked.save, json=asked.json, html=asked.html)
    if asked.grade:
        _grade(asked, console)
        return
    if asked.model is None:
        raise UsageError("MODEL is missing: expected a preset or a TOML file, such as tilemesh plan llama-3-70b")
    model = load_model(asked.model, asked.sets)
    if asked.cluster is None:
        for name in ("gpu", "fix", "save", "json", "html", "code", "headroom"):
            if getattr(asked, name):
                raise UsageError(f"--{name} is about a plan, which needs --cluster, such as --cluster 64xh100")
        _explain_model(console, asked, asked.model, model)
        return
    result = _search(asked, model, asked.cluster)
    reasons = _reasons(result)
    # Files first: whoever reads the text may stop early, as `| head` does.
    if asked.save is not None:
        _save(result, asked.save)
    if asked.html is not None:
        write_text(render(result, asked.model, reasons), asked.html)
    if asked.json is not None:
        _write_json((result.figures(place) | _origin() for place in range(len(result.predictions))), asked.json)
    console.print(_headline(asked, result))
    _print_layouts(console, result)
    if asked.explain:
        best = result.best.plan
        arithmetic = [parameter_section(model), states_section(model, best.precision)]
        _print_sections(console, [*arithmetic, zero_section(model, best.precision, best.dp), *plan_sections(result)])
    console.print("Why the first" if len(result.predictions) > 1 else "Why")
    for line in reasons:
        console.print(wrapped(line, console.width, "  - ", "    "), soft_wrap=True)
    if asked.save is not None:
        console.print(f"plan: {asked.save}{_cannot_train(result.best.plan)}", soft_wrap=True)
    if asked.html is not None:
        console.print(f"page: {asked.html}", soft_wrap=True)


def _grade(asked: PlanQuestion, console: Console) -> None:
    """Runs beside their predictions; everything else on the command line is about a plan."""
    others = (
        "model",
        "cluster",
        "gpu",
        "batch",
        "batch_tokens",
        "context",
        "fix",
        "sets",
        "code",
        "headroom",
        "save",
        "html",
    )
    given = [name for name in others if getattr(asked, name) not in (None, ())]
    if given:
        shown = "MODEL" if given[0] == "model" else "--set" if given[0] == "sets" else f"--{given[0].replace('_', '-')}"
        raise UsageError(f"--grade takes model, layout and machine from the run: leave {shown} out")
    graded = grade_runs(asked.grade)
    if asked.json is not None:
        _write_json((object_ | _origin() for object_ in grade_objects(graded)), asked.json)
    print_grades(graded, console)


def _search(asked: PlanQuestion, model: ModelConfig, cluster: str) -> SearchResult:
    pins = Pins.parse(asked.fix)
    if asked.code is not None and asked.code not in get_args(Code):
        raise unknown("code", asked.code, get_args(Code))
    machines, rates = named_cluster(cluster, asked.gpu)
    try:
        return search(
            model,
            machines,
            batch=asked.batch,
            batch_tokens=_tokens(asked),
            context=asked.context,
            pins=pins,
            rates=rates,
            code=cast(Code | None, asked.code),
            headroom=HEADROOM if asked.headroom is None else parse_fraction(asked.headroom),
        )
    except NothingFitsError as error:
        if asked.json is not None:
            _write_json([plan_figures(model, machines.name, pins, 0, error.smallest) | _origin()], asked.json)
        raise RunError(f"{asked.model} {error}") from None


def _tokens(asked: PlanQuestion) -> int | None:
    return None if asked.batch_tokens is None else parse_count(asked.batch_tokens)


def _cannot_train(plan: ParallelPlan) -> str:
    """A plan that was saved is going to be run: say so here if it cannot be."""
    words = trainable(plan)
    if words == "yes":
        return ""
    return (
        f" (`tilemesh train` cannot run it: {words.removeprefix('no, ')}; for one it can: --fix {pins_to_train(plan)})"
    )


# ---- what is asked ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Settings:
    """The section that `--set` and a TOML file speak of."""

    model: ModelConfig


def named_cluster(text: str, gpu: str | None) -> tuple[Cluster, Rates | None]:
    """The cluster of that name, with what was measured of it where it is this machine; `gpu`: a file that describes a
    GPU whose name may stand there."""
    if gpu is not None:
        return parse_cluster(text, read_gpu(gpu)), None
    if is_local(text):
        here = local_machine(text, this_machine())
        return here.cluster, here.rates
    return parse_cluster(text), None


def load_model(name: str, sets: Sequence[str]) -> ModelConfig:
    """The model of a preset or a file with a [model] section, with settings over it."""
    if name.endswith(".toml"):
        return config.load(_Settings, file=name, sets=sets).model
    if name not in PRESETS:
        raise unknown("model", name, PRESETS)
    presets = {known: {"model": values} for known, values in PRESETS.items()}
    return config.load(_Settings, preset=name, presets=presets, sets=sets).model


# ---- what is shown ---------------------------------------------------------------------------------------------


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(stderr=stderr, highlight=False, markup=False, width=WIDTH)
    return console


_CODES: Mapping[Code, str] = {
    "fused": "hand-fused code, as Megatron's (--code fused)",
    "compiled": "our model under torch.compile (--code compiled)",
    "eager": "our model, operation by operation (--code eager)",
}


def _headline(asked: PlanQuestion, result: SearchResult) -> str:
    total = result.batch * result.context
    wish = ""
    if asked.batch is None:
        default = asked.batch_tokens is None
        wanted = DEFAULT_BATCH_TOKENS if asked.batch_tokens is None else parse_count(asked.batch_tokens)
        wish = f", {format_count(wanted)} {'by default' if default else 'asked'}" if wanted != total else ""
    words = (
        f"{asked.model}: {count_parameters(result.model).total:,} parameters on {result.cluster.name}, batch of "
        f"{result.batch} sequences x {result.context:,} tokens ({format_count(total)}{wish})"
    )
    pinned = f", fixed: {result.pins.describe()}" if result.pins.describe() else ""
    plural = "" if result.considered == 1 else "s"
    code = result.estimator().clock.code(result.best.plan)
    looked = f"{result.considered:,} layout{plural} looked at, {result.fitting:,} fit; figures of {_CODES[code]}"
    return f"{words}{pinned}\n{looked}"


def _print_layouts(console: Console, result: SearchResult) -> None:
    """A line a layout, and below them what `tilemesh train` lacks for some. Silent columns are left out."""
    said = dict.fromkeys(trainable(prediction.plan) for prediction in result.predictions)
    lacks = [words for words in said if words != "yes"]
    marks = {"yes": "yes"} | {words: f"no [{place}]" for place, words in enumerate(lacks, start=1)}
    lines = [_cells(place, prediction, marks) for place, prediction in enumerate(result.predictions, start=1)]
    silent = {name for name in _OPTIONAL if all(line[name] in ("-", "0.0%") for line in lines)}
    shown = [{heading: text for heading, text in line.items() if heading not in silent} for line in lines]
    wide, narrow = _table(shown, gap=2), _table(shown, gap=1)
    measured = console.options.update(max_width=_NATURAL)
    table = wide if console.measure(wide, options=measured).maximum <= min(console.width, WIDTH) else narrow
    print_whole(console, table)
    for words in lacks:
        console.print(f"{marks[words].removeprefix('no ')} {words} (`tilemesh train`)", soft_wrap=True)


def print_whole(console: Console, table: Table) -> None:
    """A terminal too narrow for a table breaks its lines; a figure is never cut."""
    natural = console.measure(table, options=console.options.update(max_width=_NATURAL)).maximum
    whole = Console(file=console.file, width=max(console.width, natural), highlight=False, markup=False)
    whole.print(table)


_OPTIONAL = ("pp", "seq", "ZeRO", "schedule", "recompute", "bubble")
_LEFT = ("schedule", "recompute", "seq", "train")


def _table(lines: Sequence[Mapping[str, str]], gap: int) -> Table:
    """Lines with a column for each of their keys, so many blanks apart."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, gap - 1, 0, 0))
    for heading in lines[0]:
        table.add_column(heading, justify="left" if heading in _LEFT else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line.values())
    return table


def _cells(place: int, prediction: Prediction, marks: Mapping[str, str]) -> dict[str, str]:
    p = prediction.plan
    schedule = "-" if p.pp == 1 else p.schedule + (f" {p.interleave}" if p.interleave > 1 else "")
    return {
        "": str(place), "dp": str(p.dp), "tp": str(p.tp), "pp": "-" if p.pp == 1 else str(p.pp),
        "seq": "yes" if p.sequence_parallel else "-", "ZeRO": str(p.zero or "-"),
        "batch": f"{p.accumulation}x{p.microbatch}", "schedule": schedule,
        "recompute": "-" if p.recompute == "none" else p.recompute,
        "step": _seconds(prediction.step_time_s), "tok/s": format_count(prediction.tokens_per_s),
        "MFU": f"{prediction.mfu:.1%}",
        "memory": format_bytes(prediction.memory.total_bytes), "bubble": f"{prediction.bubble_fraction:.1%}",
        "comm": f"{prediction.times.exposed_s / prediction.step_time_s:.1%}", "train": marks[trainable(p)],
    }  # fmt: skip


def _seconds(value: float) -> str:
    """Four digits where the ten lines would else look alike."""
    return f"{value:.2f} s" if 10 <= value < 120 else format_seconds(value)


def _explain_model(console: Console, asked: PlanQuestion, name: str, model: ModelConfig) -> None:
    context = model.context if asked.context is None else asked.context
    layout = ParallelPlan(precision="bf16-master", attention="materialized")
    # No cluster was named; the ridge needs some device, and says which.
    reference = Estimator(model, parse_cluster(f"1x{REFERENCE_DEVICE}"), context)
    said = asked.batch is not None or asked.batch_tokens is not None
    sequences = choose_batch(asked.batch, _tokens(asked), context) if said else 1
    console.print(f"{name}: {count_parameters(model).total:,} parameters")
    arithmetic = model_sections(model, context, layout, sequences)
    _print_sections(console, [*arithmetic, roofline_section(reference, layout)])
    console.print("With --cluster, such as --cluster 64xh100, layouts are searched and one is explained.")


def _print_sections(console: Console, sections: Iterable[ExplainedPart]) -> None:
    for section in sections:
        console.print(f"\n{section.title}")
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
        for column in ("what", "formula", "numbers", "value"):
            table.add_column(column, overflow="fold", justify="right" if column == "value" else "left")
        for row in section.rows:
            table.add_row(f"  {row.what}", row.formula, row.numbers, row.value)
        console.print(table)
        if section.note:
            console.print(f"  {section.note}")
    console.print()


def _reasons(result: SearchResult) -> list[str]:
    """Why the first, and what the second loses."""
    lines = [*why(result), *filter(None, [_sentence(runner_up(result))])]
    if result.cluster.device.kind != "cpu":
        return lines
    # A rank of a CPU is some of its cores.
    words = ("GPU", "rank"), *((f"{word} {result.cluster.device.name}", f"{word} rank") for word in ("one", "One"))
    for old, new in words:
        lines = [line.replace(old, new) for line in lines]
    return lines


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


# ---- what is written -------------------------------------------------------------------------------------------


def _origin() -> dict[str, Any]:
    """What made the figures: the version and the command."""
    return {"versions": {"tilemesh": tilemesh.__version__}, "command": shlex.join(["tilemesh", *sys.argv[1:]])}


def _save(result: SearchResult, path: str) -> None:
    best = result.best
    note = f"# {_origin()['command']}\n"
    note += f"# predicted: {best.step_time_s:.4g} s per step, {best.memory.total_bytes} bytes per rank\n"
    write_text(note + result.to_toml(), path)


def _write_json(objects: Iterable[dict[str, Any]], path: str) -> None:
    write_output("".join(jsonlib.dumps(object_, allow_nan=False) + "\n" for object_ in objects), path)
