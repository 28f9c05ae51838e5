"""The frozen tile configuration, the space the tuner searches, and what prunes it.

A `Config` names one member of the kernel family and its tile sizes. `refusal` says why one cannot run (before
anything is launched), `space` lists what may, `default` is a sound choice where nothing was tuned.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import product
from typing import Any

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels.launch.steps import INT32_LIMIT
from tilemesh.kernels.matmul.problem import Problem

TILE_KINDS = ("pointer", "tma", "persistent", "pingpong", "split")
KINDS = (*TILE_KINDS, "library", "torch")

# What a Hopper block may use; a smaller GPU passes its own.
HOPPER_SHARED_BYTES = 227 * 1024
HOPPER_MULTIPROCESSORS = 132
REGISTERS_PER_THREAD = 255
# Beyond the accumulator a thread needs addresses, a slice of the epilogue and the loop's state.
REGISTERS_BESIDE_ACCUMULATOR = 56
MOST_BOX = 256  # of one TMA load, along each side
MOST_WARPS = 32  # of a block: 1024 threads
MOST_GRID_Y = 65535  # blocks along a grid's second side, which is where split-K's programs lie

_POWERS = ("block_m", "block_n", "block_k", "warps", "subtile")
_COUNTS = ("stages", "group", "split_k", "per_sm")
_FLAGS = (
    "c_first", "c_early", "tma_epilogue", "tma_loads", "flatten", "tail", "prefetch", "chained", "specialize", "paired",
    "padded",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """One way to compute the product. Fields that a kind does not use stay at their defaults.

    pointer: masked loads, any strides · tma: descriptor loads, one tile a program · persistent: as many programs as
    multiprocessors walk the tiles · pingpong: the same with a loading warp and two groups of warps that multiply and
    finish tiles in turn · split: `split_k` programs a tile, summed in order by a second kernel · library: the vendor's
    matmul and one fused pass · torch: three plain operators.
    """

    kind: str
    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    warps: int = 4
    stages: int = 3
    group: int = 8  # tile rows that walk the columns together, so that they meet in the L2
    split_k: int = 1
    subtile: int = 1  # parts the epilogue is cut in: less shared memory, stores that start earlier
    c_first: bool = False  # C is the accumulator's starting value instead of an addition at the end
    c_early: bool = False  # of kind tma: C is loaded to registers before the loop over K and added after it
    tma_epilogue: bool = False  # C and D move through descriptors where their layout allows
    tma_loads: bool = True  # of kind split: descriptor loads, or masked pointers
    flatten: bool = True  # of kind persistent: one pipelined loop over all tiles, so that loads run ahead
    tail: bool = False  # the last, partial wave of tiles is cut along K over all multiprocessors
    per_sm: int = 1  # of kind persistent: programs a multiprocessor
    prefetch: bool = False  # C's tile is asked into the L2 halfway through K (16-bit, full C)
    copy: str = ""  # "a", "b", "ab": copied to rows that start on a cache line even where TMA could do without
    chained: bool = True  # of a call's several kernels each is launched while the one before runs, and waits inside
    specialize: bool = False  # of kind persistent: loads in a warp group of their own
    paired: bool = False  # of kind pingpong: both groups share one tile, half of its rows each
    padded: bool = False  # of kind library: on aligned copies of unaligned operands, then a pass from padded rows to D

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("matmul kind", self.kind, KINDS)
        for name in _POWERS + _COUNTS:
            if type(getattr(self, name)) is not int:
                raise UsageError(f"config {name}={getattr(self, name)!r}: expected a whole number")
        for name in _FLAGS:
            if type(getattr(self, name)) is not bool:
                raise UsageError(f"config {name}={getattr(self, name)!r}: expected True or False")
        for name in _POWERS:
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise UsageError(f"config {name}={value}: expected a power of two")
        if self.copy not in ("", "a", "b", "ab"):
            raise UsageError(f"config copy='{self.copy}': expected '', 'a', 'b' or 'ab'")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise UsageError(f"config {name}={getattr(self, name)}: expected at least 1")

    @property
    def uses_tma(self) -> bool:
        """Whether its loads go through TMA descriptors, which GPUs before Hopper do not have."""
        return self.kind in ("tma", "persistent", "pingpong") or (self.kind == "split" and self.tma_loads)

    @property
    def label(self) -> str:
        if self.kind not in TILE_KINDS:
            return f"{self.kind} padded" if self.padded else self.kind
        parts = [self.kind, f"{self.block_m}x{self.block_n}x{self.block_k}", f"w{self.warps}", f"s{self.stages}"]
        parts.append(f"g{self.group}")
        if self.split_k > 1:
            parts.append(f"k{self.split_k}")
        if self.subtile > 1:
            parts.append(f"e{self.subtile}")
        parts += [
            name
            for name in ("c_first", "c_early", "tma_epilogue", "tail", "prefetch", "specialize", "paired")
            if getattr(self, name)
        ]
        if self.per_sm > 1:
            parts.append(f"x{self.per_sm}")
        if self.copy:
            parts.append(f"copy-{self.copy}")
        if self.kind == "split" and not self.tma_loads:
            parts.append("pointer")
        if not self.chained and (self.split_k > 1 or self.copy):
            parts.append("unchained")
        if self.kind == "persistent" and not self.flatten:
            parts.append("nested")
        return " ".join(parts)


_DEFAULTS = {f.name: None if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(Config)}


def to_dict(config: Config) -> dict[str, Any]:
    """Only what differs from the defaults, so that a cache file stays readable."""
    values = {name: getattr(config, name) for name in _DEFAULTS}
    return {name: value for name, value in values.items() if value != _DEFAULTS[name]}


def encode(config: Config) -> str:
    """As text, for an operator's argument; made of nothing that a tracing compiler could not follow."""
    return ",".join([f"{name}={value}" for name, value in to_dict(config).items()])


def decode(text: str) -> Config:
    """What `encode` wrote."""
    pairs = (part.split("=", 1) for part in text.split(","))
    read = {"True": True, "False": False}
    return from_dict({name: int(value) if value.isdigit() else read.get(value, value) for name, value in pairs})


def from_dict(values: dict[str, Any]) -> Config:
    for name in values:
        if name not in _DEFAULTS:
            raise unknown("config field", name, sorted(_DEFAULTS))
    if "kind" not in values:
        raise UsageError(f"config {values}: expected a kind, one of {', '.join(KINDS)}")
    return Config(**values)


def shared_bytes(config: Config, element_bytes: int) -> int:
    """Shared memory of the pipelined operands and of the epilogue's staging tile.

    An estimate: with `keep`, the compiler may stage Z too. What it really takes is known once compiled, and refused
    then (`FitError`).
    """
    operands = config.stages * (config.block_m + config.block_n) * config.block_k * element_bytes
    if config.kind == "pingpong":  # one tile of C and D a group, and the barriers
        tiles = config.block_m * config.block_n * (1 if config.paired else 2)
        return operands + tiles * element_bytes + 16 * (config.stages + 6)
    staging = config.block_m * config.block_n // config.subtile * element_bytes
    if config.kind == "persistent":
        # The next tile's loads are in flight while the epilogue stages this one; flattened, C and D are staged apart.
        return operands + staging * (2 if config.flatten and config.tma_epilogue else 1)
    return max(operands, staging)


def refusal(config: Config, problem: Problem, *, shared_limit: int = HOPPER_SHARED_BYTES) -> str | None:
    """Why this configuration cannot compute this problem, or None when it can."""
    if problem.slope and (config.kind != "pingpong" or problem.c_kind != "full" or problem.keep):
        return "a product times an activation's derivative needs kind pingpong, a C of D's shape, and keeps nothing"
    if config.padded and config.kind != "library":
        return "padded needs kind library"
    if config.kind not in TILE_KINDS:
        if config.padded and not problem.slow_operands:
            return "padded is for operands, or an N or K, that are not aligned to 16 bytes, and these are"
        if config.kind == "library" and problem.dtype == "float64":
            return "the fused pass computes in float32: use implementation='torch' for float64"
        return None
    if problem.dtype == "float64":
        return "the tile kernels accumulate in float32: use implementation='torch' for float64"
    if min(config.block_m, config.block_n, config.block_k) < 16:
        return f"tile {config.block_m}x{config.block_n}x{config.block_k}: a tile side is at least 16"
    if config.subtile > 4 or config.block_n // config.subtile < 16:
        return f"subtile {config.subtile} of block_n {config.block_n}: expected 1, 2 or 4 parts of at least 16 columns"
    if config.kind == "split" and config.split_k < 2:
        return "kind split needs split_k of at least 2"
    if config.kind != "split" and not config.tail and config.split_k != 1:
        return f"kind {config.kind} does not use split_k={config.split_k}: use kind split, or tail"
    if config.tail and (config.kind not in ("tma", "persistent") or config.split_k < 2):
        return "tail needs kind tma or persistent, and split_k of at least 2"
    if config.c_early and (config.kind != "tma" or config.c_first):
        return "c_early needs kind tma, and not c_first as well"
    if config.paired and config.kind != "pingpong":
        return "paired needs kind pingpong"
    if config.kind == "pingpong" and (reason := _not_pingpong(config, problem)):
        return reason
    if config.specialize and config.kind != "persistent":
        return "specialize needs kind persistent"
    if config.warps > MOST_WARPS:
        return f"{config.warps} warps, a block has at most {MOST_WARPS}"
    if config.split_k > MOST_GRID_Y:
        return f"split_k {config.split_k}, a grid has room for {MOST_GRID_Y}"
    if config.group * -(-problem.n // config.block_n) >= INT32_LIMIT:
        rows = -(-problem.m // config.block_m)
        return f"group {config.group}: tiles are counted in 32 bits, and there are only {rows} rows of them"
    threads = 32 * (8 if config.paired else config.warps)
    accumulator = config.block_m * config.block_n // threads
    held = accumulator * problem.element_bytes // 4 if config.c_early and problem.c_kind == "full" else 0
    registers = accumulator + held + REGISTERS_BESIDE_ACCUMULATOR
    if registers > REGISTERS_PER_THREAD + 1:
        return f"about {registers} registers a thread, a GPU has {REGISTERS_PER_THREAD}: more warps or a smaller tile"
    needed = shared_bytes(config, problem.element_bytes)
    if needed > shared_limit:
        return f"{needed} bytes of shared memory per block, this GPU has {shared_limit}: fewer stages or a smaller tile"
    return None


def libraries(problem: Problem) -> list[Config]:
    """The ways to leave the product to the vendor, as far as they differ for this problem."""
    ways = (Config("library"), Config("library", padded=True))
    return [config for config in ways if refusal(config, problem) is None]


def _not_pingpong(config: Config, problem: Problem) -> str | None:
    """What the two groups of warps cannot do: C and D move as whole tiles through shared memory, by TMA."""
    if problem.element_bytes != 2:
        return "kind pingpong needs float16 or bfloat16"
    rows = config.block_m // 2 if config.paired else config.block_m
    if config.warps != 4 or rows < 64:
        return f"kind pingpong needs warps=4 (of each group) and 64 rows or more a group, got {config.warps} and {rows}"
    if config.stages < 2:
        return "kind pingpong needs stages of at least 2: a stage is given back once the next product has been started"
    if max(config.block_m, config.block_n) > MOST_BOX:
        return f"tile {config.block_m}x{config.block_n}: a side of what TMA loads at once is at most {MOST_BOX}"
    moved = [problem.d] + ([problem.c] if problem.c is not None and problem.c_kind == "full" else [])
    if any(matrix.transposed or not matrix.tma(problem.element_bytes) for matrix in moved):
        return "kind pingpong needs a D and a full C of aligned rows"
    if config.tail or config.subtile != 1 or config.c_first or config.prefetch or config.per_sm != 1:
        return "kind pingpong knows neither tail, subtile, c_first, prefetch nor per_sm"
    return None


def check(config: Config, problem: Problem, *, shared_limit: int = HOPPER_SHARED_BYTES) -> None:
    reason = refusal(config, problem, shared_limit=shared_limit)
    if reason:
        raise UsageError(f"config '{config.label}' cannot compute {problem.key}: {reason}")


def default(kind: str, problem: Problem, *, multiprocessors: int = HOPPER_MULTIPROCESSORS, tma: bool = True) -> Config:
    """A sound configuration of one kind for a problem, before any tuning; `tma` is whether the GPU has it."""
    if kind not in TILE_KINDS:
        return Config(kind)
    narrow = problem.element_bytes == 2
    block_m = 16 if problem.m <= 16 else 64 if problem.m <= 64 else 128
    block_n = 128 if problem.m >= 64 else 64
    block_k = 64 if narrow else 32
    if kind == "split":
        tiles = -(-problem.m // block_m) * -(-problem.n // block_n)
        split = next((s for s in (2, 4, 8) if tiles * s >= multiprocessors // 2), 8)
        return Config(kind, block_m, block_n, block_k, 4, 4, split_k=split, tma_loads=tma, chained=tma)
    if kind == "pingpong":
        return Config(kind, 128, 128, 64, 4, 5)
    big = problem.m * problem.n >= multiprocessors * 128 * 128
    if kind == "persistent" and big and narrow:
        return Config(kind, 128, 256, 64, 8, 3, subtile=2)
    return Config(kind, block_m, block_n, block_k, 8 if block_m * block_n >= 128 * 128 else 4, 3)


def space(problem: Problem, *, shared_limit: int = HOPPER_SHARED_BYTES) -> list[Config]:
    """Every configuration worth compiling for a problem: the tuner's grid, in a fixed order.

    Tiles are cut to the problem (a 128-row tile computes nothing useful for 16 rows), split-K is offered where the
    tiles alone leave multiprocessors idle, persistent kernels where there is more than one wave.
    """
    rows = _sides(problem.m, (16, 64, 128, 256))
    columns = _sides(problem.n, (32, 64, 128, 256))
    depths = (64, 128) if problem.element_bytes == 2 else (32, 64)
    configs: list[Config] = []
    for block_m, block_n, block_k in product(rows, columns, depths):
        area = block_m * block_n
        if area < 16 * 32 or area > 128 * 256:
            continue
        warp_choices = (4,) if area < 128 * 128 else (4, 8) if area == 128 * 128 else (8,)
        tiles = -(-problem.m // block_m) * -(-problem.n // block_n)
        if tiles > 64 * HOPPER_MULTIPROCESSORS:
            continue
        # Few deep steps where a stage is large, many stages where it is small.
        depth = (2, 3) if area == 128 * 256 and block_k == depths[1] else (3, 4, 5)
        for warps, stages in product(warp_choices, depth):
            configs += _members(problem, block_m, block_n, block_k, warps, stages, tiles)
    configs += [config for config in libraries(problem) if config.padded]  # the plain one is timed beside the finalists
    return [config for config in configs if refusal(config, problem, shared_limit=shared_limit) is None]


def _members(problem: Problem, bm: int, bn: int, bk: int, warps: int, stages: int, tiles: int) -> list[Config]:
    """The family's members for one tile shape."""
    tile = (bm, bn, bk, warps, stages)
    waves = tiles / HOPPER_MULTIPROCESSORS
    members: list[Config] = []
    if waves >= 0.4:
        members += [Config("tma", *tile, tma_epilogue=True), Config("tma", *tile, c_first=True)]
        members += [Config("tma", *tile, c_early=True, tma_epilogue=True)]
    if waves > 0.9:
        subtile = 2 if bn >= 128 else 1
        members += [Config("persistent", *tile, subtile=subtile, tma_epilogue=True)]
        if problem.c_kind == "full" and bn >= 64:
            members += [Config("persistent", *tile, subtile=subtile, tma_epilogue=True, prefetch=True)]
    if waves > 0.9 and bm * bn == 128 * 128 and warps == 4:
        members += [Config("pingpong", *tile), Config("pingpong", *tile, group=4)]
    if waves <= 8 and bm * bn <= 128 * 128:
        members += [Config("pointer", *tile)]
    for split in (2, 4, 8, 16):
        if waves * split <= 4.2 and waves <= 1.05 and problem.k // (split * bk) >= 4:
            members += [Config("split", *tile, split_k=split)]
    return members


def _sides(size: int, choices: tuple[int, ...]) -> list[int]:
    """Tile sides that waste less than half, and always at least the smallest."""
    fitting = [side for side in choices if side < 2 * size]
    return fitting or [choices[0]]
