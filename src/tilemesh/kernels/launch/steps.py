"""What a plan is made of: launches, their arguments and the scratch memory of one call, as plain values.

An operator makes plans; `program.py` compiles and launches them on a GPU, and `interpret.py` interprets the same ones
on the CPU. Neither knows which operator a plan is of, and nothing here needs torch, Triton or a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tilemesh.core.errors import UsageError, unknown

INT32_LIMIT = 2**31


class FitError(UsageError):
    """A launch that this GPU or this Triton cannot run, known only once compiled; `auto` then takes something else."""


@dataclass(frozen=True)
class Pointer:
    """The address of a tensor by the name it has in the plan: one the caller gives, or one of the plan's buffers."""

    of: str


@dataclass(frozen=True)
class Descriptor:
    """A TMA descriptor over a tensor: the last stride is 1, the shape is what bounds loads and stores."""

    of: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


Argument = Pointer | Descriptor | int | float | None


@dataclass(frozen=True)
class Step:
    """One launch. Arguments are by name; `wide` makes every stride 64-bit, which makes all index math so.

    kernel: the Triton function, as `package.module:function`. A stride is an argument whose name is one letter, an
    underscore and more (`x_m`). With `source` it is a function of that text in CUDA C++, in which constants are macros;
    arguments are then in its order, whole numbers 32-bit ones and others doubles.
    """

    kernel: str
    grid: tuple[int, int]
    arguments: Mapping[str, Argument]
    constants: Mapping[str, object]
    warps: int = 4
    stages: int = 3
    wide: bool = False
    hints: bool = True  # tell the compiler what divides sizes and strides, so that accesses are wide
    varying: tuple[str, ...] = ()  # sizes that change from call to call: no hint, so that one kernel serves them all
    early: bool = False  # launched while the kernel before still runs; the kernel itself waits for it
    source: str = ""
    shared_bytes: int = 0  # of a block, where there is a source; Triton finds its own

    @property
    def function(self) -> str:
        """The kernel's name without its module."""
        return self.kernel.partition(":")[2]


@dataclass(frozen=True)
class Buffer:
    """Scratch memory for one call."""

    elements: int
    dtype: str


@dataclass(frozen=True)
class LaunchPlan:
    steps: tuple[Step, ...]
    buffers: Mapping[str, Buffer] = field(default_factory=dict)


def check_names(plan: LaunchPlan, tensors: Iterable[str], written: Iterable[str] = ()) -> None:
    """That what a plan and `written` name is there: tensors that the caller gives, and the plan's buffers."""
    known = [*tensors]
    for step in plan.steps:
        for argument in step.arguments.values():
            if isinstance(argument, (Pointer, Descriptor)) and argument.of not in known:
                raise unknown(f"tensor in a step of {step.function}", argument.of, known)
    for name in written:
        if name not in known:
            raise unknown("tensor in written=", name, known)


def is_double(step: Step, dtypes: Mapping[str, str]) -> bool:
    """Whether a launch is given a float64 tensor: its `float` arguments are then float64 too, else float32.

    dtypes: of the tensors and buffers, by name.
    """
    return any(
        isinstance(argument, (Pointer, Descriptor)) and dtypes.get(argument.of) == "float64"
        for argument in step.arguments.values()
    )


def blocks(size: int, block: int) -> int:
    """How many blocks cover a size."""
    return -(-size // block)
