"""Whether each rank has a GPU of its own: then NCCL moves what is on GPUs, and else it goes through the host's memory.

The one idea: which GPU a rank uses says its number of manufacture (UUID), and the ranks compare those. Counting GPUs
and ranks of a node would not do: a scheduler may show each rank its own GPU alone, always as the first one.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilemesh.comm.runtime.watch import ranges


def gpu_of(local_rank: int, visible: Sequence[str]) -> str:
    """Which of the GPUs that it sees a rank uses; empty where there are none."""
    return visible[local_rank % len(visible)] if visible else ""


def why_staged(gpus: Sequence[str]) -> str:
    """Why GPU tensors of these ranks, each with the GPU that it uses, go through the host's memory; empty where each
    has one of its own."""
    without = [rank for rank, gpu in enumerate(gpus) if not gpu]
    if without:
        return f"no GPU that NCCL can use was found for rank {ranges(without)}"
    users: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if users.setdefault(gpu, rank) != rank:
            return f"ranks {users[gpu]} and {rank} share {gpu}, and NCCL wants a GPU for each rank"
    return ""
