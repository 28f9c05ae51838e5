"""What one rank keeps of one microbatch from its forward to its backward pass: tensor by tensor, and at the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tilemesh.kernels.linear_cross_entropy.cost import chunk_rows
from tilemesh.model.config import GATED, ModelConfig
from tilemesh.model.work.passes import joins_qkv, product_weights
from tilemesh.model.work.routing import busiest_rows, hidden_elements, sent_rows
from tilemesh.model.work.task import Task
from tilemesh.model.work.weights import output_weight


class Kept(NamedTuple):
    """One tensor that is kept for the backward pass: elements of all ranks together, and how many ranks share them."""

    name: str
    formula: str
    """Its elements: b sequences of S tokens; D, Q, K, E, F: widths of the stream, of all queries, of all
    keys, of a head and of the MLP."""
    elements: int
    element_bytes: int
    over: int
    scores: bool = False
    """Whether selective recomputation drops it."""

    @property
    def nbytes(self) -> int:
        """On one rank."""
        return self.elements * self.element_bytes // self.over


class _Norm(NamedTuple):
    """One of a layer's norms, as far as its backward pass is concerned."""

    name: str
    formula: str
    kind: str
    elements: int
    rows: int
    """Each of these has a scale, and in a LayerNorm a mean."""
    element_bytes: int
    """Of what it normalizes."""
    over: int
    shares_input: bool = False
    """Whether it reads what the norm before it read."""


def _norms(model: ModelConfig, task: Task) -> tuple[_Norm, ...]:
    """Of the residual stream (or of what is added to it), in the order in which they run; then of queries and keys."""
    elements, tokens, size, stream = task.tokens * model.width, task.tokens, task.size, task.stream
    common = (model.norm, elements, tokens)
    before = size if model.norm_place == "branch" else stream
    norms = [
        _Norm("first norm", "b S D", *common, before, task.split),
        _Norm("second norm", "b S D", *common, before, task.split, shares_input=model.parallel_residual),
    ]
    if model.norm_place == "sandwich":
        norms += [
            _Norm(f"norm of {branch}'s result", "b S D", *common, size, task.split)
            for branch in ("attention", "the MLP")
        ]
    for words, width in (("latent", model.latent_width), ("queries' latent", model.query_latent_width)):
        if width:
            norms.append(_Norm(f"norm of the {words}", "b S latent", "rmsnorm", tokens * width, tokens, size, 1))
    if model.qk_norm != "none":
        kv_ranks = min(task.tp, model.kv_heads)
        for name, width, heads, letter, over in (
            ("norm of the queries", model.query_width, model.heads, "Q", task.tp),
            ("norm of the keys", model.kv_width, model.kv_heads, "K", kv_ranks),
        ):
            rows = tokens * (heads if model.qk_norm == "head" else 1)
            norms.append(_Norm(name, f"b S {letter}", "rmsnorm", tokens * width, rows, size, over))
    return tuple(norms)


def _kept_by_norm(norm: _Norm, model: ModelConfig, task: Task) -> Iterator[Kept]:
    """Its input, and beside that what torch's operators, or its compiler, keep for the backward pass.

    Where torch computes an RMSNorm operation by operation, or its weights are stored less 1, a 16-bit input is cast to
    float32 first, and each norm keeps a cast of its own.
    """
    name, formula, element_bytes, is_eager = norm.name, norm.formula, norm.element_bytes, task.code == "eager"
    is_apart = is_eager and norm.kind == "rmsnorm" and task.takes_norms_apart
    wide = max(4, element_bytes)
    if is_apart or (is_eager and model.norm_offset):
        element_bytes = wide
    if not norm.shares_input or element_bytes != norm.element_bytes:
        yield Kept(f"input of the {name}", formula, norm.elements, element_bytes, norm.over)
    if is_apart:  # a product of its own; the input of its gain's gradient
        yield Kept(f"result of the {name} before its gain", formula, norm.elements, wide, norm.over)
    if task.code == "compiled" and not norm.shares_input:  # of one input the compiler computes a scale once
        yield Kept(f"scale of each row in the {name}", f"{norm.rows // task.tokens} b S", norm.rows, wide, norm.over)
    if is_eager:
        numbers, words = (1, "scale") if norm.kind == "rmsnorm" else (2, "scale and mean")
        count = numbers * norm.rows // task.tokens
        # A LayerNorm on a CPU keeps them as wide as its weights.
        number_bytes = task.stream if norm.kind == "layernorm" and not task.gpu else wide
        yield Kept(f"{words} of each row in the {name}", f"{count} b S", numbers * norm.rows, number_bytes, norm.over)
    if is_eager and model.norm_offset:
        letter = "E" if norm.rows > task.tokens else formula[-1]
        width = norm.elements // norm.rows
        yield Kept(f"gain of the {name}, 1 + what is stored", letter, width, max(4, task.stream), 1)


def layer_input(model: ModelConfig, task: Task) -> Kept:
    """What full recomputation keeps of a layer."""
    return Kept("input of the layer", "b S D", task.tokens * model.width, task.stream, task.split)


def kept_tensors(model: ModelConfig, task: Task) -> tuple[Kept, ...]:
    """What a layer keeps for its backward pass when nothing is recomputed.

    For a GPT with dropout, 16-bit values and materialised attention this adds up to s b h (10 + 24/t + 5 a s/(h t)),
    the formula of Korthikanti et al. 2022, to its sequence-parallel (34/t + 5 a s/(h t)) and its selective (34/t) form.
    """
    size, tp, cut = task.size, task.tp, task.split
    per_kv = min(tp, model.kv_heads)  # heads fewer than ranks are repeated
    whole, own, kv, hidden = _elements(model, task)
    # Hand-fused code keeps what enters a region cut along the sequence and gathers it again; our layers keep it joined.
    entering = cut if task.code == "fused" else 1
    first, *norms = _norms(model, task)
    kept = [
        *_kept_by_norm(first, model, task),
        Kept("input of q, k, v", "b S D", whole, size, entering),
        Kept("queries", "b S Q", own, size, tp),
        Kept("keys", "b S K", kv, size, per_kv),
        Kept("values", "b S K", kv, size, per_kv),
        *_kept_by_attention(model, task),
        Kept("input of the output projection", "b S Q", own * model.value_head_width // model.head_width, size, tp),
    ]
    if model.latent_width:
        latent = task.tokens * (model.latent_width + model.query_latent_width)
        kept.append(Kept("input of k, v, and of q where it has a latent", "b S latent", latent, size, 1))
        if size == task.wide:  # the norm's input is a view
            kept.append(Kept("part of keys beside the latent", "b S R", task.tokens * model.rotary_width, size, 1))
    if model.dropout:
        kept.append(Kept("mask of attention's dropout", "b S D", whole, 1, cut))
    for norm in norms:
        kept += _kept_by_norm(norm, model, task)
    if model.experts:
        kept += _kept_by_experts(model, task)
    else:
        kept.append(Kept("input of the MLP", "b S D", whole, size, entering))
    if model.activation != "relu":  # relu's backward needs only its result, which the last projection keeps
        kept.append(Kept("input of the activation", f"{model.mlp_inputs} b S F", model.mlp_inputs * hidden, size, tp))
    kept.append(Kept("input of the MLP's last projection", "b S F", hidden, size, tp))
    if model.dropout:
        kept.append(Kept("mask of the MLP's dropout", "b S D", whole, 1, cut))
    if task.code == "compiled":
        kept += _kept_by_the_compiler(model, task)
    elif task.code == "eager":
        kept += _kept_by_torch(model, task, entering)
    return tuple(kept)


def _elements(model: ModelConfig, task: Task) -> tuple[int, int, int, int]:
    """Of the stream, of all queries, of all keys, and of what tokens pass of the MLP."""
    tokens = task.tokens
    return tokens * model.width, tokens * model.query_width, tokens * model.kv_width, hidden_elements(model, task)


def _kept_by_experts(model: ModelConfig, task: Task) -> Iterator[Kept]:
    """What routing keeps, and rows in the order of their experts. tp does not cut it: a router sees whole rows, all of
    them unless ranks of tp have experts of their own."""
    tokens, picked, width, size, wide = task.tokens, model.experts_per_token, model.width, task.size, task.wide
    cut, rows, sent = task.tp // task.ranks_per_expert, busiest_rows(model, task), sent_rows(model, task)
    is_cast = task.code == "eager" and task.stream != size  # autocast casts what each projection takes anew
    casts = model.mlp_inputs if is_cast else 1
    yield Kept("input of the router", "b S D", tokens * width, wide, cut)
    yield Kept("probabilities of experts", "b S x experts", tokens * model.experts, wide, cut)
    if model.router_scores == "sigmoid":  # on a CPU torch keeps exponentials beside them
        yield Kept("scores of experts", "b S x experts", (1 if task.gpu else 2) * tokens * model.experts, wide, cut)
        if not model.router_renormalized:
            per_token = model.experts + picked + 1
            yield Kept("sigmoids of experts, and their sum", "b S x experts", tokens * per_token, wide, cut)
    yield Kept("which experts, and rows to them and back", "3 b S x picked", 3 * sent, 8, 1)
    yield Kept("weights of a token's experts", "b S x picked", sent, size, 1)
    if model.router_renormalized:
        yield Kept("weights before they are divided, and their sum", "b S x picked", tokens * (picked + 1), wide, cut)
    if task.ep > 1:
        yield Kept("rows that came to their experts and back", "2 b S x picked", 2 * rows, 8, 1)
    yield Kept(_ROWS, "b S D x picked", casts * rows * width, size, 1)
    yield Kept("results of experts", "b S D x picked", sent * width, size, 1)
    if model.shared_width and (is_cast or size != wide):
        yield Kept("input of the shared expert", "b S D", casts * tokens * width, size, 1)
    if model.shared_gate:
        yield Kept("result of the shared expert", "b S D", tokens * width, size, 1)
        yield Kept("gate of the shared expert", "b S", tokens, wide, 1)
        if size != wide:
            yield Kept("gate of the shared expert, as narrow as it", "b S", tokens, size, 1)
    if task.stream != wide:  # 16-bit weights: scores are made from wider copies
        gates = model.experts + model.shared_gate
        yield Kept("weights of the router and of the shared expert's gate", "experts D", gates * width, wide, 1)
        if model.shared_gate:
            yield Kept("input of the shared expert's gate", "b S D", tokens * width, wide, 1)


def scores_in_memory(model: ModelConfig, task: Task) -> bool:
    """Whether scores have a soft cap, by torch's operators, all of them at once; where keys visit ranks, in blocks."""
    return model.score_cap > 0 and not (task.cp > 1 and task.cp_exchange != "heads")


def _kept_by_attention(model: ModelConfig, task: Task) -> Iterator[Kept]:
    """Between the queries, keys and values and their result; all of it is what selective recomputation drops."""
    square, size, tp = task.sequences * model.heads * task.queries * task.keys, task.size, task.tp
    if task.attention == "materialized":
        yield Kept("softmax of the scores", "b heads S S", square, size, tp, scores=True)
        if model.dropout:
            yield Kept("mask of the scores' dropout", "b heads S S", square, 1, tp, scores=True)
            yield Kept("scores after dropout", "b heads S S", square, size, tp, scores=True)
        return
    if scores_in_memory(model, task):
        yield Kept("scores after their cap", "b heads S S", square, task.wide, tp, scores=True)
        columns = square // task.keys * (task.keys + model.score_sink)
        yield Kept("softmax of the scores", "b heads S S", columns, task.wide, tp, scores=True)
        if size < task.wide:
            yield Kept("softmax of the scores, as narrow as values", "b heads S S", square, size, tp, scores=True)
        yield Kept("mask of the scores", "S S", task.queries * task.keys, 1, 1, scores=True)
        return
    yield Kept("log-sum-exp of the scores", "b heads S", task.tokens * model.heads, task.wide, tp, scores=True)
    windowed = sum(0 < model.window_of(layer) < task.queries for layer in range(model.layers))
    if windowed and not task.gpu:  # a mask for torch's attention, which knows of no window; our kernels need none
        elements = task.queries * task.keys * windowed // model.layers
        yield Kept(
            "mask of the window, a mean over the layers", f"{windowed}/{model.layers} S S", elements, size, 1, True
        )


def _kept_by_the_compiler(model: ModelConfig, task: Task) -> Iterator[Kept]:
    """What torch.compile keeps beyond that: its partition of the graph, read off (a test does so again).

    It makes nothing anew that a product of the backward pass reads, so of an activation both ends stay. A LayerNorm
    keeps its input normalised, in place of it.
    """
    _, own, _, hidden = _elements(model, task)
    if model.activation == "relu":
        yield Kept("where the activation's input was above 0", "b S F", hidden, 1, task.tp)
    if joins_qkv(model, task) and model.qk_norm == "none" and model.query_factor != 1:
        # Keys and values are parts of one product, which stays whole beside the queries made of it.
        yield Kept("queries before they are scaled", "b S Q", own, task.size, task.tp)
    if model.positions == "rotary" and not scores_in_memory(model, task):
        # Attention's result is laid out as the queries are, which turning has put head by head.
        yield Kept("result of attention, before its heads are joined", "b S Q", own, task.size, task.tp)


def _kept_by_torch(model: ModelConfig, task: Task, entering: int) -> Iterator[Kept]:
    """What torch's own operators keep beyond that, each operation for itself. `entering`: how many ranks share what
    enters attention and MLP."""
    whole, own, _, hidden = _elements(model, task)
    if model.positions == "rotary" and not scores_in_memory(model, task):
        # Attention's result is laid out as turned queries are, and joining its heads copies.
        yield Kept("result of attention, before its heads are joined", "b S Q", own, task.size, task.tp)
    if task.stream != task.size:
        # Autocast casts the input of every projection anew: of q, k and v, and of a gate and what it opens.
        casts = (2 if model.experts else 1 + model.mlp_inputs) - (model.latent_width > 0)  # which is narrow already
        yield Kept(
            "casts of the inputs for the further projections", f"{casts} b S D", casts * whole, task.size, entering
        )
    if model.activation in GATED:
        yield Kept("gate after its activation", "b S F", hidden, task.size, task.tp)
    if model.activation == "swiglu-clipped":
        words = "clipped gate, its sigmoid, and what it opens"
        yield Kept(words, "3 b S F", 3 * hidden, task.size, task.tp)


_ROWS = "rows in the order of their experts"
_INPUTS = (
    _ROWS,
    "input of q, k, v",
    "input of the output projection",
    "input of the MLP",
    "input of the MLP's last projection",
)


def kept_for_weights(model: ModelConfig, task: Task) -> tuple[Kept, ...]:
    """What a layer keeps between the two halves of its backward pass: both operands of each weight gradient, which are
    a matrix's input and the gradient of its output."""
    size, tp, cut = task.size, task.tp, task.split
    whole, own, kv, hidden = _elements(model, task)
    rows = busiest_rows(model, task) if model.experts else task.tokens
    joined = cut if task.code == "fused" else 1
    return (
        *(tensor for tensor in kept_tensors(model, task) if tensor.name in _INPUTS),
        Kept("gradient of the queries", "b S Q", own, size, tp),
        Kept("gradients of keys and values", "2 b S K", 2 * kv, size, min(tp, model.kv_heads)),
        Kept("gradient of the output projection's result", "b S D", whole, size, joined),
        Kept("gradient of the activation's input", f"{model.mlp_inputs} b S F", model.mlp_inputs * hidden, size, tp),
        Kept("gradient of the MLP's result", "b S D", rows * model.width, size, joined),
    )


def kept_by_operators(model: ModelConfig, task: Task) -> tuple[Kept, ...]:
    """What a layer keeps where recomputation is by operators: its input, attention's result, and the result of every
    second product from the first one on. torch, operation by operation, also keeps the last one of these, which no
    backward pass reads; the compiler sees that."""
    products = product_weights(model, task)
    kept = [layer_input(model, task)]
    for place in range(0, len(products), 2):
        if place == len(products) - 1 and task.code != "eager":
            continue
        name = f"result of {', '.join(weight.words for weight in products[place])}"
        is_routed = products[place][0].is_routed
        tp, rows = (task.ranks_per_expert, busiest_rows(model, task)) if is_routed else (task.tp, task.tokens)
        columns = sum(weight.shape(tp)[0] for weight in products[place])
        kept.append(Kept(name, f"b S x {columns * rows // task.tokens:,}", rows * columns, task.size, 1))
    if task.code == "eager" and model.activation in ("gelu", "gelu-erf"):  # its product gives both ends of it
        kept.append(Kept("input of the activation", "b S F", hidden_elements(model, task), task.size, task.tp))
    if task.attention == "fused":
        own = task.tokens * model.query_width
        kept.append(Kept("result of attention", "b S Q", own, task.size, task.tp))
        kept.append(Kept("log-sum-exp of the scores", "b heads S", task.tokens * model.heads, task.wide, task.tp))
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
    return (everything - scores, scores) if recompute == "selective" else (layer_input(model, task).nbytes, everything)


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
            Kept("the output table's gradient, and that in fp32", "V D", table, size + 4, 1),
        )
    if task.loss_code == "fused":
        return (Kept("logits, in fp32 for the loss, and their gradient", "b S V/tp", logits, 10, 1),)
    if task.gpu and task.tp > 1:  # over ranks, when the output table's gradient has come beside that of the logits
        by_torch = task.loss_code == "eager"
        return (
            Kept("logits, which become their gradient", "b S V/tp", logits, (4 + size) if by_torch else size, 1),
            Kept("input of the final norm", "b S D", whole, task.stream, task.split),
            Kept("input of the logits", "b S D", whole, size, 1),
            Kept("gradient of the output table", "V/tp D", rows * model.width, max(4, size), 1),
        )
    if task.loss_code == "eager":
        wide = max(size, 4)
        loss = Kept("log-softmax, the gradient of its result, and of its input", "b S V/tp", logits, 3 * wide, 1)
        capped = [Kept("tanh of the logits", "b S V/tp", logits, size, 1)] if model.logit_cap else []
        return (loss, *capped, *_kept_by_final_norm(model, task), Kept("input of the logits", "b S D", whole, size, 1))
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
    one: the angles of rotary positions, the tokens whose rows were looked up, and the mask of their dropout."""
    if task.gpu or task.code != "eager":
        return 0
    kept = 0
    if model.positions == "rotary":
        tables = 1 + (model.has_local_rotary and 0 < len(model.full_layers) < model.layers)
        kept += tables * task.wide * task.queries * model.rotary_width
    if has_embedding:
        kept += 8 * task.tokens + (task.tokens * model.width if model.dropout else 0)  # and what its dropout left
    return kept


def loss_kept_bytes(model: ModelConfig, task: Task) -> int:
    """Of that, what stays from the last chunk's forward pass to its backward pass, which may come much later."""
    rows, whole = output_weight(model).shape(task.tp)[0], task.tokens * model.width
    if task.chunked_loss:  # both gradients are made in the forward pass
        return whole * task.size + rows * model.width * 4
    wide = max(task.size, 4) if task.loss_code != "compiled" else task.size
    kept = task.tokens * rows * wide + whole * task.size
    if not task.gpu and task.loss_code == "eager":
        kept += 8 * task.tokens + task.wide  # each operation of torch for itself: targets, and the loss
    if model.logit_cap:  # the result of its tanh
        kept += task.tokens * rows * task.size
    return kept + sum(tensor.nbytes for tensor in _kept_by_final_norm(model, task))


def _kept_by_final_norm(model: ModelConfig, task: Task) -> list[Kept]:
    whole = task.tokens * model.width
    if model.norm_place == "post":
        return []
    if task.gpu or task.loss_code != "eager":
        return [Kept("input of the final norm", "b S D", whole, task.stream, 1)]
    return [*_kept_by_norm(_Norm("final norm", "b S D", model.norm, whole, task.tokens, task.stream, 1), model, task)]
