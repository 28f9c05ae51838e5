"""Products of a single token on a GPU, which a library's kernels are not made for."""

from __future__ import annotations

from torch import Tensor

from tilemesh.kernels.row_linear.reference import norm_row_linear, row_linear


def is_one_row(x: Tensor) -> bool:
    """Whether these are activations of a single token on a GPU."""
    return x.device.type == "cuda" and x.numel() == x.shape[-1] and x.is_contiguous()


def times_row(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str = "none") -> Tensor:
    """The product of a single token. A model's weights are never what the kernel before has just made."""
    y: Tensor = row_linear(x.view(1, -1), weight, bias, gate=gate, settled=True)
    return y.view(*x.shape[:-1], -1)


def times_normed_row(
    x: Tensor, branch: Tensor, scale: Tensor, weight: Tensor, eps: float, gate: str = "none"
) -> tuple[Tensor, Tensor]:
    """The same of the RMSNorm of x + branch; and x + branch."""
    rows = (x.view(1, -1), branch.view(1, -1))
    y, total = norm_row_linear(*rows, scale, weight, eps=eps, gate=gate, settled=True)
    return y.view(*x.shape[:-1], -1), total.view(x.shape)
