"""Tokens computed in blocks of one shape: a token's bits then do not depend on how many others there are.

A library chooses its kernel, and with it the order of sums, by the shape of a product; and a CPU computes the last few
elements of a long loop by other instructions. A block always has the same shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROW_BLOCK = 32
BLOCKS = "blocks"
"""As an implementation in `ModelKernels`' words: torch's operations on blocks of tokens."""


def in_row_blocks(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`compute` of x, (tokens, …) or (B, T, …), `ROW_BLOCK` tokens at a time; the last block is padded with a row of
    its own."""
    rows = x if x.dim() == 2 else x.flatten(0, 1)
    blocks = list(torch.split(rows, ROW_BLOCK))
    missing = -len(rows) % ROW_BLOCK
    if missing:
        blocks[-1] = torch.cat((blocks[-1], blocks[-1][:1].expand(missing, *rows.shape[1:])))
    y = torch.cat([compute(block) for block in blocks])[: len(rows)]
    return y.view(*x.shape[: x.dim() - rows.dim() + 1], *y.shape[1:])
