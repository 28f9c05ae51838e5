"""Ready calls for torch tensors, and for axes other than the first: a ready call of `ready.py` between two views.

`ready.py` knows numpy arrays that are split or joined along axis 0, and nothing else. A CPU tensor becomes such an
array over the same memory, whatever its address is: autograd makes new tensors in every step. Another axis is moved to
the front before the call and back after it. Whatever is unusual about a tensor (a subclass, CUDA, a lazy negation or
conjugation, an `out` that requires gradients) returns `NotImplemented`, and the ordinary way is taken.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilemesh.comm.runtime.call_parts import Call
from tilemesh.comm.runtime.memory import fits
from tilemesh.comm.runtime.transport import Array, ReadyCall

_KEPT = 64  # arrays of one call: more addresses than autograd uses for one shape in a step


def along_axis_0(call: Call, shape: tuple[int, ...]) -> tuple[Call, Array] | None:
    """The call as `ready.py` sees it, with an array like the one that each call will bring; None: a tensor on CUDA."""
    if call.like.is_cuda:
        return None
    inner = call._replace(axis=0, out=None, shape=_moved(call.shape, call.axis))
    return inner, np.empty(_moved(shape, call.axis), call.like.carrier)


def with_views(inner: ReadyCall, call: Call, shape: tuple[int, ...], by_place: bool) -> ReadyCall:
    """A ready call of numpy arrays along axis 0, for what this call was given: an array or a tensor of that shape.

    `by_place`: whether the call asks where its arrays lie in shared memory, and remembers it for an array it knows.
    """
    if call.axis:
        inner = _along(inner, call.axis, shape, call.shape, call.like.carrier)
    return _of_tensors(inner, call, shape, by_place) if call.like.is_torch else inner


def _moved(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (shape[axis], *shape[:axis], *shape[axis + 1 :]) if axis else shape


def _along(inner: ReadyCall, axis: int, shape: tuple[int, ...], result: tuple[int, ...], dtype: Any) -> ReadyCall:
    front = (axis, *(dim for dim in range(len(shape)) if dim != axis))
    back = (*range(1, axis + 1), 0, *range(axis + 1, len(shape)))
    contiguous, ndarray = np.ascontiguousarray, np.ndarray

    def ready(x: Any, out: Any) -> Any:
        if type(x) is not ndarray or (out is not None and not fits(out, result, dtype)):
            return NotImplemented
        moved = inner(contiguous(x.transpose(front)), None)
        if moved is NotImplemented:
            return moved
        if out is None:
            return contiguous(moved.transpose(back))
        out[...] = moved.transpose(back)
        return out

    return ready


def _of_tensors(inner: ReadyCall, call: Call, shape: tuple[int, ...], by_place: bool) -> ReadyCall:
    """A tensor as an array over its address. That is all a call needs while its caller holds the tensor, and takes a
    tenth of the time of `tensor.detach().numpy()`, which would cost as much as the rest of a small call.

    torch's allocator gives the same few addresses again and again, so arrays are kept by address, and the call inside
    knows them again. Not where it would also know where they lie: another tensor may have the address by then, in
    shared memory or not.
    """
    import torch

    tensor, parameter, strided = torch.Tensor, torch.nn.Parameter, torch.strided
    carrier, result, dtype, empty = call.like.carrier, call.shape, getattr(torch, call.like.dtype), torch.empty
    kept = 0 if by_place else _KEPT
    here, there = _arrays(shape, carrier, kept), _arrays(result, carrier, kept)
    is_complex, same_shape, empty_like = carrier.kind == "c", shape == result, torch.empty_like

    def is_plain(x: Any) -> bool:
        kind = type(x)
        is_ours = (kind is tensor or kind is parameter) and x.is_cpu and x.layout is strided
        return is_ours and not x.is_neg() and not (is_complex and x.is_conj())

    def ready(x: Any, out: Any) -> Any:
        if not is_plain(x) or (out is not None and getattr(out, "requires_grad", False)):
            return NotImplemented
        if not x.is_contiguous():
            x = x.detach().contiguous()
        if out is None:
            # Quicker than to make a tensor of an array; `empty_like` takes half of the time of `empty`.
            out = empty_like(x) if same_shape else empty(result, dtype=dtype)
        elif not (is_plain(out) and out.is_contiguous() and out.dtype is dtype and out.shape == result):
            return NotImplemented
        try:
            array, target = here(x.data_ptr()), there(out.data_ptr())
        except RuntimeError:  # a tensor of torch.func, which has no memory of its own
            return NotImplemented
        answer = inner(array, target)
        return out if answer is not NotImplemented else answer

    return ready


def _arrays(shape: tuple[int, ...], dtype: np.dtype[Any], most: int) -> Callable[[int], Array]:
    """What makes an array at an address, and keeps up to so many of them to give them again."""
    memory: Callable[[int], Any] = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address
    kept: dict[int, Array] = {}

    def at(address: int) -> Array:
        try:
            return kept[address]
        except KeyError:
            view: Array = np.ndarray(shape, dtype, memory(address))
            if most:
                if len(kept) == most:
                    kept.clear()
                kept[address] = view
            return view

    return at
