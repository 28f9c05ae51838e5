"""The search: every layout that can exist, those that fit, the fastest ten of them.

The one idea: closed forms look at all, simulation at ten and at whatever could be quicker than the best of them, so the
best of all is never slower than the best of a part. Nothing is random and ties are broken by memory and then by the
plan's own fields, so the same question has the same answer everywhere.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from operator import itemgetter
from typing import Any, NamedTuple

from tilemesh.core import config
from tilemesh.core.calibration import Rates
from tilemesh.core.conflicts import is_runnable
from tilemesh.core.errors import Argument, RunError, UsageError
from tilemesh.core.hardware import GPUS_PER_NODE, LOCAL, Cluster, grown, parse_cluster
from tilemesh.core.plan import OFFLOADS, ParallelPlan
from tilemesh.core.plan_file import TRAIN, plan_text
from tilemesh.core.ranges import LARGEST_WHOLE, Range
from tilemesh.core.units import format_bytes
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.work.task import STATE_BYTES, Code
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.constants import HEADROOM
from tilemesh.plan.prediction import Prediction, Refused, mfu_words, prediction_figures, refused_plan
from tilemesh.plan.space import Pins, candidates, default_precision, why_nothing
from tilemesh.plan.step import Estimator, QuickTime

SHOWN = 10
DEFAULT_BATCH_TOKENS = 1_000_000
BATCH_SLACK = 0.05
"""A batch given in tokens is a wish: the count of sequences may differ by so much to divide well."""
_BATCH = Range(1, 2**31 - 1)
_BATCH_TOKENS = Range(1, LARGEST_WHOLE)

_FEW = {base << power for base in (5, 7) for power in range(4)}
_GROWTH = tuple(sorted({base << power for base in (1, 3) for power in range(12)} | _FEW))
"""Nodes tried when nothing fits: within a quarter of the fewest up to 64, within a half beyond."""


Accepts = Callable[[ParallelPlan], bool]
"""Whether whoever is to run a layout can."""


class Point(NamedTuple):
    """A layout that fits, as the search saw it: closed form."""

    time_s: float
    nbytes: int
    layout: ParallelPlan


@dataclass(frozen=True)
class SearchResult:
    """What a search found, best first."""

    model: ModelConfig
    cluster: Cluster
    context: int
    batch: int
    pins: Pins
    predictions: tuple[Prediction, ...]
    considered: int
    points: tuple[Point, ...]
    """All that fit."""
    rates: Rates | None = None
    """What was measured of a device, where the search was told."""
    code: Code | None = None
    headroom: float = HEADROOM
    refused: Refused = refused_plan
    imbalance: float = 0.0

    @property
    def fitting(self) -> int:
        return len(self.points)

    @property
    def best(self) -> Prediction:
        return self.predictions[0]

    @property
    def mfu_words(self) -> str:
        """How the best plan's MFU is counted, and what it is as published tables count."""
        return mfu_words(self.best.mfu, self.model, self.context)

    def figures(self, place: int) -> dict[str, Any]:
        """The plan at that place, 0 being the best, with what was asked."""
        return plan_figures(self.model, self.cluster.name, self.pins, place, self.predictions[place], self.refused)

    def to_toml(self, note: str = "") -> str:
        """The best plan as a file's text: the layout, and the model and the context that it was made for."""
        model = replace(self.model, context=max(self.model.context, self.context))
        layout = self.best.settled_plan.to_dict()
        return plan_text(TRAIN, note, layout, train={"context": self.context}, model=config.to_dict(model))

    def estimator(self) -> Estimator:
        """The cost model that these figures come from."""
        return Estimator(
            self.model, self.cluster, self.context, self.rates, self.code, headroom=self.headroom,
            imbalance=self.imbalance,
        )  # fmt: skip


def plan_figures(
    model: ModelConfig, cluster: str, pins: Pins, place: int, prediction: Prediction, refused: Refused = refused_plan
) -> dict[str, Any]:
    """One layout with what was asked; also for one that does not fit."""
    case = {
        "model": config.to_dict(model),
        "cluster": cluster,
        "context": prediction.tokens // prediction.plan.batch,
        "batch": prediction.plan.batch,
        "fixed": pins.describe(),
    }
    return {"name": "plan", "place": place, "case": case, **prediction_figures(prediction, refused)}


class NothingFitsError(RunError):
    """No layout fits in memory; `smallest` is the one that comes closest."""

    def __init__(self, message: str, smallest: Prediction) -> None:
        super().__init__(message)
        self.smallest = smallest


def search(
    model: ModelConfig | str,
    cluster: Cluster | str,
    *,
    batch: int | None = None,
    batch_tokens: int | None = None,
    context: int | None = None,
    pins: Pins | None = None,
    shown: int = SHOWN,
    rates: Rates | None = None,
    code: Code | None = None,
    headroom: float = HEADROOM,
    refused: Refused = refused_plan,
    accepts: Accepts | None = None,
    imbalance: float = 0.0,
) -> SearchResult:
    """The fastest layouts that fit, their pipelines simulated. `batch` is in sequences; `rates` and `code` as in
    `predict`; `headroom` is the fraction of a device's memory that stays free; `refused` says what training lacks;
    `accepts` leaves out layouts that whoever is to run them cannot; `imbalance` as in `predict`.

    UsageError when no layout can exist; NothingFitsError when none fits.
    """
    model = preset(model) if isinstance(model, str) else model
    cluster = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    pins = pins or Pins()
    estimator = Estimator(model, cluster, context, rates, code, headroom=headroom, imbalance=imbalance)
    batch = choose_batch(batch, batch_tokens, estimator.context)
    considered, least, fitting = _look(estimator, batch, pins, accepts)
    if least is None:
        raise UsageError(f"no layout is possible: {why_nothing(estimator, batch, pins)}")
    if not fitting:
        raise _nothing_fits(estimator, batch, pins, least)
    predictions, points = _simulated(estimator, fitting, shown), tuple(point for point, _ in fitting)
    return SearchResult(
        model, cluster, estimator.context, batch, pins, predictions, considered, points, rates, code, headroom,
        refused, imbalance,
    )  # fmt: skip


def choose_batch(batch: int | None, batch_tokens: int | None, context: int) -> int:
    """Sequences in a step. From tokens: the count within 5 % that can be halved most often, then the nearest."""
    if batch is not None and batch_tokens is not None:
        raise UsageError("--batch and --batch-tokens both say the batch: give one")
    if batch is not None:
        _BATCH.check(Argument("batch"), batch, whole=True)
        return batch
    tokens = DEFAULT_BATCH_TOKENS if batch_tokens is None else batch_tokens
    _BATCH_TOKENS.check(Argument("batch_tokens"), tokens, whole=True)
    wanted = tokens / context
    if wanted < 1 - BATCH_SLACK:
        raise UsageError(f"{tokens} tokens per step are less than one sequence of {context}: give more, or --context")
    low, high = max(1, -int(-wanted * (1 - BATCH_SLACK) // 1)), max(1, int(wanted * (1 + BATCH_SLACK)))
    low = min(low, high)
    # The largest power of two with a multiple in reach; of its multiples the nearest, of two as near the smaller.
    power = next(1 << bits for bits in range(high.bit_length(), -1, -1) if high >> bits << bits >= low)
    return min(range(-(-low // power) * power, high + 1, power), key=lambda n: abs(n - wanted))


def _look(
    estimator: Estimator, batch: int, pins: Pins, accepts: Accepts | None = None
) -> tuple[int, tuple[int, ParallelPlan] | None, list[tuple[Point, QuickTime]]]:
    """All layouts once: how many there are, the smallest, and those that fit with their time."""
    considered, limit = 0, math.inf
    least: tuple[int, ParallelPlan] | None = None
    fitting: list[tuple[Point, QuickTime]] = []
    for group in candidates(estimator, batch, pins):
        for candidate in group if accepts is None else filter(accepts, group):
            considered += 1
            nbytes = estimator.total_bytes(candidate, limit)
            if least is None or nbytes < least[0]:
                least = (nbytes, candidate)
                limit = max(nbytes, estimator.usable_bytes)  # beyond it neither does one fit nor is it the smallest
            if nbytes > estimator.usable_bytes:
                continue
            quick = estimator.rank(candidate)
            fitting.append((Point(quick.step_s, nbytes, candidate), quick))
            break  # the groups go from little recomputation to much, and more only takes longer
    return considered, least, fitting


def _simulated(estimator: Estimator, fitting: list[tuple[Point, QuickTime]], shown: int) -> tuple[Prediction, ...]:
    """The best of all as they are simulated, and nine more. Closed forms offer the first ten; of the others only those
    are simulated whose least possible time is below the best that was found."""
    chosen = _distinct([point for point, _ in fitting], shown)
    predictions = [estimator.predict(candidate) for candidate in chosen]
    best_s = min(prediction.step_time_s for prediction in predictions)
    bounds = [(estimator.least_s(point.layout, quick), point.layout) for point, quick in fitting]
    for least_s, candidate in sorted(bounds, key=itemgetter(0)):
        if least_s >= best_s:
            break
        if estimator.step_s(candidate) < best_s:
            predictions.append(estimator.predict(candidate))
            best_s = predictions[-1].step_time_s
    predictions.sort(key=lambda prediction: (prediction.step_time_s, prediction.memory.total_bytes))
    return tuple(predictions[:shown])


def _distinct(ranked: list[Point], shown: int) -> list[ParallelPlan]:
    """The fastest, one for each mesh, schedule and ZeRO stage, so that ten lines are ten choices; then the others."""
    seen: set[tuple[object, ...]] = set()
    chosen: list[ParallelPlan] = []
    others: list[ParallelPlan] = []
    for _, _, candidate in heapq.nsmallest(40 * shown, ranked):
        shape = (candidate.dp, candidate.tp, candidate.pp, candidate.ep)
        key = (*shape, candidate.schedule, candidate.interleave, candidate.zero)
        (others if key in seen else chosen).append(candidate)
        seen.add(key)
    return (chosen + others)[:shown]


# ---- nothing fits ----------------------------------------------------------------------------------------------


def _nothing_fits(estimator: Estimator, batch: int, pins: Pins, least: tuple[int, ParallelPlan]) -> NothingFitsError:
    smallest = estimator.predict(least[1])
    memory, cluster = smallest.memory, estimator.cluster
    part = memory.dominant
    enough = gpus_enough(estimator, batch, pins)
    holder = "GPU" if cluster.device.kind == "gpu" else "rank"
    if enough and enough[0] == cluster.world:
        would_do = f"laid out otherwise these {holder}s would do ({enough[1].short()})"
    elif cluster.device.name == LOCAL:
        would_do = "a larger machine is needed, or a smaller batch or model"
    elif enough:
        would_do = f"{enough[0]} such {holder}s would do ({enough[1].short()})"
    else:
        would_do = f"no number of such {holder}s that was tried would do with this batch"
    under = f" under {pins.describe()}" if pins.describe() else ""
    return NothingFitsError(
        f"does not fit on {cluster.name}{under}: the least a {holder} needs is {format_bytes(memory.total_bytes)} "
        f"({smallest.plan.short()}) and it has {format_bytes(smallest.usable_bytes)} for a plan; {part} is the "
        f"largest part, {format_bytes(getattr(memory, f'{part}_bytes'))}; {would_do}"
        + _offloaded(estimator, batch, pins),
        smallest,
    )


def _offloaded(estimator: Estimator, batch: int, pins: Pins) -> str:
    """That it would fit with something in the host's memory, the least of it; nothing where that does not help."""
    if pins.offload is not None or estimator.cluster.device.kind != "gpu":
        return ""
    parameters = count_parameters(estimator.model).total
    weights, gradients, optimizer = STATE_BYTES[pins.precision or default_precision(estimator.cluster.device)]
    for count in range(1, len(OFFLOADS) + 1):
        for names in combinations(OFFLOADS, count):
            stays = gradients + weights * ("weights" not in names) + optimizer * ("optimizer" not in names)
            if stays * parameters > estimator.cluster.world * estimator.usable_bytes:
                continue  # however they are split, some rank holds too much
            moved = Pins(**{**vars(pins), "offload": "+".join(names)})
            for group in candidates(estimator, batch, moved):
                plan = group[-1]  # the one that recomputes most
                if estimator.fits(plan) and is_runnable(plan):
                    return f", and with --fix offload={moved.offload} it fits here ({plan.short()})"
    return ""


def gpus_enough(estimator: Estimator, batch: int, pins: Pins) -> tuple[int, ParallelPlan] | None:
    """The fewest GPUs of this kind tried on which something fits, as many as now first; pins on the mesh are let go."""
    free = Pins(**{**vars(pins), "dp": None, "tp": None, "pp": None, "accumulation": None})
    precision = free.precision or default_precision(estimator.cluster.device)
    states = sum(STATE_BYTES[precision]) * count_parameters(estimator.model).total
    for cluster in (estimator.cluster, *_larger(estimator.cluster)):
        if states > cluster.world * estimator.usable_bytes:
            continue  # however they are split, some rank holds too much
        bigger = Estimator(
            estimator.model, cluster, estimator.context, estimator.rates, estimator.code,
            headroom=estimator.headroom, imbalance=estimator.imbalance,
        )  # fmt: skip
        for group in candidates(bigger, batch, free):
            if bigger.fits(group[-1]):  # the one that recomputes most
                return cluster.world, group[-1]
    return None


def _larger(cluster: Cluster) -> Iterator[Cluster]:
    """Larger clusters of the same device: a fuller node first, then more nodes."""
    node = cluster.node
    if node.device.name == LOCAL:  # this machine: there are no more of it
        return
    if len(cluster.nodes) == 1 and node.count < GPUS_PER_NODE:
        for count in (2, 4, GPUS_PER_NODE):
            if count > node.count:
                yield Cluster((grown(node, count),))
        node = grown(node, GPUS_PER_NODE)
    for nodes in _GROWTH:
        if nodes > len(cluster.nodes):
            yield Cluster((node,) * nodes)
