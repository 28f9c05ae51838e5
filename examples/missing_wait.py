"""What a missing `wait()` does: the result is read before it is there.

    python examples/missing_wait.py
    tilemesh launch --ranks 4 -- examples/missing_wait.py

`wait=False` returns a handle at once, so that the rank can compute meanwhile. Until `wait()` has returned, `out` holds
whatever it held before, or something half done. Nothing raises: the numbers are just wrong, and differently every time.
"""

from __future__ import annotations

import numpy as np

from tilemesh.comm import Communicator, connect, run_threads


def main(comm: Communicator) -> tuple[float, float]:
    """(what a program without the wait would have used, the truth)"""
    gradient = np.ones(1000)
    total = np.full(1000, -1.0)
    handle = comm.all_reduce(gradient, out=total, algorithm="ring", wait=False)
    too_early = float(total[-1])  # the bug
    handle.wait()
    return too_early, float(total[-1])


if __name__ == "__main__":
    world = connect()
    results = [main(world)] if world.size > 1 else run_threads(4, main)
    for too_early, right in results:
        print(f"without wait(): {too_early:g}; after wait(): {right:g}")
