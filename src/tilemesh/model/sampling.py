"""Text from a model: one token after the other, each drawn from what the model thinks comes next.

`sample` works with any function from tokens and a cache to logits, so a model laid over ranks and one in one process
write the same text from the same weights and seed. Each token has a random number of its own, which follows from the
seed and the token's place in the answer: whoever computes the same logits in any other order draws the same text.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.ranges import check_sampling
from tilemesh.model.cache import DenseCache, KeyValueCache

Logits = Callable[[Tensor, KeyValueCache], Tensor]

_BITS, _GAMMA = 2**64 - 1, 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_CANDIDATES = 1024
"""Top-p looks at so many of the likeliest first; all are sorted only where those do not reach p."""


def sample(
    logits: Logits,
    prompt: Sequence[int],
    tokens: int,
    *,
    context: int,
    temperature: float = 0.7,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[int]:
    """So many tokens after the prompt. Temperature 0 always takes the likeliest; `keep_likeliest` has top_k and top_p.

    When the context is full, its second half is read again as a new beginning: cheaper than moving on by one token.
    """
    if not prompt:
        raise UsageError("an empty prompt: give at least one character")
    check_sampling(tokens, temperature, seed, top_k, top_p)
    whole = list(prompt)
    cache = DenseCache(1, context, device)
    pending = whole[-context:]
    for number in range(tokens):
        if cache.lengths[0] + len(pending) > context:
            cache, pending = DenseCache(1, context, device), whole[-max(1, context // 2) :]
        with torch.no_grad():
            last_logits = logits(torch.tensor([pending], device=device), cache.extend(len(pending)))[0, -1]
        scores_1V = last_logits[None].cpu()  # drawn on the CPU: the same text on every device with the same logits
        if not bool(torch.isfinite(scores_1V).all()):
            raise RunError(
                "the model's logits are NaN or infinite, so there is no text to draw: was the rate too high?"
            )
        if temperature == 0:
            token = int(scores_1V.argmax())
        else:
            shares_1V = shares(scores_1V, torch.tensor([temperature], dtype=torch.float64))
            keep_likeliest(shares_1V[0], top_k, top_p)
            token = int(pick(shares_1V, torch.tensor([keyed_uniform(seed, 0, number)], dtype=torch.float64)))
        whole.append(token)
        pending = [token]
    return whole[len(prompt) :]


@functools.lru_cache(maxsize=1 << 16)
def stream_key(seed: int, answer: int) -> int:
    """Where the random numbers of an answer to a prompt begin among 2**64."""
    return int.from_bytes(hashlib.blake2b(struct.pack("<QQ", seed, answer), digest_size=8).digest(), "little")


def keyed_uniform(seed: int, answer: int, number: int) -> float:
    """The random number, from 0 to below 1, of the token with this number in this answer to a prompt."""
    # SplitMix64 (Steele, Lea and Flood 2014), whose n-th number follows from n without those before it.
    bits = (stream_key(seed, answer) + (number + 1) * _GAMMA) & _BITS
    for shift, factor in _MIX:
        bits = ((bits ^ bits >> shift) * factor) & _BITS
    return float((bits ^ bits >> 31) >> 11) / 2**53


def keyed_uniforms(keys_N: NDArray[np.uint64], numbers_N: NDArray[np.int64]) -> NDArray[np.float64]:
    """`keyed_uniform` of many answers at once, each given by its `stream_key`."""
    bits_N = keys_N + (numbers_N.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    for shift, factor in _MIX:
        bits_N = (bits_N ^ bits_N >> np.uint64(shift)) * np.uint64(factor)
    uniform_N: NDArray[np.float64] = ((bits_N ^ bits_N >> np.uint64(31)) >> np.uint64(11)) / 2**53
    return uniform_N


def shares(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """Each row's distribution at its own temperature above 0, in at least float32."""
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    # The largest is 0 before the division: a tiny temperature gives -inf beside it, never inf - inf.
    scores_NV = logits_NV - logits_NV.amax(-1, keepdim=True).to(wide)
    divisor_N = temperature_N.to(scores_NV).clamp(min=torch.finfo(wide).tiny)
    return torch.softmax(scores_NV.div_(divisor_N[:, None]), dim=-1)


def keep_likeliest(shares_V: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> None:
    """Set the shares of tokens that may not be drawn to 0: below min_p of the largest, not among the top_k largest, or
    not needed to reach top_p of the sum. Thresholds, not positions in a list: equal shares stay or go together."""
    if min_p > 0:
        shares_V[shares_V < min_p * shares_V.max()] = 0
    if 0 < top_k < len(shares_V):
        shares_V[shares_V < shares_V.topk(top_k).values[-1]] = 0
    if top_p < 1:
        wanted = top_p * float(shares_V.sum(dtype=torch.float64))
        for most in (min(_CANDIDATES, len(shares_V)), len(shares_V)):
            likeliest = shares_V.topk(most).values
            reached = likeliest.cumsum(0, dtype=torch.float64)
            # The first token that reaches the share is kept as well, and with it all that are as likely.
            last = int((reached < wanted).sum())
            if last < most:
                shares_V[shares_V < likeliest[last]] = 0
                return


def pick(shares_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """One token per row: the one in whose part of [0, 1), parts laid out in the order of tokens, the number falls.

    Rows need not add up to 1. Sums are float64, so that the last of 100,000 tokens is as likely as it should be.
    """
    ends_NV = shares_NV.cumsum(-1, dtype=torch.float64)
    at_N1 = (uniform_N * ends_NV[:, -1])[:, None]
    found_N = torch.searchsorted(ends_NV, at_N1, right=True)[:, 0]
    # Rounding may carry the number to the very end: then it is the last token that has a share.
    last_N = torch.searchsorted(ends_NV, ends_NV[:, -1:].contiguous())[:, 0]
    return torch.minimum(found_N, last_N)
