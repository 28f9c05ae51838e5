"""Movement: collectives as proved schedules, run over MPI, torch.distributed or threads.

`schedules/` says what to do and needs nothing but Python; `runtime/` does it. Names here load when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilemesh.core.packages import names_on_use

if TYPE_CHECKING:
    from tilemesh.comm.connection import connect, run_threads
    from tilemesh.comm.map_reduce import mapreduce
    from tilemesh.comm.runtime.communicator import Communicator
    from tilemesh.comm.runtime.engine import Handle

_WHERE = {
    "Communicator": "runtime.communicator",
    "Handle": "runtime.engine",
    "connect": "connection",
    "mapreduce": "map_reduce",
    "run_threads": "connection",
}

__getattr__ = names_on_use(__name__, _WHERE)
__all__ = ["Communicator", "Handle", "connect", "mapreduce", "run_threads"]
