"""The C functions of `cpu.c`, compiled for this CPU when they are first asked for, and called on torch tensors.

The one idea: decoding reads every weight once per token, so a weight of one byte in place of four is worth up to four
times the speed, if arithmetic keeps up. torch has no such product for every CPU; a page of C and the compiler that is
there do. Where there is no compiler, callers dequantise and let torch multiply. Activations become 16-bit fixed point
(an error of at most 2^-15 of a row's largest magnitude), or codes of 8 bits where a recipe asks for that, the same that
`codes.encode` makes.

The object file is linked without OpenMP's library, so that its loops run on the threads that torch has already: two
pools of threads would take turns on the same cores.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tilemesh.core.c_library import NATIVE, build_library
from tilemesh.core.errors import RunError
from tilemesh.kernels.c_functions import loaded_openmp
from tilemesh.kernels.launch.tensors import is_watched
from tilemesh.kernels.lowbit.formats import Scheme

_SOURCE = Path(__file__).with_name("cpu.c")
# What lets compilers vectorise a largest magnitude and a rounding, and leaves divisions as IEEE 754 has them.
_FINITE = ("-fno-math-errno", "-fno-trapping-math", "-ffinite-math-only", "-fno-signed-zeros")
MOST_GROUP = 131_072  # inputs under one scale whose sum fits 32 bits
FEW_ROWS = {"int8": 32, "int4": 32, "fixed16": 16}
"""Up to so many rows of activations the integer loops are used; larger batches are worth dequantising for."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None without Linux and a C compiler."""
    if platform.system() != "Linux":
        return None
    try:
        built = build_library("lowbit", _SOURCE.read_text(), ("-O3", *_FINITE, NATIVE, "-fopenmp"))
        for path in loaded_openmp():
            ctypes.CDLL(path, mode=os.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(built), mode=os.RTLD_NOW)
        loaded.product.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_long] * 6
        loaded.fixed_product.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_long] * 5
        loaded.product.restype, loaded.fixed_product.restype = ctypes.c_int, None
        return loaded if _is_right(loaded) else None
    except (OSError, RunError, AttributeError):
        return None


def _is_right(loaded: ctypes.CDLL) -> bool:
    """One small product, before anybody relies on it."""
    w, x, y = torch.arange(-8, 8, dtype=torch.int8).repeat(5, 1), torch.full((1, 16), 3.0), torch.empty(1, 5)
    _few_bits(loaded, w, torch.ones(5, 1), None, x, None, y, 8, None)
    return bool(((y + 24).abs() < 0.01).all())


def serves(x: Tensor, scheme: Scheme, inputs: int, groups: int) -> bool:
    """Whether there is a quick product for these activations: a few rows on a CPU, outside of autograd and of whatever
    records operators or transforms functions: torch.compile holds no tensor for the sake of an address that was asked
    of it, and a forward-mode derivative is lost behind one."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16) or scheme.format not in FEW_ROWS:
        return False
    if is_compiling() or is_watched() or (torch.is_grad_enabled() and x.requires_grad):
        return False
    rows = x.numel() // max(1, inputs)
    even = scheme.format != "int4" or inputs // groups % 2 == 0
    return 0 < rows <= FEW_ROWS[scheme.format] and even and inputs // groups < MOST_GROUP and library() is not None


def product(
    x: Tensor,
    packed: Tensor,
    scheme: Scheme,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    x_scales: Tensor | None = None,
) -> Tensor:
    """x W^T + bias for x (..., K). `x_scales`: one per row, where activations become int8 codes; not for fixed16."""
    loaded = library()
    assert loaded is not None
    wide = (x if x.dtype is torch.float32 else x.to(torch.float32)).contiguous()  # asking `to` for nothing takes 0.9 µs
    bias = None if bias is None else bias.to(torch.float32).contiguous()
    y = torch.empty(*x.shape[:-1], packed.shape[0])
    if scheme.format == "fixed16":
        _fixed(loaded, packed, scales, wide, bias, y)
    else:
        _few_bits(loaded, packed, scales, zeros, wide, bias, y, scheme.bits, x_scales)
    return y if x.dtype is torch.float32 else y.to(x.dtype)


def _fixed(loaded: ctypes.CDLL, codes: Tensor, scales: Tensor, x: Tensor, bias: Tensor | None, y: Tensor) -> None:
    inputs = x.shape[-1]
    rows = x.numel() // inputs
    fixed, x_scales = torch.empty(rows, inputs, dtype=torch.int16), torch.empty(rows)
    loaded.fixed_product(
        codes.data_ptr(), scales.data_ptr(), x.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
        fixed.data_ptr(), x_scales.data_ptr(), rows, y.shape[-1], inputs, scales.shape[1], scales.shape[0],
    )  # fmt: skip


def _few_bits(
    loaded: ctypes.CDLL,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    x: Tensor,
    bias: Tensor | None,
    y: Tensor,
    bits: int,
    x_scales: Tensor | None,
) -> None:
    inputs = x.shape[-1]
    x_scales = None if x_scales is None else x_scales.to(torch.float32).contiguous()
    enough = loaded.product(
        packed.data_ptr(), scales.data_ptr(), None if zeros is None else zeros.data_ptr(), x.data_ptr(),
        None if bias is None else bias.data_ptr(), y.data_ptr(), None if x_scales is None else x_scales.data_ptr(),
        x.numel() // inputs, y.shape[-1], inputs, scales.shape[1], scales.shape[0], bits,
    )  # fmt: skip
    if not enough:
        raise RunError(f"no memory for {x.numel()} activations as bytes")
