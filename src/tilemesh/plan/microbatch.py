"""Bytes that one microbatch's passes keep on a rank: what layouts share that compute it alike."""

from __future__ import annotations

import functools

from tilemesh.model.config import ModelConfig
from tilemesh.model.work.kept import (
    kept_bytes,
    kept_for_weights,
    loss_kept_bytes,
    loss_tensors,
    outlived_bytes,
    pass_kept_bytes,
)
from tilemesh.model.work.task import Task


class MicrobatchBytes:
    """What one microbatch's passes keep on a rank, each part counted when it is first asked for."""

    def __init__(self, model: ModelConfig, task: Task) -> None:
        self.model, self.task = model, task
        self._layers: dict[str, tuple[tuple[int, int], ...]] = {}

    def layers(self, repeated: str) -> tuple[tuple[int, int], ...]:
        """Of a layer of each of the model's kinds, and what comes back while one is recomputed."""
        kept = self._layers.get(repeated)
        if kept is None:
            kept = tuple(kept_bytes(kind, self.task, repeated) for kind in self.model.kinds)
            self._layers[repeated] = kept
        return kept

    @functools.cached_property
    def late(self) -> tuple[int, ...]:
        """Of a layer of each kind, between the two halves of a backward pass."""
        return tuple(sum(tensor.nbytes for tensor in kept_for_weights(kind, self.task)) for kind in self.model.kinds)

    @functools.cached_property
    def logits(self) -> int:
        """What the loss holds at its fullest moment, on the last stage."""
        return sum(tensor.nbytes for tensor in loss_tensors(self.model, self.task))

    @functools.cached_property
    def loss_kept(self) -> int:
        """Of that, what stays until the last chunk's backward pass."""
        return loss_kept_bytes(self.model, self.task)

    @functools.cached_property
    def beside_layers(self) -> tuple[int, int]:
        """What a pass through the first chunk keeps beside its layers, and one through any other."""
        return pass_kept_bytes(self.model, self.task, True), pass_kept_bytes(self.model, self.task, False)

    @functools.cached_property
    def outlived(self) -> int:
        return outlived_bytes(self.model, self.task)

    @functools.cached_property
    def messages(self) -> int:
        """Between stages: one coming and one going."""
        return 2 * self.task.tokens * self.model.width * self.task.stream // self.task.split
