"""Pictures with their channels last in memory, where that moves fewer bytes. Plain Python.

torch's convolutions compute on blocks of channels: of a picture that lies channel after channel they copy what they
read and what they write, in every call, and a pooling of it reads single numbers. With the channels of a pixel side by
side neither happens, but what comes in or goes out otherwise is copied once, and so are the weights, which lie as
the model has them. A convolution is computed so where its pictures are more bytes than these copies; batch norms,
poolings and elementwise operators follow what they read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tilemesh.graph import build
from tilemesh.graph.ir import Graph, Node, make, rebuilt, users
from tilemesh.graph.opaque import operand_strides
from tilemesh.graph.ops import primitive
from tilemesh.graph.rewrite import number_of

SERVED = {"c": ("float32",)}
"""By the way in which kernels are generated, the dtypes whose convolutions compute on channels. No GPU was measured."""
FORWARD, BACKWARD = CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")
WEIGHTS = 4  # times what a byte of a picture costs: torch's copy of weights reads single numbers
EVALUATED_NORM = "aten._native_batch_norm_legit_no_training.default"
FOLLOWING = (
    EVALUATED_NORM, "aten._native_batch_norm_legit_functional.default", "aten.native_batch_norm_backward.default",
    "aten.max_pool2d_with_indices.default", "aten.max_pool2d_with_indices_backward.default",
    "aten.avg_pool2d.default", "aten.avg_pool2d_backward.default", "aten.native_group_norm.default",
    "aten.native_group_norm_backward.default",
)  # fmt: skip


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Those of a picture [batch, channels, height, width] with its channels last."""
    _, channels, height, width = shape
    return height * width * channels, 1, width * channels, channels


def channels_last(graph: Graph, way: str, there: Collection[Node] = ()) -> Graph:
    """The graph with its pictures in that layout where it pays. there: inputs that lie so already."""
    laid = _following(graph, SERVED.get(way, ()), there)
    if not laid or _saved_bytes(graph, laid, there) <= 0:
        return graph
    new: dict[Node, Node] = {}
    readers = users(graph.nodes())

    def read(value: Node) -> Node:
        if value in laid or not _is_picture(value) or value in there:
            return new[value]
        return make("lay", new[value], strides=strides_of(value.shape))

    for node in graph.nodes():
        if node not in laid or node.op == "item":
            new[node] = rebuilt(node, [new[value] for value in node.inputs])
            if node in laid and _is_evaluated_norm(node.inputs[0]) and len(readers[node.inputs[0]]) == 1:
                new[node] = _evaluated_norm(new[node.inputs[0]])
        elif node.op == "opaque":
            weights = _weights(node)
            strides = tuple(
                None if value in weights else strides_of(value.shape) if _is_picture(value) else steps
                for value, steps in zip(node.inputs, operand_strides(node), strict=True)
            )
            values = [new[value] for value in node.inputs]
            new[node] = make("opaque", *values, line=node.line, **{**dict(node.attributes), "strides": strides})
        else:
            new[node] = rebuilt(node, [read(value) for value in node.inputs])
    return Graph(graph.inputs, tuple(new[node] for node in graph.outputs))


def _is_picture(node: Node) -> bool:
    return len(node.shape) == 4 and number_of(node) is None and node.op != "broadcast"


def _weights(node: Node) -> tuple[Node, ...]:
    """Operands of a convolution that are no pictures."""
    if node["target"] not in CONVOLUTIONS:
        return ()
    return node.inputs[1:] if node["target"] == FORWARD else node.inputs[2:]


def _picture_bytes(node: Node) -> int:
    """What a convolution saves, less the bytes of its weights: read, and written in another order."""
    backward = node["target"] == BACKWARD
    pictures = node.inputs[:2] if backward else (node, node.inputs[0])
    return sum(each.nbytes for each in pictures) - WEIGHTS * node.inputs[2 if backward else 1].nbytes


def _following(graph: Graph, dtypes: Sequence[str], there: Collection[Node]) -> set[Node]:
    """The operators whose results have their channels last."""
    laid: set[Node] = set()
    for node in graph.nodes():
        follows = [value in laid or value in there for value in node.inputs]
        if node.op == "opaque" and node["target"] in CONVOLUTIONS:
            chosen = _is_served(node, dtypes)
        elif node.op == "opaque":
            chosen = node["target"] in FOLLOWING and any(follows[:2])
        elif node.op == "item":
            weights = node.inputs[0].op == "opaque" and node.inputs[0]["target"] == BACKWARD and node["index"] == 1
            chosen = follows[0] and len(node.shape) == 4 and not weights
        elif node.op == "concat":
            chosen = len(node.shape) == 4 and all(value in laid for value in node.inputs)
        else:
            chosen = _is_elementwise(node) and any(follows)
        if chosen:
            laid.add(node)
    readers = users(graph.nodes())
    for node in reversed(graph.nodes()):  # what only such operators read is computed in their layout too
        alone = _is_elementwise(node) and node not in graph.outputs
        if alone and all(reader in laid for reader in readers[node]):
            laid.add(node)
    return laid


def _is_served(node: Node, dtypes: Sequence[str]) -> bool:
    """Whether a convolution computes on channels, and gains by pictures that lie so: none that enlarges its input, and
    none in groups, whose gradients torch computes slower so (0.7 of eager's speed for a network of depthwise ones)."""
    x = node.inputs[0]
    transposed, _, groups = node["args"][-4:-1] if node["target"] == BACKWARD else node["args"][-3:]
    return len(x.shape) == 4 and x.dtype in dtypes and not transposed and groups == 1 and _picture_bytes(node) > 0


def _is_elementwise(node: Node) -> bool:
    return primitive(node.op).kind == "elementwise" and len(node.shape) == 4


def _is_evaluated_norm(node: Node) -> bool:
    named = node.op == "opaque" and node["target"] == EVALUATED_NORM
    return named and len(node.inputs) == 5 and {value.dtype for value in node.inputs} == {"float32"}


def _evaluated_norm(node: Node) -> Node:
    """A batch norm of known mean and variance as elementwise operators: part of the kernel of its activation. It is a
    factor and a summand per channel, as torch computes it too."""
    x, weight, bias, mean, variance = node.inputs
    *_, epsilon = node["args"]
    factor = build.multiply(weight, make("power", build.add(variance, epsilon), build.like(variance, -0.5)))
    summand = build.subtract(bias, build.multiply(mean, factor))
    factors, summands = (make("broadcast", each, shape=x.shape, dims=(1,)) for each in (factor, summand))
    return build.add(build.multiply(x, factors), summands)


def _saved_bytes(graph: Graph, laid: Collection[Node], there: Collection[Node]) -> int:
    """Bytes less to move: what convolutions save, less what is copied on the way in and out."""
    saved = sum(_picture_bytes(node) for node in laid if node.op == "opaque" and node["target"] in CONVOLUTIONS)
    copied: set[Node] = set()
    for node in graph.nodes():
        if node in laid and node.op != "item":
            weights = _weights(node) if node.op == "opaque" else ()
            copied |= {
                value for value in node.inputs
                if _is_picture(value) and value not in laid and value not in there and value not in weights
            }  # fmt: skip
        elif node not in laid and node.op != "item":
            copied |= {value for value in node.inputs if value in laid and len(value.shape) == 4}
    return saved - 2 * sum(value.nbytes for value in copied)
