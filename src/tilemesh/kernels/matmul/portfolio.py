"""The configurations offered for shapes nobody tuned: few enough to time and to choose among, each best somewhere.

The tuner's grid (`config.space`) has hundreds of configurations for one shape. For a shape that was never timed, a
choice is made by a model learnt from trials of other shapes (`learnt`), and that is only as good as the trials of
each configuration are many: so all shapes share these. They cover tiles from 16×32 to 128×256, every kind, and K cut
in two to sixteen. Pure.
"""

from __future__ import annotations

from tilemesh.kernels.matmul.config import Config, libraries, refusal
from tilemesh.kernels.matmul.cost import copy_bytes
from tilemesh.kernels.matmul.problem import Problem

LONGEST_WALK = 64 * 132  # tiles beyond which one smaller than 128×128 is not worth a trial

PORTFOLIO: tuple[Config, ...] = (
    # One to sixteen rows: what counts is how many bytes of B are on their way at once.
    Config("tma", 16, 32, 128, 4, 6, c_early=True),
    Config("tma", 16, 64, 128, 4, 5, c_early=True),
    Config("tma", 16, 128, 128, 4, 4, c_early=True),
    *(Config("split", 16, 64, 128, 4, 5, split_k=split) for split in (2, 4, 8, 16)),
    *(Config("split", 16, 128, 128, 4, 4, split_k=split) for split in (4, 16)),
    # Small and skinny.
    Config("tma", 64, 32, 128, 4, 5, c_early=True, tma_epilogue=True),
    Config("tma", 64, 64, 64, 4, 5, c_early=True, tma_epilogue=True),
    Config("tma", 64, 64, 128, 4, 4, c_early=True, tma_epilogue=True),
    Config("tma", 64, 128, 64, 4, 4, c_early=True, tma_epilogue=True),
    Config("tma", 64, 128, 128, 4, 4, c_early=True, tma_epilogue=True),
    Config("tma", 128, 32, 64, 4, 5, c_early=True, tma_epilogue=True),
    Config("tma", 128, 64, 64, 4, 4, c_early=True, tma_epilogue=True),
    Config("tma", 128, 64, 128, 4, 3, c_early=True, tma_epilogue=True),
    *(Config("split", 64, 32, 128, 4, 5, split_k=split) for split in (4, 16)),
    *(Config("split", 64, 64, 128, 4, 4, split_k=split) for split in (2, 4, 8, 16)),
    *(Config("split", 64, 128, 64, 4, 4, split_k=split) for split in (2, 4, 8)),
    *(Config("split", 128, 64, 64, 4, 4, split_k=split) for split in (2, 4, 8, 16)),
    *(Config("split", 128, 128, 64, 4, 4, split_k=split) for split in (2, 4, 8, 16)),
    # Middling and large.
    Config("tma", 64, 256, 64, 8, 4, tma_epilogue=True),
    Config("tma", 128, 128, 64, 4, 4, tma_epilogue=True),
    Config("tma", 128, 128, 64, 8, 4, c_early=True, tma_epilogue=True),
    Config("tma", 128, 256, 64, 8, 3, tma_epilogue=True),
    Config("tma", 128, 256, 64, 8, 3, c_early=True, tma_epilogue=True),
    Config("tma", 256, 64, 64, 8, 4, tma_epilogue=True),
    Config("tma", 256, 128, 64, 8, 3, tma_epilogue=True),
    Config("pingpong", 128, 128, 64, 4, 5),
    Config("pingpong", 128, 128, 64, 4, 5, group=4),
    Config("pingpong", 64, 256, 64, 4, 4),
    Config("pingpong", 128, 64, 64, 4, 6),
    Config("pingpong", 64, 128, 64, 4, 6),
    Config("persistent", 128, 256, 64, 8, 3, subtile=2, tma_epilogue=True),
    Config("persistent", 64, 256, 64, 8, 4, split_k=5, subtile=2, tma_epilogue=True, tail=True),
    # Any strides, any alignment: no copies are made in front of these.
    Config("pointer", 16, 64, 64, 4, 4),
    Config("pointer", 64, 64, 64, 4, 4),
    Config("pointer", 128, 64, 64, 4, 4),
    Config("pointer", 128, 128, 64, 8, 3),
    *(Config("split", 16, 64, 64, 4, 4, split_k=split, tma_loads=False) for split in (4, 16)),
    *(Config("split", 64, 64, 64, 4, 4, split_k=split, tma_loads=False) for split in (4, 16)),
)


_DEEP_TILES = ((16, 32, 64), (64, 32, 64), (64, 64, 64), (128, 64, 64))
_MULTIPROCESSORS = 132
_DEEPEST = 128  # programs that share a tile


def deep(problem: Problem) -> list[Config]:
    """K cut so often that even a few tiles fill the GPU. No copies are made in front of these, which read what a whole
    product of so few tiles reads."""
    made = []
    for block_m, block_n, block_k in _DEEP_TILES:
        tiles = -(-problem.m // block_m) * -(-problem.n // block_n)
        for split in (32, 64, _DEEPEST):
            if 16 * tiles < _MULTIPROCESSORS and tiles * split <= 2 * _MULTIPROCESSORS:
                made.append(Config("split", block_m, block_n, block_k, 4, 4, split_k=split, tma_loads=False))
    return made


def offered(problem: Problem) -> list[Config]:
    """The portfolio's members, and the library's ways, that a Hopper computes this problem by without being mostly
    padding."""
    fitting = [config for config in (*PORTFOLIO, *deep(problem)) if _sensible(config, problem)]
    ways = [*libraries(problem), *fitting]
    if min(problem.m, problem.n) == 1:  # a vector: the matrix is read once, and to copy it first is to move it thrice
        ways = [config for config in ways if not copy_bytes(problem, config)]
    return [config for config in ways if refusal(config, problem) is None]


def _sensible(config: Config, problem: Problem) -> bool:
    wide = config.block_m < 2 * max(problem.m, 16) and config.block_n < 2 * max(problem.n, 32)
    tiles = -(-problem.m // config.block_m) * -(-problem.n // config.block_n)
    if not wide or (tiles > LONGEST_WALK and config.block_m * config.block_n < 128 * 128):
        return False
    if config.kind == "split":
        return problem.k >= 2 * config.split_k * config.block_k and tiles * config.split_k <= 8 * 132
    return config.kind not in ("persistent", "pingpong") or tiles > 60
