"""The tuner's search: which configurations to try next, by a model fitted on what was measured so far.

An operator gives its configurations, what its cost model predicts of each and numbers in which alike ones are near.

The cost model orders the grid; a Gaussian process learns where that order is wrong (its residual, in log seconds) and
each round tries what looks fastest, a little optimistic about what is unknown. Pure: `measure` is a function, which in
the tests and in the committed claim reads recorded trials instead of a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from tilemesh.kernels.tuning.values import ConfigurationT

FIRST = 0.4  # of the budget goes to configurations chosen before anything is known
BATCH = 4
OPTIMISM = 0.7  # standard deviations below the mean that an untried configuration is believed to be
NOISE = 0.02  # of one measurement, relative
CUTOFF = 3.0  # times the best prediction, beyond which the cost model says a configuration cannot win

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Tried(Generic[ConfigurationT]):
    config: ConfigurationT
    seconds: float  # infinite when it failed


def prune(configs: Sequence[ConfigurationT], predicted: Sequence[float]) -> list[ConfigurationT]:
    """What the cost model gives a chance: within `CUTOFF` of the best prediction."""
    best = min(predicted, default=0.0)
    return [config for config, seconds in zip(configs, predicted, strict=True) if seconds <= CUTOFF * best]


def search(
    configs: Sequence[ConfigurationT],
    predict: Callable[[ConfigurationT], float],
    measure: Callable[[Sequence[ConfigurationT]], Sequence[float]],
    budget: int,
    features: Callable[[ConfigurationT], Sequence[float]],
) -> list[Tried[ConfigurationT]]:
    """Try at most `budget` configurations; `measure` times a batch. Returns every trial in the order it was made.

    features: numbers of a configuration in which near means alike; each step of one is a doubling or another choice.
    """
    if not configs or budget < 1:
        return []
    log_predicted = np.log([max(predict(config), 1e-9) for config in configs])
    points = np.array([features(config) for config in configs], dtype=np.float64)
    order = np.argsort(log_predicted, kind="stable")
    seconds: dict[int, float] = {}

    def take(chosen: Sequence[int]) -> None:
        fresh = [index for index in dict.fromkeys(chosen) if index not in seconds][: budget - len(seconds)]
        if fresh:
            seconds.update(zip(fresh, measure([configs[index] for index in fresh]), strict=True))

    take(_opening(configs, order, points, max(1, int(FIRST * budget))))
    while len(seconds) < min(budget, len(configs)):
        left = [index for index in range(len(configs)) if index not in seconds]
        mean, deviation = _expect(points, log_predicted, seconds, left)
        hopeful = np.argsort(mean - OPTIMISM * deviation, kind="stable")
        take([left[index] for index in hopeful[:BATCH]])
    return [Tried(configs[index], value) for index, value in seconds.items()]


def best(trials: Sequence[Tried[ConfigurationT]]) -> Tried[ConfigurationT]:
    return min(trials, key=lambda trial: trial.seconds)


def _opening(configs: Sequence[ConfigurationT], order: NDArray[np.int64], points: Array, count: int) -> list[int]:
    """The first trials: the model's favourite of each kind, then the best of the rest that is far from all chosen."""
    chosen: list[int] = []
    for index in order:
        if all(configs[index].kind != configs[other].kind for other in chosen):
            chosen.append(int(index))
    chosen = chosen[:count]
    candidates = [int(index) for index in order[: max(count * 3, len(order) // 2)]]
    while len(chosen) < count:
        rest = [index for index in candidates if index not in chosen] or [int(i) for i in order if i not in chosen]
        if not rest:
            break
        apart = np.min(((points[rest][:, None] - points[chosen][None]) ** 2).sum(-1), axis=1)
        rank = np.array([candidates.index(index) if index in candidates else len(candidates) for index in rest])
        chosen.append(rest[int(np.argmax(np.sqrt(apart) - 1.5 * rank / max(len(candidates), 1)))])
    return chosen


def _expect(points: Array, log_predicted: Array, seconds: dict[int, float], left: list[int]) -> tuple[Array, Array]:
    """Mean and deviation of log seconds for what is left, from a Gaussian process on the cost model's residual."""
    seen = list(seconds)
    worst = max((value for value in seconds.values() if math.isfinite(value)), default=1.0)
    values = np.log([value if math.isfinite(value) else 3 * worst for value in seconds.values()])
    residual = values - log_predicted[seen]
    centre, spread = float(residual.mean()), max(float(residual.std()), 0.05)
    kernel = _kernel(points[seen], points[seen]) + (NOISE / spread) ** 2 * np.eye(len(seen))
    across = _kernel(points[left], points[seen])
    solved = np.linalg.solve(kernel, np.column_stack([(residual - centre) / spread, across.T]))
    mean = across @ solved[:, 0]
    variance = 1.0 - np.einsum("ij,ji->i", across, solved[:, 1:])
    return log_predicted[left] + centre + spread * mean, spread * np.sqrt(np.maximum(variance, 1e-9))


def _kernel(left: Array, right: Array) -> Array:
    """Alike to the degree that features are: a sum of a smooth and a rougher similarity."""
    distance = ((left[:, None] - right[None]) ** 2).sum(-1)
    return 0.6 * np.exp(-distance / (2 * 2.0**2)) + 0.4 * np.exp(-distance / (2 * 0.8**2))
