"""What a layer does, pass by pass: matmuls by shape, everything else by bytes; and the seconds that takes.

The one idea: a roofline per operation. A matmul takes its FLOPs at the rate its shape allows (tiles, waves, a fill per
tile) or its bytes at the memory's, whichever is longer; the rest only moves bytes; nothing is shorter than a launch.
Shapes are those of one rank; T tokens, D width, F hidden width, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from tilemesh.core.calibration import Rates
from tilemesh.core.hardware import DTYPE_BYTES, Device
from tilemesh.model.config import ModelConfig
from tilemesh.plan import constants
from tilemesh.plan.shards import kv_width_per_rank, vocabulary_per_rank


class Matmul(NamedTuple):
    name: str
    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


class Pass(NamedTuple):
    """A memory-bound operation: so many bytes read and written, in so many kernels."""

    name: str
    nbytes: int
    launches: int = 1


class FusedAttention(NamedTuple):
    """Scores, softmax and values in one kernel; half the square when causal."""

    name: str
    flops: int
    nbytes: int
    backward: bool


Op = Matmul | Pass | FusedAttention


@dataclass(frozen=True)
class Work:
    """The operations of one layer on one rank, for one microbatch."""

    forward: tuple[Op, ...]
    scores: tuple[Op, ...]
    """Of `forward`, what selective recomputation repeats."""
    backward: tuple[Op, ...]


# ---- what is done ----------------------------------------------------------------------------------------------


def layer_work(
    model: ModelConfig, tp: int, sequence_parallel: bool, microbatch: int, context: int, attention: str, dtype: str
) -> Work:
    """One layer, forward and backward."""
    size = DTYPE_BYTES[dtype]
    T, D, F = microbatch * context, model.width, model.mlp_width // tp
    own, kv = D // tp, kv_width_per_rank(model, tp)
    local = T * D * size // (tp if sequence_parallel else 1)  # bytes of the stream where tp does not split it
    mask = local // size if model.dropout else 0
    first = model.mlp_inputs * F
    scores, scores_back = _attention(model, tp, microbatch, context, attention, size)
    rotary = [Pass("rotary", 2 * T * (own + kv) * size)] if model.positions == "rotary" else []
    matmuls = [
        Matmul("q, k, v", 1, T, own + 2 * kv, D),
        Matmul("output projection", 1, T, D, own),
        Matmul("MLP in", 1, T, first, D),
        Matmul("MLP out", 1, T, D, F),
    ]
    forward: list[Op] = [
        Pass("norms", 2 * 2 * local, 2),
        *rotary,
        *matmuls,
        # Bias, dropout and residual in one kernel: reads two, writes one and the mask.
        Pass("residuals", 2 * (3 * local + mask), 2),
        Pass("activation", T * (first + F) * size),
    ]
    backward: list[Op] = [
        # Backward of a norm reads its input and the gradient, writes one; the residual's sum reads two, writes one.
        Pass("norms", 2 * 3 * local, 2),
        Pass("residuals", 2 * 3 * local + (2 * (2 * local + mask) if model.dropout else 0), 4 if model.dropout else 2),
        *rotary,
        *(Matmul(f"{op.name}, input gradient", 1, op.m, op.k, op.n) for op in matmuls),
        *(Matmul(f"{op.name}, weight gradient", 1, op.k, op.n, op.m) for op in matmuls),
        Pass("activation", T * (2 * first + F) * size),
    ]
    if model.biases:  # a bias's gradient sums the output's gradient once more
        backward.append(Pass("biases", T * (own + 2 * kv + D + first + D) * size, 4))
    return Work((*forward, *scores), tuple(scores), (*backward, *scores_back))


def _attention(
    model: ModelConfig, tp: int, microbatch: int, context: int, attention: str, size: int
) -> tuple[list[Op], list[Op]]:
    heads, d = microbatch * model.heads // tp, model.head_width
    tokens = microbatch * context
    qo, kv = tokens * model.width // tp, tokens * kv_width_per_rank(model, tp)
    if attention == "fused":
        flops = 4 * heads * context * context * d // 2
        forward = FusedAttention("fused attention", flops, (2 * qo + 2 * kv) * size, False)
        # Backward makes the scores again and then four more products where forward has two.
        return [forward], [FusedAttention("fused attention", 5 * flops // 2, (4 * qo + 4 * kv) * size, True)]
    square = heads * context * context
    mask = square if model.dropout else 0
    drop = [Pass("dropout of scores", 2 * square * size + mask)] if model.dropout else []
    products = [
        Matmul("scores", heads, context, context, d),
        Matmul("values", heads, context, d, context),
    ]
    forward_ops: list[Op] = [*products, Pass("softmax", 2 * square * size), *drop]
    backward_ops: list[Op] = [
        *(Matmul(f"{op.name}, first gradient", heads, op.m, op.k, op.n) for op in products),
        *(Matmul(f"{op.name}, second gradient", heads, op.k, op.n, op.m) for op in products),
        Pass("softmax", 3 * square * size),
        *drop,
    ]
    return forward_ops, backward_ops


def head_work(model: ModelConfig, tp: int, sequence_parallel: bool, microbatch: int, context: int, dtype: str) -> Work:
    """Final norm, logits and loss, on the last stage."""
    size = DTYPE_BYTES[dtype]
    T, D, V = microbatch * context, model.width, vocabulary_per_rank(model, tp)
    local = T * D * size // (tp if sequence_parallel else 1)
    logits = Matmul("logits", 1, T, V, D)
    forward: tuple[Op, ...] = (
        Pass("final norm", 2 * local),
        logits,
        # To fp32; maximum; exponentials and their sum.
        Pass("loss", T * V * (size + 4 + 4 + 8), 4),
    )
    backward: tuple[Op, ...] = (
        Pass("loss", T * V * (4 + 4 + size), 2),
        Matmul("logits, input gradient", 1, T, D, V),
        Matmul("logits, weight gradient", 1, D, V, T),
        Pass("final norm", 3 * local),
    )
    return Work(forward, (), backward)


def embedding_work(
    model: ModelConfig, tp: int, sequence_parallel: bool, microbatch: int, context: int, dtype: str
) -> Work:
    """Looking rows up and, backward, adding to them, on the first stage."""
    nbytes = microbatch * context * model.width * DTYPE_BYTES[dtype]
    local = nbytes // (tp if sequence_parallel else 1)
    return Work((Pass("embedding", 2 * nbytes + 2 * local, 3),), (), (Pass("embedding", 3 * nbytes + 2 * local, 3),))


# ---- how long it takes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """A device as the model sees it."""

    flops_per_s: float
    """What a large matmul sustains."""
    attention_flops_per_s: tuple[float, float]
    """What a fused attention kernel sustains, forward and backward."""
    stream_bytes_per_s: float
    launch_s: float
    processors: int
    """Streaming multiprocessors; 0 where tiles and waves do not matter."""
    element_bytes: int

    def matmul_bytes(self, op: Matmul) -> int:
        """Each operand read once, the result written once."""
        return op.batch * (op.m * op.k + op.k * op.n + op.m * op.n) * self.element_bytes

    def matmul_s(self, op: Matmul) -> float:
        compute = op.flops / (self.flops_per_s * shape_fraction(op.batch, op.m, op.n, op.k, self.processors))
        return max(compute, self.matmul_bytes(op) / self.stream_bytes_per_s, self.launch_s)

    def op_s(self, op: Op) -> float:
        if isinstance(op, Matmul):
            return self.matmul_s(op)
        if isinstance(op, Pass):
            return max(op.nbytes / self.stream_bytes_per_s, op.launches * self.launch_s)
        compute = op.flops / self.attention_flops_per_s[op.backward]
        return max(compute, op.nbytes / self.stream_bytes_per_s, self.launch_s)

    def seconds(self, ops: tuple[Op, ...]) -> float:
        return sum(map(self.op_s, ops))


def speed_of(device: Device, dtype: str, rates: Rates | None = None) -> Speed:
    """A device's speed from its datasheet and the constants, or from what was measured where it was."""
    sustained = device.peak(dtype) * constants.MATMUL_FRACTION[device.name]
    measured = rates or Rates()
    flops_per_s = measured.matmul_flops_per_s.get(dtype, sustained)
    forward, backward = constants.FUSED_ATTENTION_FRACTION[device.name]
    # A machine whose matmuls are slower or faster than expected is so in attention too.
    peak = device.peak(dtype) * flops_per_s / sustained
    return Speed(
        flops_per_s=flops_per_s,
        attention_flops_per_s=(forward * peak, backward * peak),
        stream_bytes_per_s=measured.copy_bytes_per_s or device.memory_bytes_per_s * constants.STREAM_FRACTION,
        launch_s=measured.launch_s or device.launch_s,
        processors=device.sm_count if device.kind == "gpu" else 0,
        element_bytes=DTYPE_BYTES[dtype],
    )


@functools.cache
def shape_fraction(count: int, m: int, n: int, k: int, processors: int) -> float:
    """Of the sustained rate, what a shape allows: the best tile's edges, last wave and fill.

    A wave is one tile on every multiprocessor; the last one is rarely full. Each tile spends a fixed time on filling
    its pipeline and on writing its result, as long as so many steps of k.
    """
    if not processors:
        return 1.0
    best = 0.0
    for tile_m, tile_n, rate in constants.TILES:
        tiles = count * math.ceil(m / tile_m) * math.ceil(n / tile_n)
        slots = math.ceil(tiles / processors) * processors
        best = max(best, rate * count * m * n / (slots * tile_m * tile_n))
    return best * k / (k + constants.TILE_FILL_K)
