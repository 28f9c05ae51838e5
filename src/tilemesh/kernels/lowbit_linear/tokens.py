"""The CUDA kernels of `int4.cu` and, on Hopper GPUs, `int4_ring.cu`: which of their forms serves how many tokens,
compiled by NVRTC when first asked for.

Triton chooses where numbers lie in registers, and moves codes through shared memory into the order that tensor cores
want; these kernels choose an order in which they need not move. They take groups of 128 inputs or more.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CHUNK, _THREADS = 128, 256  # as in the sources
_ENTRIES = {"int4": "int4_tokens", "int4_ring": "int4_ring"}
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

    source = "int4"
    threads = _THREADS
    shared_bytes = 0

    def grid(self, tokens: int, outputs: int) -> tuple[int, int, int]:
        return -(-outputs // (16 * self.strips)), -(-tokens // (8 * self.tiles)), 1


@dataclass(frozen=True)
class RingForm:
    """Constants of one compiled kernel of `int4_ring.cu`: 16 outputs of a warp and 8 tokens each, warps that share the
    inputs of a place in the ring and its outputs, places, blocks of a multiprocessor, blocks that share outputs, and
    whether a code's offset is taken off sums."""

    strips: int
    tiles: int
    k_warps: int
    n_warps: int
    stages: int
    blocks: int
    cluster: int = 1
    fold: int = 1

    source = "int4_ring"

    @property
    def threads(self) -> int:
        return 32 * (self.k_warps * self.n_warps + 1)

    @property
    def shared_bytes(self) -> int:
        """The ring, as the source lays it out."""
        codes = 16 * self.strips * self.n_warps * (self.k_warps * _CHUNK // 2 + 32)
        return self.stages * (codes + 8 * self.tiles * (self.k_warps * _CHUNK * 2 + 16))

    def grid(self, tokens: int, outputs: int) -> tuple[int, int, int]:
        return -(-outputs // (16 * self.strips * self.n_warps)) * self.cluster, -(-tokens // (8 * self.tiles)), 1


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
def _compiled(form: TokenForm | RingForm, per_group: int, half: bool, zeros: bool, device: torch.device) -> Any:
    names = {field.upper(): value for field, value in asdict(form).items()}
    names |= {"PER_GROUP": per_group, "HALF": int(half), "ZEROS": int(zeros)}
    lines = "".join(f"#define {name} {value}\n" for name, value in names.items())
    source = Path(__file__).with_name(f"{form.source}.cu").read_text()
    with torch.cuda.device(device):
        kernel = torch.cuda._compile_kernel(lines + source, _ENTRIES[form.source])
        if form.shared_bytes:
            kernel.set_shared_memory_config(form.shared_bytes)
    return kernel


def product(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, y: Tensor, form: TokenForm | RingForm | None = None
) -> None:
    """y (M, N) = x (M, K) W^T, all of it contiguous."""
    (tokens, inputs), outputs = x.shape, len(codes)
    form = form or form_of(tokens, outputs)
    per_group = inputs // scales.shape[1] // _CHUNK
    kernel = _compiled(form, per_group, x.dtype is torch.float16, zeros is not None, x.device)
    step = 0 if len(scales) == 1 else scales.shape[1]
    given = [codes, scales, scales if zeros is None else zeros, x, y, tokens, outputs, inputs, step]
    kernel(form.grid(tokens, outputs), (form.threads, 1, 1), given, shared_mem=form.shared_bytes)
