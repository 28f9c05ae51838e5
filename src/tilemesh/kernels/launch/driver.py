"""CUDA's driver, for what torch does not say of kernels that it compiled (NVRTC).

They can be launched while the one before still runs (see `kernels.early`), and asked for what the compiler reserved.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

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


class DirectLaunch(NamedTuple):
    """What the driver is given to launch a compiled kernel."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    early: bool
    cooperative: bool
    arguments: tuple[tuple[int, int], ...]
    """Which of the addresses, and 0; or -1 and the bits of a number."""

    def call(self, stream: int, addresses: Sequence[int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """On a stream, laid out once: what is called, and what it is given."""
        values = [value if at < 0 else addresses[at] for at, value in self.arguments]
        held = (ctypes.c_int64 * len(values))(*values)
        begin = ctypes.addressof(held)
        pointers = (ctypes.c_void_p * len(values))(*range(begin, begin + 8 * len(values), 8))
        told = _Launch(
            self.grid, (self.threads, 1, 1), self.shared_bytes, stream,
            ctypes.pointer(_Attribute(_EARLY, b"", _Value(flag=1))), self.early,
        )  # fmt: skip
        function = _driver().cuLaunchKernelEx
        return _launch, (function, ctypes.byref(told), ctypes.c_void_p(self.function), pointers, held)


def _launch(function: Any, told: Any, kernel: Any, pointers: Any, held: Any) -> None:
    """`held`: the values that pointers point to."""
    _check("cuLaunchKernelEx", function(told, kernel, pointers, None))


@functools.cache
def compiled(source: str, function: str, device: int) -> int:
    """A function of CUDA C++, for the current device, whose number this is."""
    return int(torch.cuda._compile_kernel(source, function).func.value)


def kernel_attribute(kernel: Any, which: int) -> int:
    """An attribute of a kernel by its number among CUfunction_attribute: registers, bytes of shared memory."""
    value = ctypes.c_int()
    _call("cuFuncGetAttribute", ctypes.byref(value), which, kernel.func)
    return value.value


def _call(function: str, *arguments: Any) -> None:
    _check(function, getattr(_driver(), function)(*arguments))


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")  # torch has loaded it


def _check(function: str, result: int) -> None:
    if result:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(words))
        raise RuntimeError(f"{function} of a CUDA kernel: {(words.value or b'an error without a name').decode()}")
