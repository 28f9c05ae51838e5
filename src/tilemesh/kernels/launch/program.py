"""Compiles the launches of a plan and calls them at the lowest host cost.

Triton's own `kernel[grid](...)` inspects every argument at every call (34 µs on an H200's host), and encodes each
tensor descriptor anew. A plan fixes all of that beforehand, so here a kernel is compiled from an explicit signature,
and a call hands prepared arguments straight to the compiled launcher. Arguments are kept by the addresses they hold:
the caching allocator gives a training loop the same few addresses again and again.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.errors import OutOfResources

from tilemesh.core.errors import RunError
from tilemesh.kernels.launch.driver import DirectLaunch, compiled
from tilemesh.kernels.launch.steps import INT32_LIMIT, Descriptor, FitError, LaunchPlan, Pointer, Step, is_double

_TYPES = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8e4nv",
    "bool": "i1", "uint8": "u8", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
}  # fmt: skip
_MOST_KEPT = 1024  # argument lists a program keeps before it starts afresh, and tensor maps of each descriptor
# Sizes from here on are 64-bit: a size rounded up to a whole tile, and a tile's last row, must not pass 2**31.
_WIDE_SIZE = INT32_LIMIT - 4096

# Kernels by everything they are compiled from: problems that differ in sizes alone share one, loaded once per GPU.
# This is no state of a context: equal keys give equal kernels, nothing reads it but `compile_step`, and a kernel that
# is loaded stays on the GPU until the process ends, so another context had better find it than load it again.
KERNELS: dict[tuple[object, ...], CompiledKernel] = {}
# Ranks may be threads of one process: while one loads a kernel, Triton shows it to others half loaded.
_LOADING = threading.Lock()

_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
_KNOWN = ((3, 6), (3, 7))  # whose launchers take their arguments as written below


@dataclass(frozen=True)
class Operand:
    """What compiling needs to know of a tensor: its dtype and whether its address is 16-byte aligned."""

    dtype: str
    aligned: bool = True


class Described(NamedTuple):
    """All that a launch is compiled from: launches of equal keys share a kernel."""

    key: tuple[object, ...]
    source: tuple[Any, ...]
    """As Triton's sources take it: the function, its signature, constants and attributes."""
    options: dict[str, Any]


def describe(step: Step, operands: Mapping[str, Operand]) -> Described:
    function = _function(step.kernel)
    gluon = function.is_gluon()
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for position, name in enumerate(function.arg_names):
        kind, constant, divisible = _typed(step, name, operands, gluon)
        signature[name] = kind
        if kind == "constexpr":
            constants[(position,)] = constant
        elif divisible > 1 and step.hints and name not in step.varying:
            attributes[(position,)] = [["tt.divisibility", divisible]]
    options = {"num_warps": step.warps, "num_stages": step.stages, "launch_pdl": step.early}
    divisors = ((position, hint[0][1]) for position, hint in attributes.items())
    key = (step.kernel, *signature.items(), *constants.items(), *divisors, *options.values())
    return Described(key, (function, signature, constants, attributes), options)


def compile_step(step: Step, operands: Mapping[str, Operand], target: GPUTarget | None = None) -> CompiledKernel:
    """Compile one launch for this GPU, or for a target without one present; what was compiled before is found again."""
    key, source, options = describe(step, operands)
    key += (triton.runtime.driver.active.get_current_device() if target is None else target,)
    compiled = KERNELS.get(key)
    if compiled is None:
        if source[0].is_gluon():
            compiled = _compile_gluon(source, target, options)
        else:
            compiled = triton.compile(ASTSource(*source), target=target, options=options)
        KERNELS[key] = compiled
    return compiled


@functools.cache
def _function(kernel: str) -> Any:
    """The kernel of this name. Its module is imported here, because not every Triton has what one in Gluon imports."""
    module, _, name = kernel.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise FitError(f"kernel {name} cannot be imported with Triton {triton.__version__}: {error}") from error


def _compile_gluon(kernel: tuple[Any, ...], target: GPUTarget | None, options: dict[str, Any]) -> CompiledKernel:
    """Gluon is young and changes: where another Triton's does not take the kernel, `auto` has others."""
    from triton.experimental.gluon._runtime import GluonASTSource

    try:
        return triton.compile(GluonASTSource(*kernel), target=target, options=options)
    except Exception as error:
        why = str(error).strip().splitlines() or [type(error).__name__]
        name = kernel[0].__name__
        raise FitError(f"kernel {name} does not compile with Triton {triton.__version__}: {why[-1]}") from error


def _shared_layout(block: tuple[int, ...], dtype: str) -> str:
    """How a tile lies in shared memory, which Gluon wants to be told: the widest swizzle its rows allow."""
    from triton.experimental.gluon import language as gl

    return repr(gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, dtype)))


def _typed(step: Step, name: str, operands: Mapping[str, Operand], gluon: bool = False) -> tuple[str, object, int]:
    """Type, constant value and known divisor of one argument; the number 1 and None are compiled in.

    The divisor is what lets loads be wide: a row of 3000 16-bit elements starts 16-byte aligned although 3000 is only a
    multiple of 8, which Triton's own specialisation (by 16 or not at all) does not see.
    """
    if name in step.constants:
        return "constexpr", step.constants[name], 1
    argument = step.arguments[name]
    if isinstance(argument, Pointer):
        operand = operands[argument.of]
        return "*" + _TYPES[operand.dtype], None, 16 if operand.aligned else 1
    if isinstance(argument, Descriptor):
        dtype, block = operands[argument.of].dtype, ", ".join(str(size) for size in argument.block)
        layout = "," + _shared_layout(argument.block, dtype) if gluon else ""
        return f"tensordesc<{_TYPES[dtype]}[{block}]{layout}>", None, 1
    if isinstance(argument, float):
        return "fp64" if is_double(step, {of: operand.dtype for of, operand in operands.items()}) else "fp32", None, 1
    if argument is None or argument == 1:
        return "constexpr", argument, 1
    wide = argument >= _WIDE_SIZE or (step.wide and name[1:2] == "_")
    return "i64" if wide else "i32", None, math.gcd(argument, 16)


_NUMBERS = {"fp32": "<f", "fp64": "<d"}
_KINDS: dict[type, str] = {int: "i32", float: "fp64"}  # of numbers that a kernel in CUDA C++ takes


def _bits(value: Any, kind: str) -> int:
    form = _NUMBERS.get(kind)
    if form is None:
        return int(value)
    return int.from_bytes(struct.pack(form, value).ljust(8, b"\0"), "little", signed=True)


class LaunchProgram:
    """A plan compiled for the current GPU. `names` is the order in which a call gives the tensors' addresses."""

    def __init__(self, plan: LaunchPlan, operands: Mapping[str, Operand], names: Sequence[str]) -> None:
        self.plan = plan
        self.names = tuple(names)
        self._steps = [
            _FromSource(step, self.names) if step.source else _Prepared(step, operands, self.names)
            for step in plan.steps
        ]
        self.known: dict[tuple[int, ...], list[tuple[Callable[..., Any], tuple[Any, ...]]]] = {}
        """Launches and their arguments, by stream and addresses that they were asked for with lately."""

    def __call__(self, *addresses: int) -> None:
        """Launch on a stream: `addresses` is the stream's handle, then one address a name."""
        for launch, arguments in self.calls(addresses):
            launch(*arguments)

    def direct(self) -> list[DirectLaunch] | None:
        """For a launcher of our own; None where a launch takes more than addresses and numbers."""
        launches = [step.direct() for step in self._steps]
        return None if None in launches else launches  # type: ignore[return-value]

    def calls(self, addresses: tuple[int, ...]) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
        """What a call on these addresses launches."""
        calls = self.known.get(addresses)
        if calls is None:
            if len(self.known) >= _MOST_KEPT:
                self.known.clear()
            calls = self.known[addresses] = [step.call(addresses[0], addresses[1:]) for step in self._steps]
        return calls


class _FromSource:
    """One launch of a kernel in CUDA C++."""

    def __init__(self, step: Step, names: Sequence[str]) -> None:
        macros = "".join(f"#define {name.upper()} {value}\n" for name, value in step.constants.items())
        function = compiled(macros + step.source, step.function, torch.cuda.current_device())
        arguments = [
            (names.index(value.of), 0) if isinstance(value, Pointer) else (-1, _bits(value, _KINDS[type(value)]))
            for value in step.arguments.values()
        ]
        self._launch = DirectLaunch(
            function, (*step.grid, 1), 32 * step.warps, step.shared_bytes, step.early, False, tuple(arguments)
        )
        self.call = self._launch.call

    def direct(self) -> DirectLaunch:
        return self._launch


class _Prepared:
    """One compiled launch, its argument list filled but for addresses."""

    def __init__(self, step: Step, operands: Mapping[str, Operand], names: tuple[str, ...]) -> None:
        if _VERSION not in _KNOWN:
            raise FitError(
                f"kernel {step.function}: Triton {triton.__version__} may launch unlike 3.6 and 3.7, which "
                "this version of tilemesh knows: implementation='torch' works with any"
            )
        self.step = step
        try:
            with _LOADING:
                self.compiled = compile_step(step, operands)
                self.launcher = self.compiled.run  # loads the binary; raises when the GPU cannot hold it
        except OutOfResources as error:
            raise FitError(
                f"kernel {step.function}: {error.name} {error.required}, this GPU has {error.limit}"
            ) from error
        if self.launcher.global_scratch_size or self.launcher.profile_scratch_size:
            raise RunError(
                f"kernel {step.function} needs scratch memory from Triton, which this launcher does not give"
            )
        self._head: tuple[int, int, int] = (*step.grid, 1)
        self._tail: tuple[Any, ...] = (
            self.compiled.function,
            self.launcher.launch_cooperative_grid,
            self.launcher.launch_pdl,
        )
        if _VERSION <= (3, 6):
            self._tail += (None, None, self.compiled.packed_metadata, None, None, None)
        else:
            annotations = (self.launcher.arg_annotations, self.launcher.kernel_signature)
            self._tail += (self.compiled.packed_metadata, None, None, None, None, None, *annotations)
        self._launch = _unwrapped(self.launcher.launch)
        self._arguments: list[Any] = []
        self._pointers: list[tuple[int, int]] = []
        """Which of the arguments is which address."""
        self._maps: list[tuple[int, int, Callable[[int], Any]]] = []
        """Which of them describes what lies at which address, and how that is encoded."""
        descriptors = iter(self.compiled.metadata.tensordesc_meta or ())
        for name in self.compiled.src.fn.arg_names:
            self._add_argument(step.arguments.get(name), names, descriptors)

    def _add_argument(self, argument: Any, names: tuple[str, ...], descriptors: Iterator[Any]) -> None:
        position = len(self._arguments)
        if isinstance(argument, Pointer):
            self._pointers.append((position, names.index(argument.of)))
        elif isinstance(argument, Descriptor):
            shape, strides = list(argument.shape), list(argument.strides)
            encode = functools.partial(_tensor_map, meta=next(descriptors), shape=shape, strides=strides)
            self._maps.append((position, names.index(argument.of), functools.lru_cache(_MOST_KEPT)(encode)))
            self._arguments += [None, *shape, *strides]
            return
        self._arguments.append(argument)  # a number, or a placeholder: for an address, or a value that was compiled in

    def direct(self) -> DirectLaunch | None:
        facts, source = self.compiled.metadata, self.compiled.src
        if self._maps or facts.num_ctas != 1:
            return None
        places = dict(self._pointers)
        arguments = [
            (places[at], 0) if at in places else (-1, _bits(self._arguments[at], source.signature[name]))
            for at, name in enumerate(source.fn.arg_names)
            if source.signature[name] != "constexpr"
        ]
        return DirectLaunch(
            self.compiled.function, self._head, 32 * facts.num_warps, facts.shared, bool(self.launcher.launch_pdl),
            bool(self.launcher.launch_cooperative_grid), (*arguments, (-1, 0), (-1, 0)),
        )  # fmt: skip

    def call(self, stream: int, addresses: tuple[int, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The launcher and what it is given. Quick: who works on ever new memory has this in every launch."""
        arguments = self._arguments.copy()
        for position, at in self._pointers:
            arguments[position] = addresses[at]
        for position, at, encode in self._maps:
            arguments[position] = encode(addresses[at])
        if _VERSION <= (3, 6):
            return self._launch, (*self._head, stream, *self._tail, *arguments)
        return self._launch, (*self._head, stream, *self._tail, arguments)


def _unwrapped(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Triton wraps its launcher to encode descriptors at each launch; ours are encoded already: take the inner one."""
    if not inspect.isfunction(launch):
        return launch
    inner: Callable[..., Any] = inspect.getclosurevars(launch).nonlocals["launcher"]
    return inner


def _tensor_map(address: int, meta: Mapping[str, Any], shape: list[int], strides: list[int]) -> Any:
    """A hardware tensor map, as Triton's runtime would encode it; what lies outside the shape reads as zero."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    utils = triton.runtime.driver.active.utils
    encode = utils.fill_tma_descriptor if _VERSION <= (3, 6) else utils.fill_tma_descriptor_tiled
    element = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    return encode(address, meta["swizzle"], meta["elem_size"], element, meta["block_size"], shape, strides, 0)
