"""Plans, runs, rows and placements as HTML in Jupyter: their pages, each in a frame with its own light and dark.

`tilemesh` registers `show` by the names of types, so that a notebook which plans loads no torch for the others.
"""

from __future__ import annotations

from typing import Any

from tilemesh.measure.row import Row
from tilemesh.plan.choose import SearchResult
from tilemesh.plan.why import why
from tilemesh.report import kernel_page, plan_page, run, run_page
from tilemesh.report.draw import PageTable, grid
from tilemesh.report.html import article, escape, headed
from tilemesh.report.kind_page import Beside
from tilemesh.report.rows import row_table

FRAME = '<iframe srcdoc="{}" style="width:100%;height:{}px;border:0;color-scheme:light dark" title="{}"></iframe>'


def show(value: Any) -> str:
    """HTML of a plan's search, a run's result, a row, or a module placed on a mesh."""
    if isinstance(value, SearchResult):
        return _framed(plan_page.render(value, "A plan", why(value)), 620, "plan")
    if isinstance(value, Row):
        body = article(
            value.name, "tilemesh", kernel_page.verdict([value]) if value.peers else None, row_table([value])
        )
        return _framed(body, 240, "row")
    if hasattr(value, "shards"):  # a placed module: the report knows nothing of torch
        joint = next(iter(value.programs.values())).joint
        cells = [[name, str(joint.placement(name)), str(tuple(cut.whole))] for name, cut in value.shards.items()]
        table = PageTable(["parameter", "placement", "whole shape"], cells, words=True)
        return _framed(
            article("A placed module", "tilemesh", None, headed("Where it lies", grid(table))), 320, "placed"
        )
    return _framed(run_page.render(run.read(value.folder), Beside(value.rows)), 620, "run")


def _framed(page: str, height: int, title: str) -> str:
    return FRAME.format(escape(page), height, title)
