"""The C function of `cpu.c`: all layers of a decode step in one call.

What lies between two products of a small model is little; a call from Python for each of eight parts of each layer is
a fifth of a step.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilemesh.kernels.c_functions import c_functions

_ADDRESS, _LONG = ctypes.c_void_p, ctypes.c_long
_FIELDS = 27
"""Of a layer in `cpu.c`: addresses and sizes, of 8 bytes each."""


class LayerWeights(NamedTuple):
    """Of one layer: scales of its norms, and matrices (outputs, inputs) with their biases."""

    attention_norm: Tensor
    heads: Tensor
    heads_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gated: Tensor
    gated_bias: Tensor | None
    last: Tensor
    last_bias: Tensor | None


class LayerAdapters(NamedTuple):
    """Of one layer's matrices, all adapters side by side: A (parts, slots, rank, K) and B (N, slots, rank)."""

    heads: tuple[Tensor, Tensor] | None
    out: tuple[Tensor, Tensor] | None
    gated: tuple[Tensor, Tensor] | None
    last: tuple[Tensor, Tensor] | None


NO_ADAPTERS = LayerAdapters(None, None, None, None)


class RowAdapters(NamedTuple):
    """Which of them each row has; -1: none."""

    slots_R: Tensor
    slots: int
    rank: int


class LayerPages(NamedTuple):
    """Where a layer's keys and values are, (P, N, K, E), and what its heads are turned by."""

    keys: Tensor
    values: Tensor
    cosines: Tensor | None
    sines: Tensor | None
    tables_RM: Tensor
    places_R: Tensor
    """int64, as the tables: where the new tokens' go; below 0 it is counted from the end."""
    window: int


@functools.cache
def library(dtype: torch.dtype = torch.float32) -> ctypes.CDLL | None:
    """The compiled function for weights of this dtype, float32 or bfloat16; None without Linux and a C compiler."""
    here = Path(__file__).parent
    sources = [here.with_name(name) / "cpu.c" for name in ("few_linear", "paged_attention", here.name)]
    types = [_ADDRESS, _LONG, *[_ADDRESS] * 5, *[_LONG] * 8, ctypes.c_float, ctypes.c_float, _ADDRESS]
    return c_functions(here.name, sources, {"decode_layers": types}, dtype)


def decode_layers(
    x_RD: Tensor,
    weights: Sequence[LayerWeights],
    pages: Sequence[LayerPages],
    last_norm: Tensor,
    positions_R: Tensor,
    longest: int,
    epsilon: float,
    cap: float,
    adapted: Sequence[LayerAdapters] = (),
    rows_have: RowAdapters | None = None,
) -> Tensor:
    """The norm after the last layer, (R, D), of at most `few_linear.cost.MOST_ROWS` rows; all is contiguous. x, angles
    and the result are float32, the rest is of the dtype of weights. `adapted`:
    of each layer, where rows have adapters."""
    loaded = library(last_norm.dtype)
    assert loaded is not None
    (rows, width), (_, page_tokens, kv_heads, head_width) = x_RD.shape, pages[0].keys.shape
    heads, hidden, most = weights[0].out.shape[1] // head_width, weights[0].last.shape[1], longest + 4
    y_RD = torch.empty(rows, width)
    joined = (3 * heads + 2 * kv_heads) * head_width
    room = torch.empty(rows * (2 * width + joined + 3 * hidden + heads * most))
    fields = torch.tensor([
        [0 if part is None else part.data_ptr() for part in (*own, *held[:4])]
        + [0 if part is None else part.data_ptr() for pair in low for part in pair or (None, None)]
        + [held.tables_RM.data_ptr(), held.places_R.data_ptr()]
        + [held.tables_RM.shape[1], held.window, held.keys.shape[0] * page_tokens]
        for own, held, low in zip(weights, pages, adapted or [NO_ADAPTERS] * len(pages), strict=True)
    ])  # fmt: skip
    assert fields.shape[1] == _FIELDS
    given = torch.tensor([0, 0, 0] if rows_have is None else [rows_have.slots_R.data_ptr(), *rows_have[1:]])
    loaded.decode_layers(
        fields.data_ptr(), len(weights), x_RD.data_ptr(), last_norm.data_ptr(), positions_R.data_ptr(),
        y_RD.data_ptr(), room.data_ptr(), rows, heads, kv_heads, head_width, width, hidden, page_tokens, most, epsilon,
        cap, given.data_ptr(),
    )  # fmt: skip
    return y_RD
