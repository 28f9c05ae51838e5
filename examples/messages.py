"""Point to point: a message goes round the ring of ranks, first blocking, then with everybody sending at once.

tilemesh launch --ranks 8 -- examples/messages.py
python examples/messages.py
"""

from __future__ import annotations

import numpy as np

from tilemesh.comm import Communicator, connect, run_threads


def pass_it_on(comm: Communicator) -> list[int]:
    """One rank after another adds its number: each waits for the one before."""
    token = np.zeros(comm.size, np.int64)
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    if comm.rank > 0:
        comm.recv(token, source=before)
    token[comm.rank] = comm.rank + 1
    comm.send(token, to=after)
    if comm.rank == 0:
        comm.recv(token, source=before)
    return [int(value) for value in token]


def all_at_once(comm: Communicator) -> int:
    """Everybody sends to the next and receives from the one before, at the same time.

    The receive is posted first and nobody waits before both are under way: with blocking calls each would wait for
    the next to receive, all round the ring (examples/deadlock.py).
    """
    inbox = np.empty(1, np.int64)
    receipt = comm.irecv(inbox, source=(comm.rank - 1) % comm.size)
    sending = comm.isend(np.array([comm.rank]), to=(comm.rank + 1) % comm.size)
    receipt.wait()
    sending.wait()
    return int(inbox[0])


def main(comm: Communicator) -> str:
    token = pass_it_on(comm)
    neighbour = all_at_once(comm)
    seen = f"; the token came back as {token}" if comm.rank == 0 else ""
    return f"rank {comm.rank}: my neighbour before me is {neighbour}{seen}"


if __name__ == "__main__":
    world = connect()
    if world.size > 1:
        print(main(world))
    else:
        print(*run_threads(8, main), sep="\n")
