"""What one rank hands to collectives and messages in a whole step, to the byte: by axis and operation.

The one idea: what a pass exchanges is described once (`exchanges.py`), which passes a rank makes and when it gathers
and sums is in the step's list (`core/step/`), and what it holds is the list of weights (`weights.py`); a step's bytes
are these three multiplied. A recorder on the communicators must count the same (`tests/cpu/test_exchanged_bytes.py`).

A buffer counts whole: what is summed, what gathering gives, what scatter-summing takes. It does not depend on the
algorithm. Sums of single numbers along the whole mesh (the loss, the gradients' norm) are left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tilemesh.core.axes import block_name
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.action import Action
from tilemesh.core.step.book import find
from tilemesh.core.step.passes import gathers
from tilemesh.core.step.placement import ChunkPlacement
from tilemesh.core.step.program import chunk_layers, one_rank
from tilemesh.core.step.schedule import PipeShape
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.exchanges import (
    Exchange,
    embedding_exchanges,
    forward_again,
    head_exchanges,
    layer_exchanges,
    repeated_exchanges,
)
from tilemesh.model.work.task import STATE_BYTES, Task
from tilemesh.model.work.weights import Weight, embedding_weights, head_weights, layer_weights, output_weight

AxisBytes = dict[str, dict[str, int]]
_TABLE = "token_embedding"


def step_exchanges(
    model: ModelConfig, plan: ParallelPlan, task: Task, counts: Sequence[int], stage: int = 0
) -> AxisBytes:
    """Bytes of a step on the first rank of a stage, by axis and operation. `counts`: layers of each chunk of a
    pipeline."""
    total = _Bytes()
    placement = plan.placement if plan.pp > 1 else None
    held = placement.held[stage] if placement else (0,)
    for chunk in held:
        times = _microbatches(placement, stage, chunk, plan.accumulation)
        for exchange in _pass_exchanges(model, plan.on_stage(stage), task, counts, chunk):
            total.add(exchange.axis, exchange.collective, times * exchange.nbytes)
        for _ in range(_neighbours(placement, chunk)):
            for operation in ("send", "recv"):  # a gradient comes back for every activation
                total.add("pp", operation, times * sent_bytes(model, task))
    _add_sums(total, model, plan, _held_weights(model, plan, counts, held), placement)
    if plan.replicas > 1 and plan.zero:
        _add_zero(total, model, plan, counts, stage)
    return total.by_axis


class _Bytes:
    """Added up by axis and operation; nothing is kept of none."""

    def __init__(self) -> None:
        self.by_axis: AxisBytes = {}

    def add(self, axis: str, operation: str, nbytes: int) -> None:
        if nbytes:
            by = self.by_axis.setdefault(axis, {})
            by[operation] = by.get(operation, 0) + nbytes


# ---- passes ------------------------------------------------------------------------------------------------------


def sent_bytes(model: ModelConfig, task: Task) -> int:
    """Of one microbatch's activations between two layers, what a rank sends to the next stage. Ours sends what it has
    of the residual stream; hand-fused code a share of it, which the receiving ranks gather."""
    whole = task.tokens * model.width
    return whole * task.size // task.tp if task.code == "fused" else whole * task.stream // task.split


def _microbatches(placement: ChunkPlacement | None, stage: int, chunk: int, accumulation: int) -> int:
    """That pass through a chunk on this stage: with two directions some go by its other holder."""
    if placement is None:
        return accumulation
    return sum(placement.rank(chunk, microbatch) == stage for microbatch in range(accumulation))


def _neighbours(placement: ChunkPlacement | None, chunk: int) -> int:
    """Chunks before and after this one that lie on another stage."""
    if placement is None:
        return 0
    table = placement.directions[0]
    beside = (near for near in (chunk - 1, chunk + 1) if 0 <= near < len(table))
    return sum(table[near] != table[chunk] for near in beside)


def _pass_exchanges(
    model: ModelConfig, plan: ParallelPlan, task: Task, counts: Sequence[int], chunk: int
) -> Iterable[Exchange]:
    """Of one microbatch's passes through a chunk, forward and back."""
    layers, begin = counts[chunk], sum(counts[:chunk])
    every = max(1, plan.stretch(layers))
    kinds = {kind: (tuple(layer_exchanges(kind, task)), tuple(repeated_exchanges(kind, task))) for kind in model.kinds}
    for layer in range(layers):
        exchanges, repeated = kinds[model.of_layer(begin + layer)]
        yield from exchanges
        if plan.repeats_exchanges:  # of layers that are computed again together, all but the last repeat everything
            is_last = layer % every == every - 1 or layer == layers - 1
            yield from repeated if is_last else forward_again(exchanges)
    if chunk == 0:
        yield from embedding_exchanges(model, task)
    if chunk == len(counts) - 1:
        yield from head_exchanges(model, task)


# ---- gradients and weights ---------------------------------------------------------------------------------------


class _Held(NamedTuple):
    """Weights that a rank holds: so many of this kind, of one chunk."""

    weight: Weight
    times: int
    chunk: int


def _held_weights(model: ModelConfig, plan: ParallelPlan, counts: Sequence[int], held: Sequence[int]) -> list[_Held]:
    """A tied table is one tensor, the first chunk's where a rank holds both ends. Of experts that ranks share out, the
    first ones."""
    weights = []
    dense = model.dense_of(counts)
    kinds = [
        [weight for weight in layer_weights(kind) if weight.expert * plan.ep < max(1, kind.experts)]
        for kind in model.kinds
    ]
    for chunk in held:
        for layer, times in zip(kinds, (counts[chunk] - dense[chunk], dense[chunk]), strict=False):
            weights += [_Held(weight, times, chunk) for weight in layer if times]
        if chunk == 0:
            weights += [_Held(weight, 1, chunk) for weight in embedding_weights(model)]
        if chunk == len(counts) - 1:
            weights += [_Held(weight, 1, chunk) for weight in head_weights(model)]
            if model.tied and 0 not in held:
                weights.append(_Held(output_weight(model)._replace(name=_TABLE), 1, chunk))
    return weights


def _add_sums(
    total: _Bytes, model: ModelConfig, plan: ParallelPlan, held: Sequence[_Held], placement: ChunkPlacement | None
) -> None:
    """Of gradients, once a step whatever the accumulation, or with every update of an asynchronous pipeline.

    With ZeRO what is left to sum after the scatter-sum over replicas are this rank's rows alone.
    """
    gradient, updates = STATE_BYTES[plan.precision][1], updates_of(plan)
    ends = set() if placement is None else {placement.holders[0], placement.holders[-1]}
    for weight, times, chunk in held:
        alike = _Alike.of(plan, weight)
        rows = times * gradient * updates * weight.held(alike.cut, alike.zero_ranks)
        if not plan.zero and alike.replicas > 1:
            total.add(alike.axes, "all_reduce", rows)
        if plan.zero and alike.replicas > alike.zero_ranks:  # what a group has summed, summed over the groups
            total.add("dp", "all_reduce", rows)
        if plan.tp > 1:
            # Of kv heads that several ranks hold, and of what tp leaves whole where each sees a part of the tokens, or
            # within a block (a router, norms of heads) of the features.
            both = weight.repeated(plan.tp, alike.zero_ranks)
            is_inside = weight.split == "whole" and weight.block
            both += weight.replicated(alike.zero_ranks) if plan.sequence_parallel or is_inside else 0
            total.add("tp", "all_reduce", times * gradient * updates * both)
        along_tp = dict(plan.expert_spread).get("tp", 1)
        if weight.is_routed and plan.routes_apart and along_tp < plan.tp:  # ranks of tp with the same experts
            total.add(block_name("tp", along_tp), "all_reduce", rows)
        is_shared = placement is not None and len(placement.holders[chunk]) > 1
        if is_shared or (model.tied and weight.name == _TABLE and len(ends) > 1):
            total.add("pp", "all_reduce", rows)
    if plan.dp > 1 and plan.is_asynchronous:
        total.add("dp", "all_reduce", 8 * updates)  # how many targets each update is the mean of


class _Alike(NamedTuple):
    """Ranks that hold the same of a weight: all replicas, or of an expert those with the same ones."""

    replicas: int
    zero_ranks: int
    axes: str
    """Over which its gradients are summed, as whoever counts calls them."""
    cut: int
    """Ranks of tp that share it."""

    @classmethod
    def of(cls, plan: ParallelPlan, weight: Weight) -> _Alike:
        apart = dict(plan.expert_spread) if weight.is_routed else {}
        sizes = [(name, size, apart.get(name, 1)) for name, size in (("dp", plan.dp), ("cp", plan.cp))]
        axes = "+".join(block_name(name, every) for name, size, every in sizes if size > every)
        replicas = math.prod(size // every for _, size, every in sizes)
        zero_ranks = plan.expert_zero_ranks if apart else plan.zero_ranks
        return cls(replicas, zero_ranks, axes, plan.ranks_per_expert if weight.is_routed else plan.tp)


def updates_of(plan: ParallelPlan) -> int:
    """Optimizer steps within a step: one, or as many as an asynchronous pipeline makes."""
    updates = plan.pipeline.updates if plan.pp > 1 else None
    return plan.accumulation // updates.microbatches(plan.pp) if updates else 1


def scatters_of(plan: ParallelPlan) -> int:
    """How often a step of ZeRO scatter-sums gradients: once, or from ZeRO-2 on after every weight gradient, since a
    rank has no room for all of them. A chunk with two holders is summed once, when both are done."""
    if plan.zero < 2:
        return 1
    if plan.pp == 1:
        return plan.accumulation
    return 1 if len(plan.placement.directions) > 1 else plan.accumulation * plan.slices


def _add_zero(total: _Bytes, model: ModelConfig, plan: ParallelPlan, counts: Sequence[int], stage: int) -> None:
    """Gradients scatter-summed, weights gathered: after the update, or with ZeRO-3 wherever the list says so."""
    size, gradient, _ = STATE_BYTES[plan.precision]
    if plan.zero == 3 and plan.pp == 1:
        counts = chunk_layers(plan, model.layers)
        held: Sequence[int] = range(len(counts))
    else:
        held = plan.placement.held[stage] if plan.pp > 1 else (0,)
    times = gathers_of_chunks(plan, len(counts), stage) if plan.zero == 3 else {}
    both_ends = frozenset((0, len(counts) - 1))
    for weight, count, chunk in _held_weights(model, plan, counts, held):
        alike = _Alike.of(plan, weight)
        numel = count * weight.held(alike.cut)
        if alike.zero_ranks == 1:
            continue
        total.add(alike.axes, "reduce_scatter", scatters_of(plan) * gradient * numel)
        is_in_both = model.tied and weight.name == _TABLE and both_ends <= set(held)
        gathered = times[both_ends if is_in_both else frozenset((chunk,))] if plan.zero == 3 else 1
        total.add(alike.axes, "all_gather", gathered * size * numel)


@functools.lru_cache(maxsize=256)
def _gather_list(schedule: str, shape: PipeShape, chunks: int, ahead: int, stage: int) -> tuple[Action, ...]:
    """A rank's passes with the gathers among them."""
    program = one_rank(chunks, shape.microbatches) if shape.stages == 1 else find(schedule).build(shape)
    return tuple(gathers(program.actions[stage], ahead))


def gathers_of_chunks(plan: ParallelPlan, chunks: int, stage: int = 0) -> dict[frozenset[int], int]:
    """How often a step of ZeRO-3 gathers each chunk of a rank; of both ends together, what either of them wants.

    As the step's list does it. In the steady state every round of `pp` microbatches does the same, so of a long step
    two short ones, a round apart, are enough to know all.
    """
    rounds = 2 * plan.pp
    enough = 4 * rounds + plan.accumulation % rounds
    is_short = plan.accumulation <= enough + rounds
    if is_short or (plan.pp > 1 and plan.pipeline.why_not(plan.pp, enough) is not None):
        counts = [plan.accumulation]
    else:
        counts = [enough, enough + rounds]
    shapes = [plan.pipe_shape._replace(microbatches=count) for count in counts]
    tables = [_wanted(_gather_list(plan.schedule, shape, chunks, plan.prefetch, stage), chunks) for shape in shapes]
    if len(tables) == 1:
        return tables[0]
    more = (plan.accumulation - counts[0]) // rounds
    return {which: times + more * (tables[1][which] - times) for which, times in tables[0].items()}


def _wanted(actions: Iterable[Action], chunks: int) -> dict[frozenset[int], int]:
    ends = frozenset((0, chunks - 1))
    wanted: dict[frozenset[int], int] = {ends: 0}
    whole: set[int] = set()
    for action in actions:
        if action.kind == "GATHER":
            wanted[ends] += action.chunk in ends and not whole & ends
            if len(ends) > 1:
                which = frozenset((action.chunk,))
                wanted[which] = wanted.get(which, 0) + 1
            whole.add(action.chunk)
        elif action.kind == "FREE":
            whole.discard(action.chunk)
    return wanted
