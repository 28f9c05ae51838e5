"""A placed graph as a person would draw it: few boxes, coloured by placement, exchanges on the lines, times beside it.

Operators that nothing is exchanged between are one box, named by the first product, table or convolution in it with the
weights that it reads; of both passes the forward one is drawn, and what the backward one exchanges is counted below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tilemesh.cli.placed import COLOURS, by_reader
from tilemesh.cli.run_placed import PlacementRun
from tilemesh.core.tensor_placement import REPLICATED, TensorPlacement
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.graph.draw import drawing
from tilemesh.graph.ir import Graph, Node, make, ordered
from tilemesh.plan.place.problem import Chosen
from tilemesh.plan.place.propagate import PlacedExchange, PlacedGraph
from tilemesh.report.bars import Bar, BarPart, bars
from tilemesh.report.html import Html, el, join

LEADING = ("dot", "conv", "take", "put_add", "opaque")
"""What a box is named by, and begins with."""
MEANINGS = (("R: whole on every rank", 0), ("S: cut along a dim", 2), ("P: parts of a sum", 1), ("V: differs", 6))
NAMED = ("softmax", ("amax", "exp")), ("norm", ("sqrt",)), ("gelu", ("erf",)), ("tanh", ("tanh",))
"""Words for boxes without a product, by operators in them: the first that fits."""


@dataclass
class _OperatorBox:
    """Operators of one box."""

    nodes: list[Node] = field(default_factory=list)
    weights: list[Node] = field(default_factory=list)


def placed_picture(placed: PlacedGraph) -> str:
    """The forward pass as SVG; at most some sixty boxes, of the first layers."""
    graph, groups = _condensed(placed)
    sent = by_reader(placed)

    def placement(node: Node) -> TensorPlacement:
        return placed.placements[groups[node].nodes[-1]] if node in groups else REPLICATED

    def colour(node: Node) -> int:
        kinds = {mark.kind for _, mark in placement(node)}
        return next((COLOURS[kind] for kind in "PVS" if kind in kinds), 0)

    def edge(node: Node, reader: Node) -> str:
        ends, own = groups[node].nodes, groups[reader].nodes
        return _words(each for at in own for value in at.inputs if value in ends for each in sent.get((value, at), ()))

    def more(node: Node) -> str:
        own = groups[node].nodes
        after = _words(each for at in own for each in sent.get((at, None), ()))
        gathered = [
            f"{_short(weight)} {placed.placements[weight]}"
            + (f", {words}" if (words := _read_as(sent, weight, own)) else "")
            for weight in groups[node].weights
        ]
        return " · ".join([str(placement(node)), *([f"then {after}"] if after else []), *gathered])

    return drawing([("", graph)], colour=colour, more=more, edge=edge, is_centred=True)


def _short(weight: Node) -> str:
    return ".".join(str(weight["name"]).split(".")[-2:])


def _read_as(sent: dict[tuple[Node, Node | None], list[PlacedExchange]], weight: Node, readers: Sequence[Node]) -> str:
    """What is exchanged of a weight for a box, seen through its views."""
    values, exchanged = [weight], list[PlacedExchange]()
    for node in readers:
        if any(value in values for value in node.inputs):
            exchanged += [each for value in node.inputs if value in values for each in sent.get((value, node), ())]
            if not node.launched:
                values.append(node)
    return _words(exchanged)


def _words(exchanges: object) -> str:
    bytes_by_axis: dict[tuple[str, str], float] = {}
    for each in exchanges:  # type: ignore[attr-defined]
        bytes_by_axis[each.collective, each.axis] = bytes_by_axis.get((each.collective, each.axis), 0.0) + each.nbytes
    return ", ".join(f"{name} {axis} {format_bytes(round(nbytes))}" for (name, axis), nbytes in bytes_by_axis.items())


MOST = 60


def _condensed(placed: PlacedGraph) -> tuple[Graph, dict[Node, _OperatorBox]]:
    """A graph of boxes, and what is in each. A node joins the last box that it reads from, so that lines lead down;
    unless it leads one, or something is exchanged on its way there."""
    order = ordered(placed.graph.outputs[:1])
    weights = {node for node in placed.graph.inputs if "weight" in str(node["name"]) or "bias" in str(node["name"])}
    crossed = {(each.node, each.reader) for each in placed.exchanges if each.nbytes}
    settled = {each.node for each in placed.exchanges if each.nbytes and each.reader is None}
    groups: list[_OperatorBox] = []
    free: set[Node] = set()  # numbers, and what is made of them alone
    home: dict[Node, int] = {}
    of_weight: dict[Node, list[Node]] = {node: [node] for node in weights}  # views of weights alone, and of which
    for node in order:
        if node in weights or node.op in ("constant", "iota") or (node.inputs and all(v in free for v in node.inputs)):
            free |= set() if node in weights else {node}
            continue
        if node.inputs and all(value in of_weight for value in node.inputs):
            of_weight[node] = [weight for value in node.inputs for weight in of_weight[value]]
            continue
        read = [home[value] for value in node.inputs if value in home]
        begins = node.op in LEADING or node.op == "input" or not read
        last = max(read, default=-1)
        apart = any((value, node) in crossed and home.get(value) == last for value in node.inputs)
        apart = apart or any(value in settled and home.get(value) == last for value in node.inputs)
        if begins or apart or groups[last].nodes[-1].op == "input":
            groups.append(_OperatorBox())
            last = len(groups) - 1
        for value in node.inputs:
            if value in of_weight:  # with the views that lead there, on which an exchange may stand
                groups[last].nodes += [view for view in _views(value) if view not in groups[last].nodes]
                groups[last].weights += [weight for weight in of_weight[value] if weight not in groups[last].weights]
        groups[last].nodes.append(node)
        home[node] = last
    boxes: list[Node] = []
    for number, group in enumerate(groups[:MOST]):
        inside = {home[value] for node in group.nodes for value in node.inputs if value in home} - {number}
        result = group.nodes[-1]
        if result.op == "input":
            boxes.append(make("input", name=str(result["name"]), shape=result.shape, dtype=result.dtype))
        else:
            words = f"{_title(group)}{' ' * number}"  # boxes that are alike are two
            read_boxes = [boxes[at] for at in sorted(inside)]
            boxes.append(make("opaque", *read_boxes, target=words, shape=result.shape, dtype=result.dtype, kwargs=()))
    ends = [box for box in boxes if not any(box in other.inputs for other in boxes)]
    inputs = tuple(box for box in boxes if box.op == "input")
    return Graph(inputs, tuple(ends)), dict(zip(boxes, groups, strict=False))


def _views(node: Node) -> list[Node]:
    return [view for view in ordered([node]) if view.op not in ("constant", "iota")]


def _title(group: _OperatorBox) -> str:
    """What a box computes: its product with what follows that has a name."""
    counts = Counter(node.op for node in group.nodes)
    first = next((node.op for node in group.nodes if node.op in LEADING), "")
    called = {"dot": "product", "conv": "convolution", "take": "rows of a table"}
    words = [called.get(first, first)] if first and first != "opaque" else []
    words += [str(node["target"]).split(".")[1] for node in group.nodes if node.op == "opaque"][:1]
    words += [name for name, needed in NAMED if all(counts[op] for op in needed)]
    plain = [op for op in ("add", "multiply", "maximum", "sum") if counts[op]]
    return ", ".join(words or plain[:2] or [group.nodes[-1].op])


def placed_summary(
    placed: PlacedGraph, mesh: str, device: str, answers: Sequence[Chosen], runs: Sequence[PlacementRun]
) -> Html:
    """The picture beside predicted and measured times of all who chose, and what the backward pass exchanges."""
    forward = set(ordered(placed.graph.outputs[:1]))
    back = [each for each in placed.exchanges if each.nbytes and (each.reader or each.node) not in forward]
    there = [each for each in placed.exchanges if each.nbytes and (each.reader or each.node) in forward]
    passes = [
        el("p", f"{name}: {_counted(exchanges)}.")
        for name, exchanges in (("Forward pass", there), ("Gradients and new weights", back))
        if exchanges or name == "Forward pass"
    ]
    picture = el(
        "div",
        el(
            "ul",
            *(el("li", el("i", class_=f"key k{colour} box"), words) for words, colour in MEANINGS),
            class_="legend",
        ),
        el("div", Html(placed_picture(placed)), style="overflow-x:auto"),
        *passes,
        style="flex:1 1 44rem;min-width:0",
    )
    beside = el(
        "div", el("h3", "Who chose, and what it takes"), _times(answers, runs), style="flex:0 1 20rem;min-width:0"
    )
    best = answers[0] if answers else None
    verdict = f"On {mesh} each rank sends {format_bytes(round(placed.nbytes))} in a step."
    if best is not None and best.figures is not None:
        unknown = (
            "how far from the best is not known" if best.bound_s <= 0 else f"at most {best.gap:.1%} could be saved"
        )
        proof = "no placement considered takes less" if best.is_optimal else unknown
        held, sent = (format_bytes(round(size)) for size in (best.figures.memory_bytes, best.figures.sent_bytes))
        verdict = (
            f"On {mesh} the placement of {best.chooser} is predicted to take {format_seconds(best.overlapped_s)} on "
            f"{device}, {format_seconds(best.figures.seconds)} without overlap ({proof}); a rank holds {held} and "
            f"sends {sent}."
        )
    shown = [picture, beside] if answers else [picture]
    return join(
        el("p", verdict, class_="verdict"),
        el("div", *shown, style="display:flex;flex-wrap:wrap;gap:2rem;align-items:flex-start"),
    )


def _counted(exchanges: Sequence[PlacedExchange]) -> str:
    calls = Counter((each.collective, each.axis) for each in exchanges)
    sizes: Counter[tuple[str, str]] = Counter()
    for each in exchanges:
        sizes[each.collective, each.axis] += round(each.nbytes)
    words = [
        f"{count} {name} over {axis}, {format_bytes(sizes[name, axis])} per rank"
        for (name, axis), count in calls.items()
    ]
    return "; ".join(words) or "nothing is sent"


def _times(answers: Sequence[Chosen], runs: Sequence[PlacementRun]) -> Html:
    """A bar for the prediction and one for what ranks took, of each who chose."""
    measured = {name: run for run in runs for name in run.choosers}
    items = []
    for each in answers:
        if each.figures is None:
            continue
        predicted = each.overlapped_s
        items.append(Bar(each.chooser, [BarPart(predicted, 0, "predicted")], format_seconds(predicted)))
        if each.chooser in measured:
            run = measured[each.chooser]
            value = f"{format_seconds(run.seconds.median)} ({run.error:+.0%})"
            items.append(Bar("", [BarPart(run.seconds.median, 1, "measured")], value))
    kinds = [("predicted", 0), *([("measured", 1)] if runs else [])]
    note = "" if runs else "Not run: --run --device local measures each on ranks of this machine."
    return join(bars(items, kinds=kinds), el("p", note, class_="quiet") if note else None)
