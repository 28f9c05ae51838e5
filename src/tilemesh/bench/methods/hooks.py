"""PowerSGD and local SGD beside torch's own: DistributedDataParallel with its communication hooks, in the same ranks.

Ours and torch's run over the same process group (gloo on CPUs), in turns, on the same model and rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from tilemesh.comm.connection import connect
from tilemesh.core.plan import ParallelPlan
from tilemesh.measure.ranks import rank_timer
from tilemesh.measure.timing import compare
from tilemesh.methods.compressed import CompressedGradients, Compression, sent_bytes
from tilemesh.methods.local import LocalPeriod, LocalUpdates
from tilemesh.parallel.apply import lay
from tilemesh.parallel.buckets import Bucketed
from tilemesh.parallel.gradients import Way
from tilemesh.parallel.mesh import Mesh

WIDTH, LAYERS, ROWS, PERIOD, RANK, RATE = 384, 4, 16, 4, 4, 0.01
OURS = {
    "powersgd": Compression("powersgd", rank=RANK), "top-k": Compression("top-k", keep=0.1),
    "random-k": Compression("random-k", keep=0.1), "int8": Compression("int8"), "one-bit": Compression("one-bit"),
}  # fmt: skip


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def hook_steps(repeats: int, seconds: float) -> dict[str, Any]:
    """Seconds of a step by each, the slowest rank's; and bytes that an exchange of ours sends, as counted and as
    computed."""
    torch.set_num_threads(1)
    comm = connect()
    mesh = Mesh(comm, dp=comm.size)
    draw = torch.Generator().manual_seed(comm.rank)
    x, y = (torch.randn(ROWS, WIDTH, generator=draw) for _ in range(2))
    ways: dict[str, Any] = {name: _way(compression) for name, compression in OURS.items()}
    period = LocalPeriod(PERIOD)
    ways |= {"uncompressed": "bucketed", "local": lambda parts: LocalUpdates(parts, period)}
    laid = {
        name: lay(network(), mesh, ParallelPlan(dp=comm.size, precision="fp32"), {}, gradients=way)
        for name, way in ways.items()
    }

    def step(name: str) -> Callable[[int], object]:
        model = laid[name]

        def run(_: int) -> None:
            model.gradients.backward((model.module(x) - y).square().sum(), ROWS * WIDTH)
            model.gradients.finish()
            with torch.no_grad():
                for parameter in model.module.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=RATE)
            model.gradients.updated()

        return run

    candidates = {name: step(name) for name in laid}
    candidates |= _torchs(x, y)
    samples = compare(candidates, timer=rank_timer(comm), repeats=repeats, warmup=3, seconds=seconds, on_error="raise")
    shapes = [tuple(parameter.shape) for parameter in network().parameters()]
    counted = {name: [wire_bytes(mesh, ways[name]), sent_bytes(how, shapes, comm.size)] for name, how in OURS.items()}
    return {
        "samples": {name: asdict(sample) for name, sample in samples.items()}, "bytes": counted,
        "whole_bytes": wire_bytes(mesh, "bucketed"),
        "parameters": sum(math.prod(shape) for shape in shapes),
    }  # fmt: skip


def wire_bytes(mesh: Mesh, way: Way | str) -> float:
    """What this rank sends in one exchange of all gradients, as its communicator counts messages where they leave. Over
    a ring, since nobody counts what a library's own collective sends."""
    plan = ParallelPlan(dp=mesh.dp.size, precision="fp32")
    gradients = lay(network(), mesh, plan, {}, gradients=way, algorithm="ring").gradients
    assert isinstance(gradients, Bucketed)
    draw = torch.Generator().manual_seed(mesh.dp.index)
    before = mesh.dp.comm.sent.nbytes
    for bucket in gradients.buckets:
        bucket.flat.normal_(generator=draw)
        handle = gradients.exchange(bucket)
        if handle is not None:
            handle.wait()
    gradients.close()
    return float(mesh.dp.comm.sent.nbytes - before)


def _way(compression: Compression) -> Way:
    return lambda parts: CompressedGradients(parts, compression)


def _torchs(x: torch.Tensor, y: torch.Tensor) -> dict[str, Callable[[int], object]]:
    """DDP alone, with PowerSGD, and with post-local SGD's hook and averager."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.nn.parallel import DistributedDataParallel

    def stepper(name: str) -> Callable[[int], object]:
        # One bucket: over gloo the callbacks of PowerSGD's hook for two may begin their sums in another order per rank.
        model = DistributedDataParallel(network(), bucket_cap_mb=100)
        averager: Any = None
        if name == "torch PowerSGD":
            state = powersgd.PowerSGDState(
                process_group=None, matrix_approximation_rank=RANK, start_powerSGD_iter=2, min_compression_rate=1
            )
            model.register_comm_hook(state, powersgd.powerSGD_hook)
        elif name == "torch PostLocalSGD":
            made_state: Any = post_local.PostLocalSGDState
            local = made_state(None, None, start_localSGD_iter=1, post_local_gradient_allreduce=False)
            model.register_comm_hook(local, post_local.post_localSGD_hook)
            averager = PeriodicModelAverager(period=PERIOD, warmup_steps=1)

        def run(_: int) -> None:
            model.zero_grad()
            ((model(x) - y).square().sum() / (ROWS * WIDTH)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=RATE)
            if averager is not None:
                averager.average_parameters(model.parameters())

        return run

    return {name: stepper(name) for name in ("torch DDP", "torch PowerSGD", "torch PostLocalSGD")}
