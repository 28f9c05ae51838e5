"""Every example that takes a communicator, one after the other, on a rank."""

from __future__ import annotations

import runpy
from pathlib import Path

from tilemesh.comm import connect

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("hello", "messages", "collectives", "groups", "missing_wait", "minimal")
OPTIONS = {"minimal": {"seconds": 0.001}}  # how long it measures each collective
GROUPED = 8  # ranks of the mesh in "groups"


def pages() -> list[str]:
    with connect() as comm:
        names = [name for name in NAMES if name != "groups" or comm.size == GROUPED]
        mains = [runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"] for name in names]
        return [str(main(comm, **OPTIONS.get(name, {}))) for name, main in zip(names, mains, strict=True)]
