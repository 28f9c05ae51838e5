"""What a pass over answers does beside one over text of as many tokens, where answers to a prompt share its tokens.

The one idea: products and norms see the same rows. Attention sees each answer behind its prompt, so queries, keys and
values are gathered for it; and of trained tokens alone there are logits, whose entropy is computed as well. Counted on
a CPU, as `model/shared_prompts.py` and `align/head.py` do it.
"""

from __future__ import annotations

from tilemesh.model.config import ModelConfig
from tilemesh.model.work.kept import scores_in_memory
from tilemesh.model.work.operations import FusedAttention, Operation, layer_work
from tilemesh.model.work.passes import MemoryPass
from tilemesh.model.work.task import Task
from tilemesh.model.work.weights import output_weight

_LEAST_KEYS = 64
"""For a head's query torch's attention on a CPU takes as long with fewer keys. MEASURED on a Xeon (Cascade Lake), torch
2.13, float32, heads of 32, processor time: 8, 16, 32 and 48 queries before 16, 22, 38 and 64 keys 0.32, 0.37, 0.31 and
0.29 us each, backward 16 and 32 0.90 and 0.58, where 128 causal ones, 64 keys in the mean, take 0.35 and 0.85."""


def answer_operations(
    model: ModelConfig, task: Task, answers: int, prompt: int, tokens: int
) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Forward and backward, of all layers, for a microbatch of `task.sequences` answers of so many tokens, `answers` to
    each prompt of `prompt`; the attention of text, which these take the place of, is `text_attention`'s."""
    rows, before = task.sequences, prompt - 1
    prompts = -(-rows // answers)
    own, kv = model.query_width // task.tp, _key_width(model, task)
    queries, keys = rows * tokens + prompts * before, _gathered_keys(rows, answers, prompt, tokens)
    gathered = (2 * queries * own + 2 * keys * kv) * task.size  # and results, of which padding is left out
    heads, size = model.heads // task.tp, task.size
    calls = 1 + (before > 0)
    sizes = ((rows, tokens, before + tokens), (prompts, before, before))[:calls]
    attention = [] if scores_in_memory(model, task) else [
        FusedAttention("attention", count, heads, max(1, model.kv_heads // task.tp), long, wide, model.head_width,
                       task.dtype, pairs=long * max(wide, _LEAST_KEYS))
        for count, long, wide in sizes
    ]  # fmt: skip
    forward: list[Operation] = [
        *attention,
        MemoryPass("rows to attention and back", 2 * gathered, 4 * calls, kind="gathered"),
        MemoryPass("results joined", 2 * queries * own * size, 1),
    ]
    backward: list[Operation] = [
        *(each._replace(backward=True) for each in attention),
        # Zeros, to which each row is added.
        MemoryPass("gradients of gathered rows", 3 * gathered, 4 * calls, kind="gathered"),
        MemoryPass("zeros", gathered, 4 * calls),
    ]
    drawn = rows * tokens
    logits, width = drawn * output_weight(model).shape(task.tp)[0], drawn * model.width * size
    entropy = MemoryPass("entropy", 6 * task.wide * logits, 5, logits)
    chosen = MemoryPass("trained rows", 2 * 2 * width, 2, kind="gathered")
    return (
        (*forward * model.layers, entropy, chosen),
        (*backward * model.layers, chosen._replace(nbytes=2 * 3 * width)),
    )


def answer_kept_bytes(model: ModelConfig, task: Task, answers: int, prompt: int, tokens: int) -> int:
    """Of all layers, beside what text of as many tokens keeps for the backward pass: keys and values of a prompt once
    for each of its answers."""
    before = -(-task.sequences // answers) * (prompt - 1)
    more = _gathered_keys(task.sequences, answers, prompt, tokens) - task.sequences * tokens - before
    return model.layers * 2 * more * _key_width(model, task) * task.size


def _gathered_keys(rows: int, answers: int, prompt: int, tokens: int) -> int:
    return rows * (prompt - 1 + tokens) + -(-rows // answers) * (prompt - 1)


def _key_width(model: ModelConfig, task: Task) -> int:
    return model.kv_width // min(task.tp, model.kv_heads)


def text_attention(model: ModelConfig, task: Task) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Of all layers, forward and backward."""
    layer = layer_work(model, task)
    forward, backward = (
        tuple(op for op in ops if isinstance(op, FusedAttention)) for ops in (layer.forward, layer.backward)
    )
    return forward * model.layers, backward * model.layers
