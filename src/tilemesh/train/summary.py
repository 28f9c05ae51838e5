"""What a run came to, as one JSON object: figures over all ranks, for rows, for the planner's grading, for people."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from tilemesh.core.config import to_dict
from tilemesh.measure.machine import command, commit, granted_cores, this_machine, versions
from tilemesh.measure.sample import Sample
from tilemesh.model.config import count_parameters
from tilemesh.train.explain import improvement, shares
from tilemesh.train.memory import peak_bytes
from tilemesh.train.record import Recorder

if TYPE_CHECKING:
    from tilemesh.train.loop import Loop

SCHEMA = 1
_PARTS = ("step_s", "exchange_s", "data_s", "idle_s")


def gather(loop: Loop, recorder: Recorder, baseline: int, began: float) -> dict[str, Any]:
    """The summary, on every rank (a collective call)."""
    comm, config, timing = loop.mesh.comm, loop.config, loop.timing
    peak = peak_bytes(loop.device)
    mine = np.array(
        [
            peak, baseline, _median(timing.steps), _median(timing.exchange), _median(timing.data),
            _median(timing.idle),
        ],
        np.float64,
    )  # fmt: skip
    everyone = comm.all_gather(mine[None])
    # The slowest rank counts: a step is as long as its longest.
    slowest = int(np.argmax(everyone[:, 2]))
    step_s, exchange_s, data_s, idle_s = (float(value) for value in everyone[slowest, 2:])
    parts = shares(step_s, exchange_s, data_s, idle_s)
    taken = timing.sample()
    by_operation = {f"{axis} {name}": one.seconds for (axis, name), one in recorder.moved.items() if axis != "control"}
    cluster = f"{comm.size}xlocal" if loop.device.type == "cpu" else f"{comm.size}x{_gpu()}"
    return {
        "schema": SCHEMA,
        "model": to_dict(config.model),
        "plan": config.plan.to_dict(),
        "context": config.context,
        "batch": config.batch,
        "cluster": cluster,
        "device": loop.device.type,
        "machine": this_machine().id,
        "world": comm.size,
        "backend": comm.backend,
        "cores": granted_cores(),
        "parameters": count_parameters(config.model).total,
        "step": loop.progress.step,
        "loss": loop.progress.loss,
        "held_out": loop.progress.held_out,
        "interrupted": loop.interrupted,
        "seconds": time.time() - began,
        "seconds_to_first_step": None if timing.first_step_at is None else timing.first_step_at - began,
        "step_time_s": None if taken is None else asdict(taken),
        "checkpoint_step_time_s": asdict(Sample.of(timing.checkpoint_steps)) if timing.checkpoint_steps else None,
        "failed_checkpoints": loop.writer.failures,
        "shares": asdict(parts),
        "ranks": [dict(zip(_PARTS, map(float, row[2:]), strict=True)) for row in everyone],
        "code": "compiled" if config.train.compile else "eager",
        "command": command(),
        "commit": commit(),
        "versions": versions(),
        "exchange_seconds": by_operation,
        "exchanges": loop.step_bytes,
        "peak_memory_bytes": [int(value) for value in everyone[:, 0]],
        "memory_baseline_bytes": [int(value) for value in everyone[:, 1]],
        "improve": "too few steps were timed to say"
        if taken is None
        else improvement(parts, by_operation, loop.step_bytes, ranks=comm.size, cores=granted_cores()),
    }


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")
