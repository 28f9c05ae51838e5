"""Attention's launches: which blocks for which heads, and forward and backward as torch sees them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from tilemesh.kernels.attention.reference import log_sums
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.steps import Argument, LaunchPlan, Pointer, Step, blocks

_KERNELS = "tilemesh.kernels.attention.kernel"
_LOG2_E = 1.4426950408889634
_L2_BYTES = 24 << 20  # of keys and values that programs read at the same time
_BOUNDS_BLOCK = 256


@dataclass(frozen=True)
class Blocks:
    """Queries and keys of a block, warps, and stages of loads in flight."""

    m: int
    n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees, beside packed sequences. factor: what scores are multiplied by."""

    causal: bool
    window: int
    scale: float

    def constants(self, packed: bool) -> dict[str, object]:
        return {"CAUSAL": self.causal, "WINDOW": bool(self.window), "PACKED": packed}


INTERPRETED = Blocks(16, 16, 4, 1)  # small, so that small tests have several blocks of each kind


def blocks_of(kernel: str, head: int, dtype: str, interpreted: bool) -> Blocks:
    """For one kernel and a head's width, a power of two. Measured on an H200 for 64 and 128 (docs/kernels/LOG.md)."""
    if interpreted:
        return INTERPRETED
    if dtype == "float32":
        return Blocks(64, 32, 4, 2) if head <= 64 else Blocks(32, 32, 4, 2) if head <= 128 else Blocks(16, 32, 4, 1)
    if head > 128:
        return {"attend": Blocks(128, 64, 8, 2), "keys_back": Blocks(32, 64, 8, 1)}.get(kernel, Blocks(64, 32, 8, 2))
    if head > 64:
        return {"attend": Blocks(128, 64, 8, 3), "keys_back": Blocks(64, 128, 8, 2)}.get(kernel, Blocks(128, 64, 8, 2))
    return {"attend": Blocks(128, 128, 8, 3), "keys_back": Blocks(64, 128, 8, 3)}.get(kernel, Blocks(128, 64, 8, 3))


def head_block(width: int) -> int:
    """The power of two that holds a head, at least what a product needs."""
    return max(16, triton.next_power_of_2(width))


def _strides(letter: str, place: Place) -> dict[str, Argument]:
    return {f"{letter}_{dim}": stride for dim, stride in zip("bhte", place.strides, strict=True)}


def _section(heads: int, keys: Place, readers: int) -> int:
    """How many heads of queries or of keys run side by side, so that the keys and values they read fit the L2."""
    size = {"float32": 4, "float64": 8}.get(keys.dtype, 2)
    held = 2 * keys.shape[2] * keys.shape[3] * size
    return max(1, min(heads, readers * max(1, _L2_BYTES // held)))


def _step(
    name: str, places: Mapping[str, Place], letters: Mapping[str, str], programs: int, more: Mapping[str, Argument],
    constants: Mapping[str, object], chosen: Blocks,
) -> LaunchPlan:  # fmt: skip
    """One launch of a kernel, which takes every tensor given, and the strides of those that have a letter."""
    arguments: dict[str, Argument] = {name: Pointer(name) for name in places}
    arguments = {"first": None, "last": None} | arguments | dict(more)
    for tensor, letter in letters.items():
        arguments |= _strides(letter, places[tensor])
    wide = any(place.wide for place in places.values())
    step = Step(
        f"{_KERNELS}:{name}", (programs, 1), arguments, constants, warps=chosen.warps, stages=chosen.stages, wide=wide
    )
    return LaunchPlan((step,))


def _constants(
    q: Place, chosen: Blocks, section: int, mask: Mask, packed: bool, interpreted: bool
) -> dict[str, object]:
    return {
        "BLOCK_M": chosen.m, "BLOCK_N": chosen.n, "HEAD": head_block(q.shape[3]), "SECTION": section,
        "WIDE": q.dtype == "float64", "UPCAST": interpreted and q.dtype in ("float16", "bfloat16"),
        "PRECISION": "ieee", **mask.constants(packed),
    }  # fmt: skip


def bounds_plan(places: Mapping[str, Place]) -> LaunchPlan:
    """`first` and `last` of every token from `starts`."""
    sequences, tokens = places["starts"].shape[0] - 1, places["first"].shape[0]
    arguments: dict[str, Argument] = {name: Pointer(name) for name in places}
    arguments |= {"N": sequences, "T": tokens, "steps": sequences.bit_length() + 1}
    constants = {"BLOCK": _BOUNDS_BLOCK}
    grid = (blocks(tokens, _BOUNDS_BLOCK), 1)
    return LaunchPlan((Step(f"{_KERNELS}:sequence_bounds", grid, arguments, constants),))


def forward_plan(places: Mapping[str, Place], *, mask: Mask, interpreted: bool) -> LaunchPlan:
    q, k = places["q"], places["k"]
    (batch, heads, queries, width), (_, kv_heads, keys, _) = q.shape, k.shape
    chosen = blocks_of("attend", head_block(width), q.dtype, interpreted)
    more: dict[str, Argument] = {
        "B": batch, "H": heads, "GROUP": heads // kv_heads, "T": queries, "S": keys, "E": width,
        "window": mask.window, "factor": mask.scale * _LOG2_E,
    }  # fmt: skip
    section = _section(batch * heads, k, heads // kv_heads)
    constants = _constants(q, chosen, section, mask, "first" in places, interpreted)
    programs = blocks(queries, chosen.m) * batch * heads
    return _step("attend", places, {"q": "q", "k": "k", "v": "v", "y": "y"}, programs, more, constants, chosen)


def products_plan(places: Mapping[str, Place]) -> LaunchPlan:
    """delta of every query."""
    y = places["y"]
    batch, heads, queries, width = y.shape
    head = head_block(width)
    rows = max(1, 4096 // head)
    arguments: dict[str, Argument] = {name: Pointer(name) for name in places}
    arguments |= {"B": batch, "H": heads, "T": queries, "E": width, **_strides("y", y), **_strides("g", places["grad"])}
    constants = {"ROWS": rows, "HEAD": head, "WIDE": y.dtype == "float64"}
    wide = any(place.wide for place in places.values())
    grid = (blocks(queries, rows) * batch * heads, 1)
    return LaunchPlan((Step(f"{_KERNELS}:row_products", grid, arguments, constants, wide=wide),))


def keys_back_plan(places: Mapping[str, Place], *, mask: Mask, interpreted: bool) -> LaunchPlan:
    q, k = places["q"], places["k"]
    (batch, heads, queries, width), (_, kv_heads, keys, _) = q.shape, k.shape
    chosen = blocks_of("keys_back", head_block(width), q.dtype, interpreted)
    more: dict[str, Argument] = {
        "B": batch, "K": kv_heads, "GROUP": heads // kv_heads, "T": queries, "S": keys, "E": width,
        "window": mask.window, "factor": mask.scale * _LOG2_E, "scale": mask.scale,
    }  # fmt: skip
    section = max(1, _section(batch * heads, q, 1) // (heads // kv_heads))
    constants = _constants(q, chosen, section, mask, "first" in places, interpreted)
    programs = blocks(keys, chosen.n) * batch * kv_heads
    letters = {"q": "q", "k": "k", "v": "v", "grad": "g", "dk": "d"}
    return _step("keys_back", places, letters, programs, more, constants, chosen)


def queries_back_plan(places: Mapping[str, Place], *, mask: Mask, interpreted: bool) -> LaunchPlan:
    q, k = places["q"], places["k"]
    (batch, heads, queries, width), (_, kv_heads, keys, _) = q.shape, k.shape
    chosen = blocks_of("queries_back", head_block(width), q.dtype, interpreted)
    more: dict[str, Argument] = {
        "B": batch, "H": heads, "GROUP": heads // kv_heads, "T": queries, "S": keys, "E": width,
        "window": mask.window, "factor": mask.scale * _LOG2_E, "scale": mask.scale,
    }  # fmt: skip
    section = _section(batch * heads, k, heads // kv_heads)
    constants = _constants(q, chosen, section, mask, "first" in places, interpreted)
    programs = blocks(queries, chosen.m) * batch * heads
    letters = {"q": "q", "k": "k", "v": "v", "grad": "g", "dq": "d"}
    return _step("queries_back", places, letters, programs, more, constants, chosen)


def _bounds(launch: Any, q: Tensor, starts: Tensor | None) -> dict[str, Tensor]:
    """Where each token's packed sequence begins and ends, by name; nothing where sequences are not packed."""
    if starts is None:
        return {}
    made = {name: torch.empty(q.shape[2], dtype=torch.int32, device=q.device) for name in ("first", "last")}
    launch(bounds_plan, {"starts": starts.contiguous(), **made}, written=("first", "last"))
    return made


def _mask(q: Tensor, causal: bool, window: int, scale: float) -> Mask:
    return Mask(causal, window, scale or 1 / math.sqrt(q.shape[-1]))


def forward(
    launch: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, causal: bool, window: int, scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y, kept = torch.empty(q.shape, dtype=q.dtype, device=q.device), log_sums(q)
    given = {"q": q, "k": k, "v": v, "y": y, "kept": kept, **_bounds(launch, q, starts)}
    how = {"mask": _mask(q, causal, window, scale), "interpreted": q.device.type == "cpu"}
    launch(forward_plan, given, written=("y", "kept"), **how)
    return y, kept


def backward(
    launch: Any, gradients: tuple[Tensor, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor, None]:
    (grad,), (y, sums) = gradients, kept
    q, k, v, starts, causal, window, scale, _ = arguments
    delta = torch.empty(sums.shape, dtype=sums.dtype, device=sums.device)
    launch(products_plan, {"y": y, "grad": grad, "delta": delta}, written=("delta",))
    dq, dk, dv = (torch.empty(tensor.shape, dtype=q.dtype, device=q.device) for tensor in (q, k, v))
    given = {"q": q, "k": k, "v": v, "grad": grad, "kept": sums, "delta": delta, **_bounds(launch, q, starts)}
    how = {"mask": _mask(q, causal, window, scale), "interpreted": q.device.type == "cpu"}
    launch(keys_back_plan, {**given, "dk": dk, "dv": dv}, written=("dk", "dv"), **how)
    launch(queries_back_plan, {**given, "dq": dq}, written=("dq",), **how)
    return dq, dk, dv, None
