"""Two ranks that exchange a message, to see whether a transport works here: `-m tilemesh.launch.probe mpi|gloo|nccl`.

Rank 0 prints one line of what it used. A wrong byte, or a library that is not there, is an exception like any other.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tilemesh.core.context import JOB_VARIABLE
from tilemesh.launch.board import my_status

COUNT = 1 << 16


def exchange_mpi() -> str:
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    other = 1 - world.rank
    received = np.empty(COUNT, np.int64)
    my_status().at(f"exchanging {received.nbytes} bytes with rank {other}")
    world.Sendrecv(np.arange(COUNT) + world.rank, other, recvbuf=received, source=other)
    if not np.array_equal(received, np.arange(COUNT) + other):
        raise RuntimeError("the message arrived damaged")
    return MPI.Get_library_version().replace("\0", "").splitlines()[0].split(", package")[0]


def exchange_torch(backend: str) -> str:
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    # Through a file in the job's folder: torch's own server would listen on every interface.
    store = Path(os.environ[JOB_VARIABLE], "store").as_uri()
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size)
    other = 1 - rank
    mine = torch.arange(COUNT, device=device) + rank
    received = torch.empty_like(mine)
    my_status().at(f"exchanging {received.nbytes} bytes with rank {other}")
    for request in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, received, other)]
    ):
        request.wait()
    if not torch.equal(received, mine - rank + other):
        raise RuntimeError("the message arrived damaged")
    dist.destroy_process_group()
    return f"torch.distributed {torch.__version__}, {backend}"


if __name__ == "__main__":
    used = exchange_mpi() if sys.argv[1] == "mpi" else exchange_torch(sys.argv[1])
    my_status().at("done")
    if "0" in (os.environ.get("RANK"), os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
        print(used)
