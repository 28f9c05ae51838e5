"""The send/send deadlock: everybody sends first, nobody receives. How it looks, why, and two ways out.

    python examples/deadlock.py                                     both, on two threads
    tilemesh launch --ranks 2 -- examples/deadlock.py wrong         the wrong way, on processes: the job is ended

A blocking send may return only when the other side receives. Two ranks that both send first each wait for the other's
receive, which stands in the line after: a circle. With small messages MPI often gets away with it, because it copies
them aside; the program then hangs on the day the arrays grow. The watchdog sees the circle: each rank's record says in
which call it waits.
"""

from __future__ import annotations

import sys

import numpy as np

from tilemesh.comm import Communicator, connect, run_threads
from tilemesh.core.errors import RunError

ELEMENTS = 1_000_000  # more than any MPI copies aside


def wrong(comm: Communicator) -> None:
    """Send, then receive: both ranks are still in the first line when the timeout strikes."""
    other = 1 - comm.rank
    comm.send(np.full(ELEMENTS, comm.rank), to=other)
    comm.recv(np.empty(ELEMENTS, np.int64), source=other)


def in_turns(comm: Communicator) -> int:
    """One way out: somebody receives first. Right, but only one direction of the wire works at a time."""
    other = 1 - comm.rank
    mine, theirs = np.full(ELEMENTS, comm.rank), np.empty(ELEMENTS, np.int64)
    if comm.rank == 0:
        comm.send(mine, to=other)
        comm.recv(theirs, source=other)
    else:
        comm.recv(theirs, source=other)
        comm.send(mine, to=other)
    return int(theirs[0])


def both_at_once(comm: Communicator) -> int:
    """The other: post the receive, start the send, and wait only then. This is what every schedule here does."""
    other = 1 - comm.rank
    theirs = np.empty(ELEMENTS, np.int64)
    handles = [comm.irecv(theirs, source=other), comm.isend(np.full(ELEMENTS, comm.rank), to=other)]
    for handle in handles:
        handle.wait()
    return int(theirs[0])


def main() -> None:
    try:
        run_threads(2, wrong, timeout_s=1.0)
    except RunError as error:
        print(f"send, then receive, on both ranks:\n  {error}")
    print(f"in turns: the ranks got {run_threads(2, in_turns)}")
    print(f"both at once: the ranks got {run_threads(2, both_at_once)}")


if __name__ == "__main__":
    if "wrong" in sys.argv[1:]:
        wrong(connect(timeout_s=2.0))
    else:
        main()
