"""CUDA's driver, for what torch does not say of kernels that it compiled (NVRTC).

They can be launched while the one before still runs (see `kernels.early`), and asked for what the compiler reserved.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Value(ctypes.Union):
    _fields_ = (("whole", ctypes.c_char * 64), ("flag", ctypes.c_int))


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("name", ctypes.c_int), ("unused", ctypes.c_char * 4), ("value", _Value))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


def launch_early(
    kernel: Any, grid: tuple[int, int, int], threads: int, given: Sequence[Tensor | int | float], shared_bytes: int
) -> None:
    """`kernel`: what `torch.cuda._compile_kernel` made; it has to wait for the kernel ahead by itself."""
    held = [_argument(value) for value in given]
    pointers = (ctypes.c_void_p * len(held))(*[ctypes.addressof(one) for one in held])
    attribute = _Attribute(_EARLY, b"", _Value(flag=1))
    stream = torch.cuda.current_stream().cuda_stream
    told = _Launch(
        (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(threads, 1, 1), shared_bytes, stream,
        ctypes.pointer(attribute), 1,
    )  # fmt: skip
    _call("cuLaunchKernelEx", ctypes.byref(told), kernel.func, pointers, None)


def kernel_attribute(kernel: Any, which: int) -> int:
    """An attribute of a kernel by its number among CUfunction_attribute: registers, bytes of shared memory."""
    value = ctypes.c_int()
    _call("cuFuncGetAttribute", ctypes.byref(value), which, kernel.func)
    return value.value


def _call(function: str, *arguments: Any) -> None:
    driver = ctypes.CDLL("libcuda.so.1")  # torch has loaded it
    result = getattr(driver, function)(*arguments)
    if result:
        words = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(words))
        raise RuntimeError(f"{function} of a CUDA kernel: {(words.value or b'an error without a name').decode()}")


def _argument(value: Tensor | int | float) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_int(value) if isinstance(value, int) else ctypes.c_double(value)
