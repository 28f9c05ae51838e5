"""What trials of other shapes teach about a shape nobody tuned: a model of each configuration's time, and its choice.

The cost model's prediction is corrected by boosted trees, which learn where it is wrong (in log seconds) from features
of problem and configuration: the idea of AutoTVM. A fitted model travels with the package for a GPU on which trials
were taken (`tables/<gpu>.trees.json`, written by scripts/fit_matmul.py); it speaks only for the kinds of C it has
seen. Pure: no clock, no GPU, no torch.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from tilemesh.core.errors import UsageError
from tilemesh.kernels.matmul.config import TILE_KINDS, Config
from tilemesh.kernels.matmul.cost import TileRates, copy_bytes, cost, predict_s, resident
from tilemesh.kernels.matmul.problem import Problem
from tilemesh.kernels.tuning import trees
from tilemesh.kernels.tuning.table import slug

FORMAT = 1
_KINDS = ("pointer", "tma", "persistent", "split", "pingpong", "library")
_VENDORS_TILE = (128, 128, 64)  # what the library's tile is taken to be


@dataclass(frozen=True)
class Learnt:
    """A fitted model and the kinds of C that its trials had."""

    model: trees.Trees
    c_kinds: tuple[str, ...]

    def speaks_for(self, problem: Problem) -> bool:
        return (
            problem.c_kind in self.c_kinds and problem.element_bytes == 2 and 0 not in (problem.m, problem.n, problem.k)
        )

    def expected_s(self, problem: Problem, configs: Sequence[Config], rates: TileRates) -> list[float]:
        """Seconds of kernel time that each configuration should take."""
        corrections = self.model.predict([features(problem, config, rates) for config in configs])
        return [
            predict_s(problem, config, rates) * math.exp(correction)
            for config, correction in zip(configs, corrections, strict=True)
        ]


@functools.cache
def shipped(gpu: str) -> Learnt | None:
    """The model that travels with the package for this GPU, or None."""
    file = resources.files("tilemesh.kernels.matmul").joinpath("tables", f"{slug(gpu)}.trees.json")
    if not file.is_file():
        return None
    body = json.loads(file.read_text(encoding="utf-8"))
    if body.get("format") != FORMAT:
        raise UsageError(f"{file}: format {body.get('format')}, expected {FORMAT}")
    return Learnt(trees.from_dict(body["model"]), tuple(body["c_kinds"]))


def features(problem: Problem, config: Config, rates: TileRates) -> list[float]:
    """What the trees may cut by: sizes, the tile, how the tiles fill the GPU, and how the operands lie."""
    tiled = config.kind in TILE_KINDS
    block_m, block_n, block_k = (config.block_m, config.block_n, config.block_k) if tiled else _VENDORS_TILE
    rows, columns = -(-problem.m // block_m), -(-problem.n // block_n)
    split = config.split_k if config.kind == "split" else 1
    at_once = resident(config, problem.element_bytes, rates) if tiled else 1
    units = rows * columns * split
    waves = units / (rates.multiprocessors * at_once)
    steps = math.ceil(problem.k / block_k / split)
    limit, copied = cost(problem), copy_bytes(problem, config)
    padded_flops = 2 * rows * block_m * columns * block_n * problem.k
    memory_s, flops_s = limit.bytes_moved / rates.memory_bytes_per_s, padded_flops / rates.flops_per_s
    size = problem.element_bytes
    sizes = [math.log2(side) for side in (problem.m, problem.n, problem.k, problem.m * problem.n, limit.flops)]
    work = [math.log2(limit.bytes_moved), math.log2(memory_s / flops_s), math.log2(predict_s(problem, config, rates))]
    kinds = [float(config.kind == kind) for kind in _KINDS]
    tile = [math.log2(side) for side in (block_m, block_n, block_k, split, config.warps, config.group)]
    tile += [config.stages, config.c_early, config.padded, config.tail, config.uses_tma]
    filling = [math.log2(rows * columns), math.log2(units), math.log2(waves), math.ceil(waves) / waves, at_once]
    filling += [units / rates.multiprocessors, padded_flops / limit.flops, steps, math.log2(math.ceil(waves) * steps)]
    filling += [problem.m % block_m / block_m, problem.n % block_n / block_n]
    lying = [problem.a.transposed, problem.b.transposed, problem.a.tma(size), problem.b.tma(size), problem.d.tma(size)]
    lying += [side % 8 == 0 for side in (problem.m, problem.n, problem.k)]
    lying += [side % 2 == 1 for side in (problem.n, problem.k)]
    copies = [math.log2(1 + copied), copied / limit.bytes_moved]
    c = [problem.c_kind == "full", problem.c_kind == "row", config.kind == "library" and problem.epilogue_in_library]
    # Whether rows begin on lines of the L2 cache: a tile of others, which TMA fetches row by row, touches twice as
    # many.
    lines = [
        max(matrix.row_stride, matrix.column_stride) * size % 128 == 0 for matrix in (problem.a, problem.b, problem.d)
    ]
    return [float(value) for value in (*sizes, *work, *kinds, *tile, *filling, *lying, *copies, *c, *lines)]
