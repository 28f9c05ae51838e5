"""Which kind of run has which page. To give a kind a page of its own, write its `Layout` and add it here."""

from __future__ import annotations

from tilemesh.report import general, training
from tilemesh.report.layout import Layout
from tilemesh.runs.kind import TRAIN

LAYOUTS = {TRAIN.name: training.LAYOUT}


def layout_of(kind: str) -> Layout:
    """The layout of a kind of run; one that has none of its own gets the general one."""
    return LAYOUTS.get(kind, general.LAYOUT)
