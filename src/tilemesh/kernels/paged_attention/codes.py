"""Keys and values in 8 bits: how they are written to the places of a pool, and read back, in plain torch.

The one idea: a token's numbers of one head share a scale, so a page that is written token by token never has to be
rounded again, and what a scale costs is 4 bytes beside the head's width.

P: pages; N: tokens of a page; T: tokens; K: key and value heads; E: head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemesh.kernels.lowbit.codes import decode, encode, find_scales
from tilemesh.kernels.lowbit.formats import SCALE_BYTES, Scheme

CODES = {"int8": torch.int8, "fp8": torch.uint8}
"""Of keys and values in 8 bits: the dtype that codes are kept in."""


def code_scheme(dtype: str) -> Scheme:
    """How codes of a pool of this dtype are made."""
    return Scheme("fp8" if dtype == "uint8" else "int8")


def code_bytes(itemsize: int, width: int, kind: str) -> float:
    """Per number of a head `width` wide: of a plain cache of `itemsize` bytes, or of one in 8 bits with its scale."""
    return itemsize if not kind else 1 + SCALE_BYTES / width


def put_pages(pool: Tensor, scales: Tensor | None, places_T: Tensor, x_TKE: Tensor) -> None:
    """Write the keys or values of tokens to their places of a pool (P, N, K, E), as codes where it has scales."""
    kv_heads, width = pool.shape[2:]
    into = pool.view(-1, kv_heads, width)
    if scales is None:
        into[places_T] = x_TKE
        return
    scheme = code_scheme(str(pool.dtype).removeprefix("torch."))
    rows = x_TKE.reshape(-1, width)
    new_scales, _ = find_scales(rows, scheme)
    into[places_T] = encode(rows, scheme, new_scales).view(x_TKE.shape)
    scales.view(-1, kv_heads)[places_T] = new_scales.view(-1, kv_heads)


def take_pages(pool: Tensor, scales: Tensor | None, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """The keys or values of some pages, one after the other: (pages, N, K, E) in a floating-point dtype."""
    taken = pool.index_select(0, pages)
    if scales is None:
        return taken.to(dtype)
    scheme = code_scheme(str(pool.dtype).removeprefix("torch."))
    rows = decode(taken.view(-1, pool.shape[-1]), scheme, scales.index_select(0, pages).view(-1, 1), None, dtype)
    return rows.view(taken.shape)
