"""Predict step time and memory of training; choose a layout for a cluster. `--explain` says why."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import tilemesh
from tilemesh.cli.models import MODEL_WORDS, job_sizes, load_model
from tilemesh.cli.next_command import again
from tilemesh.cli.output import Block, Output, show
from tilemesh.cli.targets import check_targets
from tilemesh.core.advice import TYPED, NextCommand
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.options import Known, OutFile, OutFolder, argument, option, refuse
from tilemesh.core.ranges import Range
from tilemesh.core.units import format_count, format_seconds, parse_count, parse_fraction

if TYPE_CHECKING:
    from tilemesh.core.calibration import Rates
    from tilemesh.core.conflicts import ConflictWords
    from tilemesh.core.hardware import Cluster
    from tilemesh.core.plan import ParallelPlan
    from tilemesh.model.config import ModelConfig
    from tilemesh.model.work.task import Code
    from tilemesh.plan.choose import Accepts, SearchResult
    from tilemesh.plan.prediction import Refused
    from tilemesh.plan.software import Software

OUT = "Write the best plan; of --for a folder of its files, which are printed without."
REFERENCE_DEVICE = "h100"  # for the roofline when no cluster is named
_CLUSTER = "64xh100; 4x8xa100: 4 nodes of 8; 32xh100+32xa100; local, 4xlocal: this machine, measured."
CODE_WORDS = "What runs it: fused (Megatron's), compiled, eager (torch), a profile's name, or its file of `plan fit`."
Money = Annotated[float, Range(0, 1e12, above=True, below=True)]


@dataclass(frozen=True, kw_only=True)
class ModelOnCluster:
    """What is planned, and for which machines."""

    model: str | None = argument(None, f"{MODEL_WORDS[0].upper()}{MODEL_WORDS[1:]}.", "MODEL")
    cluster: str | None = option(None, _CLUSTER, "NxGPU")
    gpu: str | None = option(None, "A GPU of your own, which --cluster then calls by its name.", "FILE.toml")
    sets: tuple[str, ...] = option((), "model.layers=105,...", "A=B,...", flag="--set")
    headroom: str | None = option(None, "Memory of each device to leave free; 5% if not given.", "N%")

    @property
    def headroom_share(self) -> float:
        from tilemesh.plan.constants import HEADROOM

        return HEADROOM if self.headroom is None else parse_fraction(self.headroom)


@dataclass(frozen=True, kw_only=True)
class TrainPlanOptions(ModelOnCluster):
    batch_tokens: str | None = option(None, "Tokens in a step, about: 4M.", "N")
    batch: int | None = option(None, "Sequences in a step, exactly; by default a training file's own.", "N")
    context: int | None = option(None, "Tokens in a sequence; the model's, if not given.", "N")
    fix: tuple[str, ...] = option((), "Pin: tp=8,pp=4,recompute=none,...", "A=B,...")
    code: str | None = option(None, CODE_WORDS, "NAME")
    imbalance: Annotated[float, Range(1, 1e6)] | None = option(
        None, "Tokens of the busiest rank that shares out experts over the mean; of random picks if not given.", "N"
    )
    price: Money | None = option(None, "A GPU's price per hour.", "N")
    budget: Money | None = option(None, "What may be spent: how many tokens it trains on; with --price.", "N")
    engine: Annotated[str, Known("engine", "tilemesh.plan.engines.tables:TRAINING", "vllm")] | None = option(
        None,
        "The best plan that it runs, in its terms: torchtitan, megatron, deepspeed, accelerate, vllm.",
        "NAME",
        flag="--for",
    )
    out: OutFolder | None = option(None, OUT, "PLAN.toml|FOLDER")
    explain: bool = option(False, "Show the arithmetic: formulas and numbers.")
    json: OutFile | None = option(None, "Every figure by name; - for stdout.", "FILE")
    html: OutFile | None = option(None, "Draw the trade-off and the pipeline.", "FILE")

    @property
    def tokens(self) -> int | None:
        return None if self.batch_tokens is None else parse_count(self.batch_tokens)


def train(options: TrainPlanOptions) -> Output:
    from tilemesh.cli.engines import engine_job, written_for
    from tilemesh.cli.layouts import headline, layout_items, money_words, reasons_for, section_items
    from tilemesh.plan.engines.tables import ENGINES
    from tilemesh.plan.explain import parameter_section, states_section, zero_section
    from tilemesh.plan.explain_plan import plan_sections
    from tilemesh.report.plan_page import render

    if options.model is None:
        raise UsageError(f"MODEL is missing: expected {MODEL_WORDS}")
    name, model = options.model, load_model(options.model, options.sets)
    context, batch = job_sizes(name) if options.cluster else (None, None)
    if batch and options.batch is None and options.batch_tokens is None:
        options = replace(options, batch=batch)
    if context and options.context is None:
        options = replace(options, context=context)
    if options.cluster is None:
        why_not = "{} is about a plan, which needs --cluster, such as --cluster 64xh100"
        about = ("gpu", "fix", "price", "budget", "out", "json", "html", "code", "headroom", "engine", "imbalance")
        refuse(options, why_not, *about)
        return Output(_model_items(options, name, model))
    if options.engine == "vllm":
        raise UsageError("--for vllm is of serving: leave the word train out")
    if options.budget is not None and options.price is None:
        raise UsageError("--budget says what may be spent: give what a GPU costs per hour too, such as --price 2.5")
    if options.out is not None and options.engine is None:
        check_targets([("--out", options.out)])
    result, software = _search(options, model, options.cluster)
    money = _money(options, result)
    best, reasons = (
        result.best.plan,
        [*reasons_for(result), *_kinds_apart(options, result), *money_words(money, result)],
    )
    text: list[Block] = [headline(name, options.batch, options.batch_tokens, result, software), *layout_items(result)]
    if options.explain:
        arithmetic = [parameter_section(model), states_section(model, best.precision)]
        text += section_items([*arithmetic, zero_section(model, best.precision, best.dp), *plan_sections(result)])
    text += ["Why the first" if len(result.predictions) > 1 else "Why", *(f"  - {line}" for line in reasons)]
    if options.engine is not None:
        job, command = engine_job(options, result), origin()["command"]
        text += written_for(ENGINES[options.engine], job, options.out, command, _plan_file(result))
    files: dict[str, Callable[[], str]] = {"html": lambda: render(result, name, reasons)}
    if options.out is not None and options.engine is None:
        text += _cannot_train(result)
        files["out"] = lambda: _plan_file(result)
    of_all = {"software": software.words, **origin()}
    objects = [result.figures(place) | of_all for place in range(len(result.predictions))]
    after = None if options.engine is not None else _next(options, result)
    return Output(text, [objects[0] | ({"money": money} if money else {}), *objects[1:]], files, next=after)


def _next(options: TrainPlanOptions, result: SearchResult) -> NextCommand:
    """Run the plan, or first the one that can be."""
    from tilemesh.plan.prediction import pins_to_train, trainable

    best, pins = result.best, pins_to_train(result.best.plan)
    if trainable(best.plan, result.refused) != "yes":
        return again("" if pins else "--explain", pins)
    gain = f"{format_seconds(best.step_time_s)} per step, {format_count(best.tokens_per_s)} tokens/s"
    return again("--out plan.toml") if options.out is None else NextCommand(f"train --plan {options.out}", gain)


def _search(options: TrainPlanOptions, model: ModelConfig, cluster: str) -> tuple[SearchResult, Software]:
    from tilemesh.cli.engines import best_for
    from tilemesh.plan.choose import NothingFitsError, plan_figures, search
    from tilemesh.plan.engines.tables import ENGINES
    from tilemesh.plan.software import SOFTWARE, read_software
    from tilemesh.plan.space import Pins

    pins = Pins.parse(options.fix)
    machines, rates = named_cluster(cluster, options.gpu)
    engine = None if options.engine is None else ENGINES[options.engine]
    profile = None if options.code is None else read_software(options.code)
    code: Code | None = None if engine is None else engine.code
    if profile is not None:
        code, (machines, rates) = profile.code, profile.on(machines, rates)

    def find(pins: Pins, accepts: Accepts | None) -> SearchResult:
        return search(
            model, machines, batch=options.batch, batch_tokens=options.tokens, context=options.context, pins=pins,
            rates=rates, code=code, headroom=options.headroom_share, imbalance=options.imbalance or 0.0,
            refused=_refused(model, options.context or model.context), accepts=accepts,
        )  # fmt: skip

    try:
        result = find(pins, None) if engine is None else best_for(engine, options, model, machines, pins, find)
        software = profile or SOFTWARE[result.estimator().clock.code(result.best.plan)]
        if rates is not None and machines.device.kind == "cpu" and software.name == software.code:
            software = replace(software, source="on this machine, as `tilemesh calibrate` measured it")
        return result, software
    except NothingFitsError as error:
        show(Output(json=[plan_figures(model, machines.name, pins, 0, error.smallest) | origin()]), options)
        raise RunError(f"{options.model} {error}") from None


def _kinds_apart(options: TrainPlanOptions, result: SearchResult) -> list[str]:
    """Of a cluster with several kinds of nodes: what the nodes of each kind do alone."""
    from tilemesh.cli.engines import runs
    from tilemesh.core.units import format_count
    from tilemesh.plan.choose import NothingFitsError, search
    from tilemesh.plan.engines.tables import ENGINES

    alone = []
    for part in result.cluster.parts:
        engine = None if options.engine is None else ENGINES[options.engine]
        try:
            best = search(
                result.model, part, batch=result.batch, context=result.context, pins=result.pins, code=result.code,
                headroom=result.headroom, shown=1, imbalance=result.imbalance,
                accepts=None if engine is None else runs(engine, options, result.model, part),
            ).best  # fmt: skip
            alone.append(
                f"{part.name} alone trains on {format_count(best.tokens_per_s)} tokens/s ({best.plan.short()})"
            )
        except (NothingFitsError, UsageError):
            alone.append(f"{part.name} alone has no layout that fits")
    if not alone:
        return []
    pace = (
        f"All ranks get the same work, so all go at the pace of the slowest: {format_count(result.best.tokens_per_s)}"
    )
    return [f"{pace} tokens/s; {'; '.join(alone)}."]


def _money(options: TrainPlanOptions, result: SearchResult) -> dict[str, float]:
    """What a billion tokens cost, and what a budget buys."""
    from tilemesh.plan.serving import cost_per_million

    if options.price is None:
        return {}
    per_hour = options.price * result.cluster.world
    billion = 1_000 * cost_per_million(options.price, result.cluster.world, result.best.tokens_per_s)
    money = {"price": options.price, "per_hour": per_hour, "per_billion_tokens": billion}
    if options.budget is not None:
        hours = options.budget / per_hour
        money |= {"budget": options.budget, "hours": hours, "tokens": hours * 3600 * result.best.tokens_per_s}
    return money


def _refused(model: ModelConfig, context: int) -> Refused:
    """What keeps `tilemesh train` from running a plan of this model, where all else is as it is by default."""
    from tilemesh.core.conflicts import refusals
    from tilemesh.plan.prediction import refused_plan
    from tilemesh.train.config import LoopConfig, TrainConfig
    from tilemesh.train.conflicts import OF_CONFIG

    longer = replace(model, context=max(model.context, context))  # as a plan is saved

    def refused(plan: ParallelPlan) -> Iterable[ConflictWords]:
        run = TrainConfig(longer, plan=plan, train=LoopConfig(context=context))
        return [*refused_plan(plan), *refusals(OF_CONFIG, run)]

    return refused


def _cannot_train(result: SearchResult) -> list[str]:
    """A plan that was saved is going to be run: say so here if it cannot be."""
    from tilemesh.plan.prediction import pins_to_train, trainable

    plan = result.best.plan
    words, pins = trainable(plan, result.refused).removeprefix("no, "), pins_to_train(plan)
    other = f"; for one it can: --fix {pins}" * bool(pins)
    return [] if words == "yes" else [f"`tilemesh train` cannot run it: {words}{other}"]


def named_cluster(text: str, gpu: str | None) -> tuple[Cluster, Rates | None]:
    """The cluster of that name, with what was measured of it where it is this machine; `gpu`: a file that describes a
    GPU whose name may stand there."""
    from tilemesh.core.described_gpu import read_gpu
    from tilemesh.core.hardware import parse_cluster
    from tilemesh.measure.machine import this_machine
    from tilemesh.plan.local import is_local, local_machine

    if gpu is not None:
        return parse_cluster(text, read_gpu(gpu)), None
    if is_local(text):
        here = local_machine(text, this_machine())
        return here.cluster, here.rates
    return parse_cluster(text), None


def _model_items(options: TrainPlanOptions, name: str, model: ModelConfig) -> list[Block]:
    """The arithmetic of a model without a cluster."""
    from tilemesh.cli.layouts import section_items
    from tilemesh.core.hardware import parse_cluster
    from tilemesh.core.plan import ParallelPlan
    from tilemesh.model.work.weights import count_parameters
    from tilemesh.plan.choose import choose_batch
    from tilemesh.plan.explain import model_sections
    from tilemesh.plan.explain_plan import roofline_section
    from tilemesh.plan.step import Estimator

    context = model.context if options.context is None else options.context
    layout = ParallelPlan(precision="bf16-master", attention="materialized")
    # No cluster was named; the ridge needs some device, and says which.
    reference = Estimator(model, parse_cluster(f"1x{REFERENCE_DEVICE}"), context)
    has_batch = options.batch is not None or options.batch_tokens is not None
    sequences = choose_batch(options.batch, options.tokens, context) if has_batch else 1
    sections = [*model_sections(model, context, layout, sequences), roofline_section(reference, layout)]
    return [
        f"{name}: {count_parameters(model).total:,} parameters",
        *section_items(sections),
        "With --cluster, such as --cluster 64xh100, layouts are searched and one is explained.",
    ]


def origin() -> dict[str, Any]:
    """What made the figures: the version and the command."""
    command = shlex.join(["tilemesh", *TYPED.get()]).encode(errors="backslashreplace").decode()  # names may be bytes
    return {"versions": {"tilemesh": tilemesh.__version__}, "command": command}


def _plan_file(result: SearchResult) -> str:
    best = result.best
    predicted = f"{best.step_time_s:.4g} s per step, {best.memory.total_bytes} bytes per rank"
    return result.to_toml(plan_note(predicted))


def plan_note(predicted: str) -> str:
    """Of a plan's file: what wrote it, and what it is predicted to come to."""
    return f"{origin()['command']}\npredicted: {predicted}"
