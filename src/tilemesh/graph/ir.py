"""A program as data: nodes that name an operator and their inputs, and a graph of some of them. Plain Python.

Nodes are *hash-consed*: building the same node twice gives the same object. Common subexpressions are therefore equal
by construction, and equality is identity. A graph is only its inputs and outputs; what the outputs do not reach does
not belong to it, so there is no dead code to remove. The table of nodes holds them weakly and never changes a result.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from tilemesh.core.errors import UsageError
from tilemesh.graph.ops import DTYPES, TUPLE, VIEWS, Shape, Typed, primitive


@dataclass(frozen=True, eq=False)
class Node:
    """One operator applied to the results of others. Make it with `make`: equal nodes are then one object."""

    op: str
    inputs: tuple[Node, ...]
    attributes: tuple[tuple[str, Any], ...]  # sorted by name; every value can be hashed
    shape: Shape
    dtype: str
    line: str = field(default="", compare=False)  # where the program says so: for messages, no part of the identity

    def __getitem__(self, name: str) -> Any:
        return dict(self.attributes)[name]

    @property
    def typed(self) -> Typed:
        return self.shape, self.dtype

    @property
    def nbytes(self) -> int:
        return 0 if self.dtype == TUPLE else prod(self.shape) * DTYPES[self.dtype]

    @property
    def launched(self) -> bool:
        """Whether this is work for a device: no input, no constant, no memory named again."""
        return primitive(self.op).kind != "source" and self.op not in VIEWS

    @property
    def flops(self) -> int:
        return primitive(self.op).flops([node.typed for node in self.inputs], self.typed, dict(self.attributes))

    @property
    def moved_bytes(self) -> int:
        """What the operator reads and writes when it runs alone."""
        moved = [self, *dict.fromkeys(self.inputs), *(self["body"].outputs if self.op == "region" else ())]
        return sum(node.nbytes for node in moved)

    def __repr__(self) -> str:
        return f"<{self.op} {self.dtype}{list(self.shape)}>"


@dataclass(frozen=True)
class Dense:
    """The elements of a constant array: row after row, little-endian."""

    data: bytes

    def __repr__(self) -> str:
        return f"<{len(self.data)} bytes>"


# Attributes that the text of a graph leaves out.
HIDDEN = {
    "source": ("shape", "dtype"),
    "opaque": ("shape", "dtype", "target", "kwargs", "flops", "strides"),
    "region": ("body",),
}

_nodes: weakref.WeakValueDictionary[tuple[Any, ...], Node] = weakref.WeakValueDictionary()
_making = threading.Lock()


def make(op: str, *inputs: Node, line: str = "", **attributes: Any) -> Node:
    """The node of this operator, inputs and attributes; its shape and dtype come from the operator's rule."""
    known = primitive(op)
    if known.arity is not None and len(inputs) != known.arity:
        raise UsageError(f"{op} got {len(inputs)} inputs; give {known.arity}")
    frozen = tuple(sorted((name, _frozen(value)) for name, value in attributes.items()))
    try:
        shape, dtype = known.rule([node.typed for node in inputs], dict(frozen))
    except UsageError as error:
        raise UsageError(f"{op}: {error}" + (f" ({line})" if line else "")) from None
    key = (op, inputs, _identity(frozen), shape, dtype)
    with _making:
        node = _nodes.get(key)
        if node is None:
            node = _nodes[key] = Node(op, inputs, frozen, shape, dtype, line)
        return node


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def _identity(value: Any) -> Any:
    """What tells two attributes apart: 0.0 and -0.0, or 1, 1.0 and True, are equal in Python and are not one number."""
    if isinstance(value, tuple):
        return tuple(_identity(item) for item in value)
    return (type(value), repr(value)) if isinstance(value, bool | float | complex) else value


@dataclass(frozen=True)
class Graph:
    """A program: what it is given, in this order, and what it returns."""

    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    def __post_init__(self) -> None:
        given = set(self.inputs)
        missing = [node["name"] for node in self.nodes() if node.op == "input" and node not in given]
        if missing:
            raise UsageError(f"the outputs need the inputs {', '.join(missing)}; give them to the graph")
        if len(given) < len(self.inputs):
            raise UsageError(f"of the inputs {', '.join(node['name'] for node in self.inputs)} two are one; rename one")

    def nodes(self) -> list[Node]:
        """Every node that an output needs, after what it reads."""
        return ordered(self.outputs)

    @property
    def flops(self) -> int:
        return sum(node.flops for node in self.nodes())

    @property
    def moved_bytes(self) -> int:
        return sum(node.moved_bytes for node in self.nodes() if node.launched)

    @property
    def launches(self) -> int:
        """How many operators are work for a device."""
        return sum(node.launched for node in self.nodes())

    def replace(self, change: Callable[[Node, tuple[Node, ...]], Node]) -> Graph:
        """The graph whose nodes are what `change` makes of them, given their changed inputs."""
        new: dict[Node, Node] = {}
        for node in self.nodes():
            new[node] = change(node, tuple(new[value] for value in node.inputs))
        return Graph(self.inputs, tuple(new[node] for node in self.outputs))

    def substitute(self, values: Mapping[Node, Node]) -> Graph:
        """The graph in which each of these nodes is the other one."""
        return self.replace(lambda node, inputs: values.get(node) or rebuilt(node, inputs))

    def __str__(self) -> str:
        return self.text()[0]

    def text(self, words: Callable[[Node], str] = lambda node: "") -> tuple[str, dict[Node, str]]:
        """A line per node, with what `words` says of it, and what each node is called there."""
        names: dict[Node, str] = {}
        lines: list[str] = []
        for node in self.nodes():
            if node.op == "input":
                names[node] = node["name"]
                continue
            if node.op == "constant" and not isinstance(node["value"], Dense):
                names[node] = str(node["value"])
                continue
            names[node] = f"%{len(lines)}"
            hidden = HIDDEN.get(primitive(node.op).kind, ())
            operands = [names[value] for value in node.inputs]
            operands += [f"{name}={_text(value)}" for name, value in node.attributes if name not in hidden]
            typed = f"{node.dtype}{_text(node.shape)} {words(node)}".rstrip()
            lines.append(f"{names[node]} = {_called(node)}({', '.join(operands)})  # {typed}")
        given = ", ".join(
            f"{node['name']}: {node.dtype}{_text(node.shape)} {words(node)}".rstrip() for node in self.inputs
        )
        body = "\n".join(f"  {line}" for line in lines)
        return f"({given})\n{body}\n  return {', '.join(names[node] for node in self.outputs)}", names


def _called(node: Node) -> str:
    return str(node["target"]) if node.op == "opaque" else node.op


def _text(value: Any) -> str:
    return f"[{', '.join(_text(item) for item in value)}]" if isinstance(value, tuple) else str(value)


def rebuilt(node: Node, inputs: Sequence[Node]) -> Node:
    """The same operator with other inputs."""
    inputs = tuple(inputs)
    return node if inputs == node.inputs else make(node.op, *inputs, line=node.line, **dict(node.attributes))


def _inputs(node: Node) -> Sequence[Node]:
    return node.inputs


def ordered(outputs: Sequence[Node], reads: Callable[[Node], Sequence[Node]] = _inputs) -> list[Node]:
    """The nodes that these need, each after what it reads (its inputs), in an order that the graph decides.

    Without recursion: graphs are deep.
    """
    order: dict[Node, None] = {}
    waiting = [(node, False) for node in reversed(outputs)]
    while waiting:
        node, expanded = waiting.pop()
        if node in order:
            continue
        if expanded:
            order[node] = None
        else:
            waiting.append((node, True))
            waiting += [(value, False) for value in reversed(reads(node)) if value not in order]
    return list(order)


def users(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """Who reads each node, once for every reading."""
    readers: dict[Node, list[Node]] = {}
    for node in nodes:
        readers.setdefault(node, [])
        for value in node.inputs:
            readers.setdefault(value, []).append(node)
    return readers
