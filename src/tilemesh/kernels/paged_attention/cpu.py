"""The C function of `cpu.c`, compiled for this CPU when it is first asked for: attention of sequences that decode.

torch would gather the pages of every sequence into one padded tensor and attend to that, one query each; this reads
keys and values where they lie. Where there is no compiler, callers do as torch does.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path

import torch
from torch import Tensor

from tilemesh.core.c_library import NATIVE, build_library
from tilemesh.core.errors import RunError
from tilemesh.kernels.lowbit.cpu import loaded_openmp

_SOURCE = Path(__file__).with_name("cpu.c")
_OPTIONS = ("-O3", "-fno-math-errno", "-fno-trapping-math", NATIVE, "-fopenmp")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled function; None where it cannot be had here."""
    if platform.system() != "Linux":
        return None
    try:
        made = build_library("paged_attention", _SOURCE.read_text(), _OPTIONS, ("-lm",))
        for path in loaded_openmp():
            ctypes.CDLL(path, mode=os.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(made), mode=os.RTLD_NOW)
        loaded.attend_decoding.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_long] * 8 + [ctypes.c_float]
        loaded.attend_decoding.restype = None
        return loaded
    except (OSError, RunError, AttributeError):
        return None


def serves_decoding(q: Tensor, held: Tensor) -> bool:
    """Whether there is such a function for these queries and pages of numbers."""
    is_float = q.dtype == held.dtype == torch.float32
    return is_float and held.device.type == "cpu" and held.is_contiguous() and library() is not None


def attend_decoding(
    q_RHE: Tensor,
    keys: Tensor,
    values: Tensor,
    tables_RM: Tensor,
    positions_R: Tensor,
    longest: int,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """softmax(q k / sqrt(E)) v of one new token of each sequence, as `paged_attention` has it: (R, H, E).

    keys, values: (P, N, K, E). tables_RM: int64, pages of each sequence. positions_R: int64, of the new tokens, each
    below `longest`.
    """
    loaded = library()
    assert loaded is not None
    q_RHE, tables_RM, positions_R = q_RHE.contiguous(), tables_RM.contiguous(), positions_R.contiguous()
    (rows, heads, width), (_, page_tokens, kv_heads, _) = q_RHE.shape, keys.shape
    most = longest + 4
    y_RHE, scores = torch.empty_like(q_RHE), torch.empty(rows * heads * most)
    loaded.attend_decoding(
        q_RHE.data_ptr(), keys.data_ptr(), values.data_ptr(), tables_RM.data_ptr(), positions_R.data_ptr(),
        y_RHE.data_ptr(), scores.data_ptr(), rows, heads, kv_heads, width, page_tokens, tables_RM.shape[1], window,
        most, cap,
    )  # fmt: skip
    return y_RHE
