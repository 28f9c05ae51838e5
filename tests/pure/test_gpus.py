"""Whether ranks have GPUs of their own, read from what launchers and schedulers leave in the environment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tilemesh.comm import Communicator, run_threads
from tilemesh.comm.runtime.gpus import gpu_of, why_staged
from tilemesh.core.context import membership
from tilemesh.measure.machine import shown_gpus

NODE = [f"GPU-{number}" for number in range(4)]
"""What nvidia-smi lists on a node where nothing is kept from a process."""


def slurm(rank: int) -> dict[str, str]:
    where = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 4), "SLURM_JOB_ID": "7"}
    return where | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "g[1-2]"}


def open_mpi(rank: int) -> dict[str, str]:
    where = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 4)}
    return where | {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


def torchrun(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank % 4), "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize("launcher", [slurm, open_mpi, torchrun])
@pytest.mark.parametrize(
    ("listed", "variable", "why"),
    [
        # All ranks of a node see its four GPUs.
        (lambda rank: NODE, lambda rank: None, ""),
        (lambda rank: NODE, lambda rank: "3,2,1,0", ""),
        # A scheduler shows each its own, always as the first (--gpus-per-task), or a script names it.
        (lambda rank: [NODE[rank % 4]], lambda rank: "0", ""),
        (lambda rank: NODE, lambda rank: str(rank % 4), ""),
        (lambda rank: NODE, lambda rank: f"GPU-{rank % 4}", ""),
        # Ranks that share: one GPU for all, two for four.
        (lambda rank: NODE, lambda rank: "0", "ranks 0 and 1 share GPU-0/0, and NCCL wants a GPU for each rank"),
        (lambda rank: NODE[:2], lambda rank: None, "ranks 0 and 2 share GPU-0/0, and NCCL wants a GPU for each rank"),
        (lambda rank: NODE, lambda rank: "", "no GPU that NCCL can use was found for rank 0-7"),
        (lambda rank: NODE if rank < 4 else [], lambda rank: None, "no GPU that NCCL can use was found for rank 4-7"),
    ],
)
def test_a_gpu_of_its_own_is_known_under_every_launcher(launcher: Any, listed: Any, variable: Any, why: str) -> None:
    """Two nodes of four ranks; UUIDs differ from node to node."""
    gpus = []
    for rank in range(8):
        member = membership(launcher(rank))
        assert member is not None
        uuids = [f"{uuid}/{rank // 4}" for uuid in listed(rank)]
        gpus.append(gpu_of(member.local_rank, shown_gpus(uuids, variable(rank))))
    assert why_staged(gpus) == why


def test_gpu_tensors_that_go_through_the_host_are_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    """By one rank, with the reason, at the first call or message, on whichever communicator."""

    def main(comm: Communicator) -> None:
        group = comm.split(0)
        assert group is not None
        for one in (comm, group, comm):
            assert one._caller.device_for(is_cuda=False) is None
            assert not one._goes_by_device(np.ones(2))
            if one is group:
                assert not one._goes_by_device(SimpleNamespace(is_cuda=True))

    run_threads(3, main)
    said = capfd.readouterr().err
    assert said == "tilemesh: GPU tensors go through the host's memory: its ranks are threads of one process\n"


def test_a_list_of_gpus_ends_where_one_is_not_there_however_many_digits_it_has() -> None:
    assert shown_gpus(("GPU-a", "GPU-b"), "1,0") == ("GPU-b", "GPU-a")
    assert shown_gpus(("GPU-a", "GPU-b"), f"1,{'9' * 5000},0") == ("GPU-b",)
