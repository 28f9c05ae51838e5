"""What a layer does beside its matmuls and its attention: norms, residuals, activations, casts, as bytes moved.

The one idea: the same layer moves different bytes in different code. `fused` is hand-fused training code (Megatron's);
`compiled` is torch.compile: what is elementwise joins its neighbours, the loss never leaves 16 bits; `eager` is torch
operation by operation, as our Transformer calls it: every intermediate is written and read again, every call costs.
All counts are of one rank and microbatch; those of `compiled` were made beside a trace of its kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tilemesh.core.hardware import DTYPE_BYTES, Device
from tilemesh.model.config import VOCABULARY_MULTIPLE, ModelConfig
from tilemesh.plan.shards import kv_width_per_rank, vocabulary_per_rank

Code = Literal["fused", "compiled", "eager"]
ALIGNED = 8
"""Elements a row of 16-bit values must be a multiple of for tensor cores to load it whole."""


def default_code(device: Device, precision: str) -> Code:
    """What usually runs a layout: large models in 16 bits are trained with hand-fused code, GPUs with a compiler."""
    if device.kind == "cpu":
        return "eager"
    return "fused" if precision == "bf16-master" else "compiled"


class MemoryPass(NamedTuple):
    """A memory-bound operation: so many bytes read and written, in so many calls."""

    name: str
    nbytes: int
    launches: int = 1
    exponentials: int = 0
    kind: str = "plain"
    """"rows" where a sum over rows or columns is made, "softmax" where rows of exponentials are, "halves" of heads,
    "activation" where each element takes dozens of instructions (gelu), "turned" where a kernel reads either half of a
    head for each; "odd ..." where rows begin at odd addresses."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer on one rank, in elements, and bytes of an element."""

    tokens: int
    width: int
    own: int
    """Query columns of this rank."""
    kv: int
    hidden: int
    first: int
    """Columns of the projections into the MLP."""
    size: int
    """Bytes of a matmul's operand."""
    stream: int
    """Bytes of an element of the residual stream: 4 under autocast."""
    split: int
    """Ranks that share what tp does not split: tp with sequence parallelism, else 1."""
    weights: int
    """Parameters of the layer's projections here."""
    joins_qkv: bool
    """Whether compiled code makes q, k and v in one product: whole layers whose positions do not turn q and k."""

    @property
    def local(self) -> int:
        """Elements of the stream on this rank."""
        return self.tokens * self.width // self.split

    @property
    def autocast(self) -> bool:
        return self.stream != self.size


def shape_of(
    model: ModelConfig, tp: int, sequence_parallel: bool, microbatch: int, context: int, dtype: str, autocast: bool
) -> Shape:
    hidden, own, kv = model.mlp_width // tp, model.width // tp, kv_width_per_rank(model, tp)
    size = DTYPE_BYTES[dtype]
    return Shape(
        tokens=microbatch * context,
        width=model.width,
        own=own,
        kv=kv,
        hidden=hidden,
        first=model.mlp_inputs * hidden,
        size=size,
        stream=4 if autocast else size,
        split=tp if sequence_parallel else 1,
        weights=model.width * (2 * own + 2 * kv + (model.mlp_inputs + 1) * hidden),
        joins_qkv=tp == 1 and model.positions != "rotary",
    )


def layer_passes(model: ModelConfig, shape: Shape, code: Code) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """Forward and backward of one layer."""
    return {"fused": _fused, "compiled": _compiled, "eager": _eager}[code](model, shape)


def _fused(model: ModelConfig, s: Shape) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """Norms, bias + dropout + residual and activation in a kernel each; 16 bits throughout."""
    T, local = s.tokens, s.local * s.size
    mask = s.local if model.dropout else 0
    rotary = [MemoryPass("rotary", 2 * T * (s.own + s.kv) * s.size)] if model.positions == "rotary" else []
    forward = [
        MemoryPass("norms", 2 * 2 * local, 2),
        *rotary,
        # Bias, dropout and residual in one kernel: reads two, writes one and the mask.
        MemoryPass("residuals", 2 * (3 * local + mask), 2),
        MemoryPass("activation", T * (s.first + s.hidden) * s.size),
    ]
    backward = [
        # Backward of a norm reads its input and the gradient, writes one; the residual's sum reads two, writes one.
        MemoryPass("norms", 2 * 3 * local, 2),
        MemoryPass(
            "residuals", 2 * 3 * local + (2 * (2 * local + mask) if model.dropout else 0), 4 if model.dropout else 2
        ),
        *rotary,
        MemoryPass("activation", T * (2 * s.first + s.hidden) * s.size),
    ]
    if model.biases:  # a bias's gradient sums the output's gradient once more
        backward.append(MemoryPass("biases", T * (s.own + 2 * s.kv + s.width + s.first + s.width) * s.size, 4))
    return forward, backward


def _compiled(model: ModelConfig, s: Shape) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """The residual is added where the next norm reads it; casts of the stream and of the weights are passes."""
    T, x = s.tokens, s.local
    turned = 2 * T * (s.own + s.kv) * s.size
    mask = 2 * x if model.dropout else 0  # one byte a dropped element, twice a layer
    # silu and relu take few enough instructions to move their bytes as fast as a copy does.
    activation = "plain" if model.activation in ("swiglu", "relu") else "activation"
    # A norm reads the stream and what is added to it, writes the sum and the matmul's input.
    forward = [
        MemoryPass("norms and residuals", 2 * x * (2 * s.stream + 2 * s.size) + mask, 2, kind="rows"),
        MemoryPass("activation", T * (s.first + s.hidden) * s.size, kind=activation),
    ]
    backward = [
        # Reads the gradient from above, its own input and the gradient of the stream; writes the stream's.
        MemoryPass("norms and residuals", 2 * x * (s.size + 3 * s.stream) + mask, 2, kind="rows"),
        # Sums over the tokens are finished in a kernel for each gain and bias.
        MemoryPass("gradients of the norms", 0, 4 if model.norm == "layernorm" else 2),
        MemoryPass("activation", T * (2 * s.first + s.hidden) * s.size, kind=activation),
    ]
    if s.autocast:
        forward.append(MemoryPass("casts", s.weights * (4 + s.size) + 2 * x * (s.stream + s.size), 6))
        backward.append(MemoryPass("casts", s.weights * (4 + s.size), 6))
    if model.positions == "rotary":
        # Turned head by head, which is how attention's result then lies too; the products want it token by token.
        forward += [MemoryPass("rotary", turned, 2, kind="turned"), MemoryPass("heads joined", 2 * T * s.own * s.size)]
        backward += [MemoryPass("rotary", turned, 2, kind="turned"), MemoryPass("heads joined", turned, 2)]
    if s.kv < s.own:  # attention makes keys' and values' gradients for each query head, then adds up those of a group
        backward.append(MemoryPass("gradients of shared heads", 2 * T * (s.own + s.kv) * s.size, 2))
    if s.joins_qkv:  # attention hands back three gradients, the one product wants them side by side
        backward.append(MemoryPass("gradients of q, k, v joined", 2 * T * (s.own + 2 * s.kv) * s.size))
    if model.biases:
        columns = s.own + 2 * s.kv + 2 * s.width
        backward.append(MemoryPass("biases", T * columns * s.size, 5, kind="rows"))
        # The sum over the activation's gradient reads both of its factors again.
        backward.append(MemoryPass("bias of the activation", 2 * T * s.first * s.size, 1, kind="rows"))
    return forward, backward


def _eager(model: ModelConfig, s: Shape) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """One call after another, as `model/transformer.py` makes them."""
    T, x = s.tokens, s.local
    stream, qk = x * s.stream, T * (s.own + s.kv) * s.size
    hidden, first = T * s.hidden * s.size, T * s.first * s.size
    # torch's RMSNorm is square, mean, root, two products: 7 tensors moved; its backward, eleven calls, 25.
    norm, norm_back, calls, calls_back = (7, 25, 5, 11) if model.norm == "rmsnorm" else (2, 5, 1, 2)
    forward = [
        MemoryPass("norms", 2 * norm * stream, 2 * calls, kind="rows"),
        MemoryPass("residuals", 2 * 3 * stream, 2),
        MemoryPass("heads joined", 2 * T * s.own * s.size, 1),
    ]
    backward = [
        MemoryPass("norms", 2 * norm_back * stream, 2 * 2 * calls_back, kind="rows"),
        # Two sums into the stream, and the inputs' gradients of q, k, v (and of a gate) added up.
        MemoryPass("residuals", (2 + 2 + model.mlp_inputs - 1) * 3 * stream, 5),
        # Transposed operands and gradients that torch makes contiguous.
        MemoryPass("copies", 2 * T * s.own * s.size + 2 * first, 4),
    ]
    if model.positions == "rotary":
        # Two halves, each two products and a sum, then joined: nine times what is turned; backward also pads halves.
        forward.append(MemoryPass("rotary", 9 * qk, 14, kind="halves"))
        backward.append(MemoryPass("rotary", 12 * qk, 28, kind="halves"))
    if model.activation == "swiglu":
        forward.append(MemoryPass("activation", 2 * hidden + 3 * hidden, 2, T * s.hidden))
        # Two products for the two factors; the gate's derivative in six calls, one of them a sigmoid.
        backward.append(MemoryPass("activation", 6 * hidden + 15 * hidden, 2 * 8, T * s.hidden))
    else:
        exponentials = T * s.hidden if model.activation == "gelu" else 0
        forward.append(MemoryPass("activation", 2 * hidden, 1, exponentials))
        backward.append(MemoryPass("activation", 3 * hidden + (12 * hidden if exponentials else 0), 8, exponentials))
    if model.dropout:
        forward.append(MemoryPass("dropout", 2 * (2 * stream + x), 6))
        backward.append(MemoryPass("dropout", 2 * (2 * stream + x), 4))
    if model.biases:
        columns = s.own + 2 * s.kv + s.width + s.first + s.width
        backward.append(MemoryPass("biases", T * columns * s.size, 6, kind="rows"))
    if s.autocast:
        # Each projection's input and weight, and on the way back each gradient of either.
        casts = s.weights * (4 + s.size) + 2 * x * (s.stream + s.size)
        forward.append(MemoryPass("casts", casts + 2 * x * s.size, 16))
        backward.append(MemoryPass("casts", casts + 4 * x * s.stream, 16))
    # What a projection costs its caller beside the product: transposes, views, and autograd's node for each.
    forward.append(MemoryPass("calls of projections", 0, 7 + model.mlp_inputs))
    backward.append(MemoryPass("calls of projections", 0, 6 * (5 + model.mlp_inputs)))
    return forward, backward


# ---- the ends of the model -------------------------------------------------------------------------------------


def logit_columns(model: ModelConfig, tp: int, dtype: str, code: Code, gpu: bool) -> int:
    """Columns of the product that makes a rank's logits: our code rounds them up where tensor cores gain by it."""
    columns = vocabulary_per_rank(model, tp)
    if code == "fused" or not gpu or dtype == "fp64":
        return columns
    if tp == 1:
        return columns + -columns % VOCABULARY_MULTIPLE
    # Split over ranks the weight stays as it is; torch.compile pads what it must.
    return columns + -columns % ALIGNED if code == "compiled" and unaligned(columns, DTYPE_BYTES[dtype]) else columns


def head_casts(
    model: ModelConfig, tp: int, dtype: str, code: Code, gpu: bool, autocast: bool
) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """What is done to the table behind the logits beside its products: copies in 16 bits, rows added, gradients."""
    if code == "fused":
        return [], []
    size, table = DTYPE_BYTES[dtype], vocabulary_per_rank(model, tp) * model.width
    forward, backward = [], []
    if autocast:
        forward.append(MemoryPass("cast of the output table", table * (4 + size)))
        backward.append(MemoryPass("cast of the output table's gradient", table * (size + 4)))
    if code == "eager" and logit_columns(model, tp, dtype, code, gpu) != vocabulary_per_rank(model, tp):
        forward.append(MemoryPass("rows added to the output table", 2 * 4 * table, 2))  # compiled, the cast does it
    if model.tied:  # the gradients of its two uses are added up
        backward.append(MemoryPass("sum of the table's gradients", table * (4 if code == "compiled" else 3 * 4)))
    return forward, backward


def loss_passes(
    model: ModelConfig, tp: int, microbatch: int, context: int, dtype: str, code: Code, gpu: bool = True
) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """The loss over this rank's logits."""
    size, V = DTYPE_BYTES[dtype], vocabulary_per_rank(model, tp)
    logits = microbatch * context * V
    if code == "fused":
        # To fp32; maximum; exponentials and their sum.
        return [MemoryPass("loss", logits * (size + 4 + 4 + 8), 4)], [MemoryPass("loss", logits * (4 + 4 + size), 2)]
    if code == "compiled":
        # Alone, our Transformer computes logits in rows of aligned length.
        odd = "odd " if unaligned(V, size) and tp > 1 else ""
        forward = [MemoryPass("loss", logits * size, 1, kind=f"{odd}softmax")]
        backward = [MemoryPass("loss", logits * 2 * size, 1, kind=f"{odd}rows")]
        if odd:  # the gradient is written once more, into rows that tensor cores can load
            backward.append(MemoryPass("padding of the logits", logits * 2 * size, 1, kind="rows"))
        return forward, backward
    cast = logits * (size + 4) if size != 4 else 0
    # log_softmax reads and writes; backward makes a gradient of zeros, reads two and writes one.
    forward = [MemoryPass("loss", 2 * 4 * logits + cast, 4, logits)]
    backward = [MemoryPass("loss", 4 * 4 * logits + cast, 6, logits)]
    if logit_columns(model, tp, dtype, code, gpu) != V:  # zeros of the rounded width, and the gradient copied into them
        backward.append(MemoryPass("padding of the logits", 3 * size * logits, 2))
    return forward, backward


def logits_element_bytes(model: ModelConfig, tp: int, precision_bytes: int, code: Code) -> int:
    """Bytes alive for one logit at the loss's fullest moment."""
    if code == "fused":
        return 10  # as the matmul writes it, fp32 for the loss, its gradient
    if code == "compiled":
        return precision_bytes * 2  # logits and their gradient
    return 12 if precision_bytes <= 4 else 24  # log-softmax, the gradient of its result, and of its input


def unaligned(columns: int, element_bytes: int) -> bool:
    """Whether rows of so many 16-bit elements begin where tensor cores cannot load them."""
    return element_bytes == 2 and columns % ALIGNED != 0
