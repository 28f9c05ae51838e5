"""Bugs of experts: those that others shipped, to be planted as the others are (`plant.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilemesh.core.axes import block_name
from tilemesh.core.tensor_placement import Crossing, P, R
from tilemesh.model.experts import Computation, ExpertChoice, Experts, Router, Routing
from tilemesh.parallel.buckets import Bucket, Bucketed
from tilemesh.parallel.experts import ExpertExchange
from tilemesh.parallel.gate.cases import Case
from tilemesh.parallel.gate.plant_numerics import Plant
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.pipeline import Pipeline
from tilemesh.parallel.tensor import ExitHook, Passage, Seams


def _pass_losses(laid: Laid, *passages: Passage, also: bool) -> None:
    """Have the losses of all routers go another way, or another one after theirs."""
    for module in laid.module.modules():
        if isinstance(module, Experts):
            hooks = {number: hook for number, hook in module._forward_hooks.items() if isinstance(hook, ExitHook)}
            for number, hook in hooks.items():
                before = hook.losses if also else ()
                module._forward_hooks[number] = replace(hook, losses=(*before, *passages))
            if not hooks:
                module.register_forward_hook(ExitHook(None, passages))


def _counted_by_every_rank(laid: Laid) -> None:
    _pass_losses(laid, also=False)


def divide_router_losses(laid: Laid, axis: str) -> None:
    """Each rank's part of the routers' loss is divided by how many they are: once too often, since ranks add up."""
    seams, taken_for_alike = Seams(laid.mesh.axis(axis).comm), Crossing(axis, (R, P), (P, R))
    _pass_losses(laid, Passage(seams, "once", instead=taken_for_alike), also=True)


def _forgotten_by_first_stages(laid: Laid) -> None:
    assert isinstance(laid, Pipeline)
    for part in laid.parts.values():
        if not part.has_head:
            _without_targets(part)


def _without_targets(part: Laid) -> None:
    right = part.activations

    def activations(*batch: Any, **options: Any) -> Any:
        return right(*batch, **options | {"targets_BT": None})

    part.activations = activations  # type: ignore[method-assign]


def _expert_buckets(laid: Laid) -> list[Bucket]:
    assert isinstance(laid.gradients, Bucketed)
    own = {id(mine.tensor) for mine in laid.held.values() if mine.shard.every > 1}
    return [bucket for bucket in laid.gradients.buckets if id(bucket.parameters[0]) in own]


def _times_ep(laid: Laid) -> None:
    for mine in laid.held.values():
        if mine.shard.every > 1:
            mine.tensor.register_hook(lambda gradient: gradient * laid.plan.ep)  # type: ignore[no-untyped-call]


def _left_out_of_the_norm(laid: Laid) -> None:
    for bucket in _expert_buckets(laid):
        bucket.copies = 1 << 60


def _summed_over_all_replicas(laid: Laid) -> None:
    for bucket in _expert_buckets(laid):
        bucket.batch_summed = (("dp", laid.plan.dp),)


def _every_router(laid: Laid, change: Callable[[Routing], Routing]) -> None:
    for module in laid.module.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda module, args, routing: change(routing))


def _router_detached(laid: Laid) -> None:
    _every_router(laid, lambda routing: routing._replace(weights_NC=routing.weights_NC.detach()))


def _lost_on_the_way_back(laid: Laid) -> None:
    """Tokens that another replica computed get no gradient from there."""
    for module in laid.module.modules():
        if isinstance(module, Experts) and isinstance(module.exchange, ExpertExchange):
            ways = {kind: replace(way, has_gradient=False) for kind, way in module.exchange.crossings.items()}
            module.exchange = replace(module.exchange, crossings=ways)


def _clipped_apart(laid: Laid) -> None:
    """Replicas that have the same experts take their own norm for that of the model."""
    gradients = laid.gradients
    assert isinstance(gradients, Bucketed)
    shard = next(mine.shard for mine in laid.held.values() if mine.shard.spread)
    blocks = ((block_name(name, shard.apart(name)), count // shard.apart(name)) for name, count in gradients.counted)
    gradients.counted = tuple(block for block in blocks if block[1] > 1)


def _empty_slots_count(laid: Laid) -> None:
    """Experts have as many slots as the busiest of them has tokens; the free ones count for the first token."""

    def change(routing: Routing) -> Routing:
        counts_X = routing.experts_NC.flatten().bincount(minlength=routing.scores_NX.shape[1])
        slots, first = (counts_X.max() - counts_X).sum(), routing.weights_NC[:1]
        return routing._replace(weights_NC=routing.weights_NC + slots * (first - first.detach()))

    _every_router(laid, change)


def _tail_not_set(laid: Laid) -> None:
    """A grouped product has some rows more than tokens, and their gradients are what the memory had."""
    for module in laid.module.modules():
        if isinstance(module, Experts):
            module.compute = partial(_with_tail, module.compute)  # type: ignore[method-assign]


def _with_tail(right: Computation, rows_ND: Tensor, counts: Tensor, tail: int = 3) -> Tensor:
    count, longer = len(rows_ND), counts.clone()
    longer[-1] += tail
    y_ND = right(torch.cat([rows_ND, rows_ND.new_ones(tail, rows_ND.shape[1])]), longer)

    def unset(grad: Tensor) -> Tensor:
        return torch.cat([grad[:count], torch.full_like(grad[count:], 0.1)])

    if y_ND.requires_grad:
        y_ND.register_hook(unset)  # type: ignore[no-untyped-call]
    return y_ND[:count]


def _counted_again(laid: Laid) -> None:
    """A layer that is computed again adds what its router picked to what it picked before."""
    for module in laid.module.modules():
        if isinstance(module, Router):
            module.over_sequences = partial(_picks_twice, module.over_sequences)
            module.loss = partial(_asks_again, module.loss)  # type: ignore[method-assign]


def _is_again() -> bool:
    return torch._C._current_graph_task_id() != -1  # inside a backward pass


def _asks_again(right: Callable[..., Tensor], routing: Routing, counted_BT: Tensor, choice: ExpertChoice) -> Tensor:
    if _is_again():
        choice.sums = None
    return right(routing, counted_BT, choice)


def _picks_twice(right: Callable[[Tensor], Tensor] | None, counts: Tensor) -> Tensor:
    sums = counts if right is None else right(counts)
    return torch.cat([sums[:, :-1] * (1 + _is_again()), sums[:, -1:]], dim=1)


@dataclass(frozen=True)
class _SkipsIdle:
    """An optimizer that leaves parameters without a gradient as they are, decay and all."""

    right: Any

    def step(self, rate: float, divisor: Tensor | None = None) -> None:
        idle = [value for value in self.right.parameters.values() if value.grad is None or not value.grad.any()]
        before = [value.detach().clone() for value in idle]
        self.right.step(rate, divisor)
        for value, kept in zip(idle, before, strict=True):
            value.data.copy_(kept)


def _is_spread(case: Case) -> bool:
    plan = case.layout
    return plan.ep > 1 and plan.pp == 1 and not plan.zero and not plan.offload and not case.weights


def _is_balanced(case: Case) -> bool:
    return case.config.balance_loss > 0 and not case.layout.zero


def _is_routed(case: Case) -> bool:
    plan = case.layout
    return case.config.balance_loss > 0 and plan.pp == 1 and not plan.offload and not case.weights


EXPERTS = (
    Plant("expert-gradient-times-ep", "experts", "mlp.experts.", _is_spread, _times_ep),
    Plant("expert-norm-left-out", "experts", "their norm differs", _is_spread, _left_out_of_the_norm),
    Plant(
        "expert-summed-over-all", "experts", "mlp.experts.",
        lambda case: _is_spread(case) and case.layout.dp > case.layout.ep, _summed_over_all_replicas,
    ),
    Plant("expert-clipped-apart", "experts", "loss", _is_spread, _clipped_apart),
    Plant("expert-tail-not-set", "experts", "mlp.experts.", _is_spread, _tail_not_set),
    Plant(
        "expert-idle-no-decay", "optimizer", "mlp.experts.",
        lambda case: bool(case.optimizer) and case.layout.ep > 1, steps=_SkipsIdle,
    ),
    Plant("router-empty-slots", "experts", "backward differs first at layer", _is_spread, _empty_slots_count),
    Plant(
        "router-counts-twice", "experts", "mlp.router",
        lambda case: _is_routed(case) and case.layout.recompute == "full" and case.layout.zero < 3, _counted_again,
    ),
    Plant(
        "router-loss-divided", "experts", "the loss differs",
        lambda case: _is_routed(case) and case.layout.dp > 1 and not case.layout.zero,
        lambda laid: divide_router_losses(laid, "dp"),
    ),
    Plant("router-detached", "experts", "backward differs first at layer", _is_spread, _router_detached),
    Plant("remote-gradient-lost", "experts", "backward differs first at layer", _is_spread, _lost_on_the_way_back),
    Plant(
        "router-loss-times-tp", "experts", "mlp.router",
        lambda case: _is_balanced(case) and case.layout.ranks_per_expert > 1 and case.layout.pp == 1,
        _counted_by_every_rank,
    ),
    Plant(
        "router-loss-of-last-stage", "pipeline", "the loss differs",
        lambda case: _is_balanced(case) and case.layout.pp > 1, _forgotten_by_first_stages,
    ),
)  # fmt: skip
