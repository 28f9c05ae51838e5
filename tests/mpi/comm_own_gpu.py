"""Ranks that believe to have a GPU each, or to share one, started by MPI or by torch: who moves GPU tensors then.

Tensors are on the CPU and nccl is gloo; all else, from the environment to the answer, is as on GPUs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist

from tilemesh.comm import connect, connection
from tilemesh.comm.runtime import communicator, device, torchdist
from tilemesh.comm.runtime.memory import Like
from tilemesh.core.context import membership

_OPEN = (dist.init_process_group, torchdist._new_group)


@contextlib.contextmanager
def pretended(uuids: list[str]) -> Iterator[None]:
    """This machine shows these GPUs to every rank."""

    def opened(backend: str, **options: object) -> None:
        assert backend == ("cpu:gloo,cuda:nccl" if len(uuids) > 1 else "gloo"), backend
        _OPEN[0]("gloo", **options)

    def grouped(label: str, rank: int, size: int, has_nccl: bool, timeout: object) -> object:
        return _OPEN[1](label, rank, size, False, timeout)

    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=uuids[index].removeprefix("GPU-"))

    with (
        patch.object(connection, "visible_gpus", lambda: tuple(uuids)),
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "device_count", lambda: len(uuids)),
        patch.object(torch.cuda, "set_device", lambda index: None),
        patch.object(torch.cuda, "get_device_properties", properties),
        patch.object(dist, "is_nccl_available", lambda: True),
        patch.object(dist, "get_backend_config", lambda: "nccl" if len(uuids) > 1 else "gloo"),
        patch.object(dist, "init_process_group", opened),
        patch.object(torchdist, "_new_group", grouped),
        patch.object(Like, "is_cuda", property(lambda like: like.is_torch)),
        patch.object(communicator, "here", lambda kind: "cpu"),
    ):
        yield


def moved_by(starter: str, gpus: list[int]) -> list[list[object]]:
    """With so many GPUs for all ranks, one after the other: the transport, how many of three all-reduces (of a tensor,
    of one in a part of the ranks, of an array) went by device, and why not all tensors did. `starter`: whose
    environment to find."""
    environ = dict(os.environ)
    if starter == "srun":
        rank, size = environ.pop("RANK"), environ.pop("WORLD_SIZE")
        environ = {name: value for name, value in environ.items() if not name.startswith("LOCAL_")}
        environ |= {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": size, "SLURM_LOCALID": rank, "SLURM_JOB_ID": "7"}
        environ |= {"SLURM_STEP_TASKS_PER_NODE": size, "SLURM_STEP_NODELIST": "localhost"}
    with patch.dict(os.environ, environ, clear=True):
        member = membership()
        assert member is not None
        assert member.starter == starter
        found = []
        for count in gpus:
            with pretended([f"GPU-{number}" for number in range(count)]):
                found.append(_moved())
    return found


def _moved() -> list[object]:
    count = 0
    start = device.DeviceCollectives._start

    def counted(self, *arguments):  # type: ignore[no-untyped-def]
        nonlocal count
        count += 1
        return start(self, *arguments)

    with patch.object(device.DeviceCollectives, "_start", counted):
        comm = connect(timeout_s=60.0)
        part = comm.split(0)
        assert part is not None
        mine = torch.full((3,), 1.0 + comm.rank)
        sums = [comm.all_reduce(mine), part.all_reduce(mine), comm.all_reduce(mine.numpy())]
        assert [total.tolist() for total in sums] == [[sum(range(comm.size + 1))] * 3] * 3
    told = [comm.backend, count, comm.transport.staged_because]
    part.close()
    comm.close()
    return told
