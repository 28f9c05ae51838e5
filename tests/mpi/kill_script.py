"""A rank that calls collectives through shared memory until it is killed: kill_script.py WHO AFTER_S SEED."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import numpy as np

from tilemesh.comm import connect

who, after_s, seed = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
comm = connect(timeout_s=30.0)
print("connected", flush=True)
if comm.rank == who:

    def kill() -> None:
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()

dice = random.Random(seed)  # the same on every rank
end = time.monotonic() + 20
while time.monotonic() < end:
    length = dice.choice((3, 3_000, 300_000))
    x = comm.empty(length, np.float32) if dice.random() < 0.3 else np.empty(length, np.float32)
    x[:] = 1
    name = dice.choice(("all_reduce", "all_gather", "broadcast"))
    result = getattr(comm, name)(x)
    assert result[0] == (comm.size if name == "all_reduce" else 1), name
print("survived", flush=True)
