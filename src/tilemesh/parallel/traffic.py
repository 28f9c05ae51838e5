"""What a step exchanges, as a list of plain values: which collective, along which axis, how many numbers, and why.

This is the formula that bytes counted on the wire are held to, for every layer and layout. A is one microbatch's
activations, rows x tokens x width: a block (attention or MLP) costs tensor parallelism one global-sum of A in forward
and one in backward, and with sequence parallelism a gather-all and a scatter-sum of A each way, which is as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilemesh.core.axes import BATCH, Axes, Blocks, size_of
from tilemesh.core.plan import Precision
from tilemesh.model.config import ModelConfig


@dataclass(frozen=True)
class Widths:
    """Bytes of a number: in what a product takes or gives, and in the stream between the blocks and its gradients."""

    product: int
    stream: int


# Under autocast the stream and its gradients are float32, what goes into and comes out of products 16 bits.
WIDTHS: Mapping[Precision, Widths] = {
    "fp64": Widths(8, 8),
    "fp32": Widths(4, 4),
    "bf16": Widths(2, 4),
    "fp16": Widths(2, 4),
    "bf16-master": Widths(2, 2),
}


@dataclass(frozen=True)
class Exchange:
    """One collective. `elements`: of the whole vector (what each rank has before or after it)."""

    site: str
    axis: str
    collective: str
    elements: int
    itemsize: int


def microbatch(
    config: ModelConfig, axes: Axes, sequence: bool, rows: int, tokens: int, precision: Precision
) -> list[Exchange]:
    """What the ranks of tp exchange in one forward and backward pass. `axes`: of the mesh, whichever it has."""
    if size_of(axes, "tp") == 1:
        return []
    widths, whole = WIDTHS[precision], rows * tokens * config.width
    return [*_forward(config, sequence, whole, rows * tokens, widths), *_backward(config, sequence, whole, widths)]


def _forward(config: ModelConfig, sequence: bool, whole: int, positions: int, widths: Widths) -> Iterator[Exchange]:
    out = "reduce_scatter" if sequence else "all_reduce"
    yield Exchange("token_embedding", "tp", out, whole, widths.stream)
    for layer in range(config.layers):
        for block in ("attention", "mlp"):
            if sequence:
                yield Exchange(f"layers.{layer}.{block}", "tp", "all_gather", whole, widths.product)
            yield Exchange(f"layers.{layer}.{block}", "tp", out, whole, widths.product)
    if sequence:
        yield Exchange("output", "tp", "all_gather", whole, widths.product)
    wide = max(widths.product, 4)  # the loss is made in float32 at least
    yield Exchange("loss: maxima", "tp", "all_reduce", positions, wide)
    yield Exchange("loss: sums and targets", "tp", "all_reduce", 2 * positions, wide)


def _backward(config: ModelConfig, sequence: bool, whole: int, widths: Widths) -> Iterator[Exchange]:
    back = "reduce_scatter" if sequence else "all_reduce"
    yield Exchange("output", "tp", back, whole, widths.stream)
    for layer in reversed(range(config.layers)):
        for block in ("mlp", "attention"):
            if sequence:
                yield Exchange(f"layers.{layer}.{block}", "tp", "all_gather", whole, widths.product)
            yield Exchange(f"layers.{layer}.{block}", "tp", back, whole, widths.stream)
    if sequence:
        yield Exchange("token_embedding", "tp", "all_gather", whole, widths.stream)


def step_end(buckets: Sequence[tuple[int, Blocks]], axes: Axes, itemsize: int) -> list[Exchange]:
    """What a step exchanges once, whatever the accumulation: buckets as (elements, the copies that are summed).

    Gradients are summed over all axes that share the batch, named as `Mesh.axes_of` names them: "dp", "dp+cp".
    """
    batch = "+".join(name for name, size in reversed(axes) if name in BATCH and size > 1)
    made = [Exchange("gradients", batch, "all_reduce", size, itemsize) for size, _ in buckets if batch]
    made += [
        Exchange("copies", f"{axis} {count}", "all_reduce", size, itemsize)
        for size, blocks in buckets
        for axis, count in blocks
    ]
    return [*made, Exchange("loss, tokens and norm", "mesh", "all_reduce", 3, 8)]
