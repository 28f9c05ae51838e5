"""Triton's interpreter beside compiled kernels: the same source files, loaded a second time.

`@triton.jit` decides between compiling and interpreting when it decorates, once per process by an environment variable.
Here a kernel's module is executed again under another name with the interpreter switched on for just that long, so one
process can hold both forms. Whatever a module uses of other modules' jit functions, Triton's own `tl.sum` and the like
included, is replaced by its interpreted form. It computes with numpy on the CPU: for tests and for reading, not for
speed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tilemesh.core.errors import UsageError
from tilemesh.kernels.launch.steps import Argument, Descriptor, LaunchPlan, Pointer, check_names, is_double
from tilemesh.kernels.launch.tensors import dtype_name

# What the interpreter changes of Triton's language, and where we change the interpreter.
_PATCHED: tuple[Any, ...] = (
    *(tl, tl.core, tl.math, tl.standard, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base), interpreter
)  # fmt: skip


_one_at_a_time = threading.Lock()  # Triton's interpreter has one state for all threads


def run(plan: LaunchPlan, tensors: Mapping[str, Tensor | None], written: Sequence[str] = ()) -> None:
    """Interpret every launch of a plan. `tensors` holds what pointers and descriptors name, buffers included.

    written: the results among them. The interpreter truncates where it should round to bfloat16, so bfloat16 results
    are written in float32 and rounded by torch.
    """
    check_names(plan, tensors, written)
    held = dict(tensors)
    for name in written:
        target = tensors[name]
        if target is not None and target.dtype is torch.bfloat16:
            held[name] = torch.empty_strided(target.shape, target.stride(), dtype=torch.float32).copy_(target)
    dtypes = {name: dtype_name(tensor.dtype) for name, tensor in tensors.items() if tensor is not None}
    for step in plan.steps:
        module, _, name = step.kernel.partition(":")
        if step.source:
            raise UsageError(f"kernel {name} is CUDA C++, which is not interpreted: use 'auto' or 'torch'")
        real = tl.float64 if is_double(step, dtypes) else tl.float32
        arguments = {name: _value(argument, held, real) for name, argument in step.arguments.items()}
        # A GPU does not warn of log(0) in padded rows either.
        with _one_at_a_time, _interpreting(), np.errstate(all="ignore"):
            getattr(_interpreted(module), name)[(*step.grid, 1)](**arguments, **step.constants)
    for name in written:
        target, made = tensors[name], held[name]
        if target is not None and made is not None and made is not target:
            target.copy_(made)


@functools.cache
def _interpreted(name: str) -> ModuleType:
    """A second copy of a module, in which all jit functions are interpreted ones."""
    original = importlib.import_module(name)  # first, so that what it imports is not loaded in interpreted form
    second = importlib.util.spec_from_file_location(f"{name}_interpreted", str(original.__file__))
    if second is None or second.loader is None:
        raise ImportError(f"cannot load {original.__file__} a second time")
    module = importlib.util.module_from_spec(second)
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        second.loader.exec_module(module)
    for helper, value in list(vars(module).items()):
        if isinstance(value, JITFunction):  # imported from a module that was loaded to be compiled
            setattr(module, helper, getattr(_interpreted(value.fn.__module__), value.fn.__name__))
    return module


@functools.cache
def _language() -> list[tuple[Any, str, Any]]:
    """What of Triton's language is written in itself (`tl.sum`, `x.sum()`), interpreted: where, name, value.

    Of `tl.standard` only what the interpreter compares reductions with, to let numpy do those at once.
    """
    changes: list[tuple[Any, str, Any]] = []
    methods = dict(vars(tl.tensor))
    with _restored():
        for place in (tl, tl.standard):
            for name, value in list(vars(place).items()):
                if isinstance(value, JITFunction) and (place is tl or name.startswith("_")):
                    changes.append((place, name, getattr(_interpreted(value.fn.__module__), value.fn.__name__)))
        changed = [(name, value) for name, value in vars(tl.tensor).items() if methods.get(name) is not value]
        changes += [(tl.tensor, name, value) for name, value in changed]
    return changes


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """Triton's language in its interpreted form, and as it was afterwards."""
    language = _language()
    with _restored():
        # Triton patches its language again at each call of a function by a kernel, which is a fifth of its time.
        interpreter._patch_lang = functools.cache(interpreter._patch_lang)
        if not _converts_scalars():
            _correct_loop_bounds()
        for place, name, value in language:
            setattr(place, name, value)
        yield


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Takes back what is set in Triton's language meanwhile, so that compiling works afterwards.

    The interpreter patches the language while a kernel runs, but leaves what the functions called by it have patched.
    """
    before = [(place, dict(vars(place))) for place in _PATCHED]
    try:
        yield
    finally:
        for place, names in before:
            for name, value in dict(vars(place)).items():
                if name not in names and name != "__annotations__":
                    delattr(place, name)
                elif name in names and names[name] is not value:
                    setattr(place, name, names[name])


def _correct_loop_bounds() -> None:
    """Lets a scalar of a kernel be a loop's bound, where Triton and numpy together do not.

    The interpreter holds scalars as arrays of one element. Triton 3.6 makes them numbers by `int(array)`, which numpy
    refuses from 2.5 on. Triton sets its methods anew for each module: the place where is what to correct.
    """
    patch = interpreter._patch_lang_tensor

    def patch_and_correct(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_correct


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


def _value(argument: Argument, tensors: Mapping[str, Tensor | None], real: tl.dtype) -> Any:
    if isinstance(argument, Pointer):
        return tensors[argument.of]
    if isinstance(argument, Descriptor):
        base = tensors[argument.of]
        return TensorDescriptor(base, list(argument.shape), list(argument.strides), list(argument.block))
    if isinstance(argument, float):  # as compiled: a scalar of that precision, which has .to()
        number = np.array([argument], np.float64 if real is tl.float64 else np.float32)
        return tl.tensor(interpreter.TensorHandle(number, real), real)
    return argument
