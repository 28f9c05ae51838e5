"""What a step exchanges, as a list of plain values: which collective, along which axis, how many numbers, and why.

This is the formula that bytes counted on the wire are held to, for every layer and layout. A is one microbatch's
activations, rows x tokens x width: a block (attention or MLP) costs tensor parallelism one global-sum of A in forward
and one in backward, and with sequence parallelism a gather-all and a scatter-sum of A each way, which is as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilemesh.model.config import ModelConfig


@dataclass(frozen=True)
class Exchange:
    """One collective. `elements`: of the whole vector (what each rank has before or after it)."""

    site: str
    axis: str
    collective: str
    elements: int
    itemsize: int


def microbatch(config: ModelConfig, tp: int, sequence: bool, rows: int, tokens: int, itemsize: int) -> list[Exchange]:
    """What the ranks of tp exchange in one forward and backward pass."""
    if tp == 1:
        return []
    made = list(_forward(config, sequence, rows * tokens * config.width, rows * tokens, itemsize))
    made += _backward(config, sequence, rows * tokens * config.width, itemsize)
    return made


def _forward(config: ModelConfig, sequence: bool, whole: int, positions: int, itemsize: int) -> Iterator[Exchange]:
    out = "reduce_scatter" if sequence else "all_reduce"
    yield Exchange("token_embedding", "tp", out, whole, itemsize)
    for layer in range(config.layers):
        for block in ("attention", "mlp"):
            if sequence:
                yield Exchange(f"layers.{layer}.{block}", "tp", "all_gather", whole, itemsize)
            yield Exchange(f"layers.{layer}.{block}", "tp", out, whole, itemsize)
    if sequence:
        yield Exchange("output", "tp", "all_gather", whole, itemsize)
    wide = max(itemsize, 4)  # the loss is made in float32 at least
    yield Exchange("loss: maxima", "tp", "all_reduce", positions, wide)
    yield Exchange("loss: sums and targets", "tp", "all_reduce", 2 * positions, wide)


def _backward(config: ModelConfig, sequence: bool, whole: int, itemsize: int) -> Iterator[Exchange]:
    back = "reduce_scatter" if sequence else "all_reduce"
    yield Exchange("output", "tp", back, whole, itemsize)
    for layer in reversed(range(config.layers)):
        for block in ("mlp", "attention"):
            if sequence:
                yield Exchange(f"layers.{layer}.{block}", "tp", "all_gather", whole, itemsize)
            yield Exchange(f"layers.{layer}.{block}", "tp", back, whole, itemsize)
    if sequence:
        yield Exchange("token_embedding", "tp", "all_gather", whole, itemsize)


def step_end(buckets: Sequence[tuple[int, int, bool]], dp: int, itemsize: int) -> list[Exchange]:
    """What a step exchanges once, whatever the accumulation: buckets as (elements, copies, partial)."""
    made = [Exchange("gradients", "dp", "all_reduce", size, itemsize) for size, _, _ in buckets if dp > 1]
    made += [Exchange("copies", f"copies {c}", "all_reduce", size, itemsize) for size, c, partial in buckets if partial]
    return [*made, Exchange("loss, tokens and norm", "mesh", "all_reduce", 3, 8)]
