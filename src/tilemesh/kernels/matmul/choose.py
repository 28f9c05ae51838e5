"""What an implementation name stands for on this device: tables of tuned configurations, tuning on demand, the model.

`select` decides; this file brings it what it decides from.
"""

from __future__ import annotations

import functools

import torch

from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import device_for
from tilemesh.kernels import context
from tilemesh.kernels.launch.gpu import device_index, gpu_of
from tilemesh.kernels.matmul import learnt, select
from tilemesh.kernels.matmul.arguments import problem_of
from tilemesh.kernels.matmul.config import TILE_KINDS, Config, default
from tilemesh.kernels.matmul.cost import rates_of
from tilemesh.kernels.matmul.problem import Problem
from tilemesh.kernels.matmul.run import interpreted_default
from tilemesh.kernels.matmul.tuning import TUNING
from tilemesh.kernels.tuning.choose import should_tune, tune_mode
from tilemesh.kernels.tuning.table import TunedTable
from tilemesh.kernels.tuning.tuner import tune_now

_EVEN_ROWS = 64  # of a tile: as many as Hopper's instruction multiplies


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
    state = context.current.state("matmul")
    own, shipped = state.user_table(select.TABLES, gpu.name), state.shipped_table(select.TABLES, gpu.name)
    if may_tune(problem, own):
        own.entries[problem.key] = tune_now(TUNING, problem, device)
        state.tuned.add(problem.key)
    tables = [own] if shipped is None else [own, shipped]
    known = device_for(gpu.name)  # a GPU without figures is not judged by another's: the library where no table speaks
    rates = None if known is None else rates_of(known, problem.dtype, problem.precision)
    model = learnt.shipped(gpu.name)
    return select.choose(problem, tables, rates, model, gpu)


@functools.lru_cache(maxsize=4096)
def even(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Config:
    """For x (rows, K) times W' (K, N): tiles with which an element's bits do not follow from how many rows there are.

    All of a GPU's choices add up K in one order by one instruction, whatever their tile: those of 16 bits that the
    model learnt from trials expects to be the fastest, on a GPU that has one; else a single tile.
    """
    gpu, is_narrow = gpu_of(device_index(device)), dtype.itemsize == 2
    known, model = device_for(gpu.name), learnt.shipped(gpu.name)
    one = Config("tma" if gpu.tma else "pointer", block_k=64 if is_narrow else 32, warps=8)
    if not is_narrow or not gpu.hopper or known is None or model is None or outputs * inputs == 0:
        return one
    places = ((max(rows, _EVEN_ROWS), inputs), (outputs, inputs), (max(rows, _EVEN_ROWS), outputs))
    a, b, d = (torch.empty(place, dtype=dtype, device="meta") for place in places)
    problem = problem_of(a, b.t(), None, d, activation="none")
    ranked = select.ranked(problem, model, rates_of(known, problem.dtype), gpu)
    return next((config for config in ranked if _is_even(config)), one)


def _is_even(config: Config) -> bool:
    """Fewer rows are multiplied by another instruction, and cut sums are added up in another order."""
    return config.kind in ("tma", "persistent", "pingpong") and config.block_m >= _EVEN_ROWS and not config.tail


def may_tune(problem: Problem, table: TunedTable[Config]) -> bool:
    """Whether TILEMESH_TUNE wants this problem tuned, and now is a moment for it."""
    wanted = should_tune(problem.key, table, context.current.state("matmul").tuned)
    if not wanted or problem.keep or TUNING.refusal(problem):
        return False
    return not torch.cuda.is_current_stream_capturing()
