"""Draws the pictures of docs/graph from real programs: python scripts/graph_pictures.py docs/graph"""

from __future__ import annotations

import sys
from pathlib import Path

from tilemesh.core.hardware import DEVICES
from tilemesh.graph import build, derive
from tilemesh.graph.cost import graph_seconds
from tilemesh.graph.draw import drawing
from tilemesh.graph.ir import Graph
from tilemesh.graph.joining import joined_products
from tilemesh.graph.regions import fused
from tilemesh.graph.rules import ALGEBRA, INFERENCE, simplify
from tilemesh.graph.templates import with_products
from tilemesh.guide.dataflow.partial import correct, mutants
from tilemesh.guide.dataflow.search import as_rules, greedy, read_substitutions, search


def regression() -> list[tuple[str, Graph]]:
    """A program, and the same with its gradient and update."""
    data, target, w = build.argument("data", [8, 3]), build.argument("target", [8, 1]), build.argument("w", [3, 1])
    error = build.subtract(build.dot(data, w), target)
    loss = build.mean(build.multiply(error, error))
    inputs = (data, target, w)
    step = simplify(Graph(inputs, (loss, *derive.update(loss, [w], rate=0.1))))[0]
    return [("forward", Graph(inputs, (loss,))), ("forward, gradient and update: one graph", step)]


def normalised() -> list[tuple[str, Graph]]:
    """A batch norm after a convolution becomes part of its weights."""
    x, w = build.argument("x", [4, 3, 8, 8]), build.argument("w", [16, 3, 3, 3])
    scale, shift = build.argument("scale", [16]), build.argument("shift", [16])
    result = build.conv(x, w, padding=[1, 1])
    spread = [build.make("broadcast", each, shape=result.shape, dims=(1,)) for each in (scale, shift)]
    graph = Graph((x, w, scale, shift), (build.relu(build.add(build.multiply(result, spread[0]), spread[1])),))
    after = simplify(graph, [*ALGEBRA, *INFERENCE])[0]
    return [("convolution, scale, shift, ReLU", graph), ("the scale is in the weights", after)]


def constants() -> list[tuple[str, Graph]]:
    """What was written twice is one node; numbers are computed now; what nothing reads is not there."""
    x, y = build.argument("x", [64]), build.argument("y", [64])
    build.exp(y)  # written, and read by nobody
    scale = build.multiply(build.constant(2.0, [64]), build.constant(3.0, [64]))
    zero = build.subtract(scale, build.constant(6.0, [64]))
    product = build.multiply(build.add(x, y), build.tanh(build.add(x, y)))
    graph = Graph((x, y), (build.add(build.multiply(product, scale), build.multiply(build.subtract(x, zero), 1.0)),))
    return [("as written: x + y is one node", graph), ("numbers folded, - 0 and * 1 gone", simplify(graph)[0])]


def branches() -> list[tuple[str, Graph]]:
    """A switch and a merge, and their gradient."""
    x, chosen = build.argument("x", [64]), build.argument("chosen", (), "bool")
    high = build.multiply(build.switch(x, chosen, True), 3.0)
    result = build.total(build.merge(chosen, high, build.exp(build.switch(x, chosen, False))))
    gradient = Graph((x, chosen), tuple(derive.gradient(result, [x])))
    return [
        ("one of two branches", Graph((x, chosen), (result,))),
        ("the gradient: switches and merges again", gradient),
    ]


def joined() -> list[tuple[str, Graph]]:
    """q, k and v as one product; a product, its bias and its activation as one kernel."""
    x = build.argument("x", [4096, 256], "bfloat16")
    q, k, v = (build.argument(name, [256, 256], "bfloat16") for name in "qkv")
    mixed = build.multiply(build.multiply(build.dot(x, q), build.dot(x, k)), build.dot(x, v))
    w, bias = build.argument("w", [256, 256], "bfloat16"), build.argument("bias", [256], "bfloat16")
    out = build.relu(build.add(build.dot(mixed, w), build.expand(bias, mixed.shape)))
    graph = Graph((x, q, k, v, w, bias), (out,))
    after = with_products(joined_products(graph)[0], ("bfloat16",))
    return [("four products", graph), ("two: q, k and v joined; bias and ReLU in the last one's kernel", after)]


def layouts() -> list[tuple[str, Graph]]:
    x, y = build.argument("x", [64, 32]), build.argument("y", [32, 64])
    graph = Graph((x, y), (build.transpose(build.exp(build.transpose(build.dot(x, y)))),))
    return [("as written", graph), ("transposes met and went", simplify(graph)[0])]


def kernels() -> list[tuple[str, Graph]]:
    x, w, b, up = (build.argument("x", [32, 64]), build.argument("w", [64]), build.argument("b", [64]),
                   build.argument("up", [64, 64]))  # fmt: skip
    graph = simplify(Graph((x, w, b, up), (build.gelu(build.dot(build.layer_norm(x, w, b), up)),)))[0]
    return [
        ("layer norm, product, GELU", graph),
        ("two generated kernels and a product", fused(graph, lambda node: True)),
    ]


def searched() -> list[tuple[str, Graph]]:
    x, y, z, w = (build.argument(name, [512, 512]) for name in "xyzw")
    graph = Graph((x, y, z, w), (build.add(build.dot(x, y), build.add(w, build.dot(x, z))),))
    rules = as_rules(read_substitutions())

    def cost(each: Graph) -> float:
        return graph_seconds(each, DEVICES["h100"])

    stuck, found = greedy(graph, rules, cost), search(graph, rules, cost)
    return [("as given, and after greedy rewriting", stuck.graph), ("after the search", found.graph)]


def partly() -> list[tuple[str, Graph]]:
    pictures = [build.argument(name, [1, 64, 28, 28]) for name in "xy"]
    w = build.argument("w", [64, 64, 3, 3])
    graph = Graph((*pictures, w), tuple(build.conv(picture, w, padding=[1, 1]) for picture in pictures))
    mutant = next(each for each in mutants(graph) if "dim 3" in each.name)
    return [
        ("two convolutions", graph),
        ("one, wrong beside the seam", mutant.graph),
        ("the seam corrected", correct(graph, mutant)),
    ]


PICTURES = {
    "gradient": regression, "constants": constants, "branches": branches, "batch-norm": normalised, "joined": joined,
    "transposes": layouts, "kernels": kernels, "search": searched, "partial": partly,
}  # fmt: skip

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/graph")
    for name, make in PICTURES.items():
        (folder / f"{name}.svg").write_text(drawing(make()))
