"""CUDA tensors, on ranks: every collective gives on the GPU what it gives on the CPU, and the result stays there."""

from __future__ import annotations

import torch

from tilemesh.comm import connect

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8)


def cases_right(how: str, transport: str = "torch") -> int:
    """How many answers were the same; `how`: "nccl", or "staged" through the host."""
    comm = connect(transport, timeout_s=60.0)
    n, me = comm.size, comm.rank
    where = "nccl" if comm.transport.device is not None else "staged"
    assert where == how, where
    if where == "staged":
        torch.cuda.set_device(0)
    calls = {
        "all_reduce": lambda x: comm.all_reduce(x),
        "all_reduce max": lambda x: comm.all_reduce(x, "max"),
        "all_reduce in place": lambda x: comm.all_reduce(x, out=x),
        "reduce": lambda x: comm.reduce(x, root=n - 1),
        "reduce_scatter": lambda x: comm.reduce_scatter(x, axis=1),
        "all_gather": lambda x: comm.all_gather(x, axis=1),
        "all_to_all": lambda x: comm.all_to_all(x),
        "broadcast": lambda x: comm.broadcast(x),
        "scatter": lambda x: comm.scatter(x, root=0),
        "gather": lambda x: comm.gather(x, root=0, axis=1),
        "ring": lambda x: comm.all_reduce(x, algorithm="ring"),
        "handle": lambda x: comm.all_reduce(x, wait=False).wait(),
    }
    done = 0
    for dtype in DTYPES:
        x = ((torch.arange(15).reshape(5, 3) + me) % 4).to(dtype)
        for name, call in calls.items():
            on_cpu, on_gpu = call(x.clone()), call(x.cuda())
            assert (on_cpu is None) == (on_gpu is None), name
            if on_cpu is not None:
                assert on_gpu.is_cuda, f"{name} left the GPU"
                assert torch.equal(on_gpu.cpu(), on_cpu), f"{name} {dtype}: {on_gpu} is not {on_cpu}"
            done += 1
    mean = comm.all_reduce(torch.full((3,), float(me), device="cuda"), "avg")
    assert torch.equal(mean.cpu(), torch.full((3,), (n - 1) / 2))
    large = torch.full((3,), 60_000.0, dtype=torch.float16, device="cuda")  # of which two add up to infinity
    assert torch.equal(comm.all_reduce(large, "avg"), large)
    return done
