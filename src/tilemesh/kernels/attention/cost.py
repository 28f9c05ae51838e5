"""What attention cannot do without: two products per query and key it sees, and one pass over q, k, v and y."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from tilemesh.core.cost import SHORT_DTYPES, Cost, short_dtype
from tilemesh.kernels.problems import PASSES, ProblemForm, Setting

WINDOW = 1024
"""Keys of a benchmark's sliding window."""
PACKED = (1, 2, 3, 5, 1, 4)
"""Relative lengths of a benchmark's packed sequences, twice over: the shortest has 1/32 of all tokens."""


def pairs(queries: int, keys: int, *, causal: bool = False, window: int = 0) -> int:
    """Pairs of a query and a key it sees, in one head of one sequence."""
    offset, total = keys - queries, 0
    if not causal and not window:
        return queries * keys
    if causal:  # of the last query as many as there are, of the one before one less, but none more than a window holds
        narrow = max(0, queries - max(0, keys - window)) if window else queries
        first = offset + 1
        return (queries - narrow) * window + narrow * first + narrow * (narrow - 1) // 2
    for position in range(offset, keys):
        total += min(keys, position + window) - max(0, position - window + 1)
    return total


def cost(
    batch: int, heads: int, kv_heads: int, queries: int, width: int, dtype: str = "bfloat16", *,
    keys: int = 0, seen: int = 0, backward: bool = False,
) -> Cost:  # fmt: skip
    """Of one pass. seen: pairs of a head of one batch element, `pairs(...)`; all of them where it is 0.

    Backward computes the scores again: five products to the forward pass's two. It reads q, k, v, the result and its
    gradient, and writes three gradients.
    """
    short, size = short_dtype(dtype)
    keys = keys or queries
    seen = seen or queries * keys
    wide, narrow = batch * heads * queries * width * size, batch * kv_heads * keys * width * size
    flops = (10 if backward else 4) * batch * heads * seen * width
    if backward:
        return Cost(flops, 3 * wide + 2 * narrow, wide + 2 * narrow, launches=3, dtype=short)
    return Cost(flops, wide + 2 * narrow, wide, launches=1, dtype=short)


def sequence_lengths(tokens: int) -> list[int]:
    """Of a benchmark's packed sequences, which together have so many tokens."""
    unit = max(1, tokens // (2 * sum(PACKED)))
    made = [length * unit for length in (*PACKED, *PACKED)][:tokens]
    made[-1] += tokens - sum(made)
    return made


@dataclass(frozen=True)
class AttentionProblem:
    """A benchmark's: self-attention of `tokens` each in a batch, or of all of them packed into one."""

    batch: int
    tokens: int
    kv_heads: int
    group: int
    width: int
    dtype: str
    mask: str
    passes: str

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def options(self) -> dict[str, Any]:
        """What the function is given by name."""
        return {"causal": self.mask != "full", "window": WINDOW if self.mask == "window" else 0}

    @property
    def lengths(self) -> list[int]:
        """Of the sequences: alike, or packed ones."""
        return sequence_lengths(self.batch * self.tokens) if self.mask == "packed" else [self.tokens] * self.batch


def of_problem(problem: AttentionProblem) -> Cost:
    """Of a benchmark's problem."""
    causal, window = problem.mask != "full", WINDOW if problem.mask == "window" else 0
    counted = Counter(problem.lengths)
    seen = sum(count * pairs(length, length, causal=causal, window=window) for length, count in counted.items())
    sizes = (1, problem.heads, problem.kv_heads, problem.batch * problem.tokens, problem.width, problem.dtype)
    once = cost(*sizes, seen=seen)
    return once + cost(*sizes, seen=seen, backward=True) if problem.passes == "both" else once


FORM = ProblemForm(
    sizes="BATCHxTOKENSxKVHEADSxGROUPxWIDTH",
    suite=("8x2048x16x1x64", "4x4096x8x4x128", "2x8192x8x4x128", "1x16384x8x4x128", "2x8192x8x4x64"),
    settings={
        "dtype": Setting(tuple(SHORT_DTYPES), "bfloat16"),
        "mask": Setting(("causal", "full", "window", "packed"), "causal"),
        "passes": PASSES,
    },
    make=AttentionProblem,
    cost=of_problem,
)


class JoinedProblem(AttentionProblem):
    """The same with queries, keys and values in one tensor, whose function is told the heads."""

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "heads": self.heads, "kv_heads": self.kv_heads}


SELF_ATTENTION_FORM = replace(
    FORM,
    suite=("8x2048x16x1x64", "8x1024x12x1x64", "4x4096x8x4x128"),
    settings={**FORM.settings, "mask": Setting(("causal", "full", "window"), "causal")},
    make=JoinedProblem,
)
