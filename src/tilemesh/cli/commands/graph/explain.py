"""Print a model's graph before and after rewriting. Says what each rule saves, and with --mesh what ranks exchange."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tilemesh.cli import chosen
from tilemesh.cli.output import Output
from tilemesh.cli.placed import placed_drawing, placed_lines
from tilemesh.cli.placed import record as placed_record
from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.core.hardware import DEVICES
from tilemesh.core.options import Known, OutFile, argument, option
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.graph.cost import graph_seconds, saved_by
from tilemesh.graph.ir import Graph
from tilemesh.graph.memory import arena
from tilemesh.graph.size import known
from tilemesh.plan.place.problem import Chosen

LINES = 40  # of a graph that is printed without --whole


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    program: str = argument(..., "A function of yours that returns a torch module and its inputs.", "FILE.py:FUNCTION")
    device: Annotated[str, Known("device", "tilemesh.core.hardware:DEVICES")] = option(
        "h100", "Predict times for this device, such as h200."
    )
    mesh: str | None = option(None, "Place the rewritten graph on ranks, axes in this order.", "dp=2,tp=2")
    pin: tuple[str, ...] = option((), "Where a tensor lies, such as up.weight=tp:S0; again for more.", "NAME=PLACE")
    choose: Annotated[str | None, Known("chooser", "tilemesh.parallel.choose:CHOOSERS", also="all")] = option(
        None, "Let a chooser place what is not pinned: ilp, dp, mcmc, greedy, learned, random, or all.", "NAME"
    )
    memory: str | None = option(None, "What a rank may hold, such as 8GiB; by default what the device has.", "SIZE")
    train: bool = option(False, "Place a training step: with gradients, and new values of all parameters.")
    whole: bool = option(False, "Print both graphs whole, however long they are.")
    svg: OutFile | None = option(None, "Draw the graph: before, after, and as kernels.", "FILE")
    html: OutFile | None = option(None, "The drawing and the rules as a page.", "FILE")
    json: OutFile | None = option(None, "Also write this as JSON; - is standard output.")


def explain(options: ExplainOptions) -> Output:
    _require_mesh(options)
    model, inputs = load_program(options.program)
    from tilemesh.graph.draw import drawing
    from tilemesh.graph.kernel_c import CWriter
    from tilemesh.graph.regions import fused
    from tilemesh.graph.rules import ALGEBRA, simplify
    from tilemesh.graph.tracing import trace

    device = options.device
    before = trace(model, inputs).graph
    after, steps = simplify(before, ALGEBRA)
    gains = saved_by(before, steps, DEVICES[device])
    figures = {"before": _figures(before, device), "after": _figures(after, device)}
    record: dict[str, Any] = figures | {"rules": [vars(gain) for gain in gains]}

    placed, answers = None, list[Chosen]()
    if options.mesh is not None:
        words = chosen.PlacingWords(options.mesh, options.pin, options.choose, device, options.memory, options.train)
        placed, answers = chosen.place_program(after, model, words)
        record |= {"placed": placed_record(placed)} | ({"chosen": chosen.record(answers)} if answers else {})

    def drawn() -> str:
        if placed is not None:
            return placed_drawing(placed, f"on {options.mesh}")
        return drawing(
            [("as traced", before), ("after the rules", after), ("as kernels", fused(after, CWriter.serves))]
        )

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
        *([] if placed is None else ["", f"on {options.mesh}:", *placed_lines(placed)]),
        *(["", *chosen.chosen_lines(answers)] if answers else []),
    ]
    files = {"svg": drawn, "html": lambda: _page(options.program, drawn(), record, device, answers)}
    return Output([text], [record], files)


def _require_mesh(options: ExplainOptions) -> None:
    placing = {"--pin": options.pin, "--choose": options.choose, "--memory": options.memory, "--train": options.train}
    for name, value in placing.items():
        if value and options.mesh is None:
            raise UsageError(f"{name} without --mesh: give the ranks too, such as --mesh tp=2")
    if options.memory is not None and options.choose is None:
        raise UsageError("--memory without --choose: it limits what is chosen; give --choose ilp too")


def _page(program: str, drawn: str, record: dict[str, Any], device: str, answers: list[Chosen]) -> str:
    """The drawing, what each rule saved, and the figures before and after."""
    from tilemesh.report.draw import PageTable, grid
    from tilemesh.report.html import Html, el, join, page

    rules = [
        (rule["rule"], str(rule["times"]), str(rule["launches"]), format_bytes(rule["moved_bytes"]),
         format_seconds(rule["seconds"]))
        for rule in record["rules"]
    ]  # fmt: skip
    table = PageTable(("Rule", "Times", "Operators fewer", "Bytes less", f"Predicted on {device}"), rules)
    body = join(
        el("h1", f"The graph of {program}"),
        *(el("p", f"{name}: {_words(record[name], device)}") for name in ("before", "after")),
        grid(table),
        *([chosen.chosen_page(answers)] if answers else []),
        el("div", Html(drawn), style="overflow-x:auto"),
    )
    return page(f"The graph of {program}", body)


def load_program(program: str) -> tuple[Any, list[Any]]:
    """What the user's function returned: a model and its inputs."""
    path, _, name = program.rpartition(":")
    if not path or not name:
        raise UsageError(f"the program is {program!r}; give FILE.py:FUNCTION, such as model.py:make")
    if not Path(path).is_file():
        raise UsageError(f"there is no file {path}; give FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location("explained", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file; give FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RunError(f"{path} fails when it is loaded: {type(error).__name__}: {error}") from error
    make = getattr(module, name, None)
    if not callable(make):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown("function", name, functions)
    try:
        returned = make()
    except (Exception, SystemExit) as error:
        raise RunError(f"{name} of {path} fails: {type(error).__name__}: {error}") from error
    if not isinstance(returned, tuple) or len(returned) != 2 or not callable(returned[0]):
        kind = type(returned).__name__
        raise UsageError(f"{name} of {path} returned {kind}; return a model and a list of its inputs")
    model, inputs = returned
    if not isinstance(inputs, list | tuple):
        raise UsageError(f"the inputs from {name} of {path} are {type(inputs).__name__}; return a list of tensors")
    return model, list(inputs)


def _figures(graph: Graph, device: str) -> dict[str, Any]:
    plan = arena(graph)
    return {
        "operators": graph.launches,
        "opaque": sum(node.op == "opaque" for node in graph.nodes()),
        "flops": known(graph.flops, {}),
        "moved_bytes": known(graph.moved_bytes, {}),
        "arena_bytes": plan.size,
        "live_bytes": plan.bound,
        "seconds": graph_seconds(graph, DEVICES[device]),
    }


def _words(figures: Any, device: str) -> str:
    return (
        f"{figures['operators']} operators ({figures['opaque']} torch's own), {figures['flops']:.3g} FLOP,"
        f" {format_bytes(figures['moved_bytes'])} moved, {format_seconds(figures['seconds'])} predicted on {device},"
        f" {format_bytes(figures['arena_bytes'])} for its values"
    )


def _graph_lines(title: str, graph: Graph, whole: bool) -> list[str]:
    lines = str(graph).splitlines()
    if not whole and len(lines) > LINES:
        lines = [*lines[: LINES - 2], f"  … {len(lines) - LINES + 1} more lines: --whole", lines[-1]]
    return [f"{title}:", *lines, ""]
