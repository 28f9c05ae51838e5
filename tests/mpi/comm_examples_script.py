"""Every example that takes a communicator, one after the other, as a rank."""

from __future__ import annotations

import runpy
from pathlib import Path

from tilemesh.comm import connect

EXAMPLES = Path(__file__).parents[2] / "examples"

comm = connect()
for name in ("hello", "messages", "collectives", "groups", "missing_wait"):
    result = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](comm)
    if comm.rank == 0:
        print(result, flush=True)
