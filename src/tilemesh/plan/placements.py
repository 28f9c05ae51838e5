"""Which placements of the models of a run that learns from feedback there are, and the quickest that fit.

The one idea: the ranks are one pool, or two whose sizes are tried; each pool's training layouts are those that the
planner's own search finds best for as many ranks. Models that only pass over answers, and a critic with weights of its
own, lie where that makes the step shortest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tilemesh.core import placement as placed
from tilemesh.core.errors import RunError
from tilemesh.core.placement import KINDS, Placement, Pool
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.units import format_bytes
from tilemesh.model.work.weights import why_not_tp
from tilemesh.plan.align import AlignEstimator, PlacementPrediction
from tilemesh.plan.choose import Accepts, Point
from tilemesh.plan.space import Pins, candidates

_EIGHTHS = 8
"""Of the ranks, in which the number that draws answers in a split placement is counted."""
_LAYOUTS = 3
"""Training layouts that are tried for each number of ranks: the quickest that leave room for the rest."""


def search_placements(
    estimator: AlignEstimator, kinds: Sequence[str] = tuple(KINDS), pins: Pins | None = None,
    accepts: Accepts | None = None, runs: Callable[[Placement], bool] = lambda placement: True, shown: int = 10,
    drawing: int | None = None,
) -> list[PlacementPrediction]:  # fmt: skip
    """The quickest that fit: for each kind and size of its pools the best. `pins`, `accepts`: of training layouts, as
    `search` takes them; `runs`: whether whoever is to run a placement can; `drawing`: ranks that draw
    answers where they are split. RunError where none fits."""
    best: dict[tuple[str, int], PlacementPrediction] = {}
    least = math.inf
    for pools in _pools(estimator, kinds, pins or Pins(), accepts, drawing):
        for kind in kinds:
            if (kind == "colocated") != (len(pools) == 1):
                continue
            placement = Placement(pools, KINDS[kind])
            if not runs(placement):
                continue
            prediction, key = estimator.predict(placement), (kind, pools[-1].ranks)
            least = min(least, max(prediction.total_bytes))
            if prediction.fits and (key not in best or _order(prediction) < _order(best[key])):
                best[key] = prediction
    if not best:
        why = "no layout trains this model there" if math.isinf(least) else f"a rank needs {format_bytes(least)}"
        raise RunError(f"no placement fits on {estimator.cluster.name}: {why}")
    ranked = sorted(best.values(), key=_order)
    first = {each.placement.kind: each for each in reversed(ranked)}.values()
    return [each for place, each in enumerate(ranked) if place < shown or each in first]


def _order(prediction: PlacementPrediction) -> tuple[float, int, int]:
    """The quickest; of equals those with the youngest answers, then the smallest."""
    return float(f"{prediction.step.seconds:.6g}"), prediction.placement.ahead, max(prediction.total_bytes)


def _pools(
    estimator: AlignEstimator, kinds: Sequence[str], pins: Pins, accepts: Accepts | None, size: int | None
) -> Iterator[tuple[Pool, ...]]:
    work, world, node = estimator.work, estimator.cluster.world, estimator.cluster.node.count
    beside = (placed.CRITIC,) * (work.critic == "own") + (placed.REFERENCE,) * bool(work.reference)
    beside += (placed.REWARD,) * (work.reward == "model")
    subsets = [each for size in range(len(beside) + 1) for each in itertools.combinations(beside, size)]
    unit = max(1, min(node, world // _EIGHTHS))
    sizes = {max(unit, world * part // _EIGHTHS // unit * unit) for part in range(1, _EIGHTHS)} - {world}
    sizes = sizes if size is None else {size}
    together, apart = "colocated" in kinds, any(kind != "colocated" for kind in kinds)
    for drawing in (*(0,) * together, *sorted(sizes) * apart):
        points = _points(estimator, world - drawing, pins, accepts)
        there_points = _points(estimator, drawing, pins, accepts) if drawing and placed.CRITIC in beside else []
        for tp in (tp for tp in range(1, node + 1) if node % tp == (drawing or world) % tp == 0):
            if why_not_tp(estimator.model, tp):
                continue
            if not drawing:
                models = (placed.ACTOR, placed.ENGINE, *beside)
                yield from ((Pool(world, models, plan, tp),) for plan in _roomy(estimator, points, models, world, tp))
                continue
            for there in subsets:
                here = (placed.ACTOR, *(model for model in beside if model not in there))
                for plan in _roomy(estimator, points, here, world - drawing):
                    laid: list[ParallelPlan | None] = [None]
                    if placed.CRITIC in there:
                        laid = [*_roomy(estimator, there_points, (placed.ENGINE, *there), drawing, tp)[:1]]
                    elif there:
                        laid = _passing(estimator, drawing, tp, plan)
                    for other in laid:
                        yield Pool(world - drawing, here, plan), Pool(drawing, (placed.ENGINE, *there), other, tp)


def _passing(estimator: AlignEstimator, ranks: int, tp: int, like: ParallelPlan) -> list[ParallelPlan | None]:
    """How frozen models lie beside an engine: cut as it is, with microbatches as in training."""
    dp, rows = ranks // tp, estimator.work.rows
    if rows % dp:
        return []
    microbatch = math.gcd(rows // dp, like.microbatch)
    cut: dict[str, Any] = {"dp": dp, "tp": tp, "sequence_parallel": tp > 1, "precision": like.precision}
    return [ParallelPlan(microbatch=microbatch, accumulation=rows // dp // microbatch, **cut)]


def _points(estimator: AlignEstimator, ranks: int, pins: Pins, accepts: Accepts | None) -> list[Point]:
    """Layouts that fit on so many ranks with nothing beside them, quickest first, by closed forms as in `search`."""
    planner, points = estimator.train(ranks), list[Point]()
    for group in candidates(planner, estimator.work.rows, pins):
        for plan in group if accepts is None else filter(accepts, group):
            frozen = estimator.frozen_bytes(ranks, plan)
            nbytes = planner.total_bytes(plan, planner.usable_bytes + frozen) - frozen
            if nbytes <= planner.usable_bytes:
                points.append(Point(planner.rank(plan).step_s, nbytes, plan))
                break  # groups go from little recomputation to much, and more only takes longer
    return sorted(points)


def _roomy(
    estimator: AlignEstimator, points: Sequence[Point], models: tuple[str, ...], ranks: int, engine_tp: int = 1
) -> list[ParallelPlan]:
    """The quickest of these with room for what else lies on their ranks."""
    room = (
        point.layout for point in points if estimator.fits(point.nbytes, Pool(ranks, models, point.layout, engine_tp))
    )
    return list(itertools.islice(room, _LAYOUTS))
