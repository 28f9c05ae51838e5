"""Modules over the fused kernels, drop-in for torch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels.activations.names import ACTIVATIONS
from tilemesh.kernels.attention.reference import attention
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


class SelfAttention(nn.Module):
    """Self-attention over tokens (B, T, width) with grouped-query heads: four projections around `attention`.

    starts: as `attention` takes it, for sequences packed into a batch of 1.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int = 0,
        bias: bool = False,
        causal: bool = True,
        window: int = 0,
        deterministic: bool = False,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        if heads < 1 or width % heads or heads % kv_heads:
            raise UsageError(
                f"width {width} in {heads} heads over {kv_heads} of keys: expected multiples of one another"
            )
        self.heads, self.kv_heads = heads, kv_heads
        self.causal, self.window, self.deterministic = causal, window, deterministic
        self.implementation = implementation
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.fc_q = nn.Linear(width, width, **made)
        self.fc_k = nn.Linear(width, width // heads * kv_heads, **made)
        self.fc_v = nn.Linear(width, width // heads * kv_heads, **made)
        self.fc_o = nn.Linear(width, width, **made)

    def forward(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        q = self.fc_q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.fc_k(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        v = self.fc_v(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        made: Tensor = attention(
            q, k, v, starts, causal=self.causal, window=self.window, deterministic=self.deterministic,
            implementation=self.implementation,
        )  # fmt: skip
        projected: Tensor = self.fc_o(made.transpose(1, 2).flatten(-2))
        return projected

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal}, window={self.window}"
