"""Each collective as a picture of what moves where, next to what really arrived.

    tilemesh launch --ranks 8 -- examples/collectives.py
    python examples/collectives.py

In the picture a row is a rank, before and after: b2 is block 2 of rank 1, Σ2 the sum of all ranks' block 2. In the run
block k of rank r has the value 10·r + k.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilemesh.comm import Communicator, connect, run_threads
from tilemesh.comm.schedules.draw import picture


def calls(comm: Communicator) -> dict[str, Any]:
    """The result of every collective on this rank; None where a rank gets nothing."""
    blocks = 10 * comm.rank + np.arange(comm.size)  # one block for each rank
    mine = np.array([10 * comm.rank + comm.rank])  # this rank's own block
    return {
        "all_reduce": comm.all_reduce(blocks),
        "reduce_scatter": comm.reduce_scatter(blocks),
        "all_gather": comm.all_gather(mine),
        "all_to_all": comm.all_to_all(blocks),
        "broadcast": comm.broadcast(blocks[:1], root=0),
        "reduce": comm.reduce(blocks, root=0),
        "scatter": comm.scatter(blocks if comm.rank == 0 else None, root=0),
        "gather": comm.gather(mine, root=0),
    }


def main(comm: Communicator) -> str | None:
    """Rank 0 returns the whole page; the others nothing."""
    page = []
    for name, result in calls(comm).items():
        # Rows of equal length for all ranks, so that they can be gathered: -1 where there is nothing.
        row = np.full(comm.size, -1)
        if result is not None:
            row[: result.size] = result
        rows = comm.gather(row.reshape(1, -1), root=0)
        if rows is not None:
            arrived = [" ".join(str(value) for value in line if value >= 0) or "." for line in rows]
            head, *lines = picture(name, comm.size).splitlines()
            page.append("\n".join([head, *(f"{line}   =  {got}" for line, got in zip(lines, arrived, strict=True))]))
    return "\n\n".join(page) if comm.rank == 0 else None


if __name__ == "__main__":
    world = connect()
    text = main(world) if world.size > 1 else run_threads(8, main)[0]
    if text is not None:
        print(text)
