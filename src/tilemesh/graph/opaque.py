"""Operators of torch that have no primitive: their arguments, and how their operands have to lie in memory.

A rewritten program may have a value in other strides than torch traced: a transposed view where the model asked for
`.contiguous()`, a repeated number where it made a whole tensor. Primitives read any strides. An operator of torch may
read memory in order, and who gets a result may too; for those, `with_lays` puts a `lay` node between, which copies a
value whose strides are not the traced ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from tilemesh.graph.ir import Graph, Node, make, rebuilt
from tilemesh.graph.ops import Shape

Tensor = torch.Tensor
Strides: TypeAlias = tuple[int, ...]
Laid: TypeAlias = tuple[Node, Strides]  # a value, and how somebody needs it


class InputSlot:
    """The place of a node's input among an opaque operator's arguments."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InputSlot) and other.index == self.index

    def __hash__(self) -> int:
        return hash(("slot", self.index))

    def __repr__(self) -> str:
        return f"#{self.index}"


def operator_of(name: str) -> Any:
    """torch's operator of this name, as `aten.add.Tensor`."""
    namespace: Any = torch.ops
    for part in name.split("."):
        namespace = getattr(namespace, part)
    return namespace


def call_of(name: str) -> Any:
    """torch's operator of this name; where its kernel reads rows as if their numbers lay together, with such rows."""
    operator = operator_of(name)
    return partial(_with_rows_together, operator) if operator in _READS_ROWS else operator


_READS_ROWS = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,)
"""Else they go by the strides."""


def _with_rows_together(operator: Any, *args: Any, **named: Any) -> Any:
    together = [x.contiguous() if isinstance(x, Tensor) and x.stride(-1) != 1 else x for x in args]
    return operator(*together, **named)


def run_opaque(node: Node, inputs: Sequence[Any]) -> Any:
    """What torch's own operator makes of these values, laid as it needs them."""
    given = [
        value if strides is None else laid(value, strides)
        for value, strides in zip(inputs, operand_strides(node), strict=True)
    ]

    def filled(value: Any) -> Any:
        if isinstance(value, InputSlot):
            return given[value.index]
        return [filled(item) for item in value] if isinstance(value, tuple) else value

    named = {name: filled(value) for name, value in node["kwargs"]}
    return call_of(node["target"])(*[filled(value) for value in node["args"]], **named)


def operand_strides(node: Node) -> tuple[Strides | None, ...]:
    """For each input of an opaque operator the strides that torch traced; None where any do."""
    strides: tuple[Strides | None, ...] = dict(node.attributes).get("strides", ())
    return (*strides, *[None] * (len(node.inputs) - len(strides)))


def traced_strides(value: Any) -> Strides | None:
    """How a traced tensor lies in memory, where torch knows that."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    strides = tuple(value.stride())
    return strides if all(type(step) is int for step in strides) else None


def contiguous(shape: Shape) -> Strides:
    """The strides of a tensor whose elements lie in order."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(1, size)
    return tuple(reversed(steps))


def lies(value: Tensor, strides: Strides) -> bool:
    """Whether a tensor has these strides; those of dims with at most one element say nothing."""
    given = value.stride()
    if given == strides or not value.numel():
        return True
    return all(own == step or size == 1 for size, own, step in zip(value.shape, given, strides, strict=True))


def laid(value: Tensor, strides: Strides) -> Tensor:
    """The tensor with these strides: itself where it has them, else a copy.

    Where elements would share memory otherwise than by a stride of 0 nothing can be copied; whoever reads such a tensor
    has to go by its strides, and gets this one.
    """
    if lies(value, strides):
        return value
    part = unrepeated(value, strides)
    if overlap(part.shape, strides):
        return value
    return repeated(part.new_empty_strided(part.shape, strides).copy_(part), value.shape)


def unrepeated(value: Tensor, strides: Strides) -> Tensor:
    """One element along each dim in which these strides repeat it."""
    for dim, step in enumerate(strides):
        if step == 0 and value.shape[dim]:
            value = value.narrow(dim, 0, 1)
    return value


def repeated(part: Tensor, shape: Sequence[int]) -> Tensor:
    """The reverse of `unrepeated`. Itself where nothing is to be repeated: a view that is made without gradients cannot
    be changed in place later, with gradients."""
    return part if part.shape == shape else part.expand(shape)


def overlap(shape: Sequence[int], strides: Strides) -> bool:
    """Whether several elements of such a tensor are one place in memory."""
    reach = 0  # of the dims with smaller strides
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False


class LayCall:
    """One `lay` node of a program, and whether it ever copied."""

    def __init__(self, strides: Strides) -> None:
        self.strides, self.copied = strides, False

    def __call__(self, value: Tensor) -> Tensor:
        if value.stride() == self.strides:
            return value
        made = laid(value, self.strides)
        self.copied = self.copied or made is not value
        return made


def with_lays(
    graph: Graph, results: Sequence[Strides | None] | None = None, needed: Collection[Laid] | None = None
) -> tuple[Graph, dict[Node, Node], dict[Node, Laid]]:
    """The graph with a `lay` node before every reader that needs certain strides; `needed`: these alone.

    Also for each of its nodes the node of the given graph, and for each `lay` node what it is for.
    """
    new: dict[Node, Node] = {}
    lays: dict[Node, Laid] = {}

    def read(value: Node, strides: Strides | None) -> Node:
        if strides is None or (needed is not None and (value, strides) not in needed):
            return new[value]
        lay = make("lay", new[value], strides=strides)
        lays[lay] = (value, strides)
        return lay

    for node in graph.nodes():
        if node.op == "lay":
            new[node] = read(node.inputs[0], node["strides"])
            continue
        wanted = operand_strides(node) if node.op == "opaque" else (None,) * len(node.inputs)
        new[node] = rebuilt(node, [read(*pair) for pair in zip(node.inputs, wanted, strict=True)])
    outputs = [read(*pair) for pair in zip(graph.outputs, results or (None,) * len(graph.outputs), strict=True)]
    return Graph(graph.inputs, tuple(outputs)), {made: node for node, made in new.items()}, lays
