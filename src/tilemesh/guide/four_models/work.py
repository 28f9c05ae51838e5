"""What chapter 13 computes: what four models hold and do in a step, and how weights per token bend lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tilemesh.align.formulas.weights import WEIGHTINGS
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.placement import AlignWork
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.align import AlignEstimator, PlacementPrediction
from tilemesh.plan.placements import search_placements


class Role(NamedTuple):
    """One of the four: bytes kept for each parameter, operations for each parameter and token of a step."""

    state_bytes: int
    flops: int
    does: str


TRAINED, FROZEN = 2 + 2 + 12, 2
"""Weights and gradients in 16 bits, a float32 copy and two moments; weights alone."""
ROLES = {
    "actor": Role(TRAINED, 2 + 2 + 6, "draws answers, gives their log-probabilities, is trained"),
    "critic": Role(TRAINED, 2 + 6, "says what to expect before each token, is trained"),
    "reward": Role(FROZEN, 2, "scores whole answers"),
    "reference": Role(FROZEN, 2, "gives log-probabilities of where the actor came from"),
}


def held_bytes(model: ModelConfig, roles: Sequence[str]) -> int:
    """Of these models, all of one size, without activations and pages."""
    return count_parameters(model).total * sum(ROLES[role].state_bytes for role in roles)


def planned(model: ModelConfig, cluster: str, kind: str = "colocated", **changes: object) -> PlacementPrediction:
    """The planner's quickest placement of a kind; by default all ranks draw and train in turn."""
    work = AlignWork(prompts=64, answers=16, prompt=256, tokens=1024, **changes)  # type: ignore[arg-type]
    estimator = AlignEstimator(model, parse_cluster(cluster), work)
    return search_placements(estimator, (kind,), shown=1)[0]


# The length trap ------------------------------------------------------------------------------------------------------


def drift(weighting: str, more: float, advantage: float, answers: int = 20_000, longest: int = 400) -> float:
    """How an update moves the wish to go on, from drawn answers that go on after each token with probability `more` and
    all have this advantage: above 0 they become longer."""
    draw = np.random.default_rng(6)
    lengths = np.minimum(draw.geometric(1 - more, answers), longest)
    sequence = np.repeat(np.arange(answers), lengths)
    last = np.cumsum(lengths) - 1
    score = np.full(len(sequence), 1 - more)  # the derivative of log π of "go on" …
    score[last] = -more  # … and of "stop"
    weights = WEIGHTINGS[weighting](sequence, answers, longest)
    total: float = float((weights * score).sum()) * advantage
    return total


def exact_drift(more: float, advantage: float) -> float:
    """The same for weights per sequence, in the limit: A · (1 - c - E[1/L]), with E[1/L] = -(1 - c)/c · ln(1 - c)."""
    return advantage * (1 - more + (1 - more) / more * math.log(1 - more))


def trained_lengths(steps: int = 200, rate: float = 0.5) -> list[tuple[float, float]]:
    """Mean lengths of right and wrong answers while they are trained with weights per sequence: half of all are right,
    whatever their length. Other weights have no drift: the mean of ∇ log π is 0."""
    wish = {0.5: math.log(9.0), -0.5: math.log(9.0)}  # go on with probability 0.9: ten tokens
    lengths = []
    for _ in range(steps):
        for advantage in wish:
            more = 1 / (1 + math.exp(-wish[advantage]))
            wish[advantage] += rate * exact_drift(more, advantage)
        right, wrong = (1 + math.exp(wish[advantage]) for advantage in (0.5, -0.5))
        lengths.append((right, wrong))
    return lengths
