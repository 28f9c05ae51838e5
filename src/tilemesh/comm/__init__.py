"""Movement: collectives as proved schedules, run over MPI, torch.distributed or threads.

`schedules/` says what to do and needs nothing but Python; `runtime/` does it. Names here load when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilemesh.comm.connection import connect, run_threads
    from tilemesh.comm.map_reduce import mapreduce
    from tilemesh.comm.runtime.communicator import Communicator
    from tilemesh.comm.runtime.engine import Handle

_WHERE = {
    "Communicator": "tilemesh.comm.runtime.communicator",
    "Handle": "tilemesh.comm.runtime.engine",
    "connect": "tilemesh.comm.connection",
    "mapreduce": "tilemesh.comm.map_reduce",
    "run_threads": "tilemesh.comm.connection",
}

__all__ = ["Communicator", "Handle", "connect", "mapreduce", "run_threads"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        # Stored, so that the next use finds it without coming here.
        value = getattr(importlib.import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'tilemesh.comm' has no attribute '{name}'")
