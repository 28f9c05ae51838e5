"""One contender of `tilemesh bench train`, as one rank of its own process group: `python -m ... NAME FOLDER`.

It makes itself ready, says so, and then takes turns: a block of steps whenever the turn file names it, sleeping in
between, so that whoever's turn it is has the machine for itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from tilemesh.train.config import TrainConfig, of_run
from tilemesh.train.loop import Loop
from tilemesh.train.memory import peak_bytes
from tilemesh.train.optimizer import Optimizer
from tilemesh.train.peers import PlainStep
from tilemesh.train.rank import choose_device, keep_collectives, lay_model
from tilemesh.train.record import Recorder, observe_mesh
from tilemesh.train.source import TextSource, next_token
from tilemesh.train.steps import Stepper

TURN_FILE = "turn.json"
_LOOK_S = 0.002
WARM_UP_STEPS = 3
_PROFILED_STEPS = 3


def main(name: str, folder: Path) -> int:
    config = of_run(folder)
    comm = connect(timeout_s=600)  # a contender waits for its turn, not for a rank
    device = choose_device(config, comm)
    step = ours(config, comm, device) if name == "ours" else peer(name, config, comm, device)
    loss = 0.0
    for _ in range(WARM_UP_STEPS):
        loss = step()
    _sync(device)
    comm.barrier()
    if comm.rank == 0:
        _write(folder / f"{name}.ready", {"loss": loss})
    seen = -1
    while True:
        turn = _read(folder / TURN_FILE)
        if turn.get("name") == "":
            return 0
        if turn.get("name") != name or turn["block"] == seen:
            time.sleep(_LOOK_S)
            continue
        seen = turn["block"]
        if turn.get("profile"):
            spent = kernels(step, device)
            if comm.rank == 0:
                _write(folder / f"{name}-{seen}.done", {"kernels": spent})
            continue
        comm.barrier()
        began = time.perf_counter()
        for _ in range(turn["steps"]):
            loss = step()
        _sync(device)
        comm.barrier()
        seconds = (time.perf_counter() - began) / turn["steps"]
        if comm.rank == 0:
            found = {"seconds": seconds, "loss": loss, "memory_bytes": peak_bytes(device)}
            _write(folder / f"{name}-{seen}.done", found)


def ours(config: TrainConfig, comm: Communicator, device: torch.device) -> Callable[[], float]:
    """What `tilemesh train` does in a step, its bookkeeping included."""
    recorder = Recorder(Trace(None))
    mesh = Mesh(comm, dp=config.plan.dp, tp=config.plan.tp)
    keep_collectives(mesh, Choices())
    observe_mesh(mesh, recorder)
    laid = lay_model(config, mesh, device)
    optimizer = Optimizer(config.optimizer, laid.held, config.plan.precision)
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
    """Plain PyTorch on the same batches. Only `ddp` has more than one rank."""
    corpus = open_corpus(config.data)
    order = Order(corpus.train.samples(config.context), config.train.seed)
    step = PlainStep(config, device, compiled=name == "compile", ddp=name == "ddp")
    position = 0

    def fetch() -> list[tuple[Tensor, Tensor]]:
        nonlocal position
        share = config.batch // comm.size
        accumulation = max(1, share // config.plan.microbatch)
        made = []
        for micro in range(accumulation):
            rows = rows_of(config.batch, comm.size, comm.rank, accumulation, micro)
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


def _write(path: Path, value: dict[str, Any]) -> None:
    other = path.with_name(f".{path.name}.new")
    other.write_text(json.dumps(value))
    os.replace(other, path)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
