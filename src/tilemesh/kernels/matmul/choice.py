"""What an implementation name stands for on this device: tables of tuned configurations, tuning on demand, the model.

`select` decides; this file brings it what it decides from. TILEMESH_TUNE (never, once, always) says whether a shape
that was not tuned on this GPU may be tuned when it is first met; the default is never, so nothing ever pauses unasked.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

import torch

from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.hardware import device_for
from tilemesh.kernels.matmul import select
from tilemesh.kernels.matmul.cache import Table, load, shipped
from tilemesh.kernels.matmul.config import TILE_KINDS, Config, decode, default, encode
from tilemesh.kernels.matmul.cost import rates_of
from tilemesh.kernels.matmul.problem import Problem
from tilemesh.kernels.matmul.run import device_index, gpu_of, interpreted_default

TUNE_MODES = ("never", "once", "always")

_tuned_here: set[str] = set()
_picked: dict[str, Config] = {}  # by what `auto` came to in this process
_kept: dict[str, Config] = {}  # by what it came to in an earlier one that this one goes on with


def choose(problem: Problem, implementation: str, config: Config | None, device: torch.device) -> Config:
    """The configuration an implementation name stands for, for this problem on this device."""
    if config is not None:
        return config
    if implementation == "interpret":
        return interpreted_default(problem)
    if implementation not in ("auto", *TILE_KINDS):
        return Config(implementation)
    if device.type != "cuda":
        if implementation == "auto":
            tune_mode()  # a wrong word is refused on every machine
            return Config("torch")
        raise UsageError(
            f"implementation '{implementation}' needs CUDA tensors, got {device}: use 'auto' or 'interpret'"
        )
    gpu = gpu_of(device_index(device))
    if implementation in TILE_KINDS:
        return default(implementation, problem, multiprocessors=gpu.multiprocessors, tma=gpu.tma)
    tables = [user_table(gpu.name), *([table] if (table := shipped(gpu.name)) else [])]
    if should_tune(problem, tables[0]):
        from tilemesh.kernels.matmul.tune import tune_problem

        tables[0].entries[problem.key] = tune_problem(problem, device)
        _tuned_here.add(problem.key)
    known = device_for(gpu.name)  # a GPU without figures is not judged by another's: the library where no table speaks
    rates = None if known is None else rates_of(known, problem.dtype, problem.precision)
    return select.choose(problem, tables, rates, tma=gpu.tma, hopper=gpu.hopper, shared_limit=gpu.shared_bytes)


def picks() -> dict[str, str]:
    """What `auto` stands for in this process, by problem, as text: for whoever wants the same again later."""
    return {key: encode(config) for key, config in sorted(_picked.items())}


def keep_to(earlier: Mapping[str, str]) -> None:
    """Let `auto` stand for what it stood for in an earlier process, where this device can run that."""
    _kept.clear()
    _kept.update({key: decode(text) for key, text in earlier.items()})


def kept(problem: Problem) -> Config | None:
    return _kept.get(_name(problem))


def note(problem: Problem, config: Config) -> None:
    """`auto` stands for this now."""
    _picked[_name(problem)] = config


def _name(problem: Problem) -> str:
    return problem.key + " keep" * problem.keep


@functools.cache
def user_table(gpu: str) -> Table:
    return load(gpu, versions())


def versions() -> dict[str, str]:
    """What a tuned choice depends on besides the GPU."""
    import triton

    return {"torch": torch.__version__.split("+")[0], "triton": triton.__version__}


def tune_mode() -> str:
    mode = os.environ.get("TILEMESH_TUNE", "never")
    if mode not in TUNE_MODES:
        raise unknown("TILEMESH_TUNE", mode, TUNE_MODES)
    return mode


def should_tune(problem: Problem, table: Table) -> bool:
    """TILEMESH_TUNE: never (default) pauses for nothing, once tunes what this GPU has no entry for, always retunes."""
    mode = tune_mode()
    if mode == "never" or 0 in (problem.m, problem.n, problem.k) or problem.keep or problem.element_bytes != 2:
        return False
    if torch.cuda.is_current_stream_capturing() or problem.key in _tuned_here:
        return False
    return mode == "always" or problem.key not in table.entries
