"""What a step exchanges, as a list of plain values in the order of a run: what bytes counted on the wire are held to.

What a layer, the embedding and the head exchange is described in `model/work/exchanges.py`; here the whole model's are
put in order, and the gradients of a step are added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tilemesh.core.axes import BATCH, Axes, Blocks
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.exchanges import Exchange, embedding_exchanges, head_exchanges, layer_exchanges
from tilemesh.model.work.task import Task


def microbatch(config: ModelConfig, task: Task) -> list[Exchange]:
    """What the ranks of tp exchange in one forward and backward pass."""
    before, after = list(embedding_exchanges(config, task)), list(head_exchanges(config, task))
    layers = [
        dataclasses.replace(exchange, site=f"layers.{layer}.{exchange.site}")
        for layer in range(config.layers)
        for exchange in layer_exchanges(config, task)
    ]
    forward = [exchange for exchange in (*before, *layers, *after) if not exchange.backward]
    layers.sort(key=lambda exchange: -int(exchange.site.split(".")[1]))
    return [*forward, *(exchange for exchange in (*after, *layers, *before) if exchange.backward)]


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
