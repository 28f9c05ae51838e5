"""Matrices in four bits as published gpt-oss files hold them (OCP Microscaling, MXFP4), read as the numbers they mean.

Of each row, 32 numbers at a time are 16 bytes in `NAME_blocks`, two a byte, the first in the lower half: each is one of
sixteen values. `NAME_scales` has the power of two that they are multiplied by, plus 127. bfloat16 holds the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decoded(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks (experts, rows, groups, 16) and scales (experts, rows, groups) as (experts, rows, 32 x groups), an expert
    at a time: indices take more memory than what is read."""
    signed = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack((signed[byte & 15], signed[byte >> 4]), 1)  # of every byte
    made = torch.empty(*blocks.shape[:-1], 32, dtype=torch.bfloat16)
    for into, codes, scale in zip(made, blocks, scales, strict=True):
        into.copy_(torch.ldexp(pairs[codes.int()].flatten(-2), scale.int()[..., None] - 127))
    return made.flatten(-2)


@dataclass(frozen=True)
class CodedMatrices:
    """Takes the place of a file that has a tensor: the two that it is made of, and theirs."""

    blocks: Any
    scales: Any

    def get_tensor(self, name: str) -> Tensor:
        """With the inputs first."""
        return decoded(self.blocks.get_tensor(name + BLOCKS), self.scales.get_tensor(name + SCALES)).mT
