"""Where a rank listens: called on ranks by a test of the launcher."""

import os
from pathlib import Path

import numpy as np

import tilemesh as tm


def listening() -> list[str]:
    """Local addresses (hexadecimal, as in procfs) of this process's listening TCP sockets."""
    mine = set()
    for handle in Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(handle))
        except OSError:
            continue
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [fields[1].split(":")[0] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine]


def after_messages() -> list[str]:
    """Where this rank listens once it has exchanged messages and made a group."""
    with tm.comm.connect() as comm, comm.split(0) as group:
        comm.all_reduce(np.ones(100_000), algorithm="ring")  # messages, not shared memory
        group.all_reduce(np.ones(3), algorithm="native")
        found = listening()
        comm.barrier()
        return found
