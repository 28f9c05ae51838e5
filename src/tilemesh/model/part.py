"""A part of a model: some consecutive layers, with or without what comes before the first and after the last.

The one idea: a pipeline's chunk is a `Transformer` that has fewer modules. Its layers keep their numbers and its
parameters their names, so weights, dropout, caches and checkpoints do not depend on how a model is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilemesh.core.errors import UsageError
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.weights import Weight, embedding_weights, head_weights, layer_weights

TIED = "token_embedding.weight"
"""The one parameter that two parts may hold: an output projection that is the embedding's table."""


@dataclass(frozen=True)
class ModelPart:
    """Layers from `begin` up to `end`, which is not among them."""

    begin: int
    end: int
    embedding: bool
    """Whether it takes tokens; otherwise activations."""
    head: bool
    """Whether it gives logits; otherwise activations."""

    @property
    def layers(self) -> range:
        return range(self.begin, self.end)

    def check(self, config: ModelConfig) -> None:
        """Refuse what is no part of this model."""
        if not 0 <= self.begin <= self.end <= config.layers:
            raise UsageError(f"layers {self.begin} to {self.end}: expected some of the model's 0 to {config.layers}")
        if (self.embedding and self.begin) or (self.head and self.end < config.layers):
            end = "the embedding, which is before the first" if self.begin else "the head, which is after the last"
            raise UsageError(f"layers {self.begin} to {self.end} of {config.layers} with {end}: leave it out")

    def check_input(self, has_activations: bool) -> None:
        """Refuse a pass that begins otherwise than this part does."""
        if has_activations is self.embedding:
            wanted = "tokens alone" if self.embedding else "x_BTD, the activations of the part before it"
            raise UsageError(f"layers {self.begin} to {self.end} of a model: expected {wanted}")

    def shared(self, config: ModelConfig) -> tuple[str, ...]:
        """Names of parameters that another part of the model holds as well: both have a part of their gradient."""
        return (TIED,) if config.tied and self.embedding != self.head else ()

    def weights(self, config: ModelConfig) -> tuple[Weight, ...]:
        """Its modules with parameters, each by its full name; a tied table is one of them wherever it is used."""
        tied = embedding_weights(config)[:1] if self.shared(config) and self.head else ()
        layers = (
            weight._replace(name=f"layers.{layer}.{weight.name}")
            for layer in self.layers
            for weight in layer_weights(config.of_layer(layer))
        )
        return (
            *(embedding_weights(config) if self.embedding else tied),
            *layers,
            *(head_weights(config) if self.head else ()),
        )


def whole_part(config: ModelConfig) -> ModelPart:
    """All of a model."""
    return ModelPart(0, config.layers, embedding=True, head=True)


def cut_parts(config: ModelConfig, layers: Sequence[int]) -> tuple[ModelPart, ...]:
    """The model in as many parts as numbers are given, with so many layers each."""
    if sum(layers) != config.layers or min(layers, default=0) < 0:
        raise UsageError(
            f"parts of {', '.join(map(str, layers)) or 'no'} layers: expected numbers that add up to {config.layers}"
        )
    parts, begin = [], 0
    for place, count in enumerate(layers):
        parts.append(ModelPart(begin, begin + count, embedding=place == 0, head=place == len(layers) - 1))
        begin += count
    return tuple(parts)
