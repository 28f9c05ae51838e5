"""`TILEMESH_DEBUG`: what a program checks at a cost, by words separated by commas.

collectives: every rank tells the others each call, in words (comm/runtime/texts.py).
values: targets and tokens on a GPU are looked at before a kernel uses them, which waits for the GPU at each call.
"""

from __future__ import annotations

import os

VARIABLE = "TILEMESH_DEBUG"


def asks_for(what: str) -> bool:
    return what in os.environ.get(VARIABLE, "").split(",")
