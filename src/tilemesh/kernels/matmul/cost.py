"""FLOPs and bytes of the fused matmul, and the time a configuration should take.

`cost` counts what no implementation can avoid: the limit column divides it by the machine's ceiling. `predict_s` is a
model of one configuration: waves of tiles, each bound by the tensor cores, the L2 or memory, plus what a tile cannot
hide. It is written to rank configurations and to be read, not to be exact: the tuner corrects it by what it measures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilemesh.core.cost import SHORT_DTYPES, Cost
from tilemesh.core.hardware import DEVICES, Device, device_for
from tilemesh.kernels.activations.names import ACTIVATIONS
from tilemesh.kernels.matmul.config import TILE_KINDS, Config, shared_bytes
from tilemesh.kernels.matmul.problem import C_KINDS, DTYPE_BYTES, LAYOUTS, Problem, dense
from tilemesh.kernels.problems import ProblemForm, Setting
from tilemesh.kernels.rates import LAUNCH_S, SUSTAINED_FLOPS, SUSTAINED_MEMORY


@dataclass(frozen=True)
class TileRates:
    """What the model needs to know of a GPU. The fractions of peak are what well-made kernels reach, not ceilings."""

    multiprocessors: int
    flops_per_s: float
    memory_bytes_per_s: float
    l2_bytes_per_s: float
    l2_bytes: int
    shared_bytes_per_sm: int
    launch_s: float = LAUNCH_S
    tile_s: float = 0.9e-6  # filling the pipeline and writing the last tile: latency nothing overlaps


def rates_of(device: Device, dtype: str, precision: str = "tf32") -> TileRates:
    """The model's rates from a datasheet: what of its peaks is sustained."""
    short = SHORT_DTYPES[dtype]
    if short == "fp32" and precision == "tf32" and "tf32" in device.peak_flops_per_s:
        short = "tf32"
    peak = device.peak_flops_per_s.get(short, device.peak_flops_per_s["fp32"])
    return TileRates(
        multiprocessors=device.sm_count,
        flops_per_s=SUSTAINED_FLOPS * peak,
        memory_bytes_per_s=SUSTAINED_MEMORY * device.memory_bytes_per_s,
        l2_bytes_per_s=2.2 * device.memory_bytes_per_s,
        l2_bytes=device.l2_bytes,
        shared_bytes_per_sm=device.shared_bytes_per_sm,
    )


def device_or_nearest(gpu_name: str) -> Device:
    """The GPU's own figures, or an H100's for one without: good enough to rank by, never shown as a limit."""
    return device_for(gpu_name) or DEVICES["h100"]


def cost(problem: Problem, *, launches: int = 1) -> Cost:
    """What D = act(A @ B + C) cannot do without: 2MNK FLOPs, each input read once, D written once."""
    size = problem.element_bytes
    c_elements = {"none": 0, "full": problem.m * problem.n, "row": problem.n, "column": problem.m}[problem.c_kind]
    product = product_cost(1, problem.m, problem.n, problem.k, problem.dtype)
    kept = product.bytes_written if problem.keep else 0
    dtype = "tf32" if product.dtype == "fp32" and problem.precision == "tf32" else product.dtype
    read = product.bytes_read + size * c_elements
    return Cost(product.flops, read, product.bytes_written + kept, launches=launches, dtype=dtype)


def product_cost(batch: int, m: int, n: int, k: int, dtype: str = "bfloat16") -> Cost:
    """Of products and nothing else: each operand read once, each result written once."""
    size = DTYPE_BYTES[dtype]
    read, written = batch * size * (m * k + k * n), batch * size * m * n
    return Cost(2 * batch * m * n * k, read, written, launches=1, dtype=SHORT_DTYPES[dtype])


SUITE = (
    "512x512x512", "1024x1024x1024", "2048x2048x2048", "4096x4096x4096", "8192x8192x8192", "4096x11008x4096",
    "8192x8192x1024", "64x4096x4096", "16x8192x8192", "2049x2047x2051", "4096x4096x512", "128x28672x8192",
    "8192x128x8192", "3000x3000x3000",
)  # fmt: skip


def _problem(m: int, n: int, k: int, *, dtype: str, c: str, activation: str, layout: str) -> Problem:
    return dense(m, n, k, dtype=dtype, c_kind=c, activation=activation, layout=layout)


FORM = ProblemForm(
    sizes="MxNxK",
    suite=SUITE,
    settings={
        "dtype": Setting(tuple(DTYPE_BYTES), "float16"),
        "c": Setting(C_KINDS, "full"),
        "activation": Setting(ACTIVATIONS, "relu"),
        "layout": Setting(LAYOUTS, "nn", named=False),
    },
    make=_problem,
    cost=cost,
)


def copy_bytes(problem: Problem, config: Config) -> int:
    """Bytes moved to give operands aligned rows before the product: each read once and written once."""
    size = problem.element_bytes
    elements = {"a": problem.m * problem.k, "b": problem.k * problem.n}
    if config.padded:
        names = problem.slow_operands
    elif config.uses_tma:
        unread = {"a": not problem.a.tma(size), "b": not problem.b.tma(size)}
        names = [name for name in elements if unread[name] or name in config.copy]
    else:
        names = []
    return sum(2 * size * elements[name] for name in names)


def predict_s(problem: Problem, config: Config, rates: TileRates) -> float:
    """Seconds of kernel time this configuration should take."""
    if config.kind not in TILE_KINDS:
        return _library_s(problem, config, rates)
    size = problem.element_bytes
    rows, columns = -(-problem.m // config.block_m), -(-problem.n // config.block_n)
    tiles = rows * columns
    split = config.split_k if config.kind == "split" else 1
    units = tiles * split
    at_once = resident(config, size, rates)
    steps = math.ceil(problem.k / config.block_k / split)
    # One step's FLOPs on one multiprocessor, against the bytes it pulls from the L2 with all others pulling too.
    flops = 2 * config.block_m * config.block_n * config.block_k
    flops_s = flops / (rates.flops_per_s / rates.multiprocessors * _tensor_fraction(config, at_once))
    busy = min(1.0, units / rates.multiprocessors)
    loaded = (config.block_m + config.block_n) * config.block_k * size
    l2_s = loaded / (rates.l2_bytes_per_s / rates.multiprocessors) * max(busy, 0.5)
    step_s = max(flops_s, l2_s) * _pointer_slowdown(problem, config)
    fill_s = rates.tile_s * (0.5 if config.stages > 3 else 0.6)
    end_s = 0.0 if config.kind in ("persistent", "pingpong") or at_once > 1 else rates.tile_s
    if config.kind == "persistent":  # the next tile's loads overlap this one's epilogue; its products do not
        step_s += 1.8 * rates.tile_s * config.block_m * config.block_n / (128 * 128) / max(steps, 1) / at_once
    waves = units / rates.multiprocessors
    whole = _waves(config, tiles, units, rates, at_once)
    compute_s = (
        whole * (steps * step_s)
        + (whole if config.kind not in ("persistent", "pingpong") else 1) * (fill_s + end_s) / at_once
    )
    work = problem_bytes(problem)
    memory_s = work / rates.memory_bytes_per_s
    if split > 1 or config.tail:
        cut = tiles if split > 1 else tiles % rates.multiprocessors
        extra = 2 * cut * config.split_k * config.block_m * config.block_n * 4
        memory_s += extra / rates.l2_bytes_per_s + rates.launch_s + rates.tile_s
    # The copies come first: nothing else runs meanwhile.
    copied = copy_bytes(problem, config)
    copies_s = copied / rates.memory_bytes_per_s + rates.launch_s if copied else 0.0
    # Work that ends at once everywhere overlaps its memory traffic badly: the shorter the run, the less is hidden.
    overlap = 0.15 if waves > 1 else 0.35
    return rates.launch_s + copies_s + max(compute_s, memory_s) + overlap * min(compute_s, memory_s)


def _pointer_slowdown(problem: Problem, config: Config) -> float:
    """Masked pointers stall; where rows start anywhere they also load element by element (145 µs at 2049x2047x2051)."""
    size = problem.element_bytes
    if not config.uses_tma and not (problem.a.tma(size) and problem.b.tma(size)):
        return 2.6
    return 1.25 if config.kind == "pointer" else 1.0


def problem_bytes(problem: Problem) -> int:
    return cost(problem).bytes_moved


def _waves(config: Config, tiles: int, units: int, rates: TileRates, at_once: int) -> float:
    """How many tiles the busiest multiprocessor computes; programs that share one finish in steps of their share."""
    if config.tail and tiles > rates.multiprocessors:
        full, rest = divmod(tiles, rates.multiprocessors)
        return full + -(-rest * config.split_k // rates.multiprocessors) / config.split_k
    slots = rates.multiprocessors * at_once
    return float(-(-units // slots) * at_once) if units > slots else max(1.0, units / rates.multiprocessors)


def resident(config: Config, size: int, rates: TileRates) -> int:
    """Programs a multiprocessor holds at once, by shared memory and registers."""
    if config.kind in ("persistent", "pingpong"):
        return config.per_sm
    by_memory = rates.shared_bytes_per_sm // (shared_bytes(config, size) + 1024)
    accumulator = config.block_m * config.block_n // (32 * config.warps)
    by_registers = 65536 // (32 * config.warps * min(255, accumulator + 56))
    return max(1, min(by_memory, by_registers, 4))


def _tensor_fraction(config: Config, at_once: int) -> float:
    """How much of the tensor cores' rate a tile can use: small tiles and lone warp groups leave gaps."""
    if config.kind == "pingpong":
        return 1.0  # one group multiplies while the other finishes
    if config.block_m < 64:
        return 0.35
    area = config.block_m * config.block_n
    alone = 0.9 if at_once == 1 and config.warps < 8 else 1.0
    alone *= 0.87 if config.kind == "persistent" else 1.0
    return alone * (1.0 if area >= 128 * 256 else 0.92 if area >= 128 * 128 else 0.75 if area >= 64 * 128 else 0.6)


def _library_s(problem: Problem, config: Config, rates: TileRates) -> float:
    """The vendor's matmul at the rate of a good tile kernel, and the passes over D that follow it."""
    unaligned = 4.0 if problem.layout.endswith("u") and not config.padded else 1.0
    flops_s = unaligned * cost(problem).flops / rates.flops_per_s
    tile = 128 * 128
    tiles = max(1.0, problem.m * problem.n / tile)
    idle = 1.0 if tiles >= rates.multiprocessors else 1.15
    matmul_s = max(flops_s * idle, problem_bytes(problem) / rates.memory_bytes_per_s) + rates.launch_s + rates.tile_s
    moved = problem.m * problem.n * problem.element_bytes
    passes = 3 if config.kind == "library" else 5
    # A pass over what was just written finds part of it in the L2.
    rate = rates.memory_bytes_per_s * (2.0 if passes * moved < rates.l2_bytes else 1.0)
    total_s = matmul_s + passes * moved / rate + rates.launch_s * (1 if config.kind == "library" else 2)
    if config.padded:
        total_s += copy_bytes(problem, config) / rates.memory_bytes_per_s + rates.launch_s
    return total_s
