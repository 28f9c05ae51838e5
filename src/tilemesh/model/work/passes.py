"""What a layer does beside its products and its attention: norms, residuals, activations, casts, as bytes moved.

The one idea: the same layer moves different bytes in different code. `fused` is hand-fused training code (Megatron's);
`compiled` is torch.compile: what is elementwise joins its neighbours, the loss never leaves 16 bits; `eager` is torch
operation by operation, as our Transformer calls it: every intermediate is written and read again, every call costs.
What is one of our operators is counted by its own `cost.py`. All counts are of one rank and microbatch; those of
`compiled` were made beside a trace of its kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tilemesh.core.cost import LONG_DTYPES, Cost
from tilemesh.kernels.cross_entropy import cost as cross_entropy
from tilemesh.kernels.gated import cost as gated
from tilemesh.kernels.norm import cost as norm
from tilemesh.kernels.rotary import cost as rotary
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.task import Code


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

    @classmethod
    def of(cls, name: str, cost: Cost, launches: int = 1, kind: str = "plain") -> MemoryPass:
        """One of our operators, by its own count of bytes."""
        return cls(name, cost.bytes_moved, launches, kind=kind)


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer on one rank, in elements, and bytes of an element."""

    sequences: int
    tokens: int
    """Of all sequences in this pass."""
    width: int
    own: int
    """Query columns of this rank."""
    kv: int
    hidden: int
    first: int
    """Columns of the projections into the MLP."""
    dtype: str
    """Of a product's operands."""
    size: int
    """Its bytes."""
    stream: int
    """Bytes of an element of the residual stream: 4 under autocast."""
    split: int
    """Ranks that share what tp does not split: tp with sequence parallelism, else 1."""
    weights: int
    """Parameters of the layer's projections here, biases left out."""
    joins_qkv: bool
    """Whether compiled code makes q, k and v in one product: whole layers whose positions do not turn q and k."""

    @property
    def local(self) -> int:
        """Elements of the stream on this rank."""
        return self.tokens * self.width // self.split

    @property
    def autocast(self) -> bool:
        return self.stream != self.size

    @property
    def long_dtype(self) -> str:
        """As operators name it."""
        return LONG_DTYPES[self.dtype]


def layer_passes(model: ModelConfig, shape: LayerShape, code: Code) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """Forward and backward of one layer."""
    return {"fused": _fused, "compiled": _compiled, "eager": _eager}[code](model, shape)


def _fused(model: ModelConfig, s: LayerShape) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """Norms, bias + dropout + residual and activation in a kernel each; 16 bits throughout."""
    T, local = s.tokens, s.local * s.size
    mask = s.local if model.dropout else 0
    rows, dtype = s.tokens // s.split, s.long_dtype
    turned = [MemoryPass("rotary", _turned_bytes(model, s))] if model.positions == "rotary" else []
    # A gate's product with what it opens is one operator; another activation reads one tensor, and two on its way back.
    activation, activation_back = 2 * T * s.hidden * s.size, 3 * T * s.hidden * s.size
    if model.activation == "swiglu":
        activation = gated.cost(T, s.hidden, dtype).bytes_moved
        activation_back = gated.backward_cost(T, s.hidden, dtype).bytes_moved
    forward = [
        MemoryPass.of("norms", 2 * norm.cost(rows, s.width, dtype), 2),
        *turned,
        # Bias, dropout and residual in one kernel: reads two, writes one and the mask.
        MemoryPass("residuals", 2 * (3 * local + mask), 2),
        MemoryPass("activation", activation),
    ]
    backward = [
        MemoryPass.of("norms", 2 * norm.backward_cost(rows, s.width, dtype), 2),
        # The residual's sum reads two, writes one.
        MemoryPass(
            "residuals", 2 * 3 * local + (2 * (2 * local + mask) if model.dropout else 0), 4 if model.dropout else 2
        ),
        *turned,
        MemoryPass("activation", activation_back),
    ]
    if model.biases:  # a bias's gradient sums the output's gradient once more
        backward.append(MemoryPass("biases", T * (s.own + 2 * s.kv + s.width + s.first + s.width) * s.size, 4))
    return forward, backward


def _turned_bytes(model: ModelConfig, s: LayerShape) -> int:
    """Turning queries and keys, each by one kernel."""
    each, heads = s.tokens // s.sequences, (s.own // model.head_width, s.kv // model.head_width)
    return sum(rotary.cost(s.sequences, each, count, model.head_width, s.long_dtype).bytes_moved for count in heads)


def _compiled(model: ModelConfig, s: LayerShape) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """The residual is added where the next norm reads it; casts of the stream and of the weights are passes."""
    T, x = s.tokens, s.local
    turned = 2 * T * (s.own + s.kv) * s.size  # what our operator moves, and tables that the compiler makes anew
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


def _eager(model: ModelConfig, s: LayerShape) -> tuple[list[MemoryPass], list[MemoryPass]]:
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


@dataclass(frozen=True)
class HeadShape:
    """Sizes of the output projection and the loss on one rank."""

    tokens: int
    width: int
    rows: int
    """Of the vocabulary, this rank's."""
    columns: int
    """Of the product that makes its logits: our code rounds `rows` up where tensor cores gain by it."""
    local: int
    """Elements of the stream on this rank."""
    dtype: str
    size: int
    autocast: bool
    odd: bool
    """Rows of logits begin where tensor cores cannot load them."""


def head_passes(model: ModelConfig, s: HeadShape, code: Code) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """Final norm, the casts around the output table, and the loss."""
    casts, casts_back = _casts(model, s, code)
    loss, loss_back = _loss(s, code)
    forward = [MemoryPass("final norm", 2 * s.local * s.size), *casts, *loss]
    return forward, [*loss_back, *casts_back, MemoryPass("final norm", 3 * s.local * s.size)]


def _casts(model: ModelConfig, s: HeadShape, code: Code) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """What is done to the table behind the logits beside its products: copies in 16 bits, rows added, gradients."""
    if code == "fused":
        return [], []
    table = s.rows * s.width
    forward, backward = [], []
    if s.autocast:
        forward.append(MemoryPass("cast of the output table", table * (4 + s.size)))
        backward.append(MemoryPass("cast of the output table's gradient", table * (s.size + 4)))
    if code == "eager" and s.columns != s.rows:
        forward.append(MemoryPass("rows added to the output table", 2 * 4 * table, 2))  # compiled, the cast does it
    if model.tied:  # the gradients of its two uses are added up
        backward.append(MemoryPass("sum of the table's gradients", table * (4 if code == "compiled" else 3 * 4)))
    return forward, backward


def _loss(s: HeadShape, code: Code) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """The loss over this rank's logits."""
    logits, size = s.tokens * s.rows, s.size
    if code == "fused":
        # To fp32; maximum; exponentials and their sum.
        return [MemoryPass("loss", logits * (size + 4 + 4 + 8), 4)], [MemoryPass("loss", logits * (4 + 4 + size), 2)]
    if code == "compiled":
        odd, dtype = "odd " if s.odd else "", LONG_DTYPES[s.dtype]
        forward = [MemoryPass.of("loss", cross_entropy.cost(s.tokens, s.rows, dtype), kind=f"{odd}softmax")]
        backward = [MemoryPass.of("loss", cross_entropy.backward_cost(s.tokens, s.rows, dtype), kind=f"{odd}rows")]
        if odd:  # the gradient is written once more, into rows that tensor cores can load
            backward.append(MemoryPass("padding of the logits", logits * 2 * size, 1, kind="rows"))
        return forward, backward
    cast = logits * (size + 4) if size != 4 else 0
    # log_softmax reads and writes; backward makes a gradient of zeros, reads two and writes one.
    forward = [MemoryPass("loss", 2 * 4 * logits + cast, 4, logits)]
    backward = [MemoryPass("loss", 4 * 4 * logits + cast, 6, logits)]
    if s.columns != s.rows:  # zeros of the rounded width, and the gradient copied into them
        backward.append(MemoryPass("padding of the logits", 3 * size * logits, 2))
    return forward, backward


def embedding_passes(nbytes: int, local: int) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """Looking rows up and, backward, adding to them."""
    return [MemoryPass("embedding", 2 * nbytes + 2 * local, 3)], [MemoryPass("embedding", 3 * nbytes + 2 * local, 3)]
