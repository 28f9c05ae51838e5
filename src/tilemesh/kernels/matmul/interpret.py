"""Triton's interpreter beside compiled kernels: the same source files, loaded a second time.

`@triton.jit` decides between compiling and interpreting when it decorates, once a process by an environment variable.
Here kernel.py and passes.py are executed again under another name with the interpreter switched on for just that
long, so one process can hold both forms. It computes with numpy on the CPU: for tests and for reading, not for speed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton import knobs
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from tilemesh.kernels.matmul.steps import Argument, Descriptor, LaunchPlan, Pointer

_PACKAGE = "tilemesh.kernels.matmul"


def run(plan: LaunchPlan, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Interpret every launch of a plan. `tensors` holds what pointers and descriptors name, buffers included."""
    for step in plan.steps:
        kernel = _kernels()[step.kernel]
        arguments = {name: _value(argument, tensors) for name, argument in step.arguments.items()}
        with _loop_bounds():
            kernel[(*step.grid, 1)](**arguments, **step.constants)


@functools.cache
def _kernels() -> dict[str, Any]:
    tiles = _interpreted("kernel", {})
    passes = _interpreted("passes", vars(tiles))
    return {**vars(tiles), **vars(passes)}


def _interpreted(name: str, helpers: Mapping[str, Any]) -> ModuleType:
    """A second copy of a module with interpreted jit functions; `helpers` replaces what it imports from a sibling."""
    spec = importlib.util.find_spec(f"{_PACKAGE}.{name}")
    if spec is None or spec.origin is None:
        raise ImportError(f"{_PACKAGE}.{name} has no source file")
    second = importlib.util.spec_from_file_location(f"{_PACKAGE}.{name}_interpreted", spec.origin)
    if second is None or second.loader is None:
        raise ImportError(f"cannot load {spec.origin} a second time")
    module = importlib.util.module_from_spec(second)
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        second.loader.exec_module(module)
    for helper, value in helpers.items():
        if helper in vars(module) and not helper.startswith("__"):
            setattr(module, helper, value)
    return module


@contextlib.contextmanager
def _loop_bounds() -> Iterator[None]:
    """Lets a scalar of a kernel be a loop's bound, where Triton and numpy together do not.

    The interpreter holds scalars as arrays of one element. Triton 3.6 makes them numbers by `int(array)`, which numpy
    refuses from 2.5 on. Triton sets its methods anew at each call of a function, so the place to correct is where.
    """
    if _converts_scalars():
        yield
        return
    patch = interpreter._patch_lang_tensor

    def patch_and_correct(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_correct
    try:
        yield
    finally:
        interpreter._patch_lang_tensor = patch


@functools.cache
def _converts_scalars() -> bool:
    """Whether Triton's own conversion works with this numpy: asked on a class of our own, which it patches."""
    stand_in = type("Scalar", (), {})
    interpreter._patch_lang_tensor(stand_in, SimpleNamespace(set_attr=setattr))
    scalar: Any = stand_in()
    scalar.handle = SimpleNamespace(data=np.ones(1, dtype=np.int32))
    try:
        return bool(scalar.__index__() == 1)
    except (TypeError, DeprecationWarning):  # numpy from 2.5 on; before, where warnings are errors
        return False


def _value(argument: Argument, tensors: Mapping[str, torch.Tensor | None]) -> Any:
    if isinstance(argument, Pointer):
        return tensors[argument.of]
    if isinstance(argument, Descriptor):
        base = tensors[argument.of]
        return TensorDescriptor(base, list(argument.shape), list(argument.strides), list(argument.block))
    return argument
