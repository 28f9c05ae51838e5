"""What a layer does beside its products and its attention: norms, residuals, activations, casts, as bytes moved.

The one idea: the same layer moves different bytes in different code. `fused` is hand-fused training code (Megatron's);
`compiled` is torch.compile: what is elementwise joins its neighbours, the loss never leaves 16 bits; `eager` is torch
operation by operation, as our Transformer calls it: every intermediate is written and read again, every call costs.
What is one of our operators is counted by its own `cost.py`. All counts are of one rank and microbatch; those of
`compiled` were made beside a trace of its kernels.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from tilemesh.core.cost import LONG_DTYPES, Cost
from tilemesh.kernels.cross_entropy import cost as cross_entropy
from tilemesh.kernels.gated import cost as gated
from tilemesh.kernels.norm import cost as norm
from tilemesh.kernels.rotary import cost as rotary
from tilemesh.model.config import VOCABULARY_MULTIPLE, ModelConfig
from tilemesh.model.work.routing import busiest_rows, hidden_elements, sent_rows
from tilemesh.model.work.task import ALIGNED, Task, unaligned
from tilemesh.model.work.weights import Weight, is_wide_for_fp8, layer_matrices, output_weight


class MemoryPass(NamedTuple):
    """A memory-bound operation: so many bytes read and written, in so many calls."""

    name: str
    nbytes: int
    launches: int = 1
    exponentials: int = 0
    kind: str = "plain"
    """"rows" where a sum over rows or columns is made, "softmax" where rows of exponentials are, "halves" of heads,
    "activation" where each element takes dozens of instructions (gelu), "turned" where a kernel reads either half of a
    head for each; "gathered" where rows come by their numbers; "odd ..." where rows begin at odd addresses."""

    @classmethod
    def of(cls, name: str, cost: Cost, launches: int = 1, kind: str = "plain") -> MemoryPass:
        """One of our operators, by its own count of bytes."""
        return cls(name, cost.bytes_moved, launches, kind=kind)


def _columns(model: ModelConfig, task: Task) -> tuple[int, int, int, int]:
    """On this rank: columns of the queries, of the keys, of the MLP (of what a token passes of it), and elements of all
    of the layer's matrices."""
    matrices = layer_matrices(model)
    own, kv = (max(1, heads // task.tp) * model.head_width for heads in (model.heads, model.kv_heads))
    inner = -(-hidden_elements(model, task) // (task.tp * task.tokens))
    routed = sum(math.prod(weight.shape(task.ranks_per_expert)) for weight in matrices if weight.is_routed) // task.ep
    return own, kv, inner, routed + sum(math.prod(w.shape(task.tp)) for w in matrices if not w.is_routed)


def _stream_elements(model: ModelConfig, task: Task) -> int:
    """Of the residual stream on this rank."""
    return task.tokens * model.width // task.split


def joins_qkv(model: ModelConfig, task: Task) -> bool:
    """Whether compiled code makes q, k and v in one product: whole layers whose positions do not turn q and k."""
    return task.tp == 1 and model.positions != "rotary"


def product_weights(model: ModelConfig, task: Task) -> list[list[Weight]]:
    """The matrices of each of a layer's products, in their order. Hand-fused code makes q, k and v in one product, and
    a gate with what it opens; our Transformer keeps both apart, but for q, k and v that are not turned, where the whole
    layer is compiled."""
    joined = {"fused": ("attention", "mlp"), "compiled": ("attention",) if joins_qkv(model, task) else (), "eager": ()}
    products: list[list[Weight]] = []
    matrices = [weight for weight in layer_matrices(model) if weight.expert == 0]  # which stands for the others
    for (block, *_), group in itertools.groupby(matrices, key=lambda each: (each.block, each.split, each.inputs)):
        weights = list(group)
        products += [weights] if block in joined[task.code] else [[weight] for weight in weights]
    return products


def layer_passes(model: ModelConfig, task: Task) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """Forward and backward of one layer."""
    forward, backward = {"fused": _fused, "compiled": _compiled, "eager": _eager}[task.code](model, task)
    if task.is_fp8:
        there, back = _narrowed(model, task)
        forward, backward = [*forward, there], [*backward, back]
    if not model.experts:
        return forward, backward
    routed, routed_back = _routed(model, task)
    return [*forward, *routed], [*backward, *routed_back]


def _routed(model: ModelConfig, task: Task) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """Rows to their experts' order and back, where each token's are added; those that come from other ranks once more.
    Scores and their softmax are made in float32 at least."""
    sent, arrived, apart = sent_rows(model, task), busiest_rows(model, task), task.tp // task.ranks_per_expert
    row, scores = model.width * task.size, 4 * task.tokens // apart * model.experts * task.wide
    if task.gpu or task.code != "eager":
        moved = task.tokens // apart + sent + (2 * arrived if task.ep > 1 else 0)
        both = [MemoryPass("rows to experts and back", 2 * moved * row, 4), MemoryPass("routing", scores, 6)]
        return both, both
    # Each gathering reads and writes; joined experts' results are copied, weighed ones written, read and added.
    gathered = 2 * (2 * sent + (2 * arrived if task.ep > 1 else 0)) * row
    joined, calls = (2 * arrived + 4 * sent) * row, model.experts // task.ep * (1 + model.mlp_inputs)
    rows = MemoryPass("rows to experts and back", gathered, 14, kind="gathered")
    weighed = MemoryPass("results joined and weighed", joined, 6)
    there = [rows, weighed, MemoryPass("routing", scores, 16 + calls)]
    return there, [rows, weighed, MemoryPass("routing", scores, 8 + calls)]


CAST_BYTES = {"fused": 6, "compiled": 10, "eager": 10}
"""Bytes moved for an element cast to 8 bits with a scale of its tensor. COUNTED of hand-fused kernels: read for the
largest value, read again, written twice, once transposed. MEASURED of torch.compile's on an H200 with 16,384 tokens
(2048 x 5632, 3072 x 8192, 4096 x 14336, 4096 x 4096; products alone taken off): 9.7, 12.4, 8.9, 10."""


def _narrowed(model: ModelConfig, task: Task) -> tuple[MemoryPass, MemoryPass]:
    """Casts to 8 bits: forward of what goes into products, once for those with one input, and of the weights, which
    hand-fused code casts once for all microbatches; backward of their results' gradients."""
    entering = leaving = 0
    matrices = [weight for weight in layer_matrices(model) if weight.expert == 0]
    for (_, _, is_routed), group in itertools.groupby(matrices, key=lambda w: (w.block, w.split, w.is_routed)):
        tp, rows = (task.ranks_per_expert, busiest_rows(model, task)) if is_routed else (task.tp, task.tokens)
        weights = list(group)
        width = sum(weight.outputs for weight in weights)
        if not is_routed and not is_wide_for_fp8(width, weights[0].inputs, task.fp8_scales):
            continue
        shapes = [weight.shape(tp) for weight in weights]
        entering += rows * shapes[0][1]
        leaving += rows * sum(outputs for outputs, _ in shapes)
    entering += _columns(model, task)[3] if task.code != "fused" else 0
    size = CAST_BYTES[task.code]
    return MemoryPass("casts to 8 bits", size * entering, 8), MemoryPass("casts to 8 bits", size * leaving, 8)


def _fused(model: ModelConfig, task: Task) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """Norms, bias + dropout + residual and activation in a kernel each; 16 bits throughout."""
    T, (own, kv, inner, _) = task.tokens, _columns(model, task)
    local, first = _stream_elements(model, task) * task.size, model.mlp_inputs * inner
    mask = local // task.size if model.dropout else 0
    rows, dtype = T // task.split, LONG_DTYPES[task.dtype]
    turned = [MemoryPass("rotary", _turned_bytes(model, task))] if model.positions == "rotary" else []
    # A gate's product with what it opens is one operator; another activation reads one tensor, and two on its way back.
    activation, activation_back = 2 * T * inner * task.size, 3 * T * inner * task.size
    if model.activation == "swiglu":
        activation = gated.cost(T, inner, dtype).bytes_moved
        activation_back = gated.backward_cost(T, inner, dtype).bytes_moved
    forward = [
        MemoryPass.of("norms", 2 * norm.cost(rows, model.width, dtype), 2),
        *turned,
        # Bias, dropout and residual in one kernel: reads two, writes one and the mask.
        MemoryPass("residuals", 2 * (3 * local + mask), 2),
        MemoryPass("activation", activation),
    ]
    backward = [
        MemoryPass.of("norms", 2 * norm.backward_cost(rows, model.width, dtype), 2),
        # The residual's sum reads two, writes one.
        MemoryPass(
            "residuals", 2 * 3 * local + (2 * (2 * local + mask) if model.dropout else 0), 4 if model.dropout else 2
        ),
        *turned,
        MemoryPass("activation", activation_back),
    ]
    if model.biases:  # a bias's gradient sums the output's gradient once more
        backward.append(MemoryPass("biases", T * (own + 2 * kv + 2 * model.width + first) * task.size, 4))
    return forward, backward


def _turned_bytes(model: ModelConfig, task: Task) -> int:
    """Turning queries and keys, each by one kernel."""
    width, (own, kv, _, _) = model.head_width, _columns(model, task)
    sizes = ((task.sequences, task.queries, columns // width, width) for columns in (own, kv))
    return sum(rotary.cost(*size, LONG_DTYPES[task.dtype]).bytes_moved for size in sizes)


def _compiled(model: ModelConfig, task: Task) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """The residual is added where the next norm reads it; casts of the stream and of the weights are passes."""
    T, x, (own, kv, inner, weights) = task.tokens, _stream_elements(model, task), _columns(model, task)
    first, size, stream = model.mlp_inputs * inner, task.size, task.stream
    turned = 2 * T * (own + kv) * size  # what our operator moves, and tables that the compiler makes anew
    mask = 2 * x if model.dropout else 0  # one byte a dropped element, twice a layer
    # silu and relu take few enough instructions to move their bytes as fast as a copy does.
    activation = "plain" if model.activation in ("swiglu", "relu") else "activation"
    # A norm reads the stream and what is added to it, writes the sum and the matmul's input.
    forward = [
        MemoryPass("norms and residuals", 2 * x * (2 * stream + 2 * size) + mask, 2, kind="rows"),
        MemoryPass("activation", T * (first + inner) * size, kind=activation),
    ]
    backward = [
        # Reads the gradient from above, its own input and the gradient of the stream; writes the stream's.
        MemoryPass("norms and residuals", 2 * x * (size + 3 * stream) + mask, 2, kind="rows"),
        # Sums over the tokens are finished in a kernel for each gain and bias.
        MemoryPass("gradients of the norms", 0, 4 if model.norm == "layernorm" else 2),
        MemoryPass("activation", T * (2 * first + inner) * size, kind=activation),
    ]
    if stream != size:
        forward.append(MemoryPass("casts", weights * (4 + size) + 2 * x * (stream + size), 6))
        backward.append(MemoryPass("casts", weights * (4 + size), 6))
    if model.positions == "rotary":
        # Turned head by head, which is how attention's result then lies too; the products want it token by token.
        forward += [MemoryPass("rotary", turned, 2, kind="turned"), MemoryPass("heads joined", 2 * T * own * size)]
        backward += [MemoryPass("rotary", turned, 2, kind="turned"), MemoryPass("heads joined", turned, 2)]
    if kv < own:  # attention makes keys' and values' gradients for each query head, then adds up those of a group
        backward.append(MemoryPass("gradients of shared heads", 2 * T * (own + kv) * size, 2))
    if joins_qkv(model, task):  # attention hands back three gradients, the one product wants them side by side
        backward.append(MemoryPass("gradients of q, k, v joined", 2 * T * (own + 2 * kv) * size))
    if model.biases:
        columns = own + 2 * kv + 2 * model.width
        backward.append(MemoryPass("biases", T * columns * size, 5, kind="rows"))
        # The sum over the activation's gradient reads both of its factors again.
        backward.append(MemoryPass("bias of the activation", 2 * T * first * size, 1, kind="rows"))
    return forward, backward


def _eager(model: ModelConfig, task: Task) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """One call after another, as `model/transformer.py` makes them."""
    T, x, (own, kv, inner, weights) = task.tokens, _stream_elements(model, task), _columns(model, task)
    size, stream, qk = task.size, x * task.stream, T * (own + kv) * task.size
    hidden, first = T * inner * size, model.mlp_inputs * T * inner * size
    # Square, mean, root, two products: 7 tensors moved; backward, eleven calls, 25. Else a kernel, and two backward.
    is_taken_apart = model.norm == "rmsnorm" and task.takes_norms_apart
    norm, norm_back, calls, calls_back = (7, 25, 5, 11) if is_taken_apart else (2, 5, 1, 2)
    forward = [
        MemoryPass("norms", 2 * norm * stream, 2 * calls, kind="rows"),
        MemoryPass("residuals", 2 * 3 * stream, 2),
        MemoryPass("heads joined", 2 * T * own * size, 1),
    ]
    backward = [
        MemoryPass("norms", 2 * norm_back * stream, 2 * 2 * calls_back, kind="rows"),
        # Two sums into the stream, and the inputs' gradients of q, k, v (and of a gate) added up.
        MemoryPass("residuals", (2 + 2 + model.mlp_inputs - 1) * 3 * stream, 5),
        # Transposed operands and gradients that torch makes contiguous.
        MemoryPass("copies", 2 * T * own * size + 2 * first, 4),
    ]
    if model.positions == "rotary":
        # Two halves, each two products and a sum, then joined: nine times what is turned; backward also pads halves.
        forward.append(MemoryPass("rotary", 9 * qk, 14, kind="halves"))
        backward.append(MemoryPass("rotary", 12 * qk, 28, kind="halves"))
    if model.activation == "swiglu":
        forward.append(MemoryPass("activation", 2 * hidden + 3 * hidden, 2, T * inner))
        # Two products for the two factors; the gate's derivative in six calls, one of them a sigmoid.
        backward.append(MemoryPass("activation", 6 * hidden + 15 * hidden, 2 * 8, T * inner))
    else:
        exponentials = T * inner if model.activation == "gelu" else 0
        forward.append(MemoryPass("activation", 2 * hidden, 1, exponentials))
        backward.append(MemoryPass("activation", 3 * hidden + (12 * hidden if exponentials else 0), 8, exponentials))
    if model.dropout:
        forward.append(MemoryPass("dropout", 2 * (2 * stream + x), 6))
        backward.append(MemoryPass("dropout", 2 * (2 * stream + x), 4))
    if model.biases:
        columns = own + 2 * kv + 2 * model.width + model.mlp_inputs * inner
        backward.append(MemoryPass("biases", T * columns * size, 6, kind="rows"))
    if task.stream != size:
        # Each projection's input and weight, and on the way back each gradient of either.
        casts = weights * (4 + size) + 2 * x * (task.stream + size)
        forward.append(MemoryPass("casts", casts + 2 * x * size, 16))
        backward.append(MemoryPass("casts", casts + 4 * x * task.stream, 16))
    # What a projection costs its caller beside the product: transposes, views, and autograd's node for each.
    forward.append(MemoryPass("calls of projections", 0, 7 + model.mlp_inputs))
    backward.append(MemoryPass("calls of projections", 0, 6 * (5 + model.mlp_inputs)))
    return forward, backward


# ---- the ends of the model -------------------------------------------------------------------------------------


def head_passes(model: ModelConfig, task: Task) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """Final norm, the casts around the output table, and the loss."""
    local = _stream_elements(model, task) * task.size
    casts, casts_back = _casts(model, task)
    loss, loss_back = _loss(model, task)
    forward = [MemoryPass("final norm", 2 * local), *casts, *loss]
    return forward, [*loss_back, *casts_back, MemoryPass("final norm", 3 * local)]


def _casts(model: ModelConfig, task: Task) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """What is done to the table behind the logits beside its products: copies in 16 bits, rows added, gradients."""
    if task.loss_code == "fused":
        return [], []
    size, rows = task.size, output_weight(model).shape(task.tp)[0]
    table = rows * model.width
    forward, backward = [], []
    if task.stream != size:
        forward.append(MemoryPass("cast of the output table", table * (4 + size)))
        backward.append(MemoryPass("cast of the output table's gradient", table * (size + 4)))
    if task.loss_code == "eager" and logit_columns(model, task) != rows:
        forward.append(MemoryPass("rows added to the output table", 2 * 4 * table, 2))  # compiled, the cast does it
    if model.tied:  # the gradients of its two uses are added up
        backward.append(
            MemoryPass("sum of the table's gradients", table * (4 if task.loss_code == "compiled" else 3 * 4))
        )
    return forward, backward


def _loss(model: ModelConfig, task: Task) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """The loss over this rank's logits."""
    rows, size = output_weight(model).shape(task.tp)[0], task.size
    logits = task.tokens * rows
    if task.loss_code == "fused":
        # To fp32; maximum; exponentials and their sum.
        return [MemoryPass("loss", logits * (size + 4 + 4 + 8), 4)], [MemoryPass("loss", logits * (4 + 4 + size), 2)]
    if task.loss_code == "compiled":
        # Alone, our Transformer computes logits in rows of aligned length.
        odd, dtype = "odd " if unaligned(rows, size) and task.tp > 1 else "", LONG_DTYPES[task.dtype]
        forward = [MemoryPass.of("loss", cross_entropy.cost(task.tokens, rows, dtype), kind=f"{odd}softmax")]
        backward = [MemoryPass.of("loss", cross_entropy.backward_cost(task.tokens, rows, dtype), kind=f"{odd}rows")]
        if odd:  # the gradient is written once more, into rows that tensor cores can load
            backward.append(MemoryPass("padding of the logits", logits * 2 * size, 1, kind="rows"))
        return forward, backward
    cast = logits * (size + 4) if size != 4 else 0
    # log_softmax reads and writes; backward makes a gradient of zeros, reads two and writes one.
    forward = [MemoryPass("loss", 2 * 4 * logits + cast, 4, logits)]
    backward = [MemoryPass("loss", 4 * 4 * logits + cast, 6, logits)]
    if logit_columns(model, task) != rows:  # zeros of the rounded width, and the gradient copied into them
        backward.append(MemoryPass("padding of the logits", 3 * size * logits, 2))
    return forward, backward


def embedding_passes(model: ModelConfig, task: Task) -> tuple[list[MemoryPass], list[MemoryPass]]:
    """Looking rows up and, backward, adding to them."""
    nbytes = task.tokens * model.width * task.size
    local = nbytes // task.split
    return [MemoryPass("embedding", 2 * nbytes + 2 * local, 3)], [MemoryPass("embedding", 3 * nbytes + 2 * local, 3)]


def logit_columns(model: ModelConfig, task: Task) -> int:
    """Columns of the product that makes a rank's logits: our code rounds them up where tensor cores gain by it."""
    columns = output_weight(model).shape(task.tp)[0]
    if task.loss_code == "fused" or not task.gpu or task.dtype == "fp64":
        return columns
    if task.tp == 1:
        return columns + -columns % VOCABULARY_MULTIPLE
    # Split over ranks the weight stays as it is; torch.compile pads what it must.
    return columns + -columns % ALIGNED if task.loss_code == "compiled" and unaligned(columns, task.size) else columns
