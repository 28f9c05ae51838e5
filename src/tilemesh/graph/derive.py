"""Derivatives of a graph, as graphs: forward mode and reverse mode. Plain Python.

Two facts per primitive are enough for both modes. An elementwise one says its *partial derivatives*, which both modes
multiply with; one that is linear in each input says its *transpose*, and its derivative is itself. The result is an
ordinary graph: it is simplified together with the forward one, and differentiated again for higher orders.
For f: R^n -> R^k one pass forward costs about one evaluation and gives one direction; one pass backward gives the
gradient of one output. `jacobian_cost` says which is cheaper.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import CodeType

from tilemesh.core.errors import UsageError
from tilemesh.graph import build
from tilemesh.graph.build import add, divide, like, multiply, negate, subtract
from tilemesh.graph.ir import Graph, Node, make, ordered, rebuilt
from tilemesh.graph.ops import FLOATS, TUPLE, primitive


def jvp(graph: Graph, wrt: Sequence[Node]) -> Graph:
    """The graph of outputs and their directional derivatives: further inputs `d NAME` are the direction."""
    directions = [build.argument(f"d {node['name']}", node.shape, node.dtype) for node in wrt]
    tangents: dict[Node, Node | None] = dict(zip(wrt, directions, strict=True))
    order = graph.nodes()
    needed = _depend(order, wrt)
    for node in order:
        if node.op == "item" and node in needed and node.dtype in FLOATS:
            raise _underivable(node.inputs[0])
        if node not in tangents:
            tangents[node] = _tangent(node, [tangents[value] for value in node.inputs])
    derivatives = tuple(tangents[node] or like(node, 0.0) for node in graph.outputs)
    return Graph((*graph.inputs, *directions), (*graph.outputs, *derivatives))


def _tangent(node: Node, tangents: Sequence[Node | None]) -> Node | None:
    """How a node changes when its inputs change this way; None: not at all."""
    if not any(tangents) or node.dtype not in FLOATS:
        return None
    if node.op == "switch":
        assert tangents[0] is not None
        return make("switch", tangents[0], node.inputs[1], branch=node["branch"])
    if node.op == "merge":
        branches = zip(node.inputs[1:], tangents[1:], strict=True)
        return make("merge", node.inputs[0], *(tangent or like(value, 0.0) for value, tangent in branches))
    kind = primitive(node.op).kind
    if node.op in ("concat", "where", "cast"):  # linear in all of these inputs together
        kept = 1 if node.op == "where" else 0
        zeros = [
            tangent or like(value, 0.0) for value, tangent in zip(node.inputs[kept:], tangents[kept:], strict=True)
        ]
        return rebuilt(node, [*node.inputs[:kept], *zeros])
    if kind == "elementwise":
        parts = [
            _scaled(tangent, partial)
            for tangent, partial in zip(tangents, _partials(node), strict=True)
            if tangent is not None and partial is not None
        ]
    elif kind == "exchange":
        return _exchange(node, node.op, tangents[0])
    elif kind == "linear":
        parts = [
            rebuilt(node, [tangent if place == at else value for place, value in enumerate(node.inputs)])
            for at, tangent in enumerate(tangents)
            if tangent is not None
        ]
    elif node.op == "amax":
        assert tangents[0] is not None
        return build.total(multiply(tangents[0], _shares(node)), node["dims"])
    else:
        raise _underivable(node)
    return _sum(parts)


def vjp(outputs: Sequence[Node], cotangents: Sequence[Node], wrt: Sequence[Node]) -> list[Node]:
    """For each of `wrt` the sum over outputs of cotangent times derivative."""
    gradients: dict[Node, list[Node]] = {}
    for node, cotangent in zip(outputs, cotangents, strict=True):
        gradients.setdefault(node, []).append(cotangent)
    order = ordered(outputs)
    needed = _depend(order, wrt)
    for node in reversed(order):
        arrived = gradients.get(node)
        if not arrived or node in wrt or node not in needed:
            continue
        gradient = _sum(arrived)
        assert gradient is not None
        for at, value in enumerate(node.inputs):
            if value in needed and value.dtype == TUPLE:  # one of several results of an operator of torch's own
                raise _underivable(value)
            if value in needed and value.dtype in FLOATS:
                contribution = _transposed(node, at, gradient)
                if contribution is not None:
                    gradients.setdefault(value, []).append(contribution)
    return [_sum(gradients.get(node, [])) or like(node, 0.0) for node in wrt]


def gradient(output: Node, wrt: Sequence[Node]) -> list[Node]:
    """The gradient of one number."""
    if output.shape != ():
        raise UsageError(f"a gradient is of one number; the output has shape {list(output.shape)}: sum it first")
    return vjp([output], [like(output, 1.0)], wrt)


def update(output: Node, weights: Sequence[Node], rate: float) -> list[Node]:
    """The weights after one step of gradient descent, w - rate * gradient, as part of the same program."""
    steps = gradient(output, weights)
    return [subtract(weight, multiply(step, rate)) for weight, step in zip(weights, steps, strict=True)]


def _depend(order: Sequence[Node], wrt: Sequence[Node]) -> set[Node]:
    """The nodes whose value depends on one of these."""
    needed = set(wrt)
    for node in order:
        if any(value in needed for value in node.inputs):
            needed.add(node)
    return needed


def _sum(parts: Sequence[Node]) -> Node | None:
    total: Node | None = None
    for part in parts:
        total = part if total is None else add(total, part)
    return total


def _underivable(node: Node) -> UsageError:
    what = node["target"] if node.op == "opaque" else node.op
    return UsageError(f"{what} has no derivative here" + (f" ({node.line})" if node.line else ""))


def _transposed(node: Node, at: int, g: Node) -> Node | None:
    """What a gradient at a node's output means for its input number `at`."""
    if node.op in _TRANSPOSES:
        return _TRANSPOSES[node.op](node, at, g)
    if primitive(node.op).kind != "elementwise":
        raise _underivable(node)
    partial = _partials(node)[at]
    return None if partial is None else _scaled(g, partial)


def _switch_back(node: Node, at: int, g: Node) -> Node | None:
    """A gradient that lives only where the branch was taken; where it was not, the value had no effect."""
    branch, predicate = node["branch"], node.inputs[1]
    zero = make("switch", like(g, 0.0), predicate, branch=not branch)
    return make("merge", predicate, *((g, zero) if branch else (zero, g))) if at == 0 else None


def _where_back(node: Node, at: int, g: Node) -> Node:
    none = like(g, 0.0)
    return make("where", node.inputs[0], *((g, none) if at == 1 else (none, g)))


def _unreduced(node: Node, g: Node) -> Node:
    """A reduced value at every element that it was made of."""
    shape = node.inputs[0].shape
    kept = [dim for dim in range(len(shape)) if dim not in node["dims"]]
    return make("broadcast", g, shape=shape, dims=tuple(kept))


def _shares(node: Node) -> Node:
    """A maximum's derivative: shared by the elements that are equal to it."""
    x = node.inputs[0]
    hits = build.cast(build.compare("equal", x, _unreduced(node, node)), x.dtype)
    return divide(hits, _unreduced(node, build.total(hits, node["dims"])))


def _transpose_back(node: Node, at: int, g: Node) -> Node:
    order = node["order"]
    return build.transpose(g, [order.index(dim) for dim in range(len(order))])


def _broadcast_back(node: Node, at: int, g: Node) -> Node:
    dims = node["dims"]
    reduced = build.total(g, [dim for dim in range(len(node.shape)) if dim not in dims])
    left = sorted(dims)
    return build.transpose(reduced, [left.index(dim) for dim in dims])


def _concat_back(node: Node, at: int, g: Node) -> Node:
    dim = node["dim"]
    start = sum(value.shape[dim] for value in node.inputs[:at])
    return build.part(g, dim, start, start + node.inputs[at].shape[dim])


def _slice_back(node: Node, at: int, g: Node) -> Node:
    low, high, inner = list(node["start"]), [], []
    for size, start, step, taken in zip(node.inputs[0].shape, node["start"], node["step"], node.shape, strict=True):
        high.append(max(size - start - (taken + (taken - 1) * (step - 1) if taken else 0), 0))
        inner.append(step - 1)
    return build.pad(g, low, high, inner)


def _pad_back(node: Node, at: int, g: Node) -> Node:
    bounds = zip(node.inputs[0].shape, node["low"], node["inner"], strict=True)
    stops = [low + (size + (size - 1) * inner if size else 0) for size, low, inner in bounds]
    return make("slice", g, start=node["low"], stop=tuple(stops), step=tuple(inner + 1 for inner in node["inner"]))


def _dot_back(node: Node, at: int, g: Node) -> Node:
    left, right = node.inputs
    return make("dot", g, build.transpose(right)) if at == 0 else make("dot", build.transpose(left), g)


# A convolution and its two transposes: what each reads of the map x, the weights w and the result g, and what it gives.
_ROLES = {"conv": ("x", "w", "g"), "conv_input": ("g", "w", "x"), "conv_weight": ("x", "g", "w")}


def _conv_back(node: Node, at: int, g: Node) -> Node:
    """The three are the derivatives of one number that is linear in x, w and g: the transpose of each is another."""
    values = dict(zip(_ROLES[node.op], (*node.inputs, g), strict=True))
    op, roles = next((op, roles) for op, roles in _ROLES.items() if roles[2] == _ROLES[node.op][at])
    settings = {name: node[name] for name in ("stride", "padding", "dilation", "groups")}
    if op != "conv":
        settings["size"] = node.inputs[at].shape
    return make(op, values[roles[0]], values[roles[1]], **settings)


def _exchange(node: Node, op: str, value: Node | None, **changed: object) -> Node | None:
    """Among the ranks of another exchange, with a number of its own."""
    return make(op, value, **dict(node.attributes) | {"serial": -1 - node["serial"]} | changed) if value else None


_TRANSPOSES: Mapping[str, Callable[[Node, int, Node], Node | None]] = {
    "switch": _switch_back,
    "merge": lambda node, at, g: make("switch", g, node.inputs[0], branch=at == 1) if at else None,
    "where": _where_back,
    "cast": lambda node, at, g: build.cast(g, node.inputs[0].dtype),
    "amax": lambda node, at, g: multiply(_unreduced(node, g), _shares(node)),
    "argmax": lambda node, at, g: None,
    "sum": lambda node, at, g: _unreduced(node, g),
    "reshape": lambda node, at, g: build.reshape(g, node.inputs[0].shape),
    "transpose": _transpose_back,
    "broadcast": _broadcast_back,
    "concat": _concat_back,
    "slice": _slice_back,
    "pad": _pad_back,
    "reverse": lambda node, at, g: rebuilt(node, [g]),
    "dot": _dot_back,
    "take": lambda node, at, g: make("put_add", g, node.inputs[1], size=node.inputs[0].shape[0]),
    "put_add": lambda node, at, g: make("take", g, node.inputs[1]),
    **dict.fromkeys(_ROLES, _conv_back),
    "windows": lambda node, at, g: make(
        "unwindows", g, shape=node.inputs[0].shape, taps=node["taps"], stride=node["stride"]
    ),
    "unwindows": lambda node, at, g: make("windows", g, taps=node["taps"], stride=node["stride"]),
    # What all ranks have alike has one gradient, which all have; of what each computes on its own each has a part.
    "all_reduce": lambda node, at, g: _exchange(node, "own_copy", g),
    "own_copy": lambda node, at, g: _exchange(node, "all_reduce", g),
    "all_gather": lambda node, at, g: _exchange(node, "reduce_scatter", g, scatters=True),
    "reduce_scatter": lambda node, at, g: _exchange(node, "all_gather", g, scatters=False),
    "all_to_all": lambda node, at, g: _exchange(
        node, "all_to_all", g, dim=node["into"], counts=node["parts"], into=node["dim"], parts=node["counts"]
    ),
}


def _partials(node: Node) -> Sequence[Node | None]:
    """The derivative of an elementwise node with respect to each input; None where there is none."""
    text = primitive(node.op).partials
    if text is None:
        raise _underivable(node)
    values = eval(_code_of(text), vars(build), {**dict(zip("xy", node.inputs, strict=False)), "out": node})
    return [like(node, value) if isinstance(value, float) else value for value in values]


@functools.cache
def _code_of(partials: str) -> CodeType:
    return compile(f"({partials},)", "<partial derivatives>", "eval")


def _scaled(node: Node, factor: Node) -> Node:
    """A product with a partial derivative, which is often 1 or -1."""
    if factor is like(node, 1.0):
        return node
    return negate(node) if factor is like(node, -1.0) else multiply(node, factor)


def jacobian_cost(graph: Graph, wrt: Sequence[Node]) -> dict[str, dict[str, object]]:
    """For each mode: passes for the whole Jacobian and floating-point operations of one pass."""
    inputs, outputs = (sum(prod(node.shape) for node in nodes) for nodes in (wrt, graph.outputs))
    forward = jvp(graph, wrt)
    seeds = [build.argument(f"g {place}", node.shape, node.dtype) for place, node in enumerate(graph.outputs)]
    backward = Graph((*graph.inputs, *seeds), tuple(vjp(graph.outputs, seeds, wrt)))
    return {
        "forward": {"passes": inputs, "flops": forward.flops},
        "reverse": {"passes": outputs, "flops": backward.flops},
    }
