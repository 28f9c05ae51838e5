"""A step of a placement drawn: a lane for each pool of ranks, two steps of a steady state."""

from __future__ import annotations

from tilemesh.core.placement import PHASES, Placement, StepTime
from tilemesh.core.scene import LaneBlock, lanes, text_width

_WIDTH = 740
"""Of the lanes."""


def draw_step(placement: Placement, step: StepTime, title: str) -> str:
    """As SVG."""
    first, last = min(span.begin_s for span in step.spans), max(span.end_s for span in step.spans)
    blocks = []
    for span in step.spans:
        words, room = f"{span.name} {span.step}", (span.end_s - span.begin_s) / (last - first) * _WIDTH
        shown = words if text_width(words, 11) < room else ""
        if room > 0:
            begin, end, colour = span.begin_s - first, span.end_s - first, PHASES.index(span.name)
            blocks.append(LaneBlock(span.pool, begin, end, shown, colour, pale=span.step % 2 == 0))
    note = "; ".join(f"{pool.ranks} ranks: {', '.join(pool.models)}" for pool in placement.pools)
    end = float(f"{last - first:.4g}")
    return lanes(title, [f"{pool.ranks} ranks" for pool in placement.pools], blocks, unit="seconds", note=note, end=end)
