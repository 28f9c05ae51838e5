"""One pass of a serving engine as work: some sequences, each with a few new tokens and all that it had before.

The one idea: everything but attention sees only how many tokens there are in all, so one matrix holds them; attention
sees each sequence's own lengths, and what it costs are two sums over them: keys that are read, and pairs of a query and
a key that it sees. Prefill and decoding are the two ends of this: as many keys as queries, or one query.
Nothing is kept for a backward pass, and logits are made only where a token is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tilemesh.core.cost import Cost
from tilemesh.core.errors import unknown
from tilemesh.core.plan import Precision
from tilemesh.kernels.attention import cost as attention
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.exchanges import Exchange, embedding_exchanges, layer_exchanges
from tilemesh.model.work.operations import Operation, Product, RaggedAttention, layer_products
from tilemesh.model.work.passes import MemoryPass, layer_passes
from tilemesh.model.work.routing import hidden_elements
from tilemesh.model.work.task import Code, Task
from tilemesh.model.work.weights import (
    active_matrices,
    layer_matrices,
    output_weight,
    shard_parameters,
    touched_experts,
)

_PRECISIONS: dict[str, Precision] = {"fp32": "fp32", "bf16": "bf16-master", "fp64": "fp64"}
"""Weights, products and the residual stream are all of the one dtype that a model is served in."""


class SequencePart(NamedTuple):
    """What a pass computes of one sequence."""

    queries: int
    """New tokens."""
    keys: int
    """Tokens that the last of them attends to, itself included."""
    logits: int
    """New tokens that something is drawn after."""


def serving_task(tokens: int, dtype: str, tp: int = 1, code: Code = "fused", gpu: bool = True, ep: int = 1) -> Task:
    """A pass over so many tokens, all of them in one row; of `ep` replicas that share out experts each has as many."""
    if dtype not in _PRECISIONS:
        raise unknown("dtype", dtype, _PRECISIONS)
    return Task(1, tokens, tokens, tp=tp, precision=_PRECISIONS[dtype], code=code, gpu=gpu, ep=ep)


def dense_operations(model: ModelConfig, task: Task) -> tuple[Operation, ...]:
    """Of one layer, all but attention; new keys and values go to their pages."""
    keys = max(1, model.kv_heads // task.tp) * model.head_width
    written = 2 * 2 * task.tokens * keys * task.size
    stored = MemoryPass("keys and values to their pages", written, 1 if task.code == "fused" else 4)
    return (*layer_products(model, task), *layer_passes(model, task)[0], stored)


def attention_operations(
    model: ModelConfig, parts: Sequence[SequencePart], task: Task, window: int = 0
) -> tuple[Operation, ...]:
    """Over pages: a kernel for the sequences that decode, one for the chunks of prompts. On a CPU the pages of a group
    of sequences are gathered first, which moves every key and value once more."""
    operations: list[Operation] = []
    own = (model.heads // task.tp, max(1, model.kv_heads // task.tp))
    for name, some in (
        ("decoding", [part for part in parts if part.queries == 1]),
        ("prompts", [part for part in parts if part.queries > 1]),
    ):
        if not some:
            continue
        read = sum(_keys_read(part, window) for part in some)
        pairs = sum(attention.pairs(part.queries, part.keys, causal=True, window=window) for part in some)
        queries = sum(part.queries for part in some)
        operations.append(
            RaggedAttention(f"attention, {name}", len(some), *own, queries, read, pairs, model.head_width, task.dtype)
        )
        if not task.gpu:
            groups = len({part.queries for part in some})
            nbytes = 2 * 2 * read * own[1] * model.head_width * task.size
            operations.append(MemoryPass(f"pages gathered, {name}", nbytes, 4 * groups))
    return tuple(operations)


def end_operations(model: ModelConfig, task: Task, logits: int) -> tuple[Operation, ...]:
    """Rows looked up, the final norm, and the logits of so many tokens."""
    rows = output_weight(model).shape(task.tp)[0]
    stream = task.tokens * model.width * task.size
    operations: list[Operation] = [
        MemoryPass("embedding", 2 * stream),
        MemoryPass("final norm", 2 * stream, kind="rows"),
    ]
    if logits:
        operations.append(Product("logits", 1, logits, rows, model.width, task.dtype))
        operations.append(MemoryPass("drawing tokens", 2 * logits * rows * max(4, task.size), 4))
    return tuple(operations)


def pass_exchanges(model: ModelConfig, task: Task, logits: int) -> tuple[Exchange, ...]:
    """Of all layers: a sum after attention and one after the MLP, and rows to experts of others and back. Logits are
    gathered where tokens are drawn."""
    layers = [
        exchange
        for kind, count in model.layers_by_kind
        for exchange in count * tuple(layer_exchanges(kind, task))
        if not exchange.backward
    ]
    first = [exchange for exchange in embedding_exchanges(model, task) if not exchange.backward]
    last = Exchange("output", "tp", "all_gather", logits * model.vocabulary, task.size)
    return (*first, *layers, *((last,) if logits and task.tp > 1 else ()))


# ---- bytes -----------------------------------------------------------------------------------------------------


def key_value_bytes(model: ModelConfig, itemsize: int, tp: int = 1) -> int:
    """Of the keys and values of one token in all layers, on one of tp ranks."""
    return 2 * model.layers * max(1, model.kv_heads // tp) * model.head_width * itemsize


_STREAMS = 6
"""Tensors of the residual stream's width that are alive while an MLP has what its last product takes: COUNTED in a pass
of our engine."""
_DRAWN_BYTES = 12
"""Of a logit that a token is drawn by: its share, and the sum of those before it in float64."""


def step_bytes(model: ModelConfig, task: Task, logits: int) -> int:
    """What a pass of an engine on one rank has at most beside weights and pages: where a layer's MLP is fullest, or
    where so many tokens are drawn."""
    hidden = max((kind.mlp_inputs + 1) * hidden_elements(kind, task) // task.tp for kind in model.kinds)
    turned = task.tokens * model.rotary_width if model.positions == "rotary" else 0
    drawn = logits * (output_weight(model).shape(task.tp)[0] * task.size + model.vocabulary * _DRAWN_BYTES)
    return max((hidden + task.tokens * _STREAMS * model.width + turned) * task.size, drawn)


def weight_bytes(model: ModelConfig, itemsize: int, tp: int = 1, ep: int = 1) -> int:
    """Of the weights on one of tp ranks, of one of `ep` replicas that share out experts."""
    (dense,) = model.dense_of((model.layers,))
    return itemsize * shard_parameters(model, tp, ep).stage(model.layers, first=True, last=True, dense=dense)


def least_cost(model: ModelConfig, parts: Sequence[SequencePart], task: Task) -> Cost:
    """What no engine can do without in a pass: each weight that is used read once, each key and value read or written
    once, the FLOPs of products and of the pairs that are not masked. Activations could stay in a processor's caches."""
    size, tokens = task.size, sum(part.queries for part in parts)
    logits = sum(part.logits for part in parts)
    shards = shard_parameters(model, task.tp, task.ep)
    output = output_weight(model)
    rows = output.shape(task.tp)[0]
    (dense,) = model.dense_of((model.layers,))
    weights = shards.stage(model.layers, False, False, dense) + (rows * model.width if logits else 0)
    weights += tokens * model.width
    idle = model.experts - touched_experts(model, task.ep * tokens)  # experts that no token passes are not read
    routed = sum(math.prod(weight.shape(task.tp)) for weight in layer_matrices(model) if weight.is_routed) // task.ep
    weights -= round((model.layers - dense) * routed * idle / model.experts) if model.experts else 0
    flops = 2 * logits * rows * model.width
    for kind, count in model.layers_by_kind:
        flops += 2 * tokens * count * sum(math.prod(weight.shape(task.tp)) for weight in active_matrices(kind))
    read = pairs = 0
    for layer in range(model.layers):
        window = model.window_of(layer)
        read += sum(_keys_read(part, window) - part.queries for part in parts)
        pairs += sum(attention.pairs(part.queries, part.keys, causal=True, window=window) for part in parts)
    each = 2 * max(1, model.kv_heads // task.tp) * model.head_width * size
    flops += 4 * pairs * (model.heads // task.tp) * model.head_width
    return Cost(flops, weights * size + read * each, model.layers * tokens * each, dtype=task.dtype)


def _keys_read(part: SequencePart, window: int) -> int:
    return min(part.keys, window + part.queries - 1) if window else part.keys
