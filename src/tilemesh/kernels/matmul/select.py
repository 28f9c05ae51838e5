"""What `auto` means: which configuration computes a problem, from what was tuned, else from what the model expects.

In order: this very problem in the user's table, then in the table that travels with the package; a tuned problem of
nearly the same shape; the model learnt from trials, on a GPU that has one; the nearest tuned problem of the same kind;
the cost model, where it is sure; else the library. Pure: no clock, no GPU, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tilemesh.kernels.matmul.config import (
    HOPPER_SHARED_BYTES,
    TILE_KINDS,
    Config,
    default,
    from_dict,
    libraries,
    refusal,
    to_dict,
)
from tilemesh.kernels.matmul.cost import TileRates, predict_s
from tilemesh.kernels.matmul.learnt import Learnt
from tilemesh.kernels.matmul.portfolio import offered
from tilemesh.kernels.matmul.problem import DTYPE_BYTES, Problem
from tilemesh.kernels.tuning import choose as tuned
from tilemesh.kernels.tuning.table import Tables, TunedEntry, TunedTable

if TYPE_CHECKING:
    from tilemesh.kernels.launch.gpu import Gpu

TABLES = Tables("matmul", "tilemesh.kernels.matmul", to_dict, from_dict)

# Sum of |log2| over M, N and K within which a tuned shape speaks for another; 1 is one dim twice as long.
NEAR = 1.0
NEARLY_SAME = 0.45  # within which a tuned shape is believed before a model learnt from others
OTHER_KIND = 0.2  # added for another C kind, activation or 16-bit dtype
# The model is believed against the library only when it promises this much.
SURE = 0.85
# Up to this long a call waits for the host; aligned copies, the vendor's product and a pass are prepared one by one,
# tiles behind the same copies in one go. So there tiles that are expected to be nearly as fast are taken instead.
HOST_BOUND_S = 60e-6
NEARLY_AS_FAST = 1.1


class GpuFeatures(NamedTuple):
    """What of a GPU decides which configurations it runs, where there is no `Gpu`; by default a Hopper's."""

    tma: bool = True
    """Copies by descriptors."""
    hopper: bool = True
    """The tensor core instructions of that generation."""
    shared_bytes: int = HOPPER_SHARED_BYTES


HOPPER = GpuFeatures()


def choose(
    problem: Problem, tables: Sequence[TunedTable[Config]], rates: TileRates | None, learnt: Learnt | None = None,
    gpu: Gpu | GpuFeatures = HOPPER,
) -> Config:  # fmt: skip
    """The configuration `auto` uses. `tables` in order of trust, the user's own first; no `rates`, no model."""
    if problem.dtype == "float64":
        return Config("torch")
    known = tuned.exact(problem.key, tables, lambda config: _runs(config, problem, gpu))
    if known is not None:
        return known
    entries = [pair for table in tables for pair in table.entries.items()]
    has_model = rates is not None and learnt is not None and learnt.speaks_for(problem)
    within = NEARLY_SAME if has_model else NEAR
    known = nearest(problem, entries, gpu, within=within)
    if known is not None:
        return known
    if rates is None:
        return Config("library")
    if has_model and learnt is not None:
        return by_learnt(problem, learnt, rates, gpu)
    return by_model(problem, rates, gpu)


def nearest(
    problem: Problem, entries: Iterable[tuple[str, TunedEntry[Config]]], gpu: Gpu | GpuFeatures = HOPPER, *,
    within: float = NEAR,
) -> Config | None:  # fmt: skip
    """The configuration of the nearest tuned problem that can run this one."""

    def speaks(key: str, config: Config) -> bool:
        return _runs(config, problem, gpu) and _suits(config, problem) and not _special(config, problem, key)

    return tuned.nearest(entries, lambda key: _distance(problem, key), speaks, within)


def by_learnt(problem: Problem, learnt: Learnt, rates: TileRates, gpu: Gpu | GpuFeatures = HOPPER) -> Config:
    """The fastest of the portfolio and of the library's ways, as trials of other shapes have it."""
    pairs = _expected(problem, learnt, rates, gpu)
    fastest_s, fastest = pairs[0]
    if fastest.padded and fastest_s < HOST_BOUND_S:
        seconds, tiles = next((pair for pair in pairs if pair[1].kind != "library"), pairs[0])
        return tiles if seconds <= NEARLY_AS_FAST * fastest_s else fastest
    return fastest


def ranked(problem: Problem, learnt: Learnt, rates: TileRates, gpu: Gpu | GpuFeatures = HOPPER) -> list[Config]:
    """What is offered for this problem on this GPU, the fastest first by the learnt model."""
    return [config for _, config in _expected(problem, learnt, rates, gpu)]


def _expected(problem: Problem, learnt: Learnt, rates: TileRates, gpu: Gpu | GpuFeatures) -> list[tuple[float, Config]]:
    """The same with the seconds that each should take."""
    configs = [config for config in offered(problem) if _runs(config, problem, gpu)]
    expected = learnt.expected_s(problem, configs, rates)
    return sorted(zip(expected, configs, strict=True), key=lambda pair: pair[0])


def by_model(problem: Problem, rates: TileRates, gpu: Gpu | GpuFeatures = HOPPER) -> Config:
    """The model's choice among each kind's default, and the library unless it is clearly beaten."""
    if problem.k == 0 or DTYPE_BYTES[problem.dtype] != 2:
        return Config("library")  # float32 was not modelled; the vendor's kernels are safe there
    library = min(libraries(problem), key=lambda config: predict_s(problem, config, rates))
    defaults = [default(kind, problem, multiprocessors=rates.multiprocessors) for kind in TILE_KINDS]
    fitting = [config for config in defaults if _runs(config, problem, gpu)]
    if not fitting:
        return library
    best = min(fitting, key=lambda config: predict_s(problem, config, rates))
    sure = predict_s(problem, best, rates) < SURE * predict_s(problem, library, rates)
    return best if sure else library


def _runs(config: Config, problem: Problem, gpu: Gpu | GpuFeatures) -> bool:
    if (config.uses_tma and not gpu.tma) or (config.kind == "pingpong" and not gpu.hopper):
        return False
    return refusal(config, problem, shared_limit=gpu.shared_bytes) is None


def _suits(config: Config, problem: Problem) -> bool:
    """A neighbour's tile must not be mostly padding here, nor its share of K empty."""
    if config.kind not in TILE_KINDS:
        return True
    return config.block_m < 2 * max(problem.m, 16) and config.split_k * config.block_k <= max(problem.k, 1)


def _special(config: Config, problem: Problem, key: str) -> bool:
    """Whether a win of the library was that of its own epilogue, which other biases and activations do not have."""
    return config.kind == "library" and " row " in key and not key.endswith(f" {problem.c_kind} {problem.activation}")


def _distance(problem: Problem, key: str) -> float:
    """How far a tuned key is from a problem: infinite across layouts and element sizes."""
    try:
        shape, dtype, layout, c_kind, activation = key.split(" ")
        m, n, k = (int(side) for side in shape.split("x"))
    except ValueError:
        return math.inf
    same_size = DTYPE_BYTES.get(dtype) == problem.element_bytes and problem.element_bytes == 2
    if not same_size or layout.endswith("u") != problem.layout.endswith("u") or 0 in (m, n, k):
        return math.inf
    if 0 in (problem.m, problem.n, problem.k):
        return math.inf
    ratios = ((problem.m, m), (problem.n, n), (problem.k, k))
    apart = sum(abs(math.log2(ours / theirs)) for ours, theirs in ratios)
    others = (dtype != problem.dtype) + (c_kind != problem.c_kind) + (activation != problem.activation)
    return apart + OTHER_KIND * (others + (layout != problem.layout))
