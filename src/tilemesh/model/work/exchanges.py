"""What ranks exchange for one part of a model and one microbatch, and for the gradients once a step: as plain values.

This is the formula that bytes counted on the wire are held to, for every layer and layout. A is one microbatch's
activations, sequences x tokens x width: a block (attention or MLP) costs tensor parallelism one all_reduce of A in
forward and one in backward, and with sequence parallelism an all_gather and a reduce_scatter of A each way, which is as
many bytes. Data parallelism exchanges gradients, and with ZeRO weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tilemesh.core.sequence import runs_of_ranks
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.routing import busiest_rows
from tilemesh.model.work.task import Task

BLOCKS = ("attention", "mlp")
_ROUTER, _LOSS = "router", "router's loss"


@dataclass(frozen=True)
class Exchange:
    """One collective. `elements`: of the whole vector (what each rank has before or after it)."""

    site: str
    axis: str
    collective: str
    elements: int
    itemsize: int
    backward: bool = False
    hides: bool = False
    """Whether it can run beside the product of a weight gradient, which does not wait for it."""
    copies: int = 1
    """Of an all_to_all: how many of a row go to different ranks, of which one alone need travel to a node."""
    among: tuple[int, int] | None = None
    """Of the axis so many ranks alone, so far apart."""

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


def layer_exchanges(model: ModelConfig, task: Task) -> Iterator[Exchange]:
    """Forward: a sum after each of the two projections split by their input; cut along the sequence, a sum is a
    reduce_scatter there and an all_gather where the next block begins. Backward the other way round: sums belong to
    input gradients. What is only gathered travels as narrow as products take it."""
    yield from context_exchanges(model, task)
    yield from expert_exchanges(model, task)
    yield from count_exchanges(model, task)
    if task.tp == 1:
        return
    if model.qk_norm == "full":  # squares of queries and of keys, added up over all heads, and their gradients
        for backward in (False, False, True, True):
            yield Exchange(BLOCKS[0], "tp", "all_reduce", task.tokens, task.wide, backward)
    whole, out = task.tokens * model.width, "reduce_scatter" if task.sequence_parallel else "all_reduce"
    # Experts that tp does not share take a rank's own tokens and give these back.
    are_cut = task.ranks_per_expert == task.tp or model.shared_width or not model.experts
    blocks = BLOCKS if are_cut else BLOCKS[:1]
    for block in blocks:
        if task.sequence_parallel:
            yield Exchange(block, "tp", "all_gather", whole, task.size)
        yield Exchange(block, "tp", out, whole, task.size)
    for block in reversed(blocks):
        if task.sequence_parallel:
            yield Exchange(block, "tp", "all_gather", whole, task.size, backward=True)
        if task.sequence_parallel and task.code == "fused":  # it keeps its inputs cut; our layers keep them whole
            yield Exchange(block, "tp", "all_gather", whole, task.size, backward=True, hides=True)
        yield Exchange(block, "tp", out, whole, task.stream, backward=True, hides=True)


def repeated_exchanges(model: ModelConfig, task: Task) -> Iterator[Exchange]:
    """Of those, what full recomputation and that by operators do again. torch stops where it has all that the backward
    pass reads, and the layer's last sum is read by none unless a norm or dropout follows it; hand-fused code repeats
    everything."""
    forward = forward_again(layer_exchanges(model, task))
    is_read = task.code == "fused" or model.dropout > 0 or model.norm_place != "pre"
    is_last = task.tp > 1 and task.ranks_per_expert == task.tp  # else the last is rows on their way from experts
    if not is_read:
        forward = [exchange for exchange in forward[: -1 if is_last else None] if exchange.site != _LOSS]
    yield from forward


def forward_again(exchanges: Iterable[Exchange]) -> list[Exchange]:
    """Of a forward pass, what one more like it exchanges: how many rows come to experts is known by then."""
    return [exchange for exchange in exchanges if not exchange.backward and exchange.site != _ROUTER]


def context_exchanges(model: ModelConfig, task: Task) -> Iterator[Exchange]:
    """Of attention where ranks share sequences, as the first of them counts. Around the ring go keys and values of all
    ranks, backward once more and their gradients behind them, as wide as they are summed; gathered, the same at once.
    What is sent around the ring travels while other keys are computed with. By heads two all_to_alls each way, and of
    a part of the ranks those, then a ring of what neighbours have together, each of a part of the heads."""
    if task.cp == 1:
        return
    q = task.sequences * model.query_width // task.tp
    kv = 2 * task.sequences * max(1, model.kv_heads // task.tp) * model.head_width
    near, every = task.sharing_heads(model), sum(task.shares)
    if task.cp_exchange == "gather":
        for collective, size, backward in (
            ("all_gather", task.size, False), ("all_gather", task.size, True), ("reduce_scatter", task.wide, True)
        ):  # fmt: skip
            yield Exchange("attention", "cp", collective, kv * every, size, backward)
    stops = [sum(task.shares[at : at + near]) for at in range(0, task.cp, near)]
    if near > 1:
        # What a rank gets: its heads of all neighbours' tokens, or all heads of its own.
        own = task.shares[0]
        for numbers, backward in (
            (stops[0] * (q + kv) // near, False), (stops[0] * q // near, True), (own * q, False), (own * (q + kv), True)
        ):  # fmt: skip
            yield Exchange("attention", "cp", "all_to_all", numbers, task.size, backward, among=(near, 1))
    if len(stops) == 1 or task.cp_exchange == "gather":
        return
    kv //= near
    for tokens, last, size, backward in (
        (stops[1], stops[0], task.size, False), (stops[1], stops[0], task.size, True),
        (stops[0], stops[-1], task.wide, True),
    ):  # fmt: skip
        for way, numbers in (("send", kv * (every - tokens)), ("recv", kv * (every - last))):
            yield Exchange("attention", "cp", way, numbers, size, backward, hides=True, among=(len(stops), near))


def expert_exchanges(model: ModelConfig, task: Task) -> Iterator[Exchange]:
    """Of experts that ranks share out: how many rows will come, rows to them, and results back; their gradients alike.
    As many as the busiest rank gets. Hand-fused code sends a row to a node once (DeepEP), ours to each of its experts.
    """
    if task.ep == 1 or not model.experts:
        return
    rows, copies = busiest_rows(model, task), model.experts_per_token if task.code == "fused" else 1
    for backward in (False, True):
        if not backward:
            yield Exchange(_ROUTER, "ep", "all_to_all", model.experts, 8)
        for _ in ("there", "back"):
            yield Exchange("mlp", "ep", "all_to_all", rows * model.width, task.size, backward, copies=copies)


def count_exchanges(model: ModelConfig, task: Task) -> Iterator[Exchange]:
    """What ranks that share sequences, and route tokens of their own, tell one another in training of the experts that
    they picked: by run of tokens where experts take so many of a sequence; by sequence where routers are to even it
    out."""
    apart = task.tp if task.ranks_per_expert < task.tp else 1
    if task.cp * apart == 1 or not model.experts:
        return
    axis = "+".join(name for name, ranks in (("cp", task.cp), ("tp", apart)) if ranks > 1)
    if model.expert_capacity:
        runs = sum(map(len, runs_of_ranks(sum(task.shares) or task.queries, task.cp, apart)))
        yield Exchange(_ROUTER, axis, "all_reduce", task.sequences * runs * model.experts, 8)
    if model.balance_loss:
        yield Exchange(_ROUTER, axis, "all_reduce", task.sequences * (model.experts + 1), task.wide)
    if apart > 1 and (model.balance_loss or model.router_z_loss):  # each has the losses of its own tokens
        yield Exchange(_LOSS, "tp", "all_reduce", 1, task.wide)


def embedding_exchanges(model: ModelConfig, task: Task) -> Iterator[Exchange]:
    """Each rank looks up the rows it has; the others' are zeros, so a sum gives them all."""
    if task.tp == 1:
        return
    whole, out = task.tokens * model.width, "reduce_scatter" if task.sequence_parallel else "all_reduce"
    yield Exchange("token_embedding", "tp", out, whole, task.stream)
    if task.sequence_parallel:
        yield Exchange("token_embedding", "tp", "all_gather", whole, task.stream, backward=True)


def head_exchanges(model: ModelConfig, task: Task) -> Iterator[Exchange]:
    """Into the output projection, and the loss over a vocabulary that ranks share."""
    if task.tp == 1:
        return
    whole = task.tokens * model.width
    if task.sequence_parallel:
        yield Exchange("output", "tp", "all_gather", whole, task.size)
    wide = max(task.size, 4)  # the loss is made in float32 at least
    yield Exchange("loss: maxima", "tp", "all_reduce", task.tokens, wide)
    yield Exchange("loss: sums and targets", "tp", "all_reduce", 2 * task.tokens, wide)
    back = "reduce_scatter" if task.sequence_parallel else "all_reduce"
    yield Exchange("output", "tp", back, whole, task.stream, backward=True)


# ---- over replicas ---------------------------------------------------------------------------------------------


class ReplicaExchange(NamedTuple):
    """A collective over the replicas: what travels, and how often in a step."""

    collective: str
    what: Literal["gradients", "weights"]
    times: int


class ReplicaExchanges(NamedTuple):
    """What data parallelism exchanges in a step, by the pass of a microbatch that it can run beside."""

    forward: tuple[ReplicaExchange, ...] = ()
    backward: tuple[ReplicaExchange, ...] = ()
    alone: tuple[ReplicaExchange, ...] = ()


@functools.cache
def replica_exchanges(zero: int, microbatches: int, gathers: int | None = None) -> ReplicaExchanges:
    """ZeRO changes what travels: 0 sums gradients; 1 scatter-sums them once and gathers the new weights; 2 scatter-sums
    after every microbatch, since a rank no longer has room for all; 3 also gathers the weights for every forward and
    every backward pass, or `gathers` times in all where passes share what was gathered."""
    if zero == 0:
        return ReplicaExchanges(backward=(ReplicaExchange("all_reduce", "gradients", 1),))
    scatter = ReplicaExchange("reduce_scatter", "gradients", 1 if zero == 1 else microbatches)
    if zero < 3:
        return ReplicaExchanges(backward=(scatter,), alone=(ReplicaExchange("all_gather", "weights", 1),))
    gathers = 2 * microbatches if gathers is None else gathers
    forward, backward = ReplicaExchange("all_gather", "weights", -(-gathers // 2)), gathers // 2
    again = (ReplicaExchange("all_gather", "weights", backward),) if backward else ()
    return ReplicaExchanges(forward=(forward,), backward=(*again, scatter))
