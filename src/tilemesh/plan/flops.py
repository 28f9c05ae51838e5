"""FLOPs of a training step, exactly, by part: every matmul counted, nothing rounded to 6N.

Conventions: a multiply-add is 2 FLOPs; scores are counted as the full square, also under a causal mask, as MFU is
defined in the PaLM and Megatron papers; backward is twice forward. Model FLOPs are those that had to be done (MFU),
hardware FLOPs add what is recomputed (HFU).
"""

from __future__ import annotations

from dataclasses import dataclass

from tilemesh.model.config import ModelConfig


@dataclass(frozen=True)
class ForwardFlops:
    """One forward pass of some sequences through the whole model."""

    projections: int
    """q, k, v and output projections of all layers."""
    scores: int
    """Scores and their product with the values, all layers."""
    mlp: int
    logits: int

    @property
    def layers(self) -> int:
        return self.projections + self.scores + self.mlp

    @property
    def total(self) -> int:
        return self.layers + self.logits


def forward_flops(model: ModelConfig, sequences: int, context: int) -> ForwardFlops:
    tokens = sequences * context
    qkvo = 2 * tokens * model.width * (2 * model.width + 2 * model.kv_width)
    return ForwardFlops(
        projections=model.layers * qkvo,
        scores=model.layers * 4 * tokens * context * model.width,
        mlp=model.layers * 2 * tokens * (model.mlp_inputs + 1) * model.width * model.mlp_width,
        logits=2 * tokens * model.width * model.vocabulary,
    )


def model_flops(model: ModelConfig, sequences: int, context: int) -> int:
    """What a step had to do: forward and backward."""
    return 3 * forward_flops(model, sequences, context).total


def recomputed_flops(model: ModelConfig, sequences: int, context: int, recompute: str) -> int:
    """What a step does a second time: all layers, only their scores, or nothing."""
    forward = forward_flops(model, sequences, context)
    return {"none": 0, "selective": forward.scores, "full": forward.layers}[recompute]


def hardware_flops(model: ModelConfig, sequences: int, context: int, recompute: str) -> int:
    return model_flops(model, sequences, context) + recomputed_flops(model, sequences, context, recompute)
