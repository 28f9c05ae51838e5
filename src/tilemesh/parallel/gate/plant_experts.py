"""Bugs of experts: those that others shipped, to be planted as the others are (`plant.py`)."""

from __future__ import annotations

from typing import Any

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


def _is_balanced(case: Case) -> bool:
    return case.config.balance_loss > 0 and not case.layout.zero


EXPERTS = (
    Plant(
        "router-loss-times-tp", "experts", "backward differs first at layer layers.0.mlp.router",
        lambda case: _is_balanced(case) and case.layout.tp > 1 and case.layout.pp == 1, _counted_by_every_rank,
    ),
    Plant(
        "router-loss-of-last-stage", "pipeline", "the loss differs",
        lambda case: _is_balanced(case) and case.layout.pp > 1, _forgotten_by_first_stages,
    ),
)  # fmt: skip
