"""numpy arrays and torch tensors as one thing: a numpy array over the same memory, and the way back.

A CPU tensor shares its memory with the array. bf16, which numpy does not know, travels as its 16-bit patterns under
the name "bfloat16". A CUDA tensor is staged through pinned host memory (over nccl it never comes here).
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tilemesh.comm.runtime.arithmetic import BF16
from tilemesh.comm.runtime.transport import Array, Bytes
from tilemesh.core.errors import UsageError

_TORCH_NAMES = frozenset(
    f"{kind}{bits}"
    for kind, sizes in (
        ("int", (8, 16, 32, 64)),
        ("uint", (8, 16, 32, 64)),
        ("float", (16, 32, 64)),
        ("complex", (64, 128)),
    )
    for bits in sizes
) | {BF16, "bool"}
_KINDS = "biufgc"  # bool, signed, unsigned, float, complex: what every transport can carry and combine


class Like(NamedTuple):
    """What came in, so that what goes out is the same: numpy or torch, dtype, device."""

    dtype: str
    device: str | None = None  # None: numpy

    @property
    def is_torch(self) -> bool:
        return self.device is not None

    @property
    def is_cuda(self) -> bool:
        return self.device is not None and self.device.startswith("cuda")

    @property
    def carrier(self) -> np.dtype[Any]:
        return np.dtype(np.uint16) if self.dtype == BF16 else np.dtype(self.dtype)

    def back(self, array: Array) -> Any:
        """The array as what came in; a CPU tensor shares its memory."""
        if self.device is None:
            return array
        import torch

        if self.dtype == BF16:
            tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(array)
        return tensor if self.device == "cpu" else tensor.to(self.device)


def described(x: Any, what: str = "input") -> tuple[tuple[int, ...], Like]:
    """Shape and kind of x. Refuses what no transport could carry."""
    if isinstance(x, np.ndarray):
        if isinstance(x, (np.ma.MaskedArray, np.matrix)):
            raise UsageError(f"{what} is a {type(x).__name__}: give np.asarray of it, or what stands for masked values")
        return x.shape, _numpy_like(x.dtype, what)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        raise UsageError(f"{what} is a {type(x).__name__}: expected a numpy array or a torch tensor")
    if x.is_nested:
        raise UsageError(f"{what} is a nested tensor: give x.values(), or x.to_padded_tensor(0.0)")
    if x.layout != torch.strided:
        raise UsageError(f"{what} is a tensor in {x.layout}: a collective carries dense tensors")
    return tuple(x.shape), _torch_like(x.dtype, x.device, what)


# Kept, because asking numpy for a dtype's name takes longer than a small message.
@lru_cache(maxsize=256)
def _numpy_like(dtype: np.dtype[Any], what: str) -> Like:
    if dtype.kind not in _KINDS:
        raise UsageError(f"{what} has dtype {dtype}: a collective carries float, complex, integer and bool arrays")
    if not dtype.isnative:
        raise UsageError(f"{what} has dtype {dtype} in foreign byte order: convert it with astype('{dtype.name}')")
    return Like(dtype.name)


@lru_cache(maxsize=256)
def _torch_like(dtype: Any, device: Any, what: str) -> Like:
    name = str(dtype).removeprefix("torch.")
    if name not in _TORCH_NAMES:
        raise UsageError(
            f"{what} is a tensor of {dtype}: a collective carries float, complex, integer and bool tensors"
        )
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"{what} is a tensor on {device}: expected one on cpu or cuda")
    return Like(name, str(device))


def opened(x: Any, what: str = "input") -> tuple[Array, Like]:
    """A numpy array over x's memory (CUDA: a copy of it on the host), and what x is."""
    _, like = described(x, what)
    if isinstance(x, np.ndarray):
        return x, like
    import torch

    host = x.detach().resolve_conj().resolve_neg()
    if x.is_cuda:
        pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
        pinned.copy_(host)
        host = pinned
    if like.dtype == BF16:
        return host.view(torch.int16).numpy().view(np.uint16), like
    return host.numpy(), like


def flattened(array: Array, axis: int = 0) -> Array:
    """The elements in a row, `axis` slowest; the same memory where it already lies so.

    One that lies across its elements' boundaries (a view of bytes) is copied: mpi4py does not take it as numbers.
    """
    if not array.flags.aligned:
        array = array.copy()
    return np.ascontiguousarray(np.moveaxis(array, axis, 0) if axis else array).reshape(-1)


def out_array(out: Any, shape: tuple[int, ...], like: Like) -> Array | None:
    """The memory of `out` as an array (None: no out, or CUDA), after checking that the result fits it."""
    if out is None:
        return None
    _, kind = described(out, "out")
    if kind.dtype != like.dtype or kind.is_torch != like.is_torch:
        kinds = [f"{'torch' if side.is_torch else 'numpy'} {side.dtype}" for side in (kind, like)]
        raise UsageError(f"out is {kinds[0]}: expected {kinds[1]}, as the input")
    if tuple(out.shape) != tuple(shape):
        raise UsageError(f"out has shape {tuple(out.shape)}: this call's result has {tuple(shape)}")
    if getattr(out, "requires_grad", False):
        raise UsageError("out requires gradients, which a collective cannot follow: give out.detach()")
    if kind.device not in (None, "cpu"):
        return None  # and is not copied to the host to find that out
    array, _ = opened(out, "out")
    if not array.flags.writeable:
        raise UsageError("out is read-only: give an array that may be written to")
    if not array.flags.c_contiguous and _may_overlap(array):
        raise UsageError(f"out of shape {array.shape} has several elements in one place: give memory for each")
    return array


def _may_overlap(array: Array) -> bool:
    """Whether two elements of an array may lie in the same memory, as in one that was expanded."""
    reach = array.itemsize
    for stride, length in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if length > 1:
            if stride < reach:
                return True
            reach += stride * (length - 1)
    return False


def fits(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether a result can be written there as it is; any other `out` goes the ordinary way, which checks it."""
    # Almost always the very same dtype object, which is quicker to see than equality.
    is_alike = type(out) is np.ndarray and (out.dtype is dtype or out.dtype == dtype)
    return is_alike and out.shape == shape and out.flags.carray


def here(kind: str) -> str | None:
    """This rank's own device of a kind ("numpy", "cpu" or "cuda"): None for numpy."""
    if kind != "cuda":
        return None if kind == "numpy" else kind
    import torch

    return f"cuda:{torch.cuda.current_device()}"


def store(result: Array, out: Any) -> None:
    """Copy a result into the caller's `out`, whatever memory that is."""
    if isinstance(out, np.ndarray):
        if out.shape != result.shape or out.strides != result.strides or not same_start(out, result):
            out[...] = result.reshape(out.shape)
        return
    _, like = described(out, "out")
    if like.device == "cpu":
        store(result, opened(out, "out")[0])
    else:
        out.copy_(like.back(np.ascontiguousarray(result)).reshape(out.shape))


def as_bytes(array: Array) -> Bytes:
    """The same memory as bytes; the array must be flat and contiguous."""
    return array.view(np.uint8)


def same_start(one: Array, other: Array) -> bool:
    """Whether two arrays begin at the same address."""
    return bool(one.__array_interface__["data"][0] == other.__array_interface__["data"][0])
