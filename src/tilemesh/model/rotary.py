"""Rotary positions: cosines and sines of tokens' positions, and heads turned by them.

B: rows; T: tokens; R: elements of a head that are turned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilemesh.kernels.rotary.reference import rotary
from tilemesh.kernels.rotary.table import cosines_and_sines
from tilemesh.model.config import ModelConfig
from tilemesh.model.row_blocks import ROW_BLOCK

RotaryAngles = tuple[Tensor, Tensor]
"""Cosines and sines."""


def rotary_angles(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[RotaryAngles, RotaryAngles]:
    """Of these positions, (..., R/2): of a model's layers, and of those with a window. `dtype`: of the weights."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = rotary_table(positions, config, wide)
    return angles, rotary_table(positions, config, wide, is_local=True) if config.has_local_rotary else angles


class RotaryTable(NamedTuple):
    """`rotary_angles` of all positions of a context, computed once for many passes."""

    angles: RotaryAngles
    local: RotaryAngles

    @classmethod
    def of(cls, config: ModelConfig, like: Tensor) -> RotaryTable | None:
        """Where and as exact as a model with such a weight wants it; None where positions are a learned table."""
        if config.positions != "rotary":
            return None
        # In blocks of one shape: whoever makes a table has the same bits, whatever the context and number of threads.
        positions = torch.arange(-(-config.context // ROW_BLOCK) * ROW_BLOCK, device=like.device)
        blocks = [rotary_angles(block, config, like.dtype) for block in torch.split(positions, ROW_BLOCK)]
        own = _joined([angles for angles, _ in blocks])
        return cls(own, _joined([local for _, local in blocks]) if config.has_local_rotary else own)

    def at(self, positions: Tensor) -> tuple[RotaryAngles, RotaryAngles]:
        """Of these positions, (..., R/2)."""
        angles = looked_up(self.angles, positions)
        return angles, angles if self.local is self.angles else looked_up(self.local, positions)


def rotary_table(positions: Tensor, config: ModelConfig, dtype: torch.dtype, is_local: bool = False) -> RotaryAngles:
    """Cosines and sines (..., R/2): pair i of the R elements of a head that are rotated turns by position x
    base^(-2i/R) (Su et al. 2021), or slower where the context was stretched. `is_local`: of layers with a window."""
    pair = torch.arange(0, config.rotary_width, 2, device=positions.device).to(dtype)
    if is_local:
        frequency = config.rotary_local_base ** (-pair / config.rotary_width)
    else:
        frequency = _stretched(config.rotary_base ** (-pair / config.rotary_width), config)
    cos, sin = cosines_and_sines(positions.to(dtype)[..., None] * frequency)
    factor = 1.0 if is_local else config.turned_factor
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def _joined(blocks: Sequence[RotaryAngles]) -> RotaryAngles:
    return torch.cat([cos for cos, _ in blocks]), torch.cat([sin for _, sin in blocks])


def looked_up(tables: RotaryAngles, positions: Tensor) -> RotaryAngles:
    """Rows of cosines and sines."""
    cos, sin = (table.index_select(0, positions.reshape(-1)).view(*positions.shape, -1) for table in tables)
    return cos, sin


def _stretched(frequency: Tensor, config: ModelConfig) -> Tensor:
    """Rotary frequencies for a longer context than the model was first trained with."""
    if config.rotary_scaling == "none":
        return frequency
    slow = frequency / config.rotary_factor
    if config.rotary_scaling == "linear":
        return slow
    if config.rotary_scaling == "yarn":
        return _by_yarn(frequency, slow, config)
    # Llama 3.1: by how often a pair turns over the first context, kept, divided, or in between.
    turns = frequency * (config.rotary_trained / (2 * math.pi))
    kept = ((turns - config.rotary_low) / (config.rotary_high - config.rotary_low)).clamp(0, 1)
    return kept * frequency + (1 - kept) * slow


def _by_yarn(frequency: Tensor, slow: Tensor, config: ModelConfig) -> Tensor:
    """Peng et al. 2023: as Llama 3.1, but from kept to divided in equal steps from pair to pair, between whole ones."""
    pairs_per_log = config.rotary_width / (2 * math.log(config.rotary_base))
    first, last = (
        pairs_per_log * math.log(config.rotary_trained / (2 * math.pi * turns))
        for turns in (config.rotary_high, config.rotary_low)
    )
    if config.rotary_rounded:
        first, last = math.floor(first), math.ceil(last)
    begin, end = max(first, 0), min(last, config.rotary_width - 1)
    pair = torch.arange(len(frequency), device=frequency.device).to(frequency.dtype)
    divided = ((pair - begin) / (end - begin or 0.001)).clamp(0, 1)
    return (1 - divided) * frequency + divided * slow


def rotate(x: Tensor, cos: Tensor, sin: Tensor, alone: bool = False) -> Tensor:
    """Turn each head's pairs by the tokens' angles. A pair is (i, i + R/2), as in Hugging Face's weights of Llama; what
    a head has beyond R elements stays. `alone`: on a GPU rounded as keys are that a kernel turns and stores."""
    turned = 2 * cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat((rotate(x[..., :turned], cos, sin, alone), x[..., turned:]), dim=-1)
    if alone and x.is_cuda:
        y: Tensor = rotary(x, cos, sin)
        return y
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
