"""Kernels of an engine's steps, compiled by other processes while its weights are read.

Which ones they are says a rehearsal of all steps: those of a few of the model's layers, without weights. It is a guess
that costs time alone where it is wrong: what is missing is compiled when it is first launched, as it would be without.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tilemesh.kernels.launch.compile_ahead import AheadCompilers, start_workers, step_job, worker_count
from tilemesh.kernels.launch.gpu import device_index, gpu_of
from tilemesh.model.fresh import give_memory
from tilemesh.model.transformer import Transformer
from tilemesh.serve.config import EngineConfig
from tilemesh.serve.device_steps import PlainCalls
from tilemesh.serve.memory import choose_limits
from tilemesh.serve.runner import Runner
from tilemesh.serve.scheduler import ServeLimits


@contextmanager
def kernels_ahead(config: EngineConfig, device: torch.device) -> Iterator[Callable[[Transformer], None]]:
    """What the block is given takes the model before its weights are there; the block's end waits for kernels."""
    count = worker_count() if device.type == "cuda" and config.prepare and not config.ranks else 0
    try:
        start_workers(count)
    except OSError:
        count = 0
    threads: list[threading.Thread] = []
    with AheadCompilers(count) as compilers:

        def foresee(model: Transformer) -> None:
            if count:
                like = copy.deepcopy(model)  # the model itself is given memory meanwhile
                threads.append(threading.Thread(target=_hand_over, args=(like, config, device, compilers), daemon=True))
                threads[0].start()

        yield foresee
        for thread in threads:
            thread.join()


def _hand_over(model: Transformer, config: EngineConfig, device: torch.device, compilers: AheadCompilers) -> None:
    try:
        longest = min(config.context or model.config.context, model.config.context)
        dtype = next(model.parameters()).dtype
        limits = choose_limits(config, model.config, dtype, longest, device, None)
        compilers.hand_over(kernel_jobs(model, limits, device, ("cuda", gpu_of(device_index(device)).arch, 32)))
    except Exception:  # whoever needs the kernels compiles them, and says what is wrong
        return


def kernel_jobs(
    model: Transformer, limits: ServeLimits, device: torch.device, target: tuple[str, int, int]
) -> list[dict[str, Any]]:
    """Of each kernel that the engine's steps need, once. The model is on the meta device, and is used up."""
    from tilemesh.kernels.launch.call import operands_of
    from tilemesh.kernels.launch.program import describe
    from tilemesh.kernels.launch.rehearsal import rehearse

    model.layers = nn.ModuleList(_different_layers(model))

    def take_steps() -> None:
        give_memory(model, device, together=True)
        runner = Runner(model.eval().requires_grad_(False), limits, device, graphs=PlainCalls())
        if runner.ahead is not None:
            runner.ahead.rehearse()

    jobs: dict[tuple[object, ...], dict[str, Any]] = {}
    for plan, places in rehearse(take_steps, device):
        operands = operands_of(plan, places)
        for step in plan.steps:
            if step.source:  # CUDA C++ is compiled where it is launched
                continue
            described = describe(step, operands)
            if described.key not in jobs:
                jobs[described.key] = step_job(step, operands, len(described.source[0].src), target)
    return list(jobs.values())


def _different_layers(model: Transformer) -> list[nn.Module]:
    """The first two, since before the second there is something to add, and one of every other kind."""
    kinds = [(model.config.window_of(number), repr(layer)) for number, layer in enumerate(model.layers)]
    return [layer for number, layer in enumerate(model.layers) if number < 2 or kinds[number] not in kinds[:number]]
