"""The C functions of `cpu.c`: attention of sequences that decode, and what stands before any attention over pages.

torch would gather the pages of every sequence into one padded tensor and attend to that, one query each; this reads
keys and values where they lie. Where there is no compiler, callers do as torch does.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from tilemesh.kernels.c_functions import c_functions

_ADDRESS, _LONG = ctypes.c_void_p, ctypes.c_long


@functools.cache
def library(dtype: torch.dtype = torch.float32) -> ctypes.CDLL | None:
    """The compiled functions for pages of this dtype, float32 or bfloat16; None without Linux and a C compiler."""
    arguments = {
        "attend_decoding": [*[_ADDRESS] * 7, *[_LONG] * 8, ctypes.c_float, _ADDRESS],
        "attend_chunks": [*[_ADDRESS] * 6, *[_LONG] * 8, ctypes.c_float, _ADDRESS],
        "turn_and_store": [*[_ADDRESS] * 7, *[_LONG] * 5],
    }
    return c_functions("paged_attention", [Path(__file__).with_name("cpu.c")], arguments, dtype)


def serves_pages(held: Tensor) -> bool:
    """Whether there are such functions for these pages of numbers."""
    return held.device.type == "cpu" and held.is_contiguous() and library(held.dtype) is not None


def attend_decoding(
    q_RHE: Tensor,
    keys: Tensor,
    values: Tensor,
    tables_RM: Tensor,
    positions_R: Tensor,
    longest: int,
    window: int = 0,
    cap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """softmax(q k / sqrt(E)) v of one new token of each sequence, as `paged_attention` has it: (R, H, E).

    keys, values: (P, N, K, E) in float32 or bfloat16; the result is float32. tables_RM: int64, pages of each sequence.
    positions_R: int64, of the new tokens, each below `longest`.
    """
    loaded = library(keys.dtype)
    assert loaded is not None
    sinks_H = None if sinks_H is None else sinks_H.float().contiguous()
    sinks = None if sinks_H is None else sinks_H.data_ptr()
    q_RHE, tables_RM, positions_R = q_RHE.float().contiguous(), tables_RM.contiguous(), positions_R.contiguous()
    (rows, heads, width), (_, page_tokens, kv_heads, _) = q_RHE.shape, keys.shape
    most = longest + 4
    y_RHE, scores = torch.empty_like(q_RHE), torch.empty(rows * heads * most)
    loaded.attend_decoding(
        q_RHE.data_ptr(), keys.data_ptr(), values.data_ptr(), tables_RM.data_ptr(), positions_R.data_ptr(),
        y_RHE.data_ptr(), scores.data_ptr(), rows, heads, kv_heads, width, page_tokens, tables_RM.shape[1], window,
        most, cap, sinks,
    )  # fmt: skip
    return y_RHE


def attend_chunks(
    q_RTHE: Tensor,
    keys: Tensor,
    values: Tensor,
    tables_RM: Tensor,
    positions_RT: Tensor,
    window: int = 0,
    cap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """The same of several new tokens of each sequence, one after the other: (R, T, H, E)."""
    loaded = library(keys.dtype)
    assert loaded is not None
    sinks_H = None if sinks_H is None else sinks_H.float().contiguous()
    sinks = None if sinks_H is None else sinks_H.data_ptr()
    q_RTHE, tables_RM, positions_RT = q_RTHE.float().contiguous(), tables_RM.contiguous(), positions_RT.contiguous()
    (rows, tokens, heads, width), (_, page_tokens, kv_heads, _) = q_RTHE.shape, keys.shape
    y_RTHE = torch.empty_like(q_RTHE)
    loaded.attend_chunks(
        q_RTHE.data_ptr(), keys.data_ptr(), values.data_ptr(), tables_RM.data_ptr(), positions_RT.data_ptr(),
        y_RTHE.data_ptr(), rows, tokens, heads, kv_heads, width, page_tokens, tables_RM.shape[1], window, cap,
        sinks,
    )  # fmt: skip
    return y_RTHE


def turn_and_store(
    qkv_TF: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    places_T: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
) -> Tensor:
    """As `store_pages` where no code is asked for: queries (T, H, E); keys and values are in their places."""
    loaded = library(keys.dtype)
    assert loaded is not None
    qkv_TF, places_T = qkv_TF.float().contiguous(), places_T.contiguous()
    pages, page_tokens, kv_heads, width = keys.shape
    angles = [None, None] if rotary is None else [table.contiguous() for table in rotary]
    q_THE = torch.empty(len(qkv_TF), heads, width)
    loaded.turn_and_store(
        qkv_TF.data_ptr(), *[None if table is None else table.data_ptr() for table in angles], places_T.data_ptr(),
        q_THE.data_ptr(), keys.data_ptr(), values.data_ptr(), len(qkv_TF), heads, kv_heads, width, pages * page_tokens,
    )  # fmt: skip
    return q_THE
