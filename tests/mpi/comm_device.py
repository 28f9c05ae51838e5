"""What runs collectives on GPU memory, driven with CPU tensors over gloo: its logic needs no GPU.

`DeviceCollectives` talks to whatever backend its group has. Told that every tensor is a GPU's, the communicator sends
all calls through it; the answers must be those of the ordinary path. (nccl itself: comm_cuda.py.)
"""

from __future__ import annotations

from unittest.mock import patch

import torch

from tilemesh.comm import connect
from tilemesh.comm.runtime import communicator
from tilemesh.comm.runtime.device import DeviceCollectives
from tilemesh.comm.runtime.memory import Like


def cases_right() -> int:
    """How many answers were the same. What it changes it puts back: other tests call these ranks, too."""
    comm = connect("torch", timeout_s=60.0)
    group = comm.split(0)
    assert group is not None
    n, me = comm.size, comm.rank

    calls = {
        "all_reduce": lambda comm, x: comm.all_reduce(x),
        "all_reduce max": lambda comm, x: comm.all_reduce(x, "max"),
        "all_reduce prod": lambda comm, x: comm.all_reduce(x, "prod"),
        "all_reduce in place": lambda comm, x: comm.all_reduce(x, out=x),
        "reduce": lambda comm, x: comm.reduce(x, root=n - 1),
        "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
        "reduce_scatter into": lambda comm, x: comm.reduce_scatter(x, out=torch.zeros_like(x[: len(x) // n])),
        "all_gather": lambda comm, x: comm.all_gather(x, axis=1),
        "all_gather into": lambda comm, x: comm.all_gather(x, out=x.new_zeros(n * len(x), 3)),
        "all_gather over what is sent": lambda comm, x: comm.all_gather((y := x.repeat(n, 1))[:5], out=y),
        "all_to_all": lambda comm, x: comm.all_to_all(x),
        "broadcast": lambda comm, x: comm.broadcast(x, root=n - 1),
        "gather": lambda comm, x: comm.gather(x, root=0, axis=1),
        "gather uneven": lambda comm, x: comm.gather(x[: me + 1], root=1, counts=range(1, n + 1)),
        "scatter uneven": lambda comm, x: comm.scatter(x, root=1),
        "handle": lambda comm, x: comm.all_reduce(x, wait=False).wait(),
        "two handles": lambda comm, x: [comm.all_reduce(x, wait=False), comm.all_gather(x, wait=False)][1].wait(),
    }

    def answers(comm, dtype):  # type: ignore[no-untyped-def]
        x = ((torch.arange(15).reshape(5, 3) + me) % 4).to(dtype)
        # gloo itself wants equal parts, as nccl does not: 6 rows are cut evenly over 2 and 3 ranks
        even = ((torch.arange(18).reshape(6, 3) + me) % 4).to(dtype)
        cut = ("all_to_all", "reduce_scatter", "reduce_scatter into")
        return {name: call(comm, (even if name in cut else x).clone()) for name, call in calls.items()}

    def averages(comm):  # type: ignore[no-untyped-def]
        large = torch.full((3,), 60_000.0, dtype=torch.float16)  # of which two add up to infinity
        return {
            "avg": comm.all_reduce(torch.full((3,), float(me)), "avg"),
            "avg of large halves": comm.all_reduce(large, "avg"),
            "avg bf16": comm.all_reduce(torch.full((5,), 1.0 + me, dtype=torch.bfloat16), "avg"),
        }

    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
    wanted = [answers(comm, dtype) for dtype in dtypes] + [averages(comm)]
    group.transport.device = DeviceCollectives(group.transport.group)
    calls_seen = 0
    start = DeviceCollectives._start

    def counted(self, *arguments):  # type: ignore[no-untyped-def]
        nonlocal calls_seen
        calls_seen += 1
        return start(self, *arguments)

    with (
        patch.object(Like, "is_cuda", property(lambda like: like.is_torch)),
        patch.object(communicator, "here", lambda kind: "cpu"),
        patch.object(DeviceCollectives, "_start", counted),
    ):
        found = [answers(group, dtype) for dtype in dtypes] + [averages(group)]
    done = 0
    for one, other in zip(wanted, found, strict=True):
        for name, answer in one.items():
            assert (answer is None) == (other[name] is None), name
            if answer is not None:
                assert answer.dtype == other[name].dtype, name
                assert torch.equal(answer, other[name]), f"{name} {answer.dtype}: {other[name]} is not {answer}"
            done += 1
    assert calls_seen == done + len(dtypes), (
        f"{calls_seen} of {done} went through DeviceCollectives"
    )  # "two handles" are two calls
    group.close()
    comm.close()
    return done
