"""The four kinds of group on a mesh of 2 × 4 ranks (data × tensor): the world, the rows, the columns, each rank alone.

    tilemesh launch --ranks 8 -- examples/groups.py
    python examples/groups.py

Ranks are laid out model-major: neighbours share a row, so that the group that talks most is closest together.
"""

from __future__ import annotations

import numpy as np

from tilemesh.comm import Communicator, connect, run_threads

DP, TP = 2, 4


def main(comm: Communicator) -> str | None:
    """Make the groups and let each gather its members; rank 0 returns the page."""
    assert comm.size == DP * TP, f"this mesh has {DP * TP} ranks, the job {comm.size}"
    tp_index, dp_index = comm.rank % TP, comm.rank // TP
    kinds = {
        "world: one loss over all data": comm.split(0),
        "tensor parallel (a row): the parts of one layer": comm.split(dp_index),
        "data parallel (a column): copies of the same part": comm.split(tp_index),
        "alone: what needs no communication": comm.split(comm.rank),
    }
    page = [" ".join(f"{row * TP + column:>2}" for column in range(TP)) for row in range(DP)]
    for name, group in kinds.items():
        assert group is not None
        members = group.all_gather(np.array([comm.rank]))
        row = np.full((1, comm.size), -1)
        row[0, : members.size] = members
        rows = comm.gather(row, root=0)
        if rows is not None:
            groups = sorted({tuple(int(rank) for rank in line if rank >= 0) for line in rows})
            page.append(f"{name}: {' '.join(str(list(members)) for members in groups)}")
    return "\n".join(page) if comm.rank == 0 else None


if __name__ == "__main__":
    world = connect()
    text = main(world) if world.size > 1 else run_threads(DP * TP, main)[0]
    if text is not None:
        print(text)
