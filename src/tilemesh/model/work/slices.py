"""How a sequence is cut into slices for TeraPipe (`core/step/slices.py`), by what a slice costs in this model.

The one idea: products cost the same for every token, attention more the later a slice stands, since it is computed
against all keys up to the slice's end. Both in FLOPs of a layer's forward pass, so every rank finds the same lengths.
"""

from __future__ import annotations

import functools

from tilemesh.core.step import slices as cutting
from tilemesh.core.step.slices import SliceTime
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.weights import active_matrices


def slice_flops(model: ModelConfig) -> SliceTime:
    """FLOPs of a slice's forward pass through a layer. Masked pairs of queries and keys are computed too."""
    per_token = 2 * sum(weight.outputs * weight.inputs for weight in active_matrices(model))
    per_pair = 4 * model.query_width  # scores, and values weighted by them
    return lambda tokens, before: float(tokens * per_token + tokens * (tokens + before) * per_pair)


@functools.lru_cache(maxsize=256)
def slice_lengths(model: ModelConfig, stages: int, slices: int, tokens: int) -> tuple[int, ...]:
    """Tokens of each of so many slices of a sequence that passes through so many stages."""
    return cutting.slice_lengths(tokens, stages, slices, slice_flops(model))


def slice_shares(model: ModelConfig, stages: int, slices: int, tokens: int) -> tuple[float, ...]:
    """What each of them takes of a pass."""
    return cutting.slice_shares(slice_lengths(model, stages, slices, tokens), slice_flops(model))
