"""Quantising, dequantising and packing, in torch: numbers to codes under scales, and codes into bytes.

Shapes: a matrix is (outputs N, inputs K); scales and zero points are (N or 1, G), one per group of K / G inputs. In
memory, codes of 8 and 16 bits are one per element (int8; uint8 bits of an fp8; int16), and those of fewer bits lie
packed in bytes, the first in the lowest bits, a row beginning with a byte. Whole numbers of fewer than 8 bits are
stored with an offset, without a sign: for 4 and 8 bits in the order of compressed-tensors' int32 words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.kernels.lowbit.formats import SECOND_LEVEL, NumberFormat, Scheme

_FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}
Agree = Callable[[Tensor], Tensor]
"""Elementwise largest over the ranks that hold parts of the same matrix."""
_LEAST = torch.finfo(torch.float32).tiny  # of a scale: a row of zeros has one too


class Quantized(NamedTuple):
    """A quantised matrix."""

    codes: Tensor
    """(N, K) as they mean: whole numbers with their sign, bits of an fp8, places in a table. Not packed."""
    scales: Tensor
    """(N or 1, G), float32."""
    zeros: Tensor | None
    """The code that means 0, of the shape of the scales, int8; None where that is 0 everywhere."""


def by_group(x: Tensor, groups: int) -> Tensor:
    """(N, K) as (N, G, K / G)."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups)


def find_scales(
    weight: Tensor, scheme: Scheme, shrink: Tensor | float = 1.0, agree: Agree | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points by the largest magnitude, or by smallest and largest, of each group.

    `shrink`: by how much that range is made smaller first, one number or one per scale. `agree`: where rows are cut, or
    the weight is a part of a matrix under one scale: whole groups have scales of their own, and share their row's step.
    """
    number = scheme.number
    whole = weight.detach().float()
    parts = by_group(whole.reshape(1, -1) if scheme.granularity == "tensor" else whole, scheme.groups(whole.shape[1]))
    over: Agree = (lambda most: most) if agree is None or scheme.granularity == "group" else agree
    if scheme.symmetric:
        most = over(parts.abs().amax(-1))
        scales = (most * shrink / number.half_range).clamp(min=_LEAST)
        if number.kind == "fixed":
            # The next power of two, for which the largest magnitude still fits.
            scales = torch.exp2(torch.ceil(torch.log2(most.clamp(min=_LEAST) / number.high)))
        return _two_levels(scales, scheme, agree), None
    low, high = (-over(-parts.amin(-1)) * shrink).clamp(max=0), (over(parts.amax(-1)) * shrink).clamp(min=0)
    scales = _two_levels(((high - low) / (number.high - number.low)).clamp(min=_LEAST), scheme, agree)
    zeros = (number.low - torch.round(low / scales)).clamp(number.low, number.high)
    return scales, zeros.to(torch.int8)


def _two_levels(scales: Tensor, scheme: Scheme, agree: Agree | None) -> Tensor:
    """With two levels each group's scale becomes the next larger of 255 parts of the row's largest."""
    if scheme.levels == 1:
        return scales
    step = row_steps(scales) if agree is None else agree(row_steps(scales))
    return torch.ceil((scales / step).clamp(max=SECOND_LEVEL) - 1e-4).clamp(min=1) * step


def row_steps(scales: Tensor) -> Tensor:
    """Of two-level scales: what each row's are multiples of."""
    return (scales.amax(-1, keepdim=True) / SECOND_LEVEL).clamp(min=_LEAST)


def encode(weight: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Codes (N, K), each the nearest; ties between whole numbers go to the even one, as IEEE 754 rounds."""
    number = scheme.number
    parts = by_group(weight.detach().to(torch.promote_types(weight.dtype, torch.float32)), scales.shape[1])
    scaled = parts / scales[..., None].to(parts.dtype)  # as compressed-tensors does; `cpu.c` too
    if number.kind == "float":
        codes = scaled.clamp(number.low, number.high).float().to(_FLOAT8[number.name]).view(torch.uint8)
    elif number.kind == "table":
        table = _table(number, scaled.dtype, scaled.device)
        codes = torch.bucketize(scaled.contiguous(), (table[1:] + table[:-1]) / 2).to(torch.uint8)
    else:
        shifted = torch.round(scaled) if zeros is None else torch.round(scaled) + zeros[..., None].to(parts.dtype)
        codes = shifted.clamp(number.low, number.high).to(torch.int16 if number.bits > 8 else torch.int8)
    return codes.reshape(weight.shape)


def decode(codes: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What codes (N, K) mean, in a floating-point dtype; computed at least in float32."""
    wide = torch.promote_types(dtype, torch.float32)
    parts = by_group(_values(codes, scheme.number, wide), scales.shape[1])
    if zeros is not None:
        parts = parts - zeros[..., None].to(wide)
    return (parts * scales[..., None].to(wide)).reshape(codes.shape).to(dtype)


def _values(codes: Tensor, number: NumberFormat, dtype: torch.dtype) -> Tensor:
    if number.kind == "float":
        return codes.view(_FLOAT8[number.name]).to(dtype)
    if number.kind == "table":
        return _table(number, dtype, codes.device)[codes.long()]
    return codes.to(dtype)


@functools.cache
def _table(number: NumberFormat, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Kept on its device: a copy from the host cannot be recorded in a CUDA graph."""
    with torch.inference_mode(False):
        return torch.tensor(number.table, dtype=dtype, device=device)


def quantize(weight: Tensor, scheme: Scheme, shrink: Tensor | float = 1.0) -> Quantized:
    """Round to nearest under scales from the largest magnitudes."""
    scales, zeros = find_scales(weight, scheme, shrink)
    return Quantized(encode(weight, scheme, scales, zeros), scales, zeros)


def rounded(weight: Tensor, scheme: Scheme, shrink: Tensor | float = 1.0, agree: Agree | None = None) -> Tensor:
    """A matrix as it comes back after round-to-nearest."""
    scales, zeros = find_scales(weight, scheme, shrink, agree)
    return decode(encode(weight, scheme, scales, zeros), scheme, scales, zeros, weight.dtype)


# ---- packing ---------------------------------------------------------------------------------------------------


def pack(codes: Tensor, number: NumberFormat) -> Tensor:
    """Codes (N, K) as they lie in memory: bytes (N, row bytes) for fewer than 8 bits, else as they are."""
    if number.bits >= 8:
        return codes.contiguous()
    offset = number.offset if number.kind == "int" else 0
    whole = codes.to(torch.int16) + offset
    if number.bits in (2, 4):
        each = 8 // number.bits
        short = -whole.shape[1] % each
        if short:
            whole = torch.nn.functional.pad(whole, (0, short))
        places = torch.arange(each, device=codes.device, dtype=torch.int16) * number.bits
        return (whole.reshape(len(whole), -1, each) << places).sum(-1).to(torch.uint8)
    bits = (whole[..., None] >> torch.arange(number.bits, device=codes.device, dtype=torch.int16)) & 1
    bits = bits.flatten(1)
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8))
    places = torch.arange(8, device=codes.device, dtype=torch.int16)
    return (bits.reshape(len(whole), -1, 8) << places).sum(-1).to(torch.uint8)


def unpack(packed: Tensor, number: NumberFormat, inputs: int) -> Tensor:
    """The way back: codes (N, K)."""
    if number.bits >= 8:
        return packed
    if packed.shape[1] != -(-inputs * number.bits // 8):
        raise UsageError(
            f"{packed.shape[1]} bytes per row: expected {-(-inputs * number.bits // 8)} for {inputs} codes of "
            f"{number.bits} bits"
        )
    offset = number.offset if number.kind == "int" else 0
    kind = torch.int8 if number.kind == "int" else torch.uint8
    if number.bits in (2, 4):
        places = torch.arange(8 // number.bits, device=packed.device, dtype=torch.uint8) * number.bits
        whole = (packed[..., None] >> places) & ((1 << number.bits) - 1)
        return (whole.flatten(1)[:, :inputs].to(torch.int16) - offset).to(kind)
    bits = (packed[..., None] >> torch.arange(8, device=packed.device, dtype=torch.uint8)) & 1
    bits = bits.flatten(1)[:, : inputs * number.bits].reshape(len(packed), inputs, number.bits).to(torch.int16)
    places = torch.arange(number.bits, device=packed.device, dtype=torch.int16)
    return ((bits << places).sum(-1) - offset).to(kind)
