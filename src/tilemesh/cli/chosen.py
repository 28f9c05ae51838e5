"""A placement that is chosen, as a table of those who chose and as a picture: part of `tilemesh graph explain`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from tilemesh.cli.placed import read_axes, read_pins
from tilemesh.core.axes import Axes, ranks_of
from tilemesh.core.calibration import Rates
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import LOCAL, Cluster, parse_cluster
from tilemesh.core.options import Known, option
from tilemesh.core.units import format_bytes, format_seconds, parse_bytes
from tilemesh.graph.ir import Graph, Node
from tilemesh.plan.place.problem import Chosen, PlacementProblem
from tilemesh.plan.place.rules import DRAWN_ALIKE

if TYPE_CHECKING:
    from tilemesh.plan.place.space import PlacementSpace
    from tilemesh.report.html import Html

HEAD = (
    "chooser", "predicted time", "overlapped", "memory per rank", "sent per rank", "evaluations", "at most better by",
    "seconds",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlacingOptions:
    """What a command is told of placing."""

    device: Annotated[str, Known("device", "tilemesh.core.hardware:DEVICES", also=LOCAL)] = option(
        "h100", "Predict times for this device, such as h200; local is this machine as it was calibrated."
    )
    mesh: str | None = option(None, "Place the rewritten graph on ranks, axes in this order.", "dp=2,tp=2")
    pin: tuple[str, ...] = option((), "Where a tensor lies, such as up.weight=tp:S0; again for more.", "NAME=PLACE")
    choose: Annotated[str | None, Known("chooser", "tilemesh.parallel.choose:CHOOSERS", also="all")] = option(
        None, "Let a chooser place what is not pinned: ilp, dp, mcmc, greedy, learned, random, or all.", "NAME"
    )
    memory: str | None = option(None, "What a rank may hold, such as 8GiB; by default what the device has.", "SIZE")
    train: bool = option(False, "Place a training step: with gradients, and new values of all parameters.")
    optimizer: Annotated[str, Known("optimizer", "tilemesh.graph.joint:UPDATES")] = option(
        "sgd", "With --train, whose update and states are placed too."
    )

    @property
    def axes(self) -> Axes:
        return read_axes(self.mesh or "")


@dataclass(frozen=True)
class TracedProgram:
    """What is placed: a graph, which of its outputs is whose new value, and the tensors of its inputs by name."""

    graph: Graph
    carried: Mapping[Node, Node]
    tensors: Mapping[str, Any]


def traced_program(model: Any, inputs: Sequence[Any], options: PlacingOptions) -> TracedProgram:
    """A program as it is; with --train both its passes and an optimizer's update."""
    from tilemesh.graph.rules import ALGEBRA, simplify
    from tilemesh.graph.tracing import trace

    if options.train:
        return _training_step(model, inputs, options.optimizer)
    traced = trace(model, inputs)
    graph, _ = simplify(traced.graph, ALGEBRA)
    values = [value.detach() for value in (*traced.weights.values(), *inputs)]
    return TracedProgram(graph, {}, dict(zip(_names(graph.inputs), values, strict=True)))


def _training_step(model: Any, inputs: Sequence[Any], optimizer: str) -> TracedProgram:
    """New values of all parameters, of an optimizer's states and of the buffers that the program changes."""
    from tilemesh.graph.joint import UPDATES, ModuleCall, trace_joint, with_update

    parameters = dict(model.named_parameters()) if hasattr(model, "named_parameters") else {}
    if not any(value.requires_grad for value in parameters.values()):
        raise UsageError("--train of a program without parameters: give a module that has some")
    call = ModuleCall.example(list(inputs))
    trace = trace_joint(model, call)
    graph, replaced = with_update(trace, *UPDATES[optimizer])
    changed = zip(graph.outputs[trace.results :], trace.changed, strict=False)
    carried = {output: trace.node(name) for output, name in changed} | replaced
    tensors = {**parameters, **dict(model.named_buffers()), **dict(zip(call.names, call.tensors, strict=True))}
    own = {name: value.detach() for name, value in (*tensors.items(), *trace.constants.items())}
    return TracedProgram(graph, carried, own)


def _names(nodes: Sequence[Node]) -> list[str]:
    return [str(node["name"]) for node in nodes]


def program_space(traced: TracedProgram, options: PlacingOptions) -> tuple[PlacementSpace, PlacementProblem]:
    """All placements of a program, and the problem that pins leave of choosing one."""
    from tilemesh.plan.place.cost import MeshCost
    from tilemesh.plan.place.space import PlacementSpace

    graph = traced.graph
    axes = options.axes
    cluster, rates = ranks_on(options.device, ranks_of(axes))
    limit = parse_bytes(options.memory) if options.memory is not None else cluster.device.usable_bytes
    pins = read_pins(options.pin, graph)
    results = {f"output{number}": node for number, node in enumerate(graph.outputs)}
    ends = {results[name]: placement for name, placement in pins.items() if name in results}
    cost = MeshCost(axes, cluster, rates)
    space = PlacementSpace(graph, cost, traced.carried, limit_bytes=limit, ends=ends, opaque=DRAWN_ALIKE)
    return space, space.problem.fixed(space.pinned({name: pins[name] for name in pins if name not in results}))


def ranks_on(device: str, ranks: int) -> tuple[Cluster, Rates | None]:
    """So many of a device by its datasheet, or of this machine's cores (`local`) as they were measured."""
    if device != LOCAL:
        return parse_cluster(f"{ranks}x{device}"), None
    from tilemesh.measure.machine import this_machine
    from tilemesh.plan.local import local_machine

    measured = local_machine(f"{ranks}x{LOCAL}-cpu", this_machine())
    return measured.cluster, measured.rates


def choose_placements(space: PlacementSpace, problem: PlacementProblem, options: PlacingOptions) -> list[Chosen]:
    """Who found what, the fastest placement first."""
    from tilemesh.parallel.choose import CHOOSERS, race, refusal
    from tilemesh.parallel.choose.recipes import with_recipes

    answers = race(problem, tuple(CHOOSERS) if options.choose == "all" else (str(options.choose),))
    if options.choose == "all" and not options.pin:
        answers = with_recipes(space, answers)
    if answers[0].choice is None:
        raise refusal(problem, str(options.choose))
    choices = {each.choice for each in answers if each.choice is not None}
    seconds = {choice: space.cost.of_program(space.program(choice, 0))[0] for choice in choices}
    return [replace(each, overlapped_s=seconds[each.choice] if each.choice else 0.0) for each in answers]


def _cells(each: Chosen) -> tuple[str, ...]:
    if each.figures is None:
        return each.chooser, "none fits", "", "", "", f"{each.evaluations:,}", "", f"{each.seconds:.2f}"
    gap = "0, proved" if each.is_optimal else "unknown" if each.bound_s <= 0 else f"{each.gap:.1%}"
    figures = each.figures
    sizes = (format_bytes(round(figures.memory_bytes)), format_bytes(round(figures.sent_bytes)))
    times = (format_seconds(figures.seconds), format_seconds(each.overlapped_s))
    return each.chooser, *times, *sizes, f"{each.evaluations:,}", gap, f"{each.seconds:.2f}"


def chosen_lines(answers: Sequence[Chosen]) -> list[str]:
    """A line for each, the fastest placement first."""
    rows = [HEAD, *map(_cells, answers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    bounds = [each.lp_bound_s for each in answers if each.chooser == "ilp"]
    return [*lines, *(f"bound without whole numbers: {format_seconds(bound)}" for bound in bounds)]


def record(answers: Sequence[Chosen]) -> list[dict[str, Any]]:
    """For --json."""
    return [
        {
            "chooser": each.chooser,
            "predicted_s": each.figures.seconds if each.figures else None,
            "overlapped_s": each.overlapped_s if each.figures else None,
            "memory_bytes": each.figures.memory_bytes if each.figures else None,
            "bytes_per_rank": each.figures.sent_bytes if each.figures else None,
            "evaluations": each.evaluations, "bound_s": each.bound_s, "lp_bound_s": each.lp_bound_s,
            "is_optimal": each.is_optimal, "seconds": each.seconds,
        }
        for each in answers
    ]  # fmt: skip


def chosen_page(answers: Sequence[Chosen]) -> Html:
    """Who found what after how many evaluations, and the table."""
    from tilemesh.parallel.choose import CHOOSERS
    from tilemesh.report.draw import Dots, Drawing, Line, PageTable, Plot, PlotAxis, PlotLayer, Rule, around

    layers: list[PlotLayer] = []
    points: list[tuple[float, float]] = []
    layouts: dict[str, tuple[float, float]] = {}
    for each in answers:
        if each.figures is not None:
            end = (float(max(each.evaluations, 1)), each.figures.seconds)
            if each.chooser not in CHOOSERS:
                layouts[each.chooser] = end
                continue
            colour = [*CHOOSERS].index(each.chooser)
            history = [(float(count), seconds) for count, seconds in each.history if seconds < math.inf]
            layers.append(Line(each.chooser, [*history, end], colour) if history else Dots(each.chooser, [end], colour))
            points += [*history, end]
    if layouts:
        layers.append(Dots("known layouts", [*layouts.values()], 7, words=[*layouts]))
    points += layouts.values()
    bound = max(each.bound_s for each in answers)
    if bound > 0:
        layers.append(Rule("proved bound", bound, 6))
        points.append((points[0][0], bound))
    low, high = around([seconds for _, seconds in points])
    x = PlotAxis(1.0, max(2.0, *(count for count, _ in points)), "evaluations of the cost", "{:,.0f}".format, log=True)
    y = PlotAxis(max(low, bound * 0.97), high, "predicted time of a step", format_seconds)
    words = (
        "The best placement that each chooser knew after so many evaluations; integer programming counts its solves."
    )
    return Drawing("Choosers", words, Plot(x, y, layers), PageTable(HEAD, [_cells(each) for each in answers])).show(
        wide=True
    )
