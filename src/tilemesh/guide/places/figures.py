"""Drawings of chapter 14: every block comes from the planner's clock."""

from __future__ import annotations

from tilemesh.core import placement as placed
from tilemesh.core.scene import LaneBlock, lanes
from tilemesh.guide.places.work import StepWork, phase_seconds, placement, predicted
from tilemesh.report.draw import Line, PlotAxis
from tilemesh.report.picture import curves

_WORK = StepWork(0.4, 0.2, 0.003)
_COLOURS = {placed.ROLLOUT: 0, placed.UPDATE: 1, placed.SYNC: 2}
_WORDS = {placed.ROLLOUT: "draw", placed.UPDATE: "train", placed.SYNC: ""}


def figures() -> dict[str, str]:
    kinds = (("colocated", 0), ("split", 4), ("one-step-off", 5))
    return {f"{kind}.svg": _timeline(kind, drawing) for kind, drawing in kinds} | {"sizes.svg": _sizes()}


def _timeline(kind: str, drawing: int) -> str:
    """Two steps of a placement on 8 ranks."""
    place = placement(kind, 8, drawing)
    step = placed.simulate(place, phase_seconds(place, _WORK))
    first = min(span.begin_s for span in step.spans)
    blocks = [
        LaneBlock(span.pool, (span.begin_s - first) * 1e3, (span.end_s - first) * 1e3,
                  f"{_WORDS[span.name]} {span.step}" if _WORDS[span.name] else "", _COLOURS[span.name])
        for span in step.spans if span.end_s > span.begin_s
    ]  # fmt: skip
    names = [f"{pool.ranks} ranks" for pool in place.pools]
    idle = placed.idle_share(place, step)
    note = f"{step.seconds * 1e3:.0f} ms a step, {idle:.0%} idle; numbers: which batch; green: new weights"
    return lanes(f"{kind}: 0.4 rank-seconds to draw, 0.2 to train", names, blocks, unit="ms", note=note, end=320.0)


def _sizes() -> str:
    """A step over how many ranks draw."""
    points = [(drawing, predicted("one-step-off", 8, _WORK, drawing)[0].seconds * 1e3) for drawing in range(1, 8)]
    together = predicted("colocated", 8, _WORK)[0].seconds * 1e3
    lines = [Line("one step off", points, 0, dots=True), Line("colocated", [(1, together), (7, together)], 1)]
    x = PlotAxis(0.5, 7.5, "ranks of 8 that draw")
    return curves("A step over the split", x, PlotAxis(0, 430, "ms"), *lines)
