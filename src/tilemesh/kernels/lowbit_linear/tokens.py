"""The CUDA kernel of `int4.cu`: which of its forms serves how many tokens, compiled by NVRTC when first asked for.

Triton chooses where numbers lie in registers, and moves codes through shared memory into the order that tensor cores
want; this kernel chooses an order in which they need not move. It takes groups of 128 inputs or more.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_name("int4.cu")
_CHUNK, _THREADS = 128, 256  # as in the source
MOST = 16
"""Tokens that a block takes at a time; with more, codes are unpacked again."""
_NARROW = 4096
"""Outputs up to which blocks have fewer of them, so that all multiprocessors work."""


@dataclass(frozen=True)
class TokenForm:
    """Constants of one compiled kernel: 16 outputs and 8 tokens each, loads ahead, blocks of a multiprocessor."""

    strips: int
    tiles: int
    depth: int
    blocks: int

    def grid(self, tokens: int, outputs: int) -> tuple[int, int, int]:
        return -(-outputs // (16 * self.strips)), -(-tokens // (8 * self.tiles)), 1


def form_of(tokens: int, outputs: int) -> TokenForm:
    """By the numbers of tokens and outputs; docs/compress/LOG.md has what was measured."""
    if tokens <= 8:
        return TokenForm(1, 1, 4, 2) if outputs <= _NARROW else TokenForm(2, 1, 2, 2)
    return TokenForm(2, 2, 3, 1) if outputs <= _NARROW else TokenForm(4, 2, 2, 1)


def serves(x: Tensor, scales: Tensor, code: str) -> bool:
    """Whether there is such a kernel for these activations."""
    if x.device.type != "cuda" or code != "int4" or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    inputs = x.shape[-1]
    fits = inputs % _CHUNK == 0 and inputs // scales.shape[1] % _CHUNK == 0 and scales.numel() < 2**31
    return fits and torch.cuda.get_device_capability(x.device)[0] >= 8 and hasattr(torch.cuda, "_compile_kernel")


@functools.cache
def _compiled(form: TokenForm, per_group: int, half: bool, zeros: bool, device: torch.device) -> Any:
    names = {
        "STRIPS": form.strips, "TILES": form.tiles, "DEPTH": form.depth, "BLOCKS": form.blocks,
        "PER_GROUP": per_group, "HALF": int(half), "ZEROS": int(zeros),
    }  # fmt: skip
    lines = "".join(f"#define {name} {value}\n" for name, value in names.items())
    with torch.cuda.device(device):
        return torch.cuda._compile_kernel(lines + _SOURCE.read_text(), "int4_tokens")


def product(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, y: Tensor, form: TokenForm | None = None
) -> None:
    """y (M, N) = x (M, K) W^T, all of it contiguous."""
    (tokens, inputs), outputs = x.shape, len(codes)
    form = form or form_of(tokens, outputs)
    per_group = inputs // scales.shape[1] // _CHUNK
    kernel = _compiled(form, per_group, x.dtype is torch.float16, zeros is not None, x.device)
    step = 0 if len(scales) == 1 else scales.shape[1]
    given = [codes, scales, scales if zeros is None else zeros, x, y, tokens, outputs, inputs, step]
    kernel(form.grid(tokens, outputs), (_THREADS, 1, 1), given)
