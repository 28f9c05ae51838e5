"""The threads of a launch while it runs: their values, their mask, and what they read and write.

A value is one number if all threads agree, or an array with one for each. `RegisterArray` and `CudaPointer` are places:
an array of the kernel's in registers, and an element of global or shared memory for each thread.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tilemesh.core.errors import UsageError
from tilemesh.guide.ladder import warp_ops
from tilemesh.guide.ladder.memory import WARP, Array, GlobalArray, Lanes, SharedArray

NUMPY_TYPES = {"int": np.int64, "unsigned": np.uint32, "float": np.float32, "bool": np.bool_, "half_bits": np.uint16}
FOURS = {"float4": np.float32, "uint4": np.uint32}
_BYTES = {"int": 4, "unsigned": 4, "float": 4, "half_bits": 2, "float4": 16, "uint4": 16}


@dataclass
class RegisterArray:
    """An array that each thread keeps in registers: (lengths..., lanes), or (lengths..., 4, lanes) of float4."""

    data: Array
    four: bool

    @property
    def whole(self) -> bool:
        """Is this one element?"""
        return self.data.ndim == (2 if self.four else 1)


@dataclass(frozen=True)
class CudaPointer:
    """A place in memory: an element index for each thread; `lengths` are the dims still to be subscripted."""

    memory: GlobalArray | SharedArray
    at: Any
    lengths: tuple[int, ...]
    width: int = 1  # elements of the memory that one access moves

    def index(self, index: Any) -> "CudaPointer":
        stride = int(np.prod(self.lengths[1:], dtype=np.int64)) * self.width
        return CudaPointer(self.memory, self.at + index * stride, self.lengths[1:], self.width)

    def places(self, lanes: int) -> Array:
        return np.broadcast_to(np.asarray(self.at, np.int64), (lanes,))


@dataclass
class CudaThreads:
    """The threads of a launch while it runs."""

    lanes: Lanes
    dynamic: int  # elements of `extern __shared__`
    slots: list[Any] = field(default_factory=list)
    shared: dict[str, SharedArray] = field(default_factory=dict)
    open_copies: list[tuple[Any, ...]] = field(default_factory=list)
    groups: list[list[tuple[Any, ...]]] = field(default_factory=list)
    issued: int = 0
    active: int = 0
    barriers: int = 0

    def __post_init__(self) -> None:
        self.every = self.lanes.active()
        self.count = self.lanes.count
        self.single = self.lanes.threads == self.lanes.blocks == 1
        self.narrow(self.every)

    def narrow(self, mask: Array) -> None:
        self.mask = mask
        self.full = mask is self.every
        self.mask_lanes = int(mask.sum())
        self.mask_warps = int(mask.reshape(-1, WARP).any(1).sum())

    def issue(self) -> None:
        self.issued += self.mask_warps * WARP
        self.active += self.mask_lanes

    def within(self, chosen: Array, run: Callable[["CudaThreads"], Any]) -> Any:
        """Runs with the threads for which `chosen` is true; nothing if there are none."""
        before = self.mask
        narrowed = before & chosen
        if not narrowed.any():
            return None
        self.narrow(narrowed)
        value = run(self)
        self.narrow(before)
        return value


Value: TypeAlias = Any
Run: TypeAlias = Callable[[CudaThreads], Value]


def convert(kind: str, value: Value) -> Value:
    """A value as a variable of this type holds it."""
    if kind in FOURS:
        return value
    if isinstance(value, np.ndarray):
        return value.astype(NUMPY_TYPES[kind], copy=False)
    if kind == "float":
        return np.float32(value)
    return bool(value) if kind == "bool" else int(value)


def load(state: CudaThreads, place: Value) -> Value:
    """The value at a place; a value is its own."""
    if isinstance(place, RegisterArray):
        return place.data if place.whole else place
    if not isinstance(place, CudaPointer) or place.lengths:
        return place
    if state.single and place.width == 1 and not isinstance(place.at, np.ndarray):
        return place.memory.load_one(place.at)
    values = place.memory.load(place.places(state.count), state.mask, place.width)
    return _joined(values, place)


def _joined(values: Array, place: CudaPointer) -> Array:
    """Two 16-bit elements that were read as one unsigned."""
    if place.width == 2 and values.dtype == np.uint16:
        pair: Array = values[0].astype(np.uint32) | (values[1].astype(np.uint32) << np.uint32(16))
        return pair
    return values


def store(state: CudaThreads, place: Value, value: Value) -> None:
    if isinstance(place, RegisterArray):
        if state.full:
            place.data[...] = value
        else:
            place.data[..., state.mask] = np.broadcast_to(value, place.data.shape)[..., state.mask]
        return
    if state.single and place.width == 1 and not isinstance(place.at, np.ndarray):
        place.memory.store_one(place.at, value[0] if isinstance(value, np.ndarray) else value)
        return
    if place.width == 2 and place.memory.data.dtype == np.uint16:
        value = np.stack([value & np.uint32(0xFFFF), value >> np.uint32(16)])
    place.memory.store(place.places(state.count), np.asarray(value), state.mask, place.width)


def _divide(left: Value, right: Value) -> Value:
    if _whole(left) and _whole(right):
        if np.any(np.less(left, 0)) or np.any(np.less(right, 0)):
            raise UsageError("division of a negative integer: the interpreter does not know which way to round")
        return left // right
    return left / right


def _remainder(left: Value, right: Value) -> Value:
    if np.any(np.less(left, 0)) or np.any(np.less(right, 0)):
        raise UsageError("remainder of a negative integer: the interpreter does not know its sign")
    return left % right


def _whole(value: Value) -> bool:
    return bool(np.issubdtype(value.dtype, np.integer)) if hasattr(value, "dtype") else isinstance(value, int)


INFIX: dict[str, Callable[[Value, Value], Value]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _divide, "%": _remainder,
    "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
PLAIN: dict[str, Callable[..., Value]] = {"min": np.minimum, "max": np.maximum, "sqrtf": np.sqrt, "fabsf": np.abs}


def reinterpret(pointer: CudaPointer, kind: str) -> CudaPointer:
    width = _BYTES[kind] // pointer.memory.data.itemsize
    return CudaPointer(pointer.memory, pointer.at, (1,), max(1, width))


def _synchronise(state: CudaThreads) -> None:
    if not state.full:
        raise UsageError("__syncthreads() in a branch that some threads do not take: the block would wait for ever")
    state.barriers += 1
    for array in state.shared.values():
        array.barrier()


def _copy_async(state: CudaThreads, target: CudaPointer, source: CudaPointer) -> None:
    width = 16 // source.memory.data.itemsize
    values = source.memory.load(source.places(state.count), state.mask, width)
    at = target.places(state.count)
    assert isinstance(target.memory, SharedArray)
    target.memory.count_store(at, state.mask, width)
    target.memory.writing(at, state.mask, width)
    state.open_copies.append((target.memory, at, values, state.mask, width))


def _commit_copies(state: CudaThreads) -> None:
    state.groups.append(state.open_copies)
    state.open_copies = []


def _wait_copies(state: CudaThreads, left: int) -> None:
    finished = max(0, len(state.groups) - left)
    done, state.groups = state.groups[:finished], state.groups[finished:]
    for group in done:
        for memory, at, values, mask, width in group:
            memory.writing(at, mask, width)
            memory.place(at, values, mask, width)


def _load_matrices(state: CudaThreads, registers: RegisterArray, row: CudaPointer, turned: bool = False) -> None:
    assert isinstance(row.memory, SharedArray)
    warp_ops.load_matrices(registers, row.memory, row.places(state.count), state.mask, turned=turned)


COLLECTIVE: dict[str, Callable[..., None]] = {
    "__syncthreads": _synchronise,
    "copy_async": _copy_async,
    "commit_copies": _commit_copies,
    "wait_copies": _wait_copies,
    "load_matrices": _load_matrices,
    "load_matrices_turned": lambda state, registers, row: _load_matrices(state, registers, row, turned=True),
}
