"""Two ranks that exchange a message, to see whether a transport (mpi, gloo or nccl) works here.

`call("tilemesh.launch.probe:exchange", 2, "mpi")` returns what each used, in one line. A wrong byte, or a library that
is not there, is an exception like any other.
"""

from __future__ import annotations

import os
from pathlib import Path

from tilemesh.core.context import JOB_VARIABLE
from tilemesh.launch.board import my_status

COUNT = 1 << 16


def exchange(backend: str) -> str:
    return _exchange_mpi() if backend == "mpi" else _exchange_torch(backend)


def _exchange_mpi() -> str:
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


def _exchange_torch(backend: str) -> str:
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
