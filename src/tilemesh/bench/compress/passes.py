"""The two passes that models are timed by, computed as in an engine: some sequences forward, and one decoded token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilemesh.measure.gpu import KernelTimer
from tilemesh.measure.timing import LoopTimer, Timer
from tilemesh.model.cache import DenseCache
from tilemesh.model.programs.prepare import Prepared, prepare
from tilemesh.model.programs.program import Use
from tilemesh.model.transformer import Transformer

ROWS = 4
"""Sequences of a timed forward pass."""


def pass_timer(device: torch.device) -> Timer:
    """Of passes and of products, so that one predicts the other: a loop on a CPU, a recorded graph on a GPU."""
    return KernelTimer() if device.type == "cuda" else LoopTimer()


def passes_of(model: Transformer, tokens: Tensor) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """A forward pass of all sequences, and the token after the first of them, again and again.

    Projections of the same activations become one product: the model belongs to the caller no more.
    """
    programs = prepare(model, Use(), tokens.device)
    return lambda turn: programs(tokens), _decode(programs, model, tokens[:1])


def _decode(programs: Prepared, model: Transformer, prompt: Tensor) -> Callable[[int], object]:
    length = min(prompt.shape[1], model.config.context - 1)
    cache = DenseCache(1, model.config.context, prompt.device)
    with torch.inference_mode():
        programs(prompt[:, :length], cache=cache.extend(length))
    token = prompt[:, -1:]
    cache.extend(1)
    return lambda turn: programs(token, cache=cache.again())
