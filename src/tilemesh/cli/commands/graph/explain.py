"""Print a model's graph before and after rewriting. Says what each rule saves, and with --mesh what ranks exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilemesh.cli import chosen
from tilemesh.cli.next_command import again
from tilemesh.cli.output import Output
from tilemesh.cli.placed import place, placed_drawing, placed_lines
from tilemesh.cli.placed import record as placed_record
from tilemesh.cli.placed_picture import placed_summary
from tilemesh.cli.run_placed import PlacementRun, run_chosen, run_page, run_rows, run_words
from tilemesh.core import calibration
from tilemesh.core.advice import NextCommand
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import DEVICES, LOCAL, Device
from tilemesh.core.options import OutFile, argument, option
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.graph.cost import graph_seconds, saved_by
from tilemesh.graph.ir import Graph
from tilemesh.graph.memory import arena
from tilemesh.measure.machine import this_machine
from tilemesh.plan.place.problem import Chosen
from tilemesh.plan.place.propagate import PlacedGraph
from tilemesh.train.programs import load_program

if TYPE_CHECKING:
    from tilemesh.graph.timed import OperatorTime
    from tilemesh.measure.row import Row
    from tilemesh.report.html import Html

LINES = 40  # of a graph that is printed without --whole


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(chosen.PlacingOptions):
    program: str = argument(..., "A function of yours that returns a torch module and its inputs.", "FILE.py:FUNCTION")
    run: bool = option(False, "Run what is chosen on ranks of this machine; needs --device local.")
    time: bool = option(False, "Measure each operator and kernel on this machine; needs --device local.")
    whole: bool = option(False, "Print both graphs whole, however long they are.")
    svg: OutFile | None = option(None, "Draw the graph: before, after, and as kernels.", "FILE")
    html: OutFile | None = option(None, "The drawing and the rules as a page.", "FILE")
    json: OutFile | None = option(None, "Also write this as JSON; - is standard output.")


def explain(options: ExplainOptions) -> Output:
    _require_mesh(options)
    model, inputs = load_program(options.program)
    import torch

    from tilemesh.graph.draw import drawing
    from tilemesh.graph.generated import way_for
    from tilemesh.graph.kernel_c import CWriter
    from tilemesh.graph.regions import fused
    from tilemesh.graph.rules import ALGEBRA, simplify
    from tilemesh.graph.timed import operator_times
    from tilemesh.graph.tracing import trace

    device = options.device
    figures_of = DEVICES[device] if device != LOCAL else chosen.ranks_on(device, 1)[0].device
    before = trace(model, inputs).graph
    after, steps = simplify(before, ALGEBRA)
    gains = saved_by(before, steps, figures_of)
    figures = {"before": _figures(before, figures_of), "after": _figures(after, figures_of)}
    record: dict[str, Any] = figures | {"rules": [vars(gain) for gain in gains]}

    placed, answers, runs, rows = _placed(options, model, inputs)
    if placed is not None:
        record |= {"placed": placed_record(placed)} | ({"chosen": chosen.record(answers)} if answers else {})

    def drawn() -> str:
        if placed is not None:
            return placed_drawing(placed, f"on {options.mesh}")
        return drawing(
            [("as traced", before), ("after the rules", after), ("as kernels", fused(after, CWriter.serves))]
        )

    times = []
    if options.time:
        is_compiled = way_for(torch.device("cpu")) is not None
        times = operator_times(fused(after, CWriter.serves) if is_compiled else after, figures_of)
    record |= {"times": [vars(each) for each in times]} if times else {}
    width = max([len(gain.rule) for gain in gains], default=0)
    rules = [
        f"  {gain.rule:<{width}}  {gain.times:>4} times, {gain.launches:>4} operators fewer,"
        f" {format_bytes(gain.moved_bytes)} less to move, {format_seconds(gain.seconds)} predicted"
        for gain in gains
    ]
    text = [
        *_graph_lines("before", before, options.whole),
        *(rules or ["no rule fits"]),
        "",
        *_graph_lines("after", after, options.whole),
        *(f"{name:>6}: {_words(figures[name], device)}" for name in figures),
        *time_lines(times),
        *([] if placed is None else ["", f"on {options.mesh}:", *placed_lines(placed)]),
        *(["", *chosen.chosen_lines(answers)] if answers else []),
    ]
    more: list[Callable[[], Html]] = [lambda: chosen.chosen_page(answers)] if answers else []
    more += [lambda: run_page(runs)] if runs else []
    if placed is not None:
        more.insert(0, lambda: placed_summary(placed, str(options.mesh), device, answers, runs))
    files = {"svg": drawn, "html": lambda: _page(options.program, drawn(), record, device, [show() for show in more])}
    return Output([text, rows, *([run_words(runs)] if runs else [])], [record, *rows], files, next=_following(options))


def _following(options: ExplainOptions) -> NextCommand | None:
    if options.run:
        return None
    if options.mesh is None:
        return again("--mesh dp=2 --choose all")
    if calibration.find(this_machine().id) is None:  # which predictions for it are made of
        return NextCommand("calibrate")
    return again(f"{'--choose all ' * (options.choose is None)}--device local --run")


def _placed(
    options: ExplainOptions, model: Any, inputs: Sequence[Any]
) -> tuple[PlacedGraph | None, list[Chosen], list[PlacementRun], list[Row]]:
    """As pins place it, or as the best placement that was found; then who found what, and what ranks took for it."""
    if options.mesh is None:
        return None, [], [], []
    traced = chosen.traced_program(model, inputs, options)
    if options.choose is None:
        return place(traced.graph, options.mesh, options.pin), [], [], []
    space, problem = chosen.program_space(traced, options)
    answers = chosen.choose_placements(space, problem, options)
    runs = run_chosen(options.program, options, answers) if options.run else []
    return space.placed(answers[0].choice or ()), answers, runs, run_rows(runs, space)


def time_lines(times: Sequence[OperatorTime]) -> list[str]:
    """Where the time goes, operator by operator, and how well each kind of operator is predicted."""
    if not times:
        return []
    total = sum(each.measured_s or 0.0 for each in times)
    lines = ["", "as kernels, each by itself on this machine (predicted | measured):"]
    kinds: dict[str, list[OperatorTime]] = {}
    for each in times:
        kinds.setdefault(each.operator.split(" of ")[0], []).append(each)
        share = "" if each.measured_s is None else f" {each.measured_s / total:6.1%}"
        measured = each.why if each.measured_s is None else format_seconds(each.measured_s)
        many = f" {each.count} times" if each.count > 1 else ""
        lines.append(
            f"  {format_seconds(each.predicted_s):>9} | {measured:>9}{share}  {each.operator}"
            f" {list(each.shape)}{many} {each.line}".rstrip()
        )
    lines.append("by kind:")
    for kind, members in kinds.items():
        pairs = [(each.predicted_s, each.measured_s) for each in members if each.measured_s is not None]
        predicted_s, measured_s = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
        if measured_s:
            figures = f"{format_seconds(predicted_s)} | {format_seconds(measured_s)}, {measured_s / total:.1%} of all"
            lines.append(f"  {kind}: {figures}, predicted {predicted_s / measured_s - 1:+.0%}")
    return lines


def _require_mesh(options: ExplainOptions) -> None:
    if options.time and options.device != LOCAL:
        raise UsageError(
            f"--time measures on this machine, --device {options.device} predicts another: give --device local too"
        )
    placing = {"--pin": options.pin, "--choose": options.choose, "--memory": options.memory, "--train": options.train}
    for name, value in placing.items():
        if value and options.mesh is None:
            raise UsageError(f"{name} without --mesh: give the ranks too, such as --mesh tp=2")
    if options.memory is not None and options.choose is None:
        raise UsageError("--memory without --choose: it limits what is chosen; give --choose ilp too")
    if options.run and (options.choose is None or options.device != LOCAL):
        raise UsageError("--run measures what is chosen on this machine: give --choose all --device local too")


def _page(program: str, drawn: str, record: dict[str, Any], device: str, more: Sequence[Html]) -> str:
    """The drawing, what each rule saved, and the figures before and after."""
    from tilemesh.report.draw import PageTable, grid
    from tilemesh.report.html import Html, el, join, page

    rules = [
        (rule["rule"], str(rule["times"]), str(rule["launches"]), format_bytes(rule["moved_bytes"]),
         format_seconds(rule["seconds"]))
        for rule in record["rules"]
    ]  # fmt: skip
    table = PageTable(("Rule", "Times", "Operators fewer", "Bytes less", f"Predicted on {device}"), rules)
    picture = el("div", Html(drawn), style="overflow-x:auto")
    rewriting = [*(el("p", f"{name}: {_words(record[name], device)}") for name in ("before", "after")), grid(table)]
    if more:  # placed: what was rewritten before, and every operator, are for those who look closer
        rewriting = [el("details", el("summary", "Rewriting before it was placed"), *rewriting)]
        picture = el("details", el("summary", "Every operator"), picture)
    body = join(el("h1", f"The graph of {program}"), *more, *rewriting, picture)
    return page(f"The graph of {program}", body)


def _figures(graph: Graph, device: Device) -> dict[str, Any]:
    plan = arena(graph)
    return {
        "operators": graph.launches,
        "opaque": sum(node.op == "opaque" for node in graph.nodes()),
        "flops": graph.flops, "moved_bytes": graph.moved_bytes, "arena_bytes": plan.size, "live_bytes": plan.bound,
        "seconds": graph_seconds(graph, device),
    }  # fmt: skip


def _words(figures: Any, device: str) -> str:
    return (
        f"{figures['operators']} operators ({figures['opaque']} torch's own), {figures['flops']:.3g} FLOP,"
        f" {format_bytes(figures['moved_bytes'])} moved, {format_seconds(figures['seconds'])} predicted on {device},"
        f" {format_bytes(figures['arena_bytes'])} for its values"
    )


def _graph_lines(title: str, graph: Graph, is_whole: bool) -> list[str]:
    lines = str(graph).splitlines()
    if not is_whole and len(lines) > LINES:
        lines = [*lines[: LINES - 2], f"  … {len(lines) - LINES + 1} more lines: --whole", lines[-1]]
    return [f"{title}:", *lines, ""]
