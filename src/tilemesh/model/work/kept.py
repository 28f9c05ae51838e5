"""What one rank keeps of one microbatch from its forward to its backward pass: tensor by tensor, and at the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tilemesh.kernels.linear_cross_entropy.cost import chunk_rows
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.passes import product_weights
from tilemesh.model.work.task import Task
from tilemesh.model.work.weights import output_weight


class Kept(NamedTuple):
    """One tensor that is kept for the backward pass: elements of all ranks together, and how many ranks share them."""

    name: str
    formula: str
    """Its elements: b sequences, S tokens, D, K, F."""
    elements: int
    element_bytes: int
    over: int
    scores: bool = False
    """Whether selective recomputation drops it."""

    @property
    def nbytes(self) -> int:
        """On one rank."""
        return self.elements * self.element_bytes // self.over


def kept_tensors(model: ModelConfig, task: Task) -> tuple[Kept, ...]:
    """What a layer keeps for its backward pass when nothing is recomputed; its own input first.

    For a GPT with dropout, 16-bit values and materialised attention this adds up to s b h (10 + 24/t + 5 a s/(h t)),
    the formula of Korthikanti et al. 2022, to its sequence-parallel (34/t + 5 a s/(h t)) and its selective (34/t) form.
    """
    size, stream, tp, cut = task.size, task.stream, task.tp, task.split
    tokens, per_kv = task.tokens, min(tp, model.kv_heads)  # heads fewer than ranks are repeated
    whole, kv, hidden = tokens * model.width, tokens * model.kv_width, tokens * model.mlp_width
    square = task.sequences * model.heads * task.queries * task.keys
    # Hand-fused code keeps what enters a region cut along the sequence and gathers it again; our layers keep it joined.
    entering = 1 if not task.gpu and task.code == "eager" else cut
    kept = [
        Kept("input of the first norm", "b S D", whole, stream, cut),
        Kept("input of q, k, v", "b S D", whole, size, entering),
        Kept("queries", "b S D", whole, size, tp),
        Kept("keys", "b S K", kv, size, per_kv),
        Kept("values", "b S K", kv, size, per_kv),
    ]
    if task.attention == "materialized":
        kept.append(Kept("softmax of the scores", "b heads S S", square, size, tp, scores=True))
        if model.dropout:
            kept.append(Kept("mask of the scores' dropout", "b heads S S", square, 1, tp, scores=True))
            kept.append(Kept("scores after dropout", "b heads S S", square, size, tp, scores=True))
    else:
        kept.append(Kept("log-sum-exp of the scores", "b heads S", tokens * model.heads, 4, tp, scores=True))
    kept.append(Kept("input of the output projection", "b S D", whole, size, tp))
    if model.dropout:
        kept.append(Kept("mask of attention's dropout", "b S D", whole, 1, cut))
    kept.append(Kept("input of the second norm", "b S D", whole, stream, cut))
    kept.append(Kept("input of the MLP", "b S D", whole, size, entering))
    if model.activation != "relu":  # relu's backward needs only its result, which the last projection keeps
        kept.append(Kept("input of the activation", "b S F (each input)", model.mlp_inputs * hidden, size, tp))
    kept.append(Kept("input of the MLP's last projection", "b S F", hidden, size, tp))
    if model.dropout:
        kept.append(Kept("mask of the MLP's dropout", "b S D", whole, 1, cut))
    if task.code == "compiled":
        kept += _kept_by_the_compiler(model, task, whole, hidden)
    elif task.code == "eager":
        kept += _kept_by_torch(model, task, whole, hidden, entering)
    return tuple(kept)


def _kept_by_the_compiler(model: ModelConfig, task: Task, whole: int, hidden: int) -> Iterator[Kept]:
    """What torch.compile keeps beyond that: its partition of the graph, read off (a test does so again).

    It makes nothing anew that a product of the backward pass reads, so of an activation both ends stay. A LayerNorm
    keeps its input normalised, in place of it.
    """
    yield Kept("scale of each token in the norms", "2 b S", 2 * task.tokens, 4, task.split)
    if model.activation == "relu":
        yield Kept("where the activation's input was above 0", "b S F", hidden, 1, task.tp)
    if model.positions == "rotary":
        # Attention's result is laid out as the queries are, which turning has put head by head.
        yield Kept("result of attention, before its heads are joined", "b S D", whole, task.size, task.tp)


def _kept_by_torch(model: ModelConfig, task: Task, whole: int, hidden: int, entering: int) -> Iterator[Kept]:
    """What torch's own operators keep beyond that, each operation for itself. `entering`: how many ranks share what
    enters attention and MLP."""
    wide = max(4, task.stream)
    if model.positions == "rotary":
        # Attention's result is laid out as turned queries are, and joining its heads copies.
        yield Kept("result of attention, before its heads are joined", "b S D", whole, task.size, task.tp)
    if task.gpu and task.stream != task.size:
        # Autocast casts the input of every projection anew: of q, k and v, and of a gate and what it opens.
        casts = 1 + model.mlp_inputs
        yield Kept(
            "casts of the inputs for the further projections", f"{casts} b S D", casts * whole, task.size, entering
        )
    if model.norm == "rmsnorm" and task.takes_norms_apart:  # a product of its own; the input of its gain's gradient
        yield Kept("norms before their gains", "2 b S D", 2 * whole, task.stream, task.split)
    numbers = 2 if model.norm == "rmsnorm" else 4  # a scale, and of a LayerNorm a mean
    yield Kept("scale and mean of each token in the norms", f"{numbers} b S", numbers * task.tokens, wide, task.split)
    if model.activation == "swiglu":
        yield Kept("gate after its activation", "b S F", hidden, task.size, task.tp)


_INPUTS = (
    "input of q, k, v",
    "input of the output projection",
    "input of the MLP",
    "input of the MLP's last projection",
)


def kept_for_weights(model: ModelConfig, task: Task) -> tuple[Kept, ...]:
    """What a layer keeps between the two halves of its backward pass: both operands of each weight gradient, which are
    a matrix's input and the gradient of its output."""
    size, tp, cut = task.size, task.tp, task.split
    tokens, per_kv = task.tokens, min(tp, model.kv_heads)
    whole, kv, hidden = tokens * model.width, tokens * model.kv_width, tokens * model.mlp_width
    joined = 1 if not task.gpu and task.code == "eager" else cut
    return (
        *(tensor for tensor in kept_tensors(model, task) if tensor.name in _INPUTS),
        Kept("gradient of the queries", "b S D", whole, size, tp),
        Kept("gradients of keys and values", "2 b S K", 2 * kv, size, per_kv),
        Kept("gradient of the output projection's result", "b S D", whole, size, joined),
        Kept("gradient of the activation's input", "b S F (each input)", model.mlp_inputs * hidden, size, tp),
        Kept("gradient of the MLP's result", "b S D", whole, size, joined),
    )


def kept_by_operators(model: ModelConfig, task: Task) -> tuple[Kept, ...]:
    """What a layer keeps where recomputation is by operators: its input, attention's result, and the result of every
    second product from the first one on. torch, operation by operation, also keeps the last one of these, which no
    backward pass reads; the compiler sees that."""
    products = product_weights(model, task)
    kept = [kept_tensors(model, task)[0]]
    for place in range(0, len(products), 2):
        if place == len(products) - 1 and task.code != "eager":
            continue
        name = f"result of {', '.join(weight.words for weight in products[place])}"
        columns = sum(weight.shape(task.tp)[0] for weight in products[place])
        kept.append(Kept(name, "b S outputs", task.tokens * columns, task.size, 1))
    if task.code == "eager" and model.activation in ("gelu", "gelu-erf"):  # its product gives both ends of it
        kept.append(Kept("input of the activation", "b S F", task.tokens * model.mlp_width, task.size, task.tp))
    if task.attention == "fused":
        whole = task.tokens * model.query_width
        kept.append(Kept("result of attention", "b S D", whole, task.size, task.tp))
        kept.append(Kept("log-sum-exp of the scores", "b heads S", task.tokens * model.heads, 4, task.tp))
    return tuple(kept)


def kept_bytes(model: ModelConfig, task: Task, recompute: str) -> tuple[int, int]:
    """Bytes a layer keeps on one rank, and bytes that come back while its backward pass runs."""
    kept = kept_tensors(model, task)
    everything, scores = sum(tensor.nbytes for tensor in kept), sum(tensor.nbytes for tensor in kept if tensor.scores)
    if recompute == "operators":
        stays = sum(tensor.nbytes for tensor in kept_by_operators(model, task))
        return stays, everything
    if recompute == "none":
        return everything, 0
    return (everything - scores, scores) if recompute == "selective" else (kept[0].nbytes, everything)


def loss_tensors(model: ModelConfig, task: Task) -> tuple[Kept, ...]:
    """What is alive at the loss's fullest moment: where logits of all tokens exist, or those of some rows at a time."""
    rows, size = output_weight(model).shape(task.tp)[0], task.size
    logits, whole = task.tokens * rows, task.tokens * model.width
    if task.chunked_loss:
        some, table = chunk_rows(task.tokens, rows, size) * rows, rows * model.width
        return (
            Kept("logits of some rows, which become their gradient", "c V", some, size, 1),
            Kept("input of the final norm", "b S D", whole, task.stream, 1),
            Kept("input of the logits and its gradient", "2 b S D", 2 * whole, size, 1),
            Kept("the output table's cast, its gradient, and that in fp32", "V D", table, 2 * size + 4, 1),
        )
    if task.loss_code == "fused":
        return (Kept("logits, in fp32 for the loss, and their gradient", "b S V/tp", logits, 10, 1),)
    if task.loss_code == "eager":
        wide = max(size, 4)
        loss = Kept("log-softmax, the gradient of its result, and of its input", "b S V/tp", logits, 3 * wide, 1)
        if not task.gpu:
            return (loss,)
        return (
            loss,
            Kept("input of the final norm", "b S D", whole, task.stream, 1),
            Kept("input of the logits", "b S D", whole, size, 1),
        )
    return (
        Kept("logits and their gradient", "b S V/tp", logits, 2 * size, 1),
        Kept("input of the final norm", "b S D", whole, task.stream, 1),
        Kept("input of the logits and its gradient", "2 b S D", 2 * whole, size, 1),
        Kept("gradient of the output table", "V/tp D", rows * model.width, size, 1),
    )


def outlived_bytes(model: ModelConfig, task: Task) -> int:
    """16-bit logits of which torch, operation by operation, computes the loss in float32: gone before the fullest
    moment, but torch's allocator keeps their block, which is too small for what follows."""
    is_narrow = task.gpu and task.loss_code == "eager" and task.size < 4
    return task.tokens * output_weight(model).shape(task.tp)[0] * task.size if is_narrow else 0


def pass_kept_bytes(model: ModelConfig, task: Task, has_embedding: bool) -> int:
    """What a forward pass through some layers keeps beside what each of them does, where torch's operators run one by
    one: the angles of rotary positions, and the tokens whose rows were looked up."""
    if task.gpu or task.code != "eager":
        return 0
    angles = 4 * task.queries * model.head_width if model.positions == "rotary" else 0
    return angles + 8 * task.tokens * has_embedding


def loss_kept_bytes(model: ModelConfig, task: Task) -> int:
    """Of that, what stays from the last chunk's forward pass to its backward pass, which may come much later."""
    rows, whole = output_weight(model).shape(task.tp)[0], task.tokens * model.width
    if task.chunked_loss:  # both gradients are made in the forward pass
        return whole * task.size + rows * model.width * 4
    wide = max(task.size, 4) if task.loss_code != "compiled" else task.size
    kept = task.tokens * rows * wide + whole * (task.stream + task.size)
    if not task.gpu and task.loss_code == "eager":
        # Each operation of torch for itself: targets, the loss, a norm before its gain, its scale and mean.
        kept += 8 * task.tokens + max(4, task.size)
        before = whole * task.stream if model.norm == "rmsnorm" else task.tokens * max(4, task.stream)
        kept += before + task.tokens * max(4, task.stream)
    return kept
