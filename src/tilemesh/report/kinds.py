"""Which kind of run has which page. To give a kind a page of its own, write its `KindPage` and add it here."""

from __future__ import annotations

from tilemesh.report import aligning, compressing, general, serving, training
from tilemesh.report.kind_page import KindPage
from tilemesh.runs.kind import ALIGN, COMPRESS, SERVE, TRAIN

PAGES = {
    TRAIN.name: training.TRAIN_PAGE,
    ALIGN.name: aligning.ALIGN_PAGE,
    SERVE.name: serving.SERVE_PAGE,
    COMPRESS.name: compressing.COMPRESS_PAGE,
}


def page_of(kind: str) -> KindPage:
    """The page of a kind of run; one that has none of its own gets the general one."""
    return PAGES.get(kind, general.GENERAL_PAGE)
