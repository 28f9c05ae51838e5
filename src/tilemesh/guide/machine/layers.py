"""Layers as rows: what an MLP, a CNN, an RNN and a Transformer layer keep, compute and move.

Counted by formula for one forward pass in 16-bit numbers: weights are read once, inputs and outputs pass through
memory; an RNN reads its weights at every step, because the next step needs the result of the one before.
`count_with_torch` runs the same products and lets torch count the FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilemesh.core.cost import Cost

BYTES = 2


@dataclass(frozen=True)
class LayerRow:
    """One kind of layer: parameters, and the cost of a forward pass."""

    name: str
    parameters: int
    cost: Cost


def rows(tokens: int = 512, width: int = 1024) -> list[LayerRow]:
    """Four layers of comparable width."""
    return [mlp(tokens, width), cnn(8, 64, 56), rnn(tokens, width), transformer(tokens, width)]


def mlp(tokens: int, width: int) -> LayerRow:
    hidden = 4 * width
    weights = 2 * width * hidden
    moved = weights + tokens * (width + hidden) + tokens * (hidden + width)
    return LayerRow("MLP", weights, _cost(2 * tokens * weights, moved))


def cnn(images: int, channels: int, side: int) -> LayerRow:
    """One 3 x 3 convolution that keeps the size: every weight is used at every place of the image."""
    weights, places = channels * channels * 9, images * side * side
    return LayerRow("CNN", weights, _cost(2 * places * weights, weights + 2 * places * channels))


def rnn(steps: int, width: int) -> LayerRow:
    """h' = tanh(W h + U x), one sequence: two products with a vector at every step."""
    weights = 2 * width * width
    return LayerRow("RNN", weights, _cost(2 * steps * weights, steps * (weights + 3 * width)))


def transformer(tokens: int, width: int) -> LayerRow:
    """Attention (four projections, scores, values) and an MLP; scores stay on the chip (fused attention)."""
    block = mlp(tokens, width)
    weights = 4 * width * width
    flops = 2 * tokens * weights + 4 * tokens * tokens * width
    moved = weights + tokens * (width + 3 * width) + tokens * 4 * width + tokens * 2 * width
    return LayerRow("Transformer", weights + block.parameters, _cost(flops, moved) + block.cost)


def operators(tokens: int, width: int) -> list[LayerRow]:
    """The operators of a Transformer layer one by one, each of which reads from memory and writes to it."""
    hidden, x = 4 * width, tokens * width
    products = {
        "query, key, value": (width, 3 * width),
        "output": (width, width),
        "MLP up": (width, hidden),
        "MLP down": (hidden, width),
    }
    rows_of_layer = [
        LayerRow(name, rows * columns, _cost(2 * tokens * rows * columns, rows * columns + tokens * (rows + columns)))
        for name, (rows, columns) in products.items()
    ]
    rows_of_layer.append(LayerRow("attention", 0, _cost(4 * tokens * x, 4 * x)))
    # name: (how often, elements, FLOPs per element, numbers read and written per element)
    per_element = {
        "norm": (2, x, 4, 2),
        "rotary": (1, 2 * x, 3, 2),
        "residual sum": (2, x, 1, 3),
        "activation": (1, tokens * hidden, 4, 2),
    }
    for name, (times, elements, flops, numbers) in per_element.items():
        rows_of_layer += [LayerRow(name, 0, _cost(flops * elements, numbers * elements))] * times
    return rows_of_layer


def _cost(flops: int, numbers: int) -> Cost:
    return Cost(flops=flops, bytes_read=numbers * BYTES, dtype="bf16")


def count_with_torch(tokens: int = 512, width: int = 1024) -> dict[str, int]:
    """FLOPs of the same layers as torch counts them when they run (in fp32, on this CPU)."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    def count(run: object) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            run()  # type: ignore[operator]
        return int(counter.get_total_flops())

    x, hidden = torch.zeros(tokens, width), torch.zeros(tokens, 4 * width)
    up, down, square = torch.zeros(width, 4 * width), torch.zeros(4 * width, width), torch.zeros(width, width)
    image, kernel, vector = torch.zeros(8, 64, 56, 56), torch.zeros(64, 64, 3, 3), torch.zeros(1, width)

    def run_mlp() -> None:
        x @ up
        hidden @ down

    def run_rnn() -> None:
        for _ in range(tokens):
            vector @ square
            vector @ square

    def run_transformer() -> None:
        for _ in range(4):
            x @ square
        (x @ x.T) @ x
        run_mlp()

    def run_cnn() -> None:
        torch.nn.functional.conv2d(image, kernel, padding=1)

    runs = {"MLP": run_mlp, "CNN": run_cnn, "RNN": run_rnn, "Transformer": run_transformer}
    return {name: count(run) for name, run in runs.items()}
