"""The rules that simplify every graph, and the pass that applies them.

Each rule is exact in the arithmetic it is used in, or says that it is not (`exact=False`: equal in real numbers, other
roundings). There is none that is wrong for NaN, infinity or the sign of a zero: `x * 0` stays, because it is not 0 for
every x, and so does `x + 0.0`, which is 0.0 for x = -0.0.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilemesh.graph.folding import folded
from tilemesh.graph.ir import Graph
from tilemesh.graph.layout import met_transposes
from tilemesh.graph.ops import FLOATS
from tilemesh.graph.rewrite import Applied, Match, RewriteRule, rewrite, rule


def _identity(match: Match) -> bool:
    order = match.attributes["p"]
    return list(order) == sorted(order)


def _unmoved(match: Match) -> bool:
    return match.nodes["x"].shape == match.root.shape


def _widens(match: Match) -> bool:
    """The first cast loses nothing: neither digits nor range."""
    digits_and_range = {"float64": (53, 11), "float32": (24, 8), "float16": (11, 5), "bfloat16": (8, 8)}  # in bits
    source, between = match.nodes["x"].dtype, match.attributes["d"]
    if source not in FLOATS or between not in FLOATS:
        return False
    return all(more >= less for more, less in zip(digits_and_range[between], digits_and_range[source], strict=True))


def _same_dtype(match: Match) -> bool:
    return bool(match.nodes["x"].dtype == match.attributes["d"])


def _per_channel(vector: str) -> str:
    """A vector repeated along all dims but the channels'."""
    return f"broadcast({vector}, shape=t, dims=(1,))"


ALGEBRA: tuple[RewriteRule, ...] = (
    rule("x + -0", "add(x, -0.0) = x"),  # x + 0.0 stays: for x = -0.0 it is 0.0
    rule("x - 0", "subtract(x, 0.0) = x"),
    rule("x * 1", "multiply(x, 1.0) = x"),
    rule("x / 1", "divide(x, 1.0) = x"),
    rule("x * -1", "multiply(x, -1.0) = negate(x)"),
    rule("x ** 1", "power(x, 1.0) = x"),
    rule("-(-x)", "negate(negate(x)) = x"),
    rule("x + (-y)", "add(x, negate(y)) = subtract(x, y)"),
    rule("x - (-y)", "subtract(x, negate(y)) = add(x, y)"),
    rule("(-x) * (-y)", "multiply(negate(x), negate(y)) = multiply(x, y)"),
    rule("transpose of transpose", "transpose(transpose(x, order=p), order=q) = transpose(x, order=compose(p, q))"),
    rule("transpose in place", "transpose(x, order=p) = x", _identity),
    rule("reshape of reshape", "reshape(reshape(x, shape=s), shape=t) = reshape(x, shape=t)"),
    rule("reshape in place", "reshape(x, shape=s) = x", _unmoved),
    rule(
        "broadcast of broadcast",
        "broadcast(broadcast(x, shape=s, dims=p), shape=t, dims=q) = broadcast(x, shape=t, dims=compose(q, p))",
    ),
    rule("broadcast in place", "broadcast(x, shape=s, dims=p) = x", lambda match: _unmoved(match) and _identity(match)),
    rule("cast in place", "cast(x, dtype=d) = x", _same_dtype),
    rule("cast there and back", "cast(cast(x, dtype=d), dtype=e) = cast(x, dtype=e)", _widens),
    rule("same branches", "where(c, x, x) = x"),
)
INFERENCE: tuple[RewriteRule, ...] = (
    rule(
        "scale of a convolution",
        "multiply(conv(x, w, **a), broadcast(s, shape=t, dims=(1,))) = conv(x, multiply(w, column(s)), **a)",
        exact=False,
    ),
    rule(
        "quotient of a convolution",
        "divide(conv(x, w, **a), broadcast(s, shape=t, dims=(1,))) = conv(x, divide(w, column(s)), **a)",
        exact=False,
    ),
    rule("scale of a biased convolution", "multiply(add(y, b), s) = add(multiply(y, s), multiply(b, s))", exact=False),
    rule(
        "scale of a centred convolution",
        "multiply(subtract(y, b), s) = subtract(multiply(y, s), multiply(b, s))",
        exact=False,
    ),
    *(
        rule(f"{op} of vectors", f"{op}({_per_channel('a')}, {_per_channel('b')}) = {_per_channel(f'{op}(a, b)')}")
        for op in ("add", "subtract", "multiply")
    ),
    *(
        rule(
            f"vectors one after the other: {first}, {then}",
            f"{then}({first}(y, {_per_channel('a')}), {_per_channel('b')}) = add(y, {_per_channel(sum_of)})",
            exact=False,
        )
        for first, then, sum_of in (
            ("add", "add", "add(a, b)"),
            ("subtract", "add", "subtract(b, a)"),
            ("add", "subtract", "subtract(a, b)"),
        )
    ),
)


def simplify(graph: Graph, rules: Sequence[RewriteRule] = ALGEBRA) -> tuple[Graph, list[Applied]]:
    """The graph with constants folded, every rule applied, and transposes that meet gone."""
    steps: list[Applied] = []
    while True:
        graph, done = rewrite(graph, rules, finish=folded)
        graph, met = met_transposes(graph)  # fewer transposes each time, so this ends
        steps += [*done, *met]
        if not met:
            return graph, steps
