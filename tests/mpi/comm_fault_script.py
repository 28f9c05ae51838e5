"""Ranks that go wrong inside collectives: comm_fault_script.py BEHAVIOUR [SEED]. Rank 1 is the one that misbehaves."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import numpy as np

from tilemesh.comm import Communicator, connect


def daydream() -> None:
    time.sleep(300)


def told(comm: Communicator, *messages: tuple[int, int]) -> None:
    """Messages from one rank to another, in order: who has got one knows how far its sender has come."""
    for sender, receiver in messages:
        if comm.rank == sender:
            comm.send(np.zeros(1), receiver)
        elif comm.rank == receiver:
            comm.recv(np.zeros(1), sender)


def work(comm: Communicator, rounds: int) -> None:
    """A mix of collectives, algorithms and sizes, the same on every rank."""
    draw = random.Random(7)
    for _ in range(rounds):
        x = np.ones(draw.choice([1, 100, 30_000, 300_000]), np.float32)
        kind = draw.randrange(5)
        if kind == 0:
            comm.all_reduce(x, algorithm=draw.choice(["ring", "rabenseifner", "auto", "tree"]))
        elif kind == 1:
            comm.all_gather(x, algorithm=draw.choice(["bruck", "ring", "auto"]))
        elif kind == 2:
            comm.reduce_scatter(x)
        elif kind == 3:
            comm.all_to_all(x, algorithm=draw.choice(["pairwise", "auto"]))
        else:
            comm.barrier()


def dropped(comm: Communicator) -> None:
    """Begin what nobody answers, and end without waiting for it."""
    if comm.rank == 0:
        for handle in (
            comm.irecv(np.empty(4), 1, tag=1),
            comm.isend(np.empty(1_000_000), 1, tag=2),
            comm.all_reduce(np.ones(50_000), algorithm="ring", wait=False),
        ):
            handle.test()
    print("done", flush=True)


def wrong_sizes(comm: Communicator, sent: int, expected: int) -> None:
    if comm.rank == 0:
        comm.send(np.ones(sent), 1)
    else:
        comm.recv(np.ones(expected), 0)
    comm.barrier()


def main(behaviour: str, seed: int) -> None:
    if behaviour == "absent" and os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK")) == "1":
        daydream()
    comm = connect(timeout_s=2.0 if behaviour in ("never", "never-native", "elsewhere", "absent") else 60.0)
    misbehaves = comm.rank == 1
    comm.barrier()
    print("connected", flush=True)
    if behaviour == "drop":
        dropped(comm)
    elif behaviour == "sizes":
        wrong_sizes(comm, seed // 10, seed % 10)
    elif behaviour == "kill":
        if not misbehaves:
            time.sleep(0.5)  # rank 1 is to die before the others could have finished it without another word of it
        handle = comm.all_reduce(np.ones(100_000), algorithm="ring", wait=False)
        if misbehaves:
            os.kill(os.getpid(), signal.SIGKILL)
        handle.wait()
    elif behaviour == "raise":
        if misbehaves:
            raise ValueError("the widget is bent")
        comm.all_reduce(np.ones(10), algorithm="ring")
    elif behaviour in ("never", "never-native"):
        comm.all_gather(np.ones(3))
        # The others begin to wait when rank 1 has nothing left but to dream, and at the same time.
        told(comm, *((1, other) for other in range(comm.size) if other != 1), *([(2, 0)] if comm.size > 2 else []))
        if misbehaves:
            daydream()
        comm.all_reduce(np.ones(1024, np.float32), algorithm="ring" if behaviour == "never" else "native")
    elif behaviour == "elsewhere":  # in another collective of another group
        pairs = comm.split(comm.rank // 2)
        told(comm, (0, 1))  # rank 0 waits longer, so that it is the one to speak
        if misbehaves and pairs is not None:
            pairs.barrier()
        comm.all_reduce(np.ones(3), algorithm="ring")
    elif behaviour == "random-kill":
        if misbehaves:
            delay_s = random.Random(seed).uniform(0.0, 0.25)
            threading.Timer(delay_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        work(comm, 100_000)
    print("survived", flush=True)


main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
