"""What chapter 15 runs: derivatives by hand, layers as Caffe had them, a chain of operators fused, a small CNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tilemesh.core.hardware import Device, parse_cluster
from tilemesh.graph import build
from tilemesh.graph.backend import as_kernels
from tilemesh.graph.cost import node_seconds, roof_seconds
from tilemesh.graph.emit import program
from tilemesh.graph.generated import way_for
from tilemesh.graph.ir import Graph, Node
from tilemesh.guide import on_gpu

Array = np.ndarray[Any, Any]


# Derivatives ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dual:
    """A number and how it moves: forward mode by hand."""

    value: float
    slope: float

    def __mul__(self, other: Dual) -> Dual:
        return Dual(self.value * other.value, self.slope * other.value + self.value * other.slope)

    def exp(self) -> Dual:
        return Dual(float(np.exp(self.value)), self.slope * float(np.exp(self.value)))


def network() -> tuple[tuple[Node, Node, Node], Node]:
    """loss = Σ tanh(x·A)·B squared: 32 rows, 8 numbers in, 16 hidden, 4 out."""
    shapes = {"x": (32, 8), "A": (8, 16), "B": (16, 4)}
    x, a, b = (build.argument(name, shape, "float64") for name, shape in shapes.items())
    out = build.dot(build.tanh(build.dot(x, a)), b)
    return (x, a, b), build.total(build.multiply(out, out))


LAYERS: dict[str, tuple[Callable[..., Array], Callable[..., tuple[Array, Array | None]]]] = {
    "product": (lambda x, w: x @ w, lambda g, x, w: (g @ w.T, x.T @ g)),
    "tanh": (lambda x, _: np.tanh(x), lambda g, x, _: (g * (1 - np.tanh(x) ** 2), None)),
    "squares": (lambda x, _: (x * x).sum(), lambda g, x, _: (2 * g * x, None)),
}
"""As in Caffe: code that goes forward, and code that turns the gradient of what came out into that of what went in and
of the weights."""


def by_layers(x: Array, stack: Sequence[tuple[str, Array | None]]) -> tuple[Array, list[Array]]:
    """The loss and the gradients of all weights: every layer forward, then every layer's code backward."""
    inputs = []
    for name, weight in stack:
        inputs.append(x)
        x = LAYERS[name][0](x, weight)
    gradient, gradients = np.ones(()), []
    for (name, weight), value in zip(reversed(stack), reversed(inputs), strict=True):
        gradient, own = LAYERS[name][1](gradient, value, weight)
        gradients += [] if own is None else [own]
    return x, gradients[::-1]


def launches(graph: Graph) -> int:
    """Operators that a device is given; views cost nothing."""
    return sum(node.launched for node in graph.nodes())


# Fusion ---------------------------------------------------------------------------------------------------------------

CHAIN = 8
"""Operators of the chain that is fused."""


def chain(elements: int) -> Graph:
    """Cheap operators in a row: each reads what the one before wrote."""
    value = x = build.argument("x", [elements])
    for turn in range(CHAIN // 2):
        value = build.add(build.multiply(value, 1.01), 0.1 + turn)
    return Graph((x,), (value,))


def fused(graph: Graph) -> Graph | None:
    """The graph as kernels that are written for it; None where this machine has no compiler."""
    way = way_for(torch.device("cpu"))
    return None if way is None else as_kernels(graph, way)


def h100() -> Device:
    return parse_cluster("1xh100").device


def runner(graph: Graph, x: torch.Tensor) -> Callable[[], Any]:
    run = program(graph, "cpu", way=way_for(torch.device("cpu")))
    return lambda: run(x)


def in_blocks(x: Array, out: Array, block: int) -> Array:
    """The chain, a block of numbers at a time: what is written is still in the cache when it is read."""
    for begin in range(0, len(x), block):
        mine = out[begin : begin + block]
        for turn in range(CHAIN // 2):
            np.multiply(mine if turn else x[begin : begin + block], np.float32(1.01), out=mine)
            np.add(mine, np.float32(0.1 + turn), out=mine)
    return out


class ChainBlocks(NamedTuple):
    """A configuration for the tuner: how many numbers at a time."""

    size: int
    kind: str = "blocks"

    @property
    def label(self) -> str:
        return f"{self.size:,}"

    def predict_s(self, elements: int, call_s: float = 0.6e-6, cached: int = 1 << 16) -> float:
        """A simple cost model: calls of numpy, and bytes through memory or, of small blocks, through a cache."""
        bytes_per_s = 40e9 if self.size <= cached else 10e9
        return CHAIN * elements / self.size * call_s + CHAIN * 8 * elements / bytes_per_s


def measured_blocks(x: Array, configs: Sequence[ChainBlocks]) -> list[float]:
    """Seconds of the chain in blocks of each size, really run."""
    out = np.empty_like(x)
    return [on_gpu.timed("cpu", lambda size=config.size: in_blocks(x, out, size)).median for config in configs]  # type: ignore[misc]


# A CNN ----------------------------------------------------------------------------------------------------------------


def small_cnn(width: int = 32, layers: int = 6) -> torch.nn.Sequential:
    """Convolution, batch norm, ReLU, so many times over, as it is used after training."""
    parts: list[torch.nn.Module] = []
    for layer in range(layers):
        parts += [torch.nn.Conv2d(width if layer else 3, width, 3, padding=1), torch.nn.BatchNorm2d(width)]
        parts.append(torch.nn.ReLU())
    return torch.nn.Sequential(*parts).eval()


class TimeShares(NamedTuple):
    """Predicted seconds of a graph on a device: launches; operators bound by memory; convolutions."""

    launches: float
    memory: float
    convolutions: float
    flops_s: float
    """What the arithmetic alone would take."""

    @property
    def seconds(self) -> float:
        return self.launches + self.memory + self.convolutions


def shares(graph: Graph, device: Device | None = None) -> TimeShares:
    """Where the time of a graph goes, by the cost model that `tilemesh graph explain` prints."""
    device = device or h100()
    nodes = [node for node in graph.nodes() if node.launched]
    convolutions = sum(roof_seconds(node, device) for node in nodes if node.op == "conv")
    memory = sum(roof_seconds(node, device) for node in nodes if node.op != "conv")
    flops = sum(int(str(node.flops)) for node in nodes)
    launch_s = sum(node_seconds(node, device) - roof_seconds(node, device) for node in nodes)
    return TimeShares(launch_s, memory, convolutions, flops / device.peak("bf16"))


def on_device(device: str, batches: Sequence[int] = (1, 64, 1024)) -> dict[str, float]:
    """Seconds of the network on a GPU: as it is, with channels last, and recorded as one launch where that can be."""
    seconds = {}
    network = small_cnn().to(device)
    with torch.no_grad():
        for batch in batches:
            x = torch.randn(batch, 3, 32, 32, device=device)
            seconds[f"batch {batch}"] = on_gpu.timed(device, lambda x=x: network(x)).median  # type: ignore[misc]
            last = x.contiguous(memory_format=torch.channels_last)
            seconds[f"batch {batch}, channels last"] = on_gpu.timed(device, lambda x=last: network(x)).median  # type: ignore[misc]
            if device.startswith("cuda"):
                recording = torch.cuda.CUDAGraph()
                with torch.cuda.graph(recording):
                    network(x)
                seconds[f"batch {batch}, recorded"] = on_gpu.timed(device, recording.replay).median
    return seconds


def cnn_graph(batch: int, folded: bool = False, width: int = 32, layers: int = 6, side: int = 32) -> Graph:
    """The same network as a graph of primitives; `folded`: batch norms are part of the convolutions' weights."""
    x = value = build.argument("x", [batch, 3, side, side], "bfloat16")
    weights = []

    def weight(name: str, *shape: int) -> Node:
        weights.append(build.argument(name, shape, "bfloat16"))
        return weights[-1]

    for layer in range(layers):
        kernel = weight(f"w{layer}", width, 3 if layer == 0 else width, 3, 3)
        value = build.conv(value, kernel, padding=(1, 1))
        if not folded:
            value = build.multiply(build.subtract(value, weight(f"mean{layer}", width, 1, 1)),
                                   weight(f"s{layer}", width, 1, 1))  # fmt: skip
        value = build.relu(build.add(value, weight(f"b{layer}", width, 1, 1)))
    return Graph((x, *weights), (value,))
