"""Rewriting a graph by rules. A rule is two small programs and a condition, written as text. Plain Python.

    subtract(x, 0.0)                                     = x
    transpose(transpose(x, order=p), order=q)            = transpose(x, order=compose(p, q))
    multiply(conv(x, w, **a), broadcast(s, dims=(1,)))   = conv(x, multiply(w, column(s)), **a)

A name stands for any node, a number for a constant repeated to any shape, `name=value` binds or compares an attribute,
`**a` binds the attributes that are not named, `name := operator(...)` names an operator. On the right side attributes
may be computed by the functions of `ATTRIBUTES`. `rewrite` takes the first rule that fits anywhere and goes on until
none does; it keeps what it did.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tilemesh.core.errors import UsageError, unknown
from tilemesh.graph import build
from tilemesh.graph.ir import Dense, Graph, Node, make, rebuilt
from tilemesh.graph.ops import PRIMITIVES, primitive


@dataclass(frozen=True)
class Anything:
    """Stands for any node."""

    name: str


@dataclass(frozen=True)
class Pattern:
    """An operator applied to patterns."""

    op: str
    inputs: tuple[Any, ...]  # Anything, Pattern, or a number
    attributes: tuple[tuple[str, Any], ...]  # a value, or the ast of an expression over bound names
    rest: str | None = None  # binds the attributes that are not named
    bound: str | None = None  # `name := operator(...)`: the operator itself gets a name


@dataclass
class Match:
    """What a pattern's names stand for at one place of a graph."""

    root: Node
    nodes: dict[str, Node] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> Match:
        return Match(self.root, dict(self.nodes), dict(self.attributes))


@dataclass(frozen=True)
class RewriteRule:
    """`left` may be replaced by `right` where the condition holds."""

    name: str
    left: Any
    right: Any
    condition: Callable[[Match], bool] | None = None
    exact: bool = True  # False: the same in real numbers, with other roundings

    def apply(self, node: Node) -> Node | None:
        """What this node becomes; None where the rule, or the shapes of its right side, do not fit."""
        for match in matches(self.left, node, Match(node)):
            if self.condition is None or self.condition(match):
                try:
                    new = _built(self.right, match)
                except UsageError:
                    continue
                if new is not node and new.typed == node.typed:
                    return new
        return None


@dataclass(frozen=True)
class Applied:
    """One step of a rewriting: which rule changed which node into what."""

    rule: str
    before: Node
    after: Node


def rule(name: str, text: str, condition: Callable[[Match], bool] | None = None, exact: bool = True) -> RewriteRule:
    """A rule from its text `left = right`."""
    left, equal, right = text.partition(" = ")
    if not equal:
        raise UsageError(f"rule {name}: {text!r} has no ' = '; write left = right")
    made = RewriteRule(name, parsed(left, name), parsed(right, name), condition, exact)
    missing = _names(made.right) - _names(made.left)
    if missing or not isinstance(made.left, Pattern):
        raise UsageError(f"rule {name}: the right side uses {', '.join(sorted(missing)) or 'nothing of the left'}")
    return made


def rewrite(
    graph: Graph, rules: Sequence[RewriteRule], limit: int = 10_000, finish: Callable[[Node], Node] = lambda node: node
) -> tuple[Graph, list[Applied]]:
    """The graph after every rule that fits was applied, greedily, and the steps that led there.

    `finish` sees every node that is made, before the rules: folding of constants.
    """
    steps: list[Applied] = []
    by_op = by_operator(rules)
    while len(steps) < limit:
        graph, done = _sweep(graph, by_op, limit - len(steps), finish)
        if not done:
            return graph, steps
        steps += done
    raise UsageError(f"{limit} rewrites did not come to an end; two rules undo one another: {_last(steps)}")


def by_operator(rules: Sequence[RewriteRule]) -> dict[str, list[RewriteRule]]:
    """The rules that can fit a node, by its operator."""
    groups: dict[str, list[RewriteRule]] = {}
    for each in rules:
        groups.setdefault(each.left.op, []).append(each)
    return groups


def _last(steps: Sequence[Applied]) -> str:
    return ", ".join(dict.fromkeys(step.rule for step in steps[-20:]))


def _sweep(
    graph: Graph, by_op: Mapping[str, Sequence[RewriteRule]], limit: int, finish: Callable[[Node], Node]
) -> tuple[Graph, list[Applied]]:
    """Every node once, inputs first."""
    done: list[Applied] = []

    def change(node: Node, inputs: tuple[Node, ...]) -> Node:
        current = finish(rebuilt(node, inputs))
        for _ in range(20):
            new = _first(by_op.get(current.op, ()), current)
            if new is None or len(done) >= limit:
                break
            done.append(Applied(new[0], current, new[1]))
            current = finish(new[1])
        return current

    return graph.replace(change), done


def _first(rules: Sequence[RewriteRule], node: Node) -> tuple[str, Node] | None:
    for each in rules:
        new = each.apply(node)
        if new is not None:
            return each.name, new
    return None


def number_of(node: Node) -> float | int | bool | None:
    """The number that a node repeats, or None."""
    while node.op in ("broadcast", "reshape"):
        node = node.inputs[0]
    if node.op != "constant" or isinstance(node["value"], Dense):
        return None
    value: float | int | bool = node["value"]
    return value


def _is_number(number: float | int | bool | None, pattern: float) -> bool:
    """Whether a number is the one of a pattern: of floats, 0.0 and -0.0 are two."""
    if not isinstance(number, float):
        return number == pattern
    return number == pattern and math.copysign(1.0, number) == math.copysign(1.0, pattern)


def _itself(node: Node) -> Node:
    return node


def matches(pattern: Any, node: Node, match: Match, seen: Callable[[Node], Node] = _itself) -> Iterator[Match]:
    """Every way in which a pattern fits a node. `seen`: what a node is looked at as (without its reshapes, say)."""
    if not isinstance(pattern, int | float):
        node = seen(node)
    if isinstance(pattern, int | float):
        if _is_number(number_of(node), pattern):
            yield match
        return
    if isinstance(pattern, Anything):
        bound = match.nodes.get(pattern.name)
        if bound is None:
            match = match.copy()
            match.nodes[pattern.name] = node
            yield match
        elif bound is node:
            yield match
        return
    if node.op != pattern.op or len(node.inputs) != len(pattern.inputs):
        return
    bound_match = _attributes(pattern, node, match)
    if bound_match is None or (pattern.bound and bound_match.nodes.setdefault(pattern.bound, node) is not node):
        return
    orders = [node.inputs]
    if primitive(node.op).commutes and node.inputs[0] is not node.inputs[1]:
        orders.append((node.inputs[1], node.inputs[0]))
    for inputs in orders:
        yield from _all(pattern.inputs, inputs, bound_match, seen)


def _all(patterns: Sequence[Any], nodes: Sequence[Node], match: Match, seen: Callable[[Node], Node]) -> Iterator[Match]:
    if not patterns:
        yield match
        return
    for first in matches(patterns[0], nodes[0], match, seen):
        yield from _all(patterns[1:], nodes[1:], first, seen)


def _attributes(pattern: Pattern, node: Node, match: Match) -> Match | None:
    """The match with the pattern's attributes bound; None where one differs."""
    match = match.copy()
    given = dict(node.attributes)
    for name, expected in pattern.attributes:
        value = given.pop(name, None)
        if isinstance(expected, ast.Name):
            if match.attributes.setdefault(expected.id, value) != value:
                return None
        elif expected != value:
            return None
    if pattern.rest and match.attributes.setdefault(pattern.rest, given) != given:
        return None
    return match


def _built(pattern: Any, match: Match) -> Node:
    """The right side of a rule as nodes.

    Every operator is made of operands that have its shapes, never of broadcast ones: a rule is true of the shapes that
    its text says, and a weight of one tap repeated to two is another convolution. Only numbers take any shape.
    """
    if isinstance(pattern, Anything):
        return match.nodes[pattern.name]
    if isinstance(pattern, int | float):
        return build.like(match.root, float(pattern))
    given = [value if isinstance(value, int | float) else _built(value, match) for value in pattern.inputs]
    beside = next((value for value in given if isinstance(value, Node)), match.root)
    inputs = [value if isinstance(value, Node) else build.like(beside, float(value)) for value in given]
    attributes = {key: _value(value, match) for key, value in pattern.attributes}
    if pattern.rest:
        attributes |= match.attributes[pattern.rest]
    if pattern.op in SHORTHANDS:
        return SHORTHANDS[pattern.op](match, *inputs, **attributes)
    return make(pattern.op, *inputs, line=match.root.line, **attributes)


def _value(expression: Any, match: Match) -> Any:
    """An attribute of the right side."""
    if isinstance(expression, ast.Name):
        return match.root.shape if expression.id == "out" else match.attributes[expression.id]
    if isinstance(expression, ast.Call):
        assert isinstance(expression.func, ast.Name)
        return ATTRIBUTES[expression.func.id](*(_value(argument, match) for argument in expression.args))
    return expression


def compose(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """The order of two transposes, or the dims of two broadcasts the other way round."""
    return tuple(first[dim] for dim in second)


ATTRIBUTES: Mapping[str, Callable[..., Any]] = {"compose": compose}


def _column(match: Match, vector: Node) -> Node:
    """A vector as a column of the weights that it scales: dim 0 of the shape of `w`."""
    shape = match.nodes["w"].shape
    return make("broadcast", vector, shape=shape, dims=(0,))


SHORTHANDS: Mapping[str, Callable[..., Node]] = {"column": _column}


def parsed(text: str, name: str) -> Any:
    """A side of a rule, from its text."""
    try:
        return _pattern(ast.parse(text.strip(), mode="eval").body, name)
    except SyntaxError:
        raise UsageError(f"rule {name}: {text.strip()!r} is no pattern") from None


def _pattern(tree: ast.expr, name: str) -> Any:
    if isinstance(tree, ast.Name):
        return Anything(tree.id)
    if isinstance(tree, ast.NamedExpr):
        inner = _pattern(tree.value, name)
        if not isinstance(inner, Pattern):
            raise UsageError(f"rule {name}: {ast.unparse(tree)} names no operator")
        return replace(inner, bound=tree.target.id)
    if isinstance(tree, ast.UnaryOp | ast.Constant):
        return float(ast.literal_eval(tree))
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise UsageError(f"rule {name}: {ast.unparse(tree)} is no pattern; write names, numbers and operators")
    op = tree.func.id
    if op not in PRIMITIVES and op not in SHORTHANDS:
        raise UsageError(f"rule {name}: {unknown('primitive', op, PRIMITIVES)}")
    inputs = tuple(_pattern(argument, name) for argument in tree.args)
    arity = PRIMITIVES[op].arity if op in PRIMITIVES else None
    if arity is not None and len(inputs) != arity:
        raise UsageError(f"rule {name}: {op} has {len(inputs)} inputs; give {arity}")
    attributes, rest = [], None
    for keyword in tree.keywords:
        if keyword.arg is None and isinstance(keyword.value, ast.Name):
            rest = keyword.value.id
        elif keyword.arg is not None:
            attributes.append((keyword.arg, _attribute(keyword.value, name)))
    return Pattern(op, inputs, tuple(attributes), rest)


def _attribute(tree: ast.expr, name: str) -> Any:
    if isinstance(tree, ast.Name):
        return tree
    if isinstance(tree, ast.Call):
        if not isinstance(tree.func, ast.Name) or tree.func.id not in ATTRIBUTES:
            raise UsageError(f"rule {name}: {ast.unparse(tree)} is not known; there are {', '.join(ATTRIBUTES)}")
        return tree
    return ast.literal_eval(tree)


def _names(pattern: Any) -> set[str]:
    if isinstance(pattern, Anything):
        return {pattern.name}
    if not isinstance(pattern, Pattern):
        return set()
    own = {pattern.bound} if pattern.bound else set()
    return own.union(*map(_names, pattern.inputs))
