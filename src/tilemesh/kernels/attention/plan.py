"""Attention's launches: which blocks for which heads, and forward and backward as torch sees them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import triton
from torch import Tensor

from tilemesh.kernels.attention.reference import log_sums
from tilemesh.kernels.launch.call import Place, Plan, one_launch
from tilemesh.kernels.launch.gpu import device_index, gpu_of
from tilemesh.kernels.launch.steps import Argument, Descriptor, FitError, LaunchPlan, Pointer, Step, blocks

_KERNELS = "tilemesh.kernels.attention.kernel"
_HOPPER = {
    "attend_hopper": "tilemesh.kernels.attention.hopper:attend_hopper",
    "keys_back_hopper": "tilemesh.kernels.attention.hopper_back:keys_back_hopper",
    "queries_back_hopper": "tilemesh.kernels.attention.hopper_back:queries_back_hopper",
}
_ROWS = 64  # of a group of warps in hopper.py and hopper_back.py; a program has two
_LOG2_E = 1.4426950408889634
_L2_BYTES = 24 << 20  # of keys and values that programs read at the same time
_BOUNDS_BLOCK = 256
_SIZES = ("B", "H", "K", "GROUP", "T", "S", "window", "section", "tiles")
"""What no access gets wider by: one kernel serves all of them."""


@dataclass(frozen=True)
class Blocks:
    """Queries and keys of a block, warps, and stages of loads in flight."""

    m: int
    n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees, beside packed sequences, and what scores are multiplied by."""

    causal: bool
    window: int
    scale: float

    def constants(self, packed: bool) -> dict[str, object]:
        return {"CAUSAL": self.causal, "WINDOW": bool(self.window), "PACKED": packed}


@dataclass(frozen=True)
class TileRing:
    """Of a kernel for Hopper: rows of a tile that is streamed, and stages of its ring."""

    rows: int
    stages: int


def ring_of(kernel: str, width: int) -> TileRing:
    """Measured on an H200 (docs/kernels/LOG.md)."""
    if kernel == "attend":
        return TileRing(128, 2)
    if kernel == "keys_back":
        return TileRing(64, 2) if width == 128 else TileRing(128, 2)
    return TileRing(64, 3)


@dataclass(frozen=True)
class Target:
    """What a plan is made for.

    multiprocessors: of a Hopper GPU, for its own kernels; 0 for the portable ones. small: in the smallest blocks, for
    GPUs with little shared memory.
    """

    interpreted: bool = False
    multiprocessors: int = 0
    small: bool = False


INTERPRETED = Blocks(16, 16, 4, 1)  # small, so that small tests have several blocks of each kind


def blocks_of(kernel: str, head: int, dtype: str, target: Target) -> Blocks:
    """For one portable kernel and a head's width, a power of two. Chosen to fit an A100 and later; not tuned."""
    if target.interpreted:
        return INTERPRETED
    if dtype == "float32" or target.small:
        return Blocks(32, 32, 4, 1) if head <= 128 else Blocks(16, 16, 4, 1)
    if head > 128:
        return {"attend": Blocks(128, 64, 8, 2), "keys_back": Blocks(32, 64, 8, 1)}.get(kernel, Blocks(64, 32, 8, 2))
    if head > 64:
        return {"attend": Blocks(128, 64, 8, 3), "keys_back": Blocks(64, 64, 8, 2)}.get(kernel, Blocks(128, 64, 8, 2))
    return {"attend": Blocks(128, 64, 8, 3), "keys_back": Blocks(64, 64, 8, 3)}.get(kernel, Blocks(128, 64, 8, 3))


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
    numbers = {bound: None for bound in ("first", "last") if bound not in places} | dict(more)
    for tensor, letter in letters.items():
        numbers |= _strides(letter, places[tensor])
    return one_launch(
        f"{_KERNELS}:{name}", (programs, 1), places, numbers, constants, warps=chosen.warps, stages=chosen.stages,
        varying=_SIZES,
    )  # fmt: skip


def _constants(q: Place, chosen: Blocks, mask: Mask, packed: bool, target: Target) -> dict[str, object]:
    return {
        "BLOCK_M": chosen.m, "BLOCK_N": chosen.n, "HEAD": head_block(q.shape[3]),
        "WIDE": q.dtype == "float64", "UPCAST": target.interpreted and q.dtype in ("float16", "bfloat16"),
        "PRECISION": "ieee", **mask.constants(packed),
    }  # fmt: skip


def on_hopper(places: Mapping[str, Place], mask: Mask) -> bool:
    """Whether the kernels for Hopper take these tensors: 16-bit heads of 64 or 128, aligned for TMA."""
    q = places["q"]
    if q.dtype not in ("float16", "bfloat16") or q.shape[3] not in (64, 128) or mask.scale <= 0:
        return False
    tiles = [place for place in places.values() if len(place.shape) == 4]
    return all(place.aligned and _by_tma(place) for place in tiles)


def _by_tma(place: Place) -> bool:
    """Strides of 16-bit elements that a descriptor can have; where a size is 1, its stride does not matter."""
    *outer, last = place.strides
    sizes = place.shape[:-1]
    return last == 1 and all(size == 1 or (0 < s < 2**38 and s % 8 == 0) for size, s in zip(sizes, outer, strict=True))


def _descriptor(of: str, place: Place, rows: int) -> Descriptor:
    """Over all of a tensor (B, H, T, E), in tiles of so many rows of one head."""
    strides = [8 if size == 1 else stride for size, stride in zip(place.shape[:-1], place.strides[:-1], strict=True)]
    return Descriptor(of, place.shape, (*strides, 1), (1, 1, rows, place.shape[3]))


def _hopper_plan(
    name: str, places: Mapping[str, Place], streamed: tuple[str, ...], ring: TileRing, programs: int,
    more: Mapping[str, Argument], constants: Mapping[str, object],
) -> LaunchPlan:  # fmt: skip
    """A launch of a kernel for Hopper. streamed: the tensors whose tiles go through rings."""
    arguments: dict[str, Argument] = {"first": None, "last": None, **more}
    for tensor, place in places.items():
        if len(place.shape) == 4:
            letter = "g" if tensor == "grad" else tensor
            rows = ring.rows if tensor in streamed else _ROWS
            arguments[f"{letter}_desc"] = _descriptor(tensor, place, rows)
        else:
            arguments[tensor] = Pointer(tensor)
    constants = {**constants, "STAGES": ring.stages}
    return LaunchPlan((Step(_HOPPER[name], (programs, 1), arguments, constants, warps=4, varying=_SIZES),))


def bounds_plan(places: Mapping[str, Place]) -> LaunchPlan:
    """`first` and `last` of every token from `starts`."""
    sequences, tokens = places["starts"].shape[0] - 1, places["first"].shape[0]
    numbers = {"N": sequences, "T": tokens, "steps": sequences.bit_length() + 1}
    constants, grid = {"BLOCK": _BOUNDS_BLOCK}, (blocks(tokens, _BOUNDS_BLOCK), 1)
    return one_launch(f"{_KERNELS}:sequence_bounds", grid, places, numbers, constants, varying=("N", "T", "steps"))


@dataclass(frozen=True)
class _Pass:
    """One of attention's three passes. `streamed`: what its kernel for Hopper has in rings; `letters`: of the portable
    kernel's strides; `of_keys`: whether a program has a block of keys, and not of queries."""

    name: str
    streamed: tuple[str, ...]
    letters: Mapping[str, str]
    of_keys: bool = False

    def plan(self, places: Mapping[str, Place], mask: Mask, target: Target, more: Mapping[str, Argument]) -> LaunchPlan:
        q, k = places["q"], places["k"]
        (batch, heads, queries, width), (_, kv_heads, keys, _) = q.shape, k.shape
        group = heads // kv_heads
        rows, own_heads = (keys, kv_heads) if self.of_keys else (queries, heads)
        more = {
            "B": batch, "K" if self.of_keys else "H": own_heads, "GROUP": group, "T": queries, "S": keys,
            "window": min(mask.window, keys), "factor": mask.scale * _LOG2_E, **more,
        }  # fmt: skip
        of_queries = max(1, _section(batch * heads, q, 1) // group)
        more["section"] = of_queries if self.of_keys else _section(batch * heads, k, group)
        if target.multiprocessors and on_hopper(places, mask):
            ring = ring_of(self.name, width)
            streamed_rows = {"BLOCK_M" if self.of_keys else "BLOCK_N": ring.rows}
            fixed = {**streamed_rows, "HEAD": width, **mask.constants("first" in places)}
            programs = blocks(rows, 2 * _ROWS) * batch * own_heads
            if self is _FORWARD:  # whose programs walk over tiles
                more["tiles"], programs = programs, min(programs, target.multiprocessors)
            return _hopper_plan(f"{self.name}_hopper", places, self.streamed, ring, programs, more, fixed)
        chosen = blocks_of(self.name, head_block(width), q.dtype, target)
        more["E"] = width
        constants = _constants(q, chosen, mask, "first" in places, target)
        programs = blocks(rows, chosen.n if self.of_keys else chosen.m) * batch * own_heads
        return _step(self.name, places, self.letters, programs, more, constants, chosen)


_FORWARD = _Pass("attend", ("k", "v"), {"q": "q", "k": "k", "v": "v", "y": "y"})
_KEYS_BACK = _Pass("keys_back", ("q", "grad"), {"q": "q", "k": "k", "v": "v", "grad": "g", "dk": "d"}, of_keys=True)
_QUERIES_BACK = _Pass("queries_back", ("k", "v"), {"q": "q", "k": "k", "v": "v", "grad": "g", "dq": "d"})


def forward_plan(places: Mapping[str, Place], *, mask: Mask, target: Target) -> LaunchPlan:
    return _FORWARD.plan(places, mask, target, {"sinks": Pointer("sinks") if "sinks" in places else None})


def products_plan(places: Mapping[str, Place]) -> LaunchPlan:
    """delta of every query."""
    y = places["y"]
    batch, heads, queries, width = y.shape
    head = head_block(width)
    rows = max(1, 4096 // head)
    numbers = {"B": batch, "H": heads, "T": queries, "E": width, **_strides("y", y), **_strides("g", places["grad"])}
    constants = {"ROWS": rows, "HEAD": head, "WIDE": y.dtype == "float64"}
    return one_launch(
        f"{_KERNELS}:row_products", (blocks(queries, rows) * batch * heads, 1), places, numbers, constants
    )


def sinks_back_plan(places: Mapping[str, Place]) -> LaunchPlan:
    """The gradients of sinks."""
    batch, heads, queries = places["kept"].shape
    numbers = {"B": batch, "H": heads, "T": queries}
    constants = {"BLOCK": min(1024, triton.next_power_of_2(queries)), "WIDE": places["kept"].dtype == "float64"}
    return one_launch(f"{_KERNELS}:sinks_back", (heads, 1), places, numbers, constants, varying=("B", "H", "T"))


def keys_back_plan(places: Mapping[str, Place], *, mask: Mask, target: Target) -> LaunchPlan:
    return _KEYS_BACK.plan(places, mask, target, {"scale": mask.scale})


def queries_back_plan(places: Mapping[str, Place], *, mask: Mask, target: Target) -> LaunchPlan:
    return _QUERIES_BACK.plan(places, mask, target, {"scale": mask.scale})


def _bounds(launch: Any, q: Tensor, starts: Tensor | None) -> dict[str, Tensor]:
    """Where each token's packed sequence begins and ends, by name; nothing where sequences are not packed."""
    if starts is None:
        return {}
    bounds = {name: torch.empty(q.shape[2], dtype=torch.int32, device=q.device) for name in ("first", "last")}
    launch(bounds_plan, {"starts": starts.contiguous(), **bounds}, written=("first", "last"))
    return bounds


def _how(q: Tensor, causal: bool, window: int, scale: float) -> dict[str, Any]:
    """What a plan is told beside the tensors' places."""
    mask = Mask(causal, window, scale or 1 / math.sqrt(q.shape[-1]))
    if q.device.type == "cpu":
        return {"mask": mask, "target": Target(interpreted=True)}
    gpu = gpu_of(device_index(q.device))
    return {"mask": mask, "target": Target(multiprocessors=gpu.multiprocessors if gpu.hopper else 0)}


def _launch(
    launch: Any, plan: Plan, tensors: Mapping[str, Tensor], written: tuple[str, ...], how: dict[str, Any]
) -> None:
    """A plan; where this Triton or this GPU cannot run its kernel, the portable one, at last in small blocks."""
    first = how["target"]
    for target in dict.fromkeys((first, Target(first.interpreted), Target(first.interpreted, small=True))):
        try:
            launch(plan, tensors, written=written, **{**how, "target": target})
            return
        except FitError:
            if target.small:
                raise


def attend(launch: Any, tensors: Mapping[str, Tensor], causal: bool, window: int, scale: float) -> None:
    """Write `y` and `kept` from q, k and v, in whatever memory they are views of."""
    _launch(launch, forward_plan, tensors, ("y", "kept"), _how(tensors["q"], causal, window, scale))


def attend_back(
    launch: Any, tensors: Mapping[str, Tensor], gradients: Mapping[str, Tensor], causal: bool, window: int,
    scale: float, bounds_of_keys: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Write dq, dk, dv and of sinks, where there are some, dsinks, which `gradients` holds, from q, k, v, y, its
    gradient and what was kept.

    `bounds_of_keys`: `first` and `last` of the queries that see each key, where those of `tensors` are not theirs too.
    """
    sums = tensors["kept"]
    delta = torch.empty(sums.shape, dtype=sums.dtype, device=sums.device)
    launch(products_plan, {"y": tensors["y"], "grad": tensors["grad"], "delta": delta}, written=("delta",))
    read = {**{name: tensor for name, tensor in tensors.items() if name not in ("y", "sinks")}, "delta": delta}
    if "sinks" in tensors:
        of_sinks = {"kept": sums, "delta": delta, "sinks": tensors["sinks"], "dsinks": gradients["dsinks"]}
        launch(sinks_back_plan, of_sinks, written=("dsinks",))
    how = _how(tensors["q"], causal, window, scale)
    of_keys = {**read, **bounds_of_keys, "dk": gradients["dk"], "dv": gradients["dv"]}
    _launch(launch, keys_back_plan, of_keys, ("dk", "dv"), how)
    _launch(launch, queries_back_plan, {**read, "dq": gradients["dq"]}, ("dq",), how)


def forward(
    launch: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, sinks: Tensor | None, causal: bool,
    window: int, scale: float, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y, kept = torch.empty(q.shape, dtype=q.dtype, device=q.device), log_sums(q)
    tensors = {"q": q, "k": k, "v": v, "y": y, "kept": kept, **_sinks(sinks), **_bounds(launch, q, starts)}
    attend(launch, tensors, causal, window, scale)
    return y, kept


def backward(
    launch: Any, gradients: tuple[Tensor, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    (grad,), (y, sums) = gradients, kept
    q, k, v, starts, sinks, causal, window, scale, _ = arguments
    inputs = {"q": q, "k": k, "v": v, **_sinks(sinks)}
    written = {f"d{name}": torch.empty(x.shape, dtype=x.dtype, device=x.device) for name, x in inputs.items()}
    tensors = {**inputs, "y": y, "grad": grad, "kept": sums, **_bounds(launch, q, starts)}
    attend_back(launch, tensors, written, causal, window, scale)
    return written["dq"], written["dk"], written["dv"], None, written.get("dsinks")


def _sinks(sinks: Tensor | None) -> dict[str, Tensor]:
    return {} if sinks is None else {"sinks": sinks.contiguous()}
