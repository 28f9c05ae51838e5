"""Along which dims operators of torch's own can be cut: a row each, for those that treat these dims alike everywhere.

What is no row here is computed whole by every rank. Operands are known by their order among an operator's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tilemesh.core.tensor_placement import Mark, R, S
from tilemesh.graph.ir import Node

Dims = Callable[[Node], Sequence[int]]


def _first(count: int) -> Dims:
    return lambda node: range(count)


def _besides(place: int) -> Dims:
    """All but the one that an argument names; the operands must be as long as one another there."""

    def dims(node: Node) -> Sequence[int]:
        rank = len(node.inputs[0].shape)
        named = node["args"][place] if len(node["args"]) > place else -1
        return [dim for dim in range(rank) if isinstance(named, int) and dim != named % rank] if rank else []

    return dims


def _untouched(node: Node) -> Sequence[int]:
    """Dims before the first that is indexed."""
    indices = node["args"][1]
    return range(next((place for place, index in enumerate(indices) if index is not None), len(indices)))


_POOLS = (
    *("max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d_backward"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward"),
)
_EACH = ("log1p", "expm1", "floor", "elu_backward", "hardswish_backward")  # element by element
CUT_DIMS: Mapping[str, Dims] = {
    **{f"aten.{name}.default": _first(2) for name in _POOLS},  # examples and channels
    "tilemesh.class_targets.default": _first(1),
    **{f"aten.{name}": _besides(1) for name in ("gather.default", "scatter.src", "scatter.value", "cumsum.default")},
    "aten.topk.default": _besides(2),
    **{f"aten.{name}": _untouched for name in ("index.Tensor", "index_put.default")},
    **{f"aten.{name}.default": lambda node: range(len(node.shape)) for name in _EACH},
}


def opaque_marks(node: Node) -> Iterator[tuple[tuple[Mark, ...], Mark]]:
    """As what an operator can take its inputs, and what it then gives."""
    known = CUT_DIMS.get(node["target"])
    if known is None or not node.inputs:
        return
    is_index = node["target"].startswith("aten.index")
    last = len(node.inputs) - 1 if node["target"] == "aten.index_put.default" else 0
    cut = [place for place in range(len(node.inputs)) if not is_index or place in (0, last)]
    for dim in known(node):
        lengths = {node.inputs[place].shape[dim] for place in cut if dim < len(node.inputs[place].shape)}
        if len(lengths) == 1 and all(dim < len(node.inputs[place].shape) for place in cut):
            yield tuple(S(dim) if place in cut else R for place in range(len(node.inputs))), S(dim)
