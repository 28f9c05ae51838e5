"""How long a step of a serving engine takes: predicted from the work it does, or fitted to steps that were timed.

The one idea: a step's time is a function of what each sequence does in it (`SequencePart`). `StepClock` computes it
from the layer's operations and a device's speed; `FittedSteps` has the same inputs and learns its few coefficients from
measured steps of the same model, which is what a calibrated machine means here. Both are given to the simulator.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tilemesh.core.calibration import Rates
from tilemesh.core.cost import Ceiling, limit_s
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import Cluster
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.decoding import (
    SequencePart,
    attention_operations,
    dense_operations,
    end_operations,
    least_cost,
    pass_exchanges,
    serving_task,
)
from tilemesh.model.work.operations import Operation
from tilemesh.model.work.passes import MemoryPass
from tilemesh.model.work.task import Code, Task
from tilemesh.plan import constants
from tilemesh.plan.speed import group, speed_of


class StepSeconds(NamedTuple):
    """Where a step's time goes."""

    dense: float
    """All but attention, of all layers and both ends."""
    attention: float
    exchange: float
    launches: float
    """What the device waits for kernels to begin, beside its work."""
    host: float
    """Planning, preparing and booking the step, while the device waits."""

    @property
    def total(self) -> float:
        return sum(self)


class StepClock:
    """`clock(parts)` is the time of a step in seconds, on tp ranks of a cluster, where `ep` replicas that do the same
    at the same time share out the experts."""

    def __init__(
        self,
        model: ModelConfig,
        cluster: Cluster,
        dtype: str = "bf16",
        tp: int = 1,
        rates: Rates | None = None,
        ep: int = 1,
        whole: bool = False,
    ) -> None:
        """`whole`: nobody hears of answers before they end."""
        self.model, self.cluster, self.dtype, self.tp, self.ep = model, cluster, dtype, tp, ep
        self.gpu = cluster.device.kind == "gpu"
        self.code: Code = "fused" if self.gpu else "eager"
        peaks = cluster.device.peak_flops_per_s
        # A CPU widens what is stored in 16 bits and computes in float32, unless its products of 16 bits are faster.
        self._computed = dtype if self.gpu else max((dtype, "fp32"), key=lambda name: peaks.get(name, 0.0))
        speed = speed_of(cluster.device, self._computed, rates, self.code)
        # Launches are counted apart: a graph's kernels follow each other, and nothing of them is in training's figure.
        self._eager_launch_s = (rates and rates.launch_s) or cluster.device.launch_s
        self._speed = replace(speed, launch_s=0.0)
        self._host_s = (constants.WHOLE_HOST_S if whole else constants.SERVE_HOST_S)[cluster.device.kind]
        self._launch_s = constants.WHOLE_LAUNCH_S if whole else constants.SERVE_LAUNCH_S
        self._groups = {"tp": group(cluster, tp, 1), "ep": group(cluster, ep, tp)}
        self._ceiling = Ceiling.of_device(cluster.device)
        if rates is not None and rates.copy_bytes_per_s:
            copy = rates.copy_bytes_per_s
            reading = rates.read_bytes_per_s or copy
            self._ceiling = Ceiling(
                "measured", rates.matmul_flops_per_s, copy, reading, rates.write_bytes_per_s or copy
            )
        self._windows = Counter(model.window_of(layer) for layer in range(model.layers))
        self._dense = functools.lru_cache(maxsize=4096)(self._dense_seconds)

    def __call__(self, parts: Sequence[SequencePart]) -> float:
        """A step that is launched when it begins."""
        return max(self.seconds(parts).total, self.launching(parts))

    def seconds(self, parts: Sequence[SequencePart]) -> StepSeconds:
        """Of the device, where the host is in front of it."""
        tokens, logits = sum(part.queries for part in parts), sum(part.logits for part in parts)
        if not tokens:
            return StepSeconds(0.0, 0.0, 0.0, 0.0, self._host_s[0])
        dense, exchange, launches = self._dense(tokens, logits)
        attention = 0.0
        task = self._task(tokens)
        for window, count in self._windows.items():
            operations = attention_operations(self.model, parts, task, window)
            share = constants.PAGED_ATTENTION_FRACTION if self.gpu else 1.0
            attention += count * self._speed.seconds(operations) / share
            launches += count * _launches(operations)
        is_graph = self.gpu and self.ep == 1  # how many rows come is asked for within a step that shares out experts
        launch_s = constants.GRAPH_KERNEL_S[tokens > 1] if is_graph else self._eager_launch_s
        host = self._host_s[0] + len(parts) * self._host_s[1]
        return StepSeconds(dense, attention, exchange, launches * launch_s, host)

    def launching(self, parts: Sequence[SequencePart]) -> float:
        """What the host takes to launch a step on a GPU, beside which the GPU works: one call for the step's graph, and
        the numbers of its sequences and of its prompts' tokens."""
        if not parts or not self.gpu:
            return 0.0
        step_s, sequence_s, token_s = self._launch_s
        return step_s + len(parts) * sequence_s + sum(part.queries for part in parts if part.queries > 1) * token_s

    def limit(self, parts: Sequence[SequencePart]) -> float:
        """The least time: weights, keys and values once through memory, or the FLOPs at the peak."""
        tokens = sum(part.queries for part in parts)
        cost = least_cost(self.model, parts, self._task(tokens))
        return limit_s(cost if self.gpu else replace(cost, dtype=self._computed), self._ceiling)

    def _task(self, tokens: int) -> Task:
        return serving_task(tokens, self.dtype, self.tp, self.code, self.gpu, self.ep)

    def _dense_seconds(self, tokens: int, logits: int) -> tuple[float, float, int]:
        """Seconds of everything but attention, of exchanges, and how many launches."""
        model, task = self.model, self._task(tokens)
        ends = end_operations(model, task, logits)
        busy, launches = self._speed.seconds(ends), _launches(ends)
        for kind, layers in model.layers_by_kind:
            layer = dense_operations(kind, task)
            busy, launches = busy + layers * self._speed.seconds(layer), launches + layers * _launches(layer)
        exchanges = pass_exchanges(model, task, logits)
        exchange = sum(
            self._groups[part.axis].exchange_s(part.collective, part.nbytes, part.copies) for part in exchanges
        )
        return busy, exchange, launches + len(exchanges)


def _launches(operations: Sequence[Operation]) -> int:
    return sum(op.launches if isinstance(op, MemoryPass) else 1 for op in operations)


# ---- fitted ----------------------------------------------------------------------------------------------------

_FITS, _EXACT = 4, 0.02
"""Fits, each with the last one's weights; relative errors below the second count alike."""
_KNOTS = (0, 4, 16, 64, 256)
"""Tokens of a step between which its time grows in a line: products of few rows read weights, of many they compute."""


@dataclass(frozen=True)
class FittedSteps:
    """Seconds of a step: a constant, a line over its tokens that bends at the knots, and so much for each sequence,
    each row of logits, each key that a decoding sequence reads and each pair of a prompt's query and key."""

    coefficients: tuple[float, ...]
    steps: int
    """How many it was fitted to."""
    error: float
    """Median of the relative errors there."""

    def __call__(self, parts: Sequence[SequencePart]) -> float:
        return sum(c * f for c, f in zip(self.coefficients, _features(parts), strict=True))

    @classmethod
    def of(cls, timed: Sequence[tuple[Sequence[SequencePart], float]]) -> FittedSteps:
        """The least sum of relative errors, no coefficient below zero: more work never takes less time.

        Not of their squares: other work on the machine makes some steps slower, and none faster, and squares would
        follow those. So steps count less the farther they were from the last of a few fits.
        """
        useful = [(_features(parts), seconds) for parts, seconds in timed if parts and seconds > 0]
        if len(useful) < 4:
            raise UsageError(f"{len(useful)} timed steps: a fit needs 4 at least")
        rows = [[feature / seconds for feature in features] for features, seconds in useful]
        weights = [1.0] * len(rows)
        for _ in range(_FITS):
            weighted = [[value * weight for value in row] for row, weight in zip(rows, weights, strict=True)]
            coefficients = non_negative_least_squares(weighted, weights)
            errors = [abs(sum(c * f for c, f in zip(coefficients, row, strict=True)) - 1) for row in rows]
            weights = [max(error, _EXACT) ** -0.5 for error in errors]
        return cls(tuple(coefficients), len(rows), sorted(errors)[len(errors) // 2])


def _features(parts: Sequence[SequencePart]) -> list[float]:
    tokens = sum(part.queries for part in parts)
    bent = [
        float(max(0, min(tokens, after) - before)) for before, after in zip(_KNOTS, (*_KNOTS[1:], 1 << 60), strict=True)
    ]
    decoded = sum(part.keys for part in parts if part.queries == 1)
    pairs = sum(part.queries * (part.keys - (part.queries - 1) / 2) for part in parts if part.queries > 1)
    logits = sum(part.logits for part in parts)
    return [1.0, *bent, float(len(parts)), float(logits), float(decoded), pairs]


def non_negative_least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """The x >= 0 with the least sum of squares of rows x - wanted: one coordinate after the other, which converges
    because the problem is convex. Columns are scaled first, so that none is slow for its unit."""
    width = len(rows[0])
    scale = [sum(row[j] ** 2 for row in rows) ** 0.5 or 1.0 for j in range(width)]
    columns = [[row[j] / scale[j] for row in rows] for j in range(width)]
    left, x = list(wanted), [0.0] * width
    for _ in range(4000):
        largest = 0.0
        for j, column in enumerate(columns):
            step = max(sum(a * b for a, b in zip(column, left, strict=True)), -x[j])
            if step and any(column):
                x[j] += step
                left = [b - step * a for a, b in zip(column, left, strict=True)]
                largest = max(largest, abs(step))
        if largest < 1e-9:
            break
    return [value / scale[j] for j, value in enumerate(x)]
