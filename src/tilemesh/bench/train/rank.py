"""One contender of `tilemesh bench train`, on one rank: `prepare` it, then time a `block` of steps or `profile` one.

Functions that `compare.py` calls on ranks it keeps (`launch.Ranks`). What `prepare` makes (the model on this rank, its
optimizer, its place in the data) must outlive the call, and a call can return neither; so it lies in this module. That
is right here and nowhere else: a rank process serves one contender of one bench, and ends with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tilemesh.bench.profile import KernelTime, kernel_times
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
from tilemesh.train.rank import choose_device, keep_collectives, lay_model, make_optimizer, make_stepper
from tilemesh.train.record import Recorder, observe_mesh
from tilemesh.train.source import TextSource

WARM_UP_STEPS = 3

Step = Callable[[bool], float]
"""Takes a step. Told to, it gives this rank's share of the mean loss: over all ranks these add up to it."""
Batches = list[tuple[Tensor, Tensor]]
PeerStep = Callable[[Batches], Tensor]


@dataclass(frozen=True)
class RankContender:
    """What takes steps on this rank."""

    step: Step
    comm: Communicator
    device: torch.device
    baseline_bytes: int
    """What its libraries took before there was a model."""


_prepared: list[RankContender] = []  # the one of this process, once `prepare` was called


def prepare(name: str, config_toml: str) -> list[float]:
    """Make this rank of "ours" or of a peer, and take its first steps: compiling and tuning are over after them.

    Returns the losses of these steps, over the whole batch.
    """
    config = from_toml(config_toml)
    comm = connect(timeout_s=600)  # a rank that compiles keeps the others waiting for minutes
    device = choose_device(config, comm)
    make = ours if name == "ours" else peer_maker(name)
    baseline = peak_bytes(device)
    step = make(config, comm, device)
    losses = comm.all_reduce(np.array([step(True) for _ in range(WARM_UP_STEPS)]))
    _sync(device)
    comm.barrier()
    _prepared[:] = [RankContender(step, comm, device, baseline)]
    return [float(loss) for loss in losses]


def block(steps: int) -> dict[str, float]:
    """Seconds per step, from the moment all ranks are there until all are done; and the fullest rank's peak memory."""
    (prepared,) = _prepared
    reads = prepared.device.type == "cpu"  # a loop that shows its loss reads it; on a GPU most do so only now and then
    prepared.comm.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        prepared.step(reads)
    _sync(prepared.device)
    prepared.comm.barrier()
    seconds = (time.perf_counter() - began) / steps
    (peak,) = prepared.comm.max_over_ranks([float(peak_bytes(prepared.device) - prepared.baseline_bytes)])
    return {"seconds": seconds, "memory_bytes": int(peak)}


def profile() -> list[KernelTime]:
    """What a step spends its time on, as `kernel_times` tells it."""
    (prepared,) = _prepared
    return kernel_times(lambda: prepared.step(False), prepared.device)


def ours(config: TrainConfig, comm: Communicator, device: torch.device) -> Step:
    """What `tilemesh train` does in a step, its bookkeeping included."""
    recorder = Recorder(Trace(None))
    mesh = Mesh(comm, **config.plan.axes)
    keep_collectives(mesh, Choices())
    observe_mesh(mesh, recorder)
    laid = lay_model(config, mesh, device)
    optimizer = make_optimizer(config, laid, config.optimizer_kernels_on(device.type))
    nowhere = Path(os.devnull)
    writer = checkpoint.Writer(nowhere, comm.rank, ranks=comm.size, keep=1)
    source = TextSource(config, open_corpus(config.data), mesh.dp, device)
    stepper = make_stepper(config, laid, optimizer, source, recorder)
    loop = Loop(config, stepper, writer, Journal(nowhere, False, print), nowhere, lambda event: None)

    def run(reads: bool) -> float:
        loop.step()
        return loop.read()[-1].loss / comm.size if reads else 0.0

    return run


def peer_maker(name: str) -> Callable[[TrainConfig, Communicator, torch.device], Step]:
    """Who makes a peer. Its libraries are loaded here, before anybody looks at the memory, and only where they run."""
    if name in ("pipeline", "fsdp-pipeline"):
        from tilemesh.bench.train.torch_pipeline import TorchPipelineStep

        meshed = name == "fsdp-pipeline"
        return lambda config, comm, device: peer(
            TorchPipelineStep(config, comm.rank, is_meshed=meshed), config, comm, device
        )
    if name in ("eager", "compile"):
        from tilemesh.bench.train.peers import PlainStep

        compiled = name == "compile"
        return lambda config, comm, device: peer(PlainStep(config, device, compiled=compiled), config, comm, device)
    from tilemesh.bench.train.torch_zero import replicas_step

    make = replicas_step(name)
    return lambda config, comm, device: peer(make(config, device), config, comm, device)


def peer(step: PeerStep, config: TrainConfig, comm: Communicator, device: torch.device) -> Step:
    """A peer's step on the same batches as ours."""
    corpus = open_corpus(config.data)
    order = Order(corpus.train.samples(config.context), config.train.seed)
    replicas, replica = 1, 0
    if comm.size > 1:
        replicas, replica = config.plan.dp, comm.rank // config.plan.tp % config.plan.dp
    # Of a pipeline the last stage alone has a loss, and all ranks of tp have the same.
    share = 1 / (replicas * config.plan.tp) if comm.size > 1 else 1.0
    position = 0

    def fetch() -> Batches:
        nonlocal position
        share = config.batch // replicas
        accumulation = max(1, share // config.plan.microbatch)
        batches = []
        for micro in range(accumulation):
            rows = rows_of(config.batch, replicas, replica, accumulation, micro)
            samples = torch.from_numpy(batch(corpus.train, order, position, rows, config.context))
            if device.type == "cuda":
                samples = samples.pin_memory().to(device, non_blocking=True)
            batches.append((samples[:, :-1].contiguous(), samples[:, 1:].contiguous()))
        position += config.batch
        return batches

    def run(reads: bool) -> float:
        loss = step(fetch())
        return float(loss) * share if reads else 0.0

    return run


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
