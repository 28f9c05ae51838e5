"""The CUDA kernel of `int4.cu`: which of its forms serves how many tokens, compiled by NVRTC when first asked for.

Triton chooses where numbers lie in registers, and moves codes through shared memory into the order that tensor cores
want; this kernel chooses an order in which they need not move. It takes groups of 128 inputs or more on Hopper GPUs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_name("int4.cu")
_CHUNK, _LINE, _DEPTH = 128, 320, 4  # as in the source
_NARROW = 4096
"""Outputs up to which blocks are smaller and inputs are shared by more of them, so that all multiprocessors work."""


@dataclass(frozen=True)
class TokenForm:
    """Constants of one compiled kernel."""

    warps: int
    split: int
    tiles: int
    depth: int
    blocks: int

    @property
    def shared_bytes(self) -> int:
        """Two stages of activations; in the end a block's sums."""
        return max(2 * self.depth * 8 * self.tiles * _LINE, 16 * self.warps * 8 * self.tiles * 4)

    def grid(self, tokens: int, outputs: int) -> tuple[int, int, int]:
        return -(-outputs // (16 * self.warps)), self.split, -(-tokens // (8 * self.tiles))


def form_of(tokens: int, outputs: int) -> TokenForm:
    """By the number of tokens; docs/compress/LOG.md has what was measured."""
    tiles = 1 if tokens <= 8 else 2 if tokens <= 16 else 4 if tokens <= 32 else 8
    if outputs <= _NARROW:
        return TokenForm(4, 8, tiles, 2 if tiles == 8 else _DEPTH, 2 if tiles == 8 else 4 if tiles <= 2 else 3)
    return TokenForm(8, 4, tiles, 2 if tiles == 8 else _DEPTH, 1 if tiles == 8 else 2)


def serves(x: Tensor, scales: Tensor, code: str) -> bool:
    """Whether there is such a kernel for these activations."""
    if x.device.type != "cuda" or code != "int4" or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    inputs = x.shape[-1]
    fits = inputs % _CHUNK == 0 and inputs // scales.shape[1] % _CHUNK == 0
    return fits and torch.cuda.get_device_capability(x.device)[0] == 9 and hasattr(torch.cuda, "_compile_kernel")


@functools.cache
def _compiled(form: TokenForm, half: bool, zeros: bool, device: torch.device) -> Any:
    names = {
        "WARPS": form.warps, "SPLIT": form.split, "TILES": form.tiles, "DEPTH": form.depth, "BLOCKS": form.blocks,
        "HALF": int(half), "ZEROS": int(zeros),
    }  # fmt: skip
    lines = "".join(f"#define {name} {value}\n" for name, value in names.items())
    with torch.cuda.device(device):
        kernel = torch.cuda._compile_kernel(lines + _SOURCE.read_text(), "int4_tokens")
        kernel.set_shared_memory_config(form.shared_bytes)
    return kernel


def product(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, y: Tensor, form: TokenForm | None = None
) -> None:
    """y (M, N) = x (M, K) W^T, all of it contiguous."""
    (tokens, inputs), outputs = x.shape, len(codes)
    form = form or form_of(tokens, outputs)
    kernel = _compiled(form, x.dtype is torch.float16, zeros is not None, x.device)
    step = 0 if len(scales) == 1 else scales.shape[1]
    given = [codes, scales, scales if zeros is None else zeros, x, y, tokens, outputs, inputs, scales.shape[1], step]
    kernel(form.grid(tokens, outputs), (32 * form.warps, 1, 1), given, shared_mem=form.shared_bytes)
