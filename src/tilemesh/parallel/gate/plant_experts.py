"""Bugs of experts: those that others shipped, to be planted as the others are (`plant.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilemesh.model.experts import Experts, Router, Routing
from tilemesh.parallel.buckets import Bucket, Bucketed
from tilemesh.parallel.experts import ExpertExchange, Journey
from tilemesh.parallel.gate.cases import Case
from tilemesh.parallel.gate.plant_numerics import Plant
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.pipeline import Pipeline


def _counted_by_every_rank(laid: Laid) -> None:
    laid.seams.once = lambda loss: loss  # type: ignore[assignment, method-assign]


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
            module.exchange = dataclasses.replace(module.exchange, journey=_Forgetful)


class _Forgetful(Journey):
    def arrived(self, landing: Tensor) -> Tensor:
        right = super().arrived(landing)
        rank = self.exchange.comm.rank
        first = sum(self.receives[:rank])
        own = torch.zeros(len(right), 1, dtype=torch.bool, device=right.device)
        own[first : first + self.receives[rank]] = True
        return torch.where(own, right, right.detach())


def _is_spread(case: Case) -> bool:
    plan = case.layout
    return plan.ep > 1 and plan.pp == 1 and not plan.zero and not plan.offload and not case.weights


def _is_balanced(case: Case) -> bool:
    return case.config.balance_loss > 0 and not case.layout.zero


EXPERTS = (
    Plant("expert-gradient-times-ep", "experts", "mlp.experts.", _is_spread, _times_ep),
    Plant("expert-norm-left-out", "experts", "their norm differs", _is_spread, _left_out_of_the_norm),
    Plant(
        "expert-summed-over-all", "experts", "mlp.experts.",
        lambda case: _is_spread(case) and case.layout.dp > case.layout.ep, _summed_over_all_replicas,
    ),
    Plant("router-detached", "experts", "backward differs first at layer", _is_spread, _router_detached),
    Plant("remote-gradient-lost", "experts", "backward differs first at layer", _is_spread, _lost_on_the_way_back),
    Plant(
        "router-loss-times-tp", "experts", "mlp.router",
        lambda case: _is_balanced(case) and case.layout.tp > 1 and case.layout.pp == 1, _counted_by_every_rank,
    ),
    Plant(
        "router-loss-of-last-stage", "pipeline", "the loss differs",
        lambda case: _is_balanced(case) and case.layout.pp > 1, _forgotten_by_first_stages,
    ),
)  # fmt: skip
