"""What a run came to, as one JSON object: figures over all ranks, for rows, for the planner's grading, for people."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from tilemesh.core.advice import improvement, step_shares
from tilemesh.core.config import to_dict
from tilemesh.core.hardware import device_for
from tilemesh.measure.machine import command, commit, granted_cores, this_machine, versions
from tilemesh.measure.sample import Sample
from tilemesh.model.work.weights import count_parameters
from tilemesh.train.memory import peak_bytes, storage_bytes
from tilemesh.train.record import CONTROL
from tilemesh.train.rules import kept_share

if TYPE_CHECKING:
    from tilemesh.train.loop import Loop

_PARTS = ("step_s", "exchange_s", "data_s", "idle_s")
KEPT = ("weights", "gradients", "optimizer", "activations")
HOW = (
    "weights, gradients, optimizer: the storage of their tensors; activations: the most that autograd kept for the "
    "backward passes of the first step, logits and cast weights included (left out for compiled code and where "
    "recomputation is by operators); other: the rest of what the rank grew by, such as temporaries, exchange buffers, "
    "snapshots and libraries"
)


def gather(loop: Loop, baseline: int, began: float, *, limit_s: float | None = None) -> dict[str, Any]:
    """The summary, on every rank (a collective call). `limit_s`: the step the machine allows, where that is known."""
    comm, config, timing = loop.mesh.comm, loop.config, loop.timing
    peak = peak_bytes(loop.device)
    mine = np.array(
        [
            peak, baseline, _median(timing.steps), _median(timing.exchange), _median(timing.data),
            _median(timing.idle), *_energy(loop), *_kept_bytes(loop),
        ],
        np.float64,
    )  # fmt: skip
    everyone = comm.all_gather(mine[None])
    # The slowest rank counts: a step is as long as its longest.
    slowest = int(np.argmax(everyone[:, 2]))
    step_s, exchange_s, data_s, idle_s = (float(value) for value in everyone[slowest, 2:6])
    shares = step_shares(step_s, exchange_s, data_s, idle_s)
    taken = timing.sample()
    method = loop.method_figures()
    # Ranks that lay nothing of the mesh: other workers beside parameter servers, and these.
    others, world = method.pop("others", []), config.ranks if config.train.method == "server" else comm.size
    by_operation = {
        f"{axis} {name}": transfers.step_seconds
        for (axis, name), transfers in loop.recorder.moved.items()
        if axis != CONTROL and transfers.step_seconds
    }
    cluster = f"{world}xlocal" if loop.device.type == "cpu" else f"{world}x{_gpu()}"
    return {
        "model": to_dict(config.model),
        "plan": config.plan.to_dict(),
        "context": config.context,
        "batch": config.batch,
        "tokens_per_step": sum(timing.tokens) / len(timing.tokens) if timing.tokens else config.tokens_per_step,
        "cluster": cluster,
        "device": loop.device.type,
        "machine": this_machine().id,
        "world": world,
        "backend": comm.backend,
        "cores": granted_cores(),
        "parameters": count_parameters(config.model).total,
        "step": loop.progress.step,
        "loss": loop.progress.loss,
        "held_out": loop.progress.held_out,
        "lora": to_dict(config.lora) if config.lora.rank else None,
        "kept_share": kept_share(config.optimizer, config.plan.precision),
        "force_balance": config.train.force_balance,
        "bits_per_byte": _bits_per_byte(loop),
        "best": None
        if loop.progress.best_step is None
        else {"step": loop.progress.best_step, "held_out": loop.progress.best_held_out},
        "ended_early": loop.ended_early,
        "interrupted": loop.interrupted,
        "resumed": loop.is_resumed,
        "seconds": time.time() - began,
        "seconds_to_first_step": None if timing.first_step_at is None else timing.first_step_at - began,
        "step_time_s": None if taken is None else asdict(taken),
        "checkpoint_step_time_s": asdict(Sample.of(timing.checkpoint_steps)) if timing.checkpoint_steps else None,
        "failed_checkpoints": loop.writer.failures,
        "saved_step": loop.saved.step,
        "saved_in": None if loop.saved.folder == loop.folder else str(loop.saved.folder.resolve()),
        "shares": shares,
        "ranks": [
            *(
                {
                    **({"name": "worker 0" + f".{rank}" * (comm.size > 1)} if others else {}),
                    **dict(zip(_PARTS, map(float, row[2:6]), strict=True)),
                }
                for rank, row in enumerate(everyone)
            ),
            *({key: other[key] for key in ("name", "is_server", *_PARTS)} for other in others),
        ],
        "code": "compiled" if config.train.compile else "eager",
        "command": command(),
        "commit": commit(),
        "versions": versions(),
        "exchange_seconds": by_operation,
        "exchange_steps": loop.steps_done,
        "exchanges": loop.step_bytes,
        "method": method,
        "peak_memory_bytes": [*map(int, everyone[:, 0]), *(int(other["peak_memory_bytes"]) for other in others)],
        "memory_baseline_bytes": [
            *map(int, everyone[:, 1]),
            *(int(other["memory_baseline_bytes"]) for other in others),
        ],
        "memory_bytes": _by_kind(everyone[:, 0] - everyone[:, 1], everyone[:, 8:]),
        "memory_how": HOW,
        "joules_per_step": _joules_per_step(everyone[:, 6:8]),
        "energy_source": loop.energy.source if timing.joule_steps else loop.energy.why_none,
        "improve": "too few steps were timed to say"
        if taken is None
        else improvement(
            shares, by_operation, loop.step_bytes, ranks=world, cores=granted_cores(),
            of_limit=None if limit_s is None else limit_s / taken.median,
        ),
    }  # fmt: skip


def _bits_per_byte(loop: Loop) -> float | None:
    """The held-out loss independent of the tokenizer: bits for each byte of text."""
    held_out, per_token = loop.progress.held_out, loop.bytes_per_token
    return None if held_out is None or not per_token else held_out / math.log(2) / per_token


def _energy(loop: Loop) -> tuple[float, float]:
    """Joules of this rank's device per ordinary step, and which device that is."""
    timing, counter = loop.timing, loop.energy.counter
    if not timing.joule_steps or counter is None:
        return math.nan, math.nan
    return timing.joules / timing.joule_steps, float(counter.device)


def _joules_per_step(ranks: np.ndarray) -> float | None:
    """Over all devices, one that several ranks share counted once; None where one was not measured."""
    if not np.isfinite(ranks).all():
        return None
    return float(sum(max(ranks[ranks[:, 1] == device, 0]) for device in set(ranks[:, 1])))


def _kept_bytes(loop: Loop) -> list[float]:
    """Bytes of this rank for each of `KEPT`; NaN for what was not seen."""
    stepper, weights = loop.stepper, [mine.tensor for mine in loop.laid.weights().values()]
    gradients, activations = stepper.gradients_bytes, stepper.activations_bytes
    return [
        storage_bytes([*weights, *loop.laid.module.buffers()]),
        math.nan if gradients is None else gradients,
        storage_bytes(loop.optimizer.kept()),
        math.nan if activations is None else activations,
    ]


def _by_kind(grown: np.ndarray, kept: np.ndarray) -> dict[str, list[int]]:
    """By kind one figure per rank; the rest of what a rank grew by is `other`. A kind that was not seen is left out."""
    seen = {kind: column for kind, column in zip(KEPT, kept.T, strict=True) if np.isfinite(column).all()}
    rest = np.maximum(0.0, grown - sum(seen.values()))
    return {kind: [int(value) for value in column] for kind, column in {**seen, "other": rest}.items()}


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def _gpu() -> str:
    """This rank's GPU by the name the planner knows it by, or else the driver's."""
    import torch

    name = torch.cuda.get_device_name()
    device = device_for(name)
    return name.lower().removeprefix("nvidia ").replace(" ", "-") if device is None else device.name
