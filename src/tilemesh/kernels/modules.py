"""Modules over the fused kernels, drop-in for torch's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilemesh.core.errors import unknown
from tilemesh.kernels.activations.names import ACTIVATIONS
from tilemesh.kernels.embedding.reference import embedding
from tilemesh.kernels.launch.implementation import check_implementation
from tilemesh.kernels.matmul.arguments import IMPLEMENTATIONS
from tilemesh.kernels.matmul.op import fused_matmul


class FusedLinear(nn.Linear):
    """`nn.Linear` with its activation fused in: act(x @ weight.T + bias). Parameters and state dict are the same."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str | None = "relu",
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        activation = "none" if activation is None else activation
        if activation not in ACTIVATIONS:
            raise unknown("activation", str(activation), ACTIVATIONS)
        if implementation not in IMPLEMENTATIONS:
            raise unknown("implementation", str(implementation), IMPLEMENTATIONS)
        self.activation = activation
        self.implementation = implementation

    def reset_parameters(self) -> None:
        # Without memory there is nothing to draw, and torch's random ops on the meta device import for two seconds.
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name nn.Linear uses)
        # One row, as nn.Linear allows: the kernels want two dims.
        if isinstance(input, Tensor) and input.dim() == 1:
            return self.forward(input.unsqueeze(0)).squeeze(0)
        return fused_matmul(
            input, self.weight.t(), self.bias, activation=self.activation, implementation=self.implementation
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


class FusedEmbedding(nn.Embedding):
    """`nn.Embedding` whose gradient repeats bit for bit, and that can add a table of positions in the same pass."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, device=device, dtype=dtype)
        check_implementation(implementation)
        self.implementation = implementation

    def forward(
        self,
        input: Tensor,  # noqa: A002  (the name nn.Embedding uses)
        positions: Tensor | None = None,
        start: int = 0,
    ) -> Tensor:
        """weight[input], plus positions[start : start + T] where a table of positions is given."""
        y: Tensor = embedding(input, self.weight, positions, start=start, implementation=self.implementation)
        return y
