"""How many parameters a rank holds: the sharding convention, counted.

Projections are split over tp; norms, and biases added after a sum, are whole on every rank; kv heads fewer than tp are
repeated; where tp does not divide the vocabulary, the first ranks, whose share is counted, have one row more. The first
stage holds the embeddings, the last the output: a tied one is on both when there are several stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilemesh.core.errors import UsageError
from tilemesh.model.config import ModelConfig, why_not_tp


@dataclass(frozen=True)
class Shards:
    """Parameters on one of tp ranks."""

    layer: int
    layer_replicated: int
    """Of `layer`, those that every rank has."""
    embeddings: int
    """Token and position tables."""
    head: int
    """Final norm and output projection; the projection of a tied model is in `embeddings`."""
    tied_head: int
    """What a last stage apart from the first holds of a tied output projection."""


def kv_width_per_rank(model: ModelConfig, tp: int) -> int:
    return max(1, model.kv_heads // tp) * model.head_width


def vocabulary_per_rank(model: ModelConfig, tp: int) -> int:
    return -(-model.vocabulary // tp)


def require_divisible(model: ModelConfig, tp: int) -> None:
    """Refuse a tp that cannot split this model, with the reason."""
    problem = why_not_tp(model, tp)
    if problem:
        raise UsageError(problem)


def shard_parameters(model: ModelConfig, tp: int) -> Shards:
    """What one rank of tp holds of each part."""
    require_divisible(model, tp)
    width, hidden, kv = model.width, model.mlp_width // tp, kv_width_per_rank(model, tp)
    own = width // tp
    norm = width * (2 if model.norm == "layernorm" else 1)
    split = width * (own + 2 * kv) + own * width + (model.mlp_inputs + 1) * width * hidden
    replicated = 2 * norm
    if model.biases:
        split += own + 2 * kv + model.mlp_inputs * hidden
        replicated += 2 * width  # of the two projections whose partial outputs are summed
    rows = vocabulary_per_rank(model, tp)
    final_norm = norm if model.norm_place == "pre" else 0
    return Shards(
        layer=split + replicated,
        layer_replicated=replicated,
        embeddings=(rows + (model.context if model.positions == "learned" else 0)) * width,
        head=final_norm + (0 if model.tied else rows * width),
        tied_head=rows * width if model.tied else 0,
    )


def stage_parameters(shards: Shards, layers: int, first: bool, last: bool) -> int:
    """Parameters on one rank of a stage with so many layers."""
    total = layers * shards.layer
    if first:
        total += shards.embeddings
    if last:
        total += shards.head + (0 if first else shards.tied_head)
    return total
