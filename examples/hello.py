"""Ranks, the world, and groups of ranks.

tilemesh launch --ranks 8 -- examples/hello.py      eight processes
python examples/hello.py                            eight threads of one process
"""

from __future__ import annotations

import numpy as np

from tilemesh.comm import Communicator, connect, run_threads


def main(comm: Communicator) -> str:
    """Say who we are, and add something up in the world and in a group."""
    everyone = comm.all_reduce(np.array([comm.rank]))[0]
    # Ranks that give the same color form a group; inside it they are numbered from 0 again.
    group = comm.split(color=comm.rank % 2)
    assert group is not None
    together = group.all_reduce(np.array([comm.rank]))[0]
    return (
        f"rank {comm.rank} of {comm.size} over {comm.backend}: all ranks add up to {everyone}; "
        f"in my group I am {group.rank} of {group.size}, and its ranks add up to {together}"
    )


if __name__ == "__main__":
    world = connect()
    if world.size > 1:
        print(main(world))
    else:
        print(*run_threads(8, main), sep="\n")
