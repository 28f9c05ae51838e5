"""What a layer does, pass by pass: matmuls by shape, everything else by bytes; and the seconds that takes.

The one idea: a roofline per operation. A matmul takes its FLOPs at the rate its shape allows (tiles, waves, a fill per
tile, parts along k) or its bytes at the memory's, whichever is longer; the rest only moves bytes; nothing is shorter
than a launch.
Shapes are those of one rank; T tokens, D width, F hidden width, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tilemesh.core.calibration import Rates
from tilemesh.core.hardware import DTYPE_BYTES, Device
from tilemesh.model.config import ModelConfig
from tilemesh.plan import constants
from tilemesh.plan.passes import (
    Code,
    MemoryPass,
    head_casts,
    layer_passes,
    logit_columns,
    loss_passes,
    shape_of,
    unaligned,
)
from tilemesh.plan.shards import kv_width_per_rank


class Matmul(NamedTuple):
    name: str
    batch: int
    m: int
    n: int
    k: int
    backward: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


RateCurve = tuple[tuple[int, float], ...]


class FusedAttention(NamedTuple):
    """Scores, softmax and values in one kernel; half the square when causal."""

    name: str
    flops: int
    nbytes: int
    backward: bool
    head_width: int
    context: int


Op = Matmul | MemoryPass | FusedAttention


@dataclass(frozen=True)
class LayerWork:
    """The operations of one layer on one rank, for one microbatch."""

    forward: tuple[Op, ...]
    scores: tuple[Op, ...]
    """Of `forward`, what selective recomputation repeats."""
    backward: tuple[Op, ...]


# ---- what is done ----------------------------------------------------------------------------------------------


def layer_work(
    model: ModelConfig,
    tp: int,
    sequence_parallel: bool,
    microbatch: int,
    context: int,
    attention: str,
    dtype: str,
    code: Code = "fused",
    autocast: bool = False,
) -> LayerWork:
    """One layer, forward and backward."""
    size = DTYPE_BYTES[dtype]
    shape = shape_of(model, tp, sequence_parallel, microbatch, context, dtype, autocast)
    T, D, own, kv = shape.tokens, shape.width, shape.own, shape.kv
    scores, scores_back = _attention(model, tp, microbatch, context, attention, size)
    # Hand-fused code makes q, k and v in one product, and a gate with what it opens; our Transformer keeps both apart,
    # but for q, k and v that are not turned, where the whole layer is compiled.
    qkv = [Matmul("q, k, v", 1, T, own + 2 * kv, D)]
    inputs = [Matmul("MLP in", 1, T, shape.first, D)]
    if code == "eager" or (code == "compiled" and not shape.joins_qkv):
        qkv = [Matmul("q", 1, T, own, D), Matmul("k", 1, T, kv, D), Matmul("v", 1, T, kv, D)]
    if code != "fused":
        inputs = [Matmul("MLP in", 1, T, shape.hidden, D)]
        inputs += [Matmul("MLP gate", 1, T, shape.hidden, D)] if model.mlp_inputs == 2 else []
    matmuls = [*qkv, Matmul("output projection", 1, T, D, own), *inputs, Matmul("MLP out", 1, T, D, shape.hidden)]
    passes, passes_back = layer_passes(model, shape, code)
    forward: list[Op] = [*matmuls, *passes]
    backward: list[Op] = [
        *passes_back,
        *(Matmul(f"{op.name}, input gradient", 1, op.m, op.k, op.n, True) for op in matmuls),
        *(Matmul(f"{op.name}, weight gradient", 1, op.k, op.n, op.m, True) for op in matmuls),
    ]
    return LayerWork((*forward, *scores), tuple(scores), (*backward, *scores_back))


def _attention(
    model: ModelConfig, tp: int, microbatch: int, context: int, attention: str, size: int
) -> tuple[list[Op], list[Op]]:
    heads, d = microbatch * model.heads // tp, model.head_width
    tokens = microbatch * context
    qo, kv = tokens * model.width // tp, tokens * kv_width_per_rank(model, tp)
    if attention == "fused":
        flops = 4 * heads * context * context * d // 2
        forward = FusedAttention("fused attention", flops, (2 * qo + 2 * kv) * size, False, d, context)
        # Backward makes the scores again and then four more products where forward has two.
        nbytes = (4 * qo + 4 * kv) * size
        return [forward], [FusedAttention("fused attention", 5 * flops // 2, nbytes, True, d, context)]
    square = heads * context * context
    mask = square if model.dropout else 0
    drop = [MemoryPass("dropout of scores", 2 * square * size + mask)] if model.dropout else []
    products = [
        Matmul("scores", heads, context, context, d),
        Matmul("values", heads, context, d, context),
    ]
    forward_ops: list[Op] = [*products, MemoryPass("softmax", 2 * square * size), *drop]
    backward_ops: list[Op] = [
        *(Matmul(f"{op.name}, first gradient", heads, op.m, op.k, op.n) for op in products),
        *(Matmul(f"{op.name}, second gradient", heads, op.k, op.n, op.m) for op in products),
        MemoryPass("softmax", 3 * square * size),
        *drop,
    ]
    return forward_ops, backward_ops


def head_work(
    model: ModelConfig,
    tp: int,
    sequence_parallel: bool,
    microbatch: int,
    context: int,
    dtype: str,
    code: Code = "fused",
    autocast: bool = False,
    gpu: bool = True,
) -> LayerWork:
    """Final norm, logits and loss, on the last stage."""
    size = DTYPE_BYTES[dtype]
    T, D, V = microbatch * context, model.width, logit_columns(model, tp, dtype, code, gpu)
    local = T * D * size // (tp if sequence_parallel else 1)
    loss, loss_back = loss_passes(model, tp, microbatch, context, dtype, code, gpu)
    casts, casts_back = head_casts(model, tp, dtype, code, gpu, autocast)
    forward: tuple[Op, ...] = (MemoryPass("final norm", 2 * local), *casts, Matmul("logits", 1, T, V, D), *loss)
    backward: tuple[Op, ...] = (
        *loss_back,
        Matmul("logits, input gradient", 1, T, D, V, True),
        Matmul("logits, weight gradient", 1, D, V, T, True),
        *casts_back,
        MemoryPass("final norm", 3 * local),
    )
    return LayerWork(forward, (), backward)


def embedding_work(
    model: ModelConfig, tp: int, sequence_parallel: bool, microbatch: int, context: int, dtype: str
) -> LayerWork:
    """Looking rows up and, backward, adding to them, on the first stage."""
    nbytes = microbatch * context * model.width * DTYPE_BYTES[dtype]
    local = nbytes // (tp if sequence_parallel else 1)
    return LayerWork(
        (MemoryPass("embedding", 2 * nbytes + 2 * local, 3),), (), (MemoryPass("embedding", 3 * nbytes + 2 * local, 3),)
    )


# ---- how long it takes -----------------------------------------------------------------------------------------


class AttentionRates(NamedTuple):
    """What a fused attention kernel sustains: FLOP/s by head width for either pass, and how short sequences lose."""

    forward: tuple[tuple[int, float], ...]
    backward: tuple[tuple[int, float], ...]
    fill_tokens: tuple[int, int] = (0, 0)
    """Tokens of a sequence that take as long again: blocks on the diagonal half used, and what precedes the loop."""

    def rate(self, backward: bool, head_width: int, context: int) -> float:
        known = self.backward if backward else self.forward
        _, rate = min(known, key=lambda pair: (abs(pair[0] - head_width), pair[0]))
        return rate / (1 + self.fill_tokens[backward] / context)


@dataclass(frozen=True)
class Speed:
    """A device as the model sees it."""

    flops_per_s: float
    """What a large matmul sustains."""
    attention: AttentionRates
    stream_bytes_per_s: float
    elementwise_bytes_per_s: float
    """Of tensors of a layer's size: on a CPU caches and allocation make it another figure than the memory's."""
    exponentials_per_s: float
    kinds_bytes_per_s: Mapping[str, float]
    """By a pass's kind, where that was measured apart."""
    narrow: tuple[RateCurve, RateCurve]
    """Of the sustained rate, what products reach by their smallest dim, forward and backward; empty: all of it."""
    launch_s: float
    processors: int
    """Streaming multiprocessors; 0 where tiles and waves do not matter."""
    tiles: constants.Tiles
    element_bytes: int
    waits: bool
    """The caller waits for each operation (a CPU), so its launch adds to the work instead of hiding behind it."""
    pads: bool
    """Rows of unaligned length are padded before they reach a matmul."""

    def matmul_bytes(self, op: Matmul) -> int:
        """Each operand read once, the result written once."""
        return op.batch * (op.m * op.k + op.k * op.n + op.m * op.n) * self.element_bytes

    def matmul_s(self, op: Matmul) -> float:
        fraction, splits = shape_fraction(op.batch, op.m, op.n, op.k, self.processors, self.tiles)
        awkward = unaligned(op.n, self.element_bytes) or unaligned(op.k, self.element_bytes)
        if awkward and self.processors and not self.pads:
            fraction = min(fraction, constants.UNALIGNED_FRACTION)
        compute = op.flops / (self.flops_per_s * fraction * narrow_fraction(self.narrow[op.backward], op))
        # Parts of a split product are written in fp32 and read again to be summed.
        partial = 2 * 4 * splits * op.batch * op.m * op.n / self.stream_bytes_per_s if splits > 1 else 0.0
        return self._with_launches(max(compute + partial, self.matmul_bytes(op) / self.stream_bytes_per_s), 1)

    def op_s(self, op: Op) -> float:
        if isinstance(op, Matmul):
            return self.matmul_s(op)
        if isinstance(op, MemoryPass):
            rate = self.kinds_bytes_per_s.get(op.kind, self.elementwise_bytes_per_s)
            moving = op.nbytes / (rate * constants.PASS_FRACTION[self.waits][op.kind])
            return self._with_launches(moving + op.exponentials / self.exponentials_per_s, op.launches)
        compute = op.flops / self.attention.rate(op.backward, op.head_width, op.context)
        return self._with_launches(max(compute, op.nbytes / self.stream_bytes_per_s), 1)

    def _with_launches(self, busy_s: float, launches: int) -> float:
        return busy_s + launches * self.launch_s if self.waits else max(busy_s, launches * self.launch_s)

    def seconds(self, ops: tuple[Op, ...]) -> float:
        return sum(map(self.op_s, ops))


def speed_of(device: Device, dtype: str, rates: Rates | None = None, code: Code = "fused") -> Speed:
    """A device's speed from its datasheet and the constants, or from what was measured where it was."""
    sustained = device.peak(dtype) * constants.MATMUL_FRACTION[device.name]
    measured = rates or Rates()
    flops_per_s = measured.matmul_flops_per_s.get(dtype, sustained)
    stream = measured.copy_bytes_per_s or device.memory_bytes_per_s * constants.STREAM_FRACTION
    cpu = device.kind == "cpu"
    # A CPU without a figure of its own: a vectorised exponential takes about as long as so many multiply-adds.
    exponentials = measured.exponentials_per_s or (flops_per_s / constants.EXPONENTIAL_FLOPS if cpu else math.inf)
    return Speed(
        flops_per_s=flops_per_s,
        # A machine whose matmuls are slower or faster than expected is so in attention too.
        attention=_attention_speed(device, device.peak(dtype) * flops_per_s / sustained, measured, code),
        stream_bytes_per_s=stream,
        elementwise_bytes_per_s=measured.elementwise_bytes_per_s or stream,
        exponentials_per_s=exponentials,
        kinds_bytes_per_s={
            kind: rate
            for kind, rate in (("rows", measured.rows_bytes_per_s), ("halves", measured.halves_bytes_per_s))
            if rate is not None
        },
        narrow=_narrow(measured),
        launch_s=measured.operation_s or measured.launch_s or device.launch_s,
        processors=0 if cpu else device.sm_count,
        tiles=constants.HOPPER_TILES if device.capability >= (9, 0) and code != "fused" else constants.TILES,
        element_bytes=DTYPE_BYTES[dtype],
        waits=cpu,
        pads=code != "eager",
    )


PEAK_WIDTH = 1024
"""From this smallest dim on a product runs at the rate of the peak, which is measured there."""


def _narrow(measured: Rates) -> tuple[RateCurve, RateCurve]:
    """Measured rates of narrow products, as fractions of the measured peak, so that they hold for any dtype."""
    peak = measured.matmul_flops_per_s.get("fp32")
    found: dict[str, list[tuple[int, float]]] = {"forward": [], "backward": []}
    for key, rate in measured.projection_flops_per_s.items() if peak else ():
        name, _, width = key.partition("-")
        found[name].append((int(width), rate / (peak or 1.0)))
    curves = (tuple(sorted(points)) for points in (found["forward"], found["backward"]))
    forward, backward = ((*points, (PEAK_WIDTH, 1.0)) if points else () for points in curves)
    return forward, backward


def narrow_fraction(curve: RateCurve, op: Matmul) -> float:
    """Between measured widths in a line over the width's logarithm; beyond them as at the ends."""
    width = min(op.m, op.n, op.k)
    if not curve or width >= curve[-1][0]:
        return 1.0
    if width <= curve[0][0]:
        return curve[0][1]
    (x0, y0), (x1, y1) = next(pair for pair in itertools.pairwise(curve) if pair[0][0] <= width < pair[1][0])
    return y0 + (y1 - y0) * math.log(width / x0) / math.log(x1 / x0)


def _attention_speed(device: Device, peak: float, measured: Rates, code: Code) -> AttentionRates:
    if measured.attention_flops_per_s:
        passes: dict[str, list[tuple[int, float]]] = {"forward": [], "backward": []}
        for key, rate in measured.attention_flops_per_s.items():
            name, _, width = key.partition("-")
            passes[name].append((int(width), rate))
        return AttentionRates(tuple(sorted(passes["forward"])), tuple(sorted(passes["backward"])))
    known = constants.TORCH_ATTENTION_FRACTION.get(device.name)
    if known is None or code == "fused":
        forward, backward = constants.FUSED_ATTENTION_FRACTION[device.name]
        return AttentionRates(((128, forward * peak),), ((128, backward * peak),))
    return AttentionRates(
        tuple((width, forward * peak) for width, (forward, _) in known.items()),
        tuple((width, backward * peak) for width, (_, backward) in known.items()),
        constants.TORCH_ATTENTION_FILL,
    )


@functools.cache
def shape_fraction(
    count: int, m: int, n: int, k: int, processors: int, choice: constants.Tiles = constants.TILES
) -> tuple[float, int]:
    """Of the sustained rate, what a shape allows (the best tile's edges, last wave and fill), and into how many parts
    its k is split.

    A wave is one tile on every multiprocessor; the last one is rarely full. Each tile spends a fixed time on filling
    its pipeline and on writing its result, as long as so many steps of k. A result of fewer tiles than multiprocessors
    (a narrow layer's weight gradient) is computed in parts along k, so that all have work.
    """
    if not processors:
        return 1.0, 1
    best = (0.0, 1)
    for tile_m, tile_n, rate in choice:
        tiles = count * math.ceil(m / tile_m) * math.ceil(n / tile_n)
        for splits in range(1, max(1, min(processors // tiles, k // constants.LEAST_SPLIT_K)) + 1):
            slots = math.ceil(tiles * splits / processors) * processors
            used = rate * splits * count * m * n / (slots * tile_m * tile_n)
            own_k = k / splits
            # Fewer parts among equals: each part's result is written and read.
            best = max(best, (used * own_k / (own_k + constants.TILE_FILL_K), splits), key=lambda b: (b[0], -b[1]))
    return best
