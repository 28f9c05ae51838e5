"""Text from a model: one token after the other, each drawn from what the model thinks comes next.

`sample` works with any function from tokens and a cache to logits, so a model laid over ranks and one in one process
write the same text from the same weights and seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.ranges import check_sampling
from tilemesh.model.cache import DenseCache, KeyValueCache

Logits = Callable[[Tensor, KeyValueCache], Tensor]


def sample(
    logits: Logits,
    prompt: Sequence[int],
    tokens: int,
    *,
    context: int,
    temperature: float = 0.7,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[int]:
    """So many tokens after the prompt. Temperature 0 always takes the likeliest.

    When the context is full, its second half is read again as a new beginning: cheaper than moving on by one token.
    """
    if not prompt:
        raise UsageError("an empty prompt: give at least one character")
    check_sampling(tokens, temperature, seed)
    generator = torch.Generator().manual_seed(seed)
    whole = list(prompt)
    cache = DenseCache(1, context, device)
    pending = whole[-context:]
    for _ in range(tokens):
        if cache.lengths[0] + len(pending) > context:
            cache, pending = DenseCache(1, context, device), whole[-max(1, context // 2) :]
        with torch.no_grad():
            found = logits(torch.tensor([pending], device=device), cache.extend(len(pending)))[0, -1]
        scores = found.double().cpu()  # drawn on the CPU: the same text on every device with the same logits
        if not bool(torch.isfinite(scores).all()):
            raise RunError(
                "the model's logits are NaN or infinite, so there is no text to draw: was the rate too high?"
            )
        if temperature == 0:
            token = int(scores.argmax())
        else:
            # The largest is 0 before the division: a tiny temperature gives -inf beside it, never inf - inf.
            shares = torch.softmax((scores - scores.max()) / temperature, dim=0)
            token = int(torch.multinomial(shares, 1, generator=generator))
        whole.append(token)
        pending = [token]
    return whole[len(prompt) :]
