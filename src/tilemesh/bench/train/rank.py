"""One contender of `tilemesh bench train`, on one rank: `prepare` it, then time a `block` of steps or `profile` one.

Functions that `bench.py` calls on ranks it keeps (`launch.Ranks`). What `prepare` makes (the model on this rank, its
optimizer, its place in the data) must outlive the call, and a call can return neither; so it lies in this module. That
is right here and nowhere else: a rank process serves one contender of one bench, and ends with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilemesh.bench.train.peers import PlainStep
from tilemesh.bench.train.torch_pipeline import TorchPipelineStep
from tilemesh.comm.connection import connect
from tilemesh.comm.runtime.choose import Choices
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.data.corpus import open_corpus
from tilemesh.data.order import Order, rows_of
from tilemesh.data.stream import batch
from tilemesh.measure.trace import Trace
from tilemesh.parallel.mesh import Mesh
from tilemesh.runs import checkpoint
from tilemesh.runs.journal import Journal
from tilemesh.train.config import TrainConfig, from_toml
from tilemesh.train.loop import Loop
from tilemesh.train.memory import peak_bytes
from tilemesh.train.rank import choose_device, keep_collectives, lay_model, make_optimizer
from tilemesh.train.record import Recorder, observe_mesh
from tilemesh.train.source import TextSource, next_token
from tilemesh.train.steps import Stepper

WARM_UP_STEPS = 3
_PROFILED_STEPS = 3


@dataclass(frozen=True)
class RankContender:
    """What takes steps on this rank."""

    step: Callable[[], float]
    comm: Communicator
    device: torch.device


_prepared: list[RankContender] = []  # the one of this process, once `prepare` was called


def prepare(name: str, config_toml: str) -> None:
    """Make this rank of "ours" or of a peer, and take its first steps: compiling and tuning are over after them."""
    config = from_toml(config_toml)
    comm = connect(timeout_s=600)  # a rank that compiles keeps the others waiting for minutes
    device = choose_device(config, comm)
    step = ours(config, comm, device) if name == "ours" else peer(name, config, comm, device)
    for _ in range(WARM_UP_STEPS):
        step()
    _sync(device)
    comm.barrier()
    _prepared[:] = [RankContender(step, comm, device)]


def block(steps: int) -> dict[str, float]:
    """Seconds per step, from the moment all ranks are there until all are done; and this rank's peak memory."""
    (one,) = _prepared
    one.comm.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        one.step()
    _sync(one.device)
    one.comm.barrier()
    seconds = (time.perf_counter() - began) / steps
    return {"seconds": seconds, "memory_bytes": peak_bytes(one.device)}


def profile() -> list[tuple[float, float, str]]:
    """What a step spends its time on, as `kernels` tells it."""
    (one,) = _prepared
    return kernels(one.step, one.device)


def ours(config: TrainConfig, comm: Communicator, device: torch.device) -> Callable[[], float]:
    """What `tilemesh train` does in a step, its bookkeeping included."""
    recorder = Recorder(Trace(None))
    mesh = Mesh(comm, **config.plan.axes)
    keep_collectives(mesh, Choices())
    observe_mesh(mesh, recorder)
    laid = lay_model(config, mesh, device)
    optimizer = make_optimizer(config, laid, config.optimizer_kernels_on(device.type))
    nowhere = Path(os.devnull)
    writer = checkpoint.Writer(nowhere, comm.rank, keep=1)
    source = TextSource(config, open_corpus(config.data), mesh.dp, device)
    stepper = Stepper(config, laid, optimizer, source, next_token(config, laid), recorder)
    loop = Loop(config, stepper, writer, Journal(nowhere, False, print), nowhere, lambda event: None)

    def run() -> float:
        loop.step()
        return loop.read()[-1][1] if device.type == "cpu" else 0.0

    return run


def peer(name: str, config: TrainConfig, comm: Communicator, device: torch.device) -> Callable[[], float]:
    """Plain PyTorch on the same batches. Only `ddp` and `pipeline` have more than one rank."""
    corpus = open_corpus(config.data)
    order = Order(corpus.train.samples(config.context), config.train.seed)
    replicas, replica = (1, 0) if name == "pipeline" else (comm.size, comm.rank)
    step: Callable[[list[tuple[Tensor, Tensor]]], Tensor]
    if name == "pipeline":
        step = TorchPipelineStep(config, comm.rank)
    else:
        step = PlainStep(config, device, compiled=name == "compile", ddp=name == "ddp")
    position = 0

    def fetch() -> list[tuple[Tensor, Tensor]]:
        nonlocal position
        share = config.batch // replicas
        accumulation = max(1, share // config.plan.microbatch)
        made = []
        for micro in range(accumulation):
            rows = rows_of(config.batch, replicas, replica, accumulation, micro)
            whole = torch.from_numpy(batch(corpus.train, order, position, rows, config.context))
            if device.type == "cuda":
                whole = whole.pin_memory().to(device, non_blocking=True)
            made.append((whole[:, :-1].contiguous(), whole[:, 1:].contiguous()))
        position += config.batch
        return made

    def run() -> float:
        loss = step(fetch())
        # A loop that shows its loss reads it; on a GPU most do so only now and then.
        return float(loss) if device.type == "cpu" else 0.0

    return run


def kernels(step: Callable[[], object], device: torch.device) -> list[tuple[float, float, str]]:
    """(seconds, calls, name) of every kernel of a step, or on a CPU of every operator, the longest first."""
    on_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as seen:
        for _ in range(_PROFILED_STEPS):
            step()
        _sync(device)
    found = []
    for event in seen.key_averages():
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        # A range that somebody named ("Optimizer.step#AdamW.step") holds kernels that are counted by themselves.
        if spent and not (on_gpu and event.is_user_annotation):
            found.append((spent * 1e-6 / _PROFILED_STEPS, event.count / _PROFILED_STEPS, event.key))
    return sorted(found, reverse=True)


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
