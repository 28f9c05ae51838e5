"""LayerNorm and RMSNorm with the addition to the residual stream before them, by torch's operations or ours.

D: width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.kernels.norm.reference import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from tilemesh.model.config import ModelConfig
from tilemesh.model.kernels import TORCH, ModelKernels
from tilemesh.model.row_blocks import BLOCKS, in_row_blocks


class ResidualNorm(nn.Module):
    """`norm(x, branch)`: the norm of x + branch, and x + branch.

    Under autocast x, the residual stream, is float32 and a branch 16-bit. Our kernels then write the norm in 16 bits,
    which is what the products that read it would cast it to; `wide` keeps it as wide as the stream.
    """

    def __init__(
        self,
        width: int,
        kind: str,
        epsilon: float,
        implementation: str,
        dtype: torch.dtype | None,
        offset: bool = False,
        wide: bool = False,
    ) -> None:
        """`kind`: layernorm or rmsnorm; `implementation`: as in `ModelKernels`. Without memory at first.

        `offset`: the parameter is the weight less 1, under the name `offset`.
        """
        super().__init__()
        self.kind, self.epsilon, self.implementation, self.width = kind, epsilon, implementation, width
        self.wide = wide
        self.added: Callable[[Tensor], Tensor] | None = None
        """Where ranks share the width: adds up what each has summed."""
        self.ranks = 1
        self.weight = None if offset else nn.Parameter(torch.empty(width, device="meta", dtype=dtype))
        self.offset = nn.Parameter(torch.empty(width, device="meta", dtype=dtype)) if offset else None
        self.bias = nn.Parameter(torch.empty(width, device="meta", dtype=dtype)) if kind == "layernorm" else None

    def forward(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.implementation in (TORCH, BLOCKS) or self.added is not None:
            total = x if branch is None else x + branch
            is_whole = self.implementation == TORCH
            return self._by_torch(total) if is_whole else in_row_blocks(self._by_torch, total), total
        options = {"eps": self.epsilon, "implementation": self.implementation}
        vectors = (self._scale(x),) if self.bias is None else (self._scale(x), self.bias)
        if branch is None:
            alone = rms_norm if self.bias is None else layer_norm
            return alone(x, *vectors, **options), x
        with_sum = add_rms_norm if self.bias is None else add_layer_norm
        y, total = with_sum(branch.to(x.dtype) if self.wide else branch, x, *vectors, **options)
        return y, total

    def widen(self) -> None:
        """Write norms as wide as the stream: of ranks that share what reads them, the gradients are summed."""
        self.wide = True

    def spread(self, added: Callable[[Tensor], Tensor], ranks: int) -> None:
        """Be a part of a norm whose width so many ranks share evenly; of some of it several may have the same."""
        scale = self.offset if self.weight is None else self.weight
        assert scale is not None
        self.added, self.ranks, self.width = added, ranks, len(scale)

    def compute_by(self, implementation: str) -> None:
        """Take another implementation, as in `ModelKernels`, or `BLOCKS`."""
        self.implementation = implementation

    def _scale(self, x: Tensor) -> Tensor:
        """What the normalized x is multiplied by."""
        if self.weight is not None:
            return self.weight
        assert self.offset is not None
        # In 16 bits 1 + offset would lose the offset: the sum is made in x's dtype, or wider.
        return 1 + self.offset.to(torch.promote_types(x.dtype, torch.float32))

    def _by_torch(self, x: Tensor) -> Tensor:
        if self.added is not None:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            mean = self.added(wide.square().sum(-1, keepdim=True)) / (self.ranks * self.width)
            return (wide * torch.rsqrt(mean + self.epsilon) * self._scale(x)).to(x.dtype)
        if self.offset is not None:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            return functional.rms_norm(wide, (self.width,), self._scale(x), self.epsilon).to(x.dtype)
        if self.bias is None:
            return functional.rms_norm(x, (self.width,), self.weight, self.epsilon)
        return functional.layer_norm(x, (self.width,), self.weight, self.bias, self.epsilon)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.width}, eps={self.epsilon}, implementation={self.implementation}"


def norm_of(config: ModelConfig, dtype: torch.dtype | None, kernels: ModelKernels) -> ResidualNorm:
    """A norm of the residual stream."""
    wide = config.norm_place == "post"  # there a norm's result is the residual stream itself
    return ResidualNorm(config.width, config.norm, config.norm_epsilon, kernels.norms, dtype, config.norm_offset, wide)


def head_norm_of(config: ModelConfig, heads: int, dtype: torch.dtype | None) -> ResidualNorm | None:
    """A norm of queries or keys: over each head, or over all heads together."""
    if config.qk_norm == "none":
        return None
    width = config.head_width * (heads if config.qk_norm == "full" else 1)
    return ResidualNorm(width, "rmsnorm", config.norm_epsilon, TORCH, dtype, config.norm_offset)
