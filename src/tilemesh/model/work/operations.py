"""The operations of a layer, of the embedding and of the head on one rank, with their FLOPs and bytes.

The one idea: each part of the model is one `PartWork` value: what it does forward and backward, what it keeps and what
it exchanges. Bytes of a product and of an operator are those that their own `cost.py` counts.
Shapes are those of one rank; T tokens, D width, F hidden width, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tilemesh.core.cost import LONG_DTYPES, Cost
from tilemesh.core.plan import StepSettings
from tilemesh.core.sequence import BlockPair, block_pairs, joined_runs, runs_around, zigzag
from tilemesh.kernels.attention import cost as attention
from tilemesh.kernels.matmul.cost import product_cost
from tilemesh.kernels.softmax import cost as softmax
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.exchanges import Exchange, embedding_exchanges, head_exchanges, layer_exchanges
from tilemesh.model.work.kept import Kept, kept_for_weights, kept_tensors, loss_tensors, scores_in_memory
from tilemesh.model.work.passes import (
    MemoryPass,
    embedding_passes,
    head_passes,
    layer_passes,
    logit_columns,
    product_weights,
)
from tilemesh.model.work.routing import busiest_rows, local_experts
from tilemesh.model.work.task import Task
from tilemesh.model.work.weights import Weight, active_matrices, is_wide_for_fp8, output_weight


class Product(NamedTuple):
    """`batch` products of m x k and k x n."""

    name: str
    batch: int
    m: int
    n: int
    k: int
    dtype: str
    backward: bool = False
    fp8: bool = False
    """Whether its operands are cast to 8 bits."""

    @property
    def outputs(self) -> int:
        """Elements of the result: B M P of B products of M x N and N x P, B C H W of a convolution written as one."""
        return self.batch * self.m * self.n

    @property
    def cost(self) -> Cost:
        """FLOPs, and bytes where each operand is read once and the result written once."""
        return product_cost(self.batch, self.m, self.n, self.k, LONG_DTYPES[self.dtype])


class FusedAttention(NamedTuple):
    """Scores, softmax and values in one kernel; queries are the last of the keys and see none after themselves."""

    name: str
    sequences: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_width: int
    dtype: str
    backward: bool = False
    is_block: bool = False
    """Whether every query meets every key of a block, and what it does not see is masked afterwards."""
    pairs: int = 0
    """Of a query and a key, in one head of one sequence; 0: those that are not masked, about half of the square where
    there are as many keys as queries."""

    @property
    def cost(self) -> Cost:
        """FLOPs of its pairs."""
        seen = self.pairs or attention.pairs(self.queries, self.keys, causal=not self.is_block)
        sizes = (self.sequences, self.heads, self.kv_heads, self.queries, self.head_width, LONG_DTYPES[self.dtype])
        return attention.cost(*sizes, keys=self.keys, seen=seen, backward=self.backward)


class RaggedAttention(NamedTuple):
    """Attention of several sequences in one kernel, each with its own number of new tokens and of keys in pages."""

    name: str
    sequences: int
    heads: int
    kv_heads: int
    queries: int
    """New tokens of all sequences."""
    keys_read: int
    """Of all sequences: keys that some query of theirs sees."""
    pairs: int
    """Of a query and a key that it sees, of all sequences, in one head."""
    head_width: int
    dtype: str
    backward: bool = False

    @property
    def keys(self) -> int:
        """Of one sequence, on average."""
        return max(1, self.keys_read // self.sequences)

    @property
    def cost(self) -> Cost:
        """One pass over queries, keys, values and the result; two products for each pair."""
        sizes = (1, self.heads, self.kv_heads, self.queries, self.head_width, LONG_DTYPES[self.dtype])
        return attention.cost(*sizes, keys=self.keys_read, seen=self.pairs)


Operation = Product | MemoryPass | FusedAttention | RaggedAttention


@dataclass(frozen=True)
class PartWork:
    """One part of the model (a layer, the embedding, the head) on one rank, for one microbatch."""

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    kept: tuple[Kept, ...]
    exchanges: tuple[Exchange, ...]
    scores: tuple[Operation, ...] = ()
    """Of `forward`, what selective recomputation repeats."""
    between: tuple[Operation, ...] = ()
    """Of `forward`, what recomputation by operators repeats: every second product but the last of the layer, whose
    result no backward pass reads, and all that is neither product nor attention."""
    again: tuple[Operation, ...] = ()
    """Of `forward`, what full recomputation repeats: torch's stops where all that backward reads is there, which is
    before the last product; hand-fused code repeats everything."""
    weight_gradients: tuple[Operation, ...] = ()
    """Of `backward`, what nothing waits for: a backward pass in two halves leaves it for the second. Not that of the
    logits, whose gradient takes too much memory to be kept."""
    kept_for_weights: tuple[Kept, ...] = ()
    """What those read, so what is kept between the halves."""


# ---- a layer ---------------------------------------------------------------------------------------------------


def layer_work(model: ModelConfig, task: Task) -> PartWork:
    """One layer."""
    products = layer_products(model, task)
    scores, scores_back = _attention(model, task)
    passes, passes_back = layer_passes(model, task)
    weight_gradients = tuple(_weight_gradients(products))
    if task.fp8_scales != "tensor":
        weight_gradients = tuple(op._replace(fp8=False) for op in weight_gradients)
    return PartWork(
        forward=(*products, *passes, *scores),
        backward=(*passes_back, *_input_gradients(products), *weight_gradients, *scores_back),
        kept=kept_tensors(model, task),
        exchanges=tuple(layer_exchanges(model, task)),
        scores=scores,
        between=(*products[1:-1:2], *passes),
        again=(*(products if task.code == "fused" else products[:-1]), *passes, *scores),
        weight_gradients=weight_gradients,
        kept_for_weights=kept_for_weights(model, task),
    )


def layer_products(model: ModelConfig, task: Task) -> tuple[Product, ...]:
    """With the layer's matrices, in the order in which they are made."""
    return tuple(_product(model, weights, task) for weights in product_weights(model, task))


class ExpertProducts(NamedTuple):
    """Of a layer's products, forward or backward, those of experts that a token picks, and of a shared one."""

    picked: tuple[Product, ...]
    shared: tuple[Product, ...]


def expert_products(model: ModelConfig, task: Task, backward: bool = False) -> ExpertProducts:
    """`backward`: of input gradients."""
    both = []
    for is_routed in (True, False):
        group = (each for each in product_weights(model, task) if each[0].is_routed == is_routed)
        mine = [each for each in group if is_routed or ".shared." in each[0].name]
        products = tuple(_product(model, weights, task) for weights in mine)
        both.append(tuple(_input_gradients(products)) if backward else products)
    return ExpertProducts(*both)


def _product(model: ModelConfig, weights: list[Weight], task: Task) -> Product:
    """Of experts as many products at once as some token passes, with as many rows each."""
    is_routed = weights[0].is_routed
    tp = task.ranks_per_expert if is_routed else task.tp
    outputs = sum(weight.shape(tp)[0] for weight in weights)
    name, inputs = ", ".join(weight.words for weight in weights), weights[0].shape(tp)[1]
    if not is_routed:
        width = sum(weight.outputs for weight in weights)
        is_fp8 = task.is_fp8 and is_wide_for_fp8(width, weights[0].inputs, task.fp8_scales)
        return Product(name, 1, task.tokens, outputs, inputs, task.dtype, fp8=is_fp8)
    rows, used = busiest_rows(model, task), local_experts(model, task)
    return Product(f"{name} of {used} experts", used, -(-rows // used), outputs, inputs, task.dtype, fp8=task.is_fp8)


def _input_gradients(products: tuple[Product, ...]) -> Iterator[Product]:
    for op in products:
        yield op._replace(name=f"{op.name}, input gradient", n=op.k, k=op.n, backward=True)


def _weight_gradients(products: tuple[Product, ...]) -> Iterator[Product]:
    for op in products:
        yield op._replace(name=f"{op.name}, weight gradient", m=op.k, k=op.m, backward=True)


def _attention(model: ModelConfig, task: Task) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Scores and their product with the values, forward and backward."""
    queries, keys, d, size = task.queries, task.keys, model.head_width, task.size
    if task.attention == "fused" and task.cp > 1 and task.cp_exchange != "heads" and not task.gpu:
        return _attention_in_blocks(model, task)
    if task.attention == "fused" and not scores_in_memory(model, task):
        own = (task.sequences, model.heads // task.tp, max(1, model.kv_heads // task.tp))
        forward = FusedAttention("fused attention", *own, queries, keys, d, task.dtype, pairs=_pairs(model, task))
        return (forward,), (forward._replace(backward=True),)
    heads = task.sequences * model.heads // task.tp
    square = heads * queries * keys
    drop = (MemoryPass("dropout of scores", 2 * square * size + square),) if model.dropout else ()
    if model.score_cap:  # divided, tanh, multiplied, masked; no dropout of scores here
        drop = (MemoryPass("soft cap of scores", 8 * square * task.wide),)
    products = (
        Product("scores", heads, queries, keys, d, task.dtype),
        Product("values", heads, queries, d, keys, task.dtype),
    )
    dtype = LONG_DTYPES[task.dtype]
    return (
        (*products, MemoryPass.of("softmax", softmax.cost(heads * queries, keys, dtype)), *drop),
        (
            *(op._replace(name=f"{op.name}, first gradient", n=op.k, k=op.n) for op in products),
            *(op._replace(name=f"{op.name}, second gradient", m=op.k, k=op.m) for op in products),
            MemoryPass.of("softmax", softmax.backward_cost(heads * queries, keys, dtype)),
            *drop,
        ),
    )


def _pairs(model: ModelConfig, task: Task) -> int:
    """That attention computes, a mean over layers with and without a window. Behind a window kernels of a GPU compute
    nothing; on a CPU it is a mask over all."""
    sizes, total = (task.queries, task.keys), 0
    for window, layers in Counter(model.window_of(layer) for layer in range(model.layers)).items():
        is_mask = window and not task.gpu
        total += layers * (math.prod(sizes) if is_mask else attention.pairs(*sizes, causal=True, window=window))
    return total // model.layers


@functools.cache
def shared_blocks(tokens: int, ranks: int, near: int = 1, gathered: bool = False) -> tuple[BlockPair, ...]:
    """Blocks of keys that come to the first rank's queries of one sequence, in zigzag order: those of each stop of the
    ring, which is `near` ranks together, or of all of them in their order."""
    runs = [zigzag(tokens, ranks, rank) for rank in range(ranks)]
    stops = [joined_runs(runs[at : at + near]) for at in range(0, ranks, near)]
    visits = [runs_around(stops[0])] if gathered else stops
    return tuple(pair for keys in visits for pair in block_pairs(stops[0], keys))


BLOCK_CALLS = (32, 36)
"""Calls of torch beside a block's attention, forward and backward: COUNTED in `parallel/ring.py` and
`kernels/attention/blocks.py`."""


def _attention_in_blocks(model: ModelConfig, task: Task) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Where keys visit a rank of a CPU (`kernels/attention/blocks.py`): attention of each block, whose result is merged
    with what others gave (read and written as two products and a sum), or whose gradients are added; keys and values as
    often as query heads share them. What visits is made and copied once."""
    near, width = task.sharing_heads(model), model.head_width
    heads, kv_heads = model.heads // task.tp // near, max(1, model.kv_heads // task.tp) // near
    forward: list[Operation] = []
    backward: list[Operation] = []
    for pair in shared_blocks(sum(task.shares), task.cp, near, task.cp_exchange == "gather"):
        sizes = (task.sequences, heads, kv_heads, pair.queries.length, pair.keys.length, width, task.dtype)
        block = FusedAttention("attention of a block", *sizes, is_block=True)
        query, key = (task.sequences * heads * width * run.length * task.wide for run in (pair.queries, pair.keys))
        forward += [block, MemoryPass("merging", 7 * query + 4 * key, BLOCK_CALLS[0])]
        backward += [block._replace(backward=True), MemoryPass("adding up", 3 * query + 10 * key, BLOCK_CALLS[1])]
    return tuple(forward), tuple(backward)


# ---- the ends of the model -------------------------------------------------------------------------------------


def embedding_work(model: ModelConfig, task: Task) -> PartWork:
    """Looking rows up, on the first stage."""
    forward, backward = embedding_passes(model, task)
    return PartWork(tuple(forward), tuple(backward), (), tuple(embedding_exchanges(model, task)))


def head_work(model: ModelConfig, task: Task) -> PartWork:
    """Final norm, logits and loss, on the last stage."""
    passes, passes_back = head_passes(model, task)
    logits = (Product("logits", 1, task.tokens, logit_columns(model, task), model.width, task.dtype),)
    return PartWork(
        forward=(*passes, *logits),
        backward=(*passes_back, *_input_gradients(logits), *_weight_gradients(logits)),
        kept=loss_tensors(model, task),
        exchanges=tuple(head_exchanges(model, task)),
    )


# ---- FLOPs of the whole model ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardFlops:
    """One forward pass of some sequences through the whole model."""

    projections: int
    """q, k, v and output projections of all layers."""
    scores: int
    """Scores and their product with the values, all layers."""
    mlp: int
    logits: int

    @property
    def layers(self) -> int:
        return self.projections + self.scores + self.mlp

    @property
    def total(self) -> int:
        return self.layers + self.logits


def forward_flops(model: ModelConfig, sequences: int, queries: int, keys: int | None = None) -> ForwardFlops:
    """Exactly, every product counted; `keys` are as many as queries if not given.

    Conventions: a multiply-add is 2 FLOPs; scores are counted as the full square, also under a causal mask, as MFU is
    defined in the PaLM and Megatron papers, behind a window as what it holds of each row; backward is twice forward.
    Model FLOPs are those that had to be done (MFU), hardware FLOPs add what is recomputed (HFU).
    """
    task = Task(sequences, queries, queries if keys is None else keys, attention="materialized")
    blocks = {"attention": 0, "mlp": 0}
    for kind, layers in model.layers_by_kind:
        for weight in active_matrices(kind):
            blocks[weight.block] += layers * 2 * task.tokens * weight.outputs * weight.inputs
    output = output_weight(model)
    scores = sum(op.cost.flops for op in _attention(model, task)[0] if isinstance(op, Product))
    # Narrower values are computed with zeros beside them, which nothing asks for.
    scores = scores * (model.head_width + model.value_head_width) // (2 * model.head_width)
    return ForwardFlops(
        projections=blocks["attention"],
        scores=scores * sum(keys_seen(model, task.keys)) // task.keys,
        mlp=blocks["mlp"],
        logits=2 * task.tokens * output.outputs * output.inputs,
    )


def keys_seen(model: ModelConfig, keys: int) -> list[int]:
    """Of each layer, the most keys that a query sees."""
    return [min(model.window_of(layer) or keys, keys) for layer in range(model.layers)]


def model_flops(model: ModelConfig, sequences: int, context: int) -> int:
    """What a step had to do: forward and backward."""
    return 3 * forward_flops(model, sequences, context).total


def peak_of_step(model: ModelConfig, context: int, plan: StepSettings, peaks: Mapping[str, float]) -> float:
    """FLOP/s at which a step's model FLOPs take their least time, given the peaks by dtype. In fp8 the wide matrices of
    the layers take 8 bits, with a scale per row or block not for their gradients; attention and the head take 16."""
    peak = peaks[plan.compute_dtype]
    if plan.precision != "fp8":
        return peak
    narrow = sum(
        layers * 2 * context * weight.outputs * weight.inputs
        for kind, layers in model.layers_by_kind
        for weight in active_matrices(kind)
        if weight.is_routed or is_wide_for_fp8(weight.outputs, weight.inputs, plan.fp8_scales)
    )
    share = (3 if plan.fp8_scales == "tensor" else 2) * narrow / model_flops(model, 1, context)
    return 1 / (share / peaks["fp8"] + (1 - share) / peak)


def published_flops(model: ModelConfig, context: int) -> float:
    """Of training, per token, as tables of others count: 6 N + 6 layers x heads x width x context, where N is what a
    token passes of the layers' matrices and the output projection (no embedding, no router), and half of the scores'
    square is masked, or all that lies behind a window."""
    forward, widths = forward_flops(model, 1, context), keys_seen(model, context)
    masked = sum(width * width / (2 * context) for width in widths) / sum(widths)
    return 3 * (forward.total - forward.scores * masked) / context


def recomputed_flops(model: ModelConfig, sequences: int, context: int, recompute: str, share: float = 1.0) -> int:
    """What a step does a second time: all layers, every second product of theirs, only their scores, or nothing.
    `share`: of the layers that do so."""
    forward = forward_flops(model, sequences, context)
    second = (
        2
        * sequences
        * context
        * sum(
            layers * weight.outputs * weight.inputs
            for kind, layers in model.layers_by_kind
            for weight in active_matrices(kind)[1:-1:2]
        )
    )
    flops = {"none": 0, "selective": forward.scores, "operators": second, "full": forward.layers}
    return round(share * flops[recompute])


def hardware_flops(model: ModelConfig, sequences: int, context: int, recompute: str, share: float = 1.0) -> int:
    return model_flops(model, sequences, context) + recomputed_flops(model, sequences, context, recompute, share)
