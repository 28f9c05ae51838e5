"""Computing what does not depend on a program's inputs, once, when the program is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from tilemesh.graph import build
from tilemesh.graph.evaluate import Array, dense, evaluate_numpy
from tilemesh.graph.ir import Dense, Graph, Node, make, rebuilt
from tilemesh.graph.ops import primitive
from tilemesh.graph.rewrite import number_of

LARGEST = 1 << 16  # elements of an array that is worth being part of a program


def folded(node: Node) -> Node:
    """A constant, where the operator has constants alone; else the node."""
    kind = primitive(node.op).kind
    if not node.inputs or kind in ("opaque", "control"):
        return node
    if "bfloat16" in (node.dtype, *(value.dtype for value in node.inputs)):  # numpy has none
        return node
    numbers = [number_of(value) for value in node.inputs]
    if kind == "elementwise" and None not in numbers:
        scalars = [
            build.constant(_native(number, value), (), value.dtype)
            for number, value in zip(numbers, node.inputs, strict=True)
        ]
        small = make(node.op, *scalars, **dict(node.attributes))
        result = evaluate_numpy(small, [dense(scalar) for scalar in scalars])
        return build.constant(_native(result.item(), small), node.shape, node.dtype)
    if node.op in ("broadcast", "reshape"):
        return node  # memory named again: nothing to compute
    if not all(value.op == "constant" for value in node.inputs):
        return node
    if prod(node.shape) > LARGEST:
        return node
    return constant_of(evaluate_numpy(node, [dense(value) for value in node.inputs]), node.dtype)


def _native(number: float | int | bool | None, node: Node) -> float | int | bool:
    assert number is not None
    if node.dtype == "bool":
        return bool(number)
    return float(number) if "float" in node.dtype else int(number)


def constant_of(array: Array, dtype: str) -> Node:
    """An array as part of a program."""
    array = np.ascontiguousarray(array, dtype=dtype)
    if array.shape == ():
        return build.constant(array.item(), (), dtype)
    return make("constant", value=Dense(array.tobytes()), shape=array.shape, dtype=dtype)


def specialise(graph: Graph, values: Mapping[str, Array]) -> Graph:
    """The graph with these inputs fixed: what depends on them alone is computed now (weights of a trained model)."""
    fixed = {node: constant_of(values[node["name"]], node.dtype) for node in graph.inputs if node["name"] in values}

    def change(node: Node, inputs: Sequence[Node]) -> Node:
        if node in fixed:
            return fixed[node]
        new = rebuilt(node, inputs)
        arrays = [_array_of(value) for value in new.inputs]
        ready = [array for array in arrays if array is not None]
        if new.op in REPEATS or len(ready) < max(1, len(arrays)):
            return folded(new)
        if primitive(new.op).kind in ("opaque", "control", "source"):
            return folded(new)
        return constant_of(evaluate_numpy(new, ready), new.dtype)

    changed = graph.replace(change)
    return Graph(tuple(node for node in graph.inputs if node not in fixed), changed.outputs)


REPEATS = ("broadcast", "reshape")  # they name a constant again: as an array of their own they would only be larger


def _array_of(node: Node) -> Array | None:
    """The array of a constant, or of one that is repeated or reshaped."""
    if node.op == "constant":
        return dense(node)
    inner = _array_of(node.inputs[0]) if node.op in REPEATS else None
    return None if inner is None else evaluate_numpy(node, [inner])
