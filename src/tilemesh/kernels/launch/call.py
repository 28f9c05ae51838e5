"""Launching a plan on tensors: `launch(plan, tensors, ...)`, compiled on a GPU or interpreted on the CPU.

An operator's kernel.py is ordinary torch code that calls `launch`. The plan is a function of how the tensors lie in
memory, not of the tensors: it is called, and what it plans is compiled, once per signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilemesh.kernels import context
from tilemesh.kernels.launch.gpu import current_stream, device_index
from tilemesh.kernels.launch.steps import INT32_LIMIT, Argument, Buffer, LaunchPlan, Pointer, Step, check_names
from tilemesh.kernels.launch.tensors import dtype_name

if TYPE_CHECKING:
    from tilemesh.kernels.launch.program import Operand


@dataclass(frozen=True)
class Place:
    """How a tensor lies in memory; strides are in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    aligned: bool  # its address, to 16 bytes

    @property
    def wide(self) -> bool:
        """Whether an element's offset can pass 2**31, so that index math must be 64-bit."""
        pairs = zip(self.shape, self.strides, strict=True)
        return sum((size - 1) * abs(stride) for size, stride in pairs if size > 0) + 1 >= INT32_LIMIT


def one_launch(
    kernel: str, grid: tuple[int, int], places: Mapping[str, Place], numbers: Mapping[str, Argument],
    constants: Mapping[str, object], **options: Any,
) -> LaunchPlan:  # fmt: skip
    """A plan of one step that takes every tensor and these numbers; `options`: as `Step` has them. Index math is 64-bit
    where a tensor wants it."""
    arguments = {**{name: Pointer(name) for name in places}, **numbers}
    wide = any(place.wide for place in places.values())
    return LaunchPlan((Step(kernel, grid, arguments, constants, **{"wide": wide, **options}),))


SCRATCH_ALIGNMENT_BYTES = 512  # where one of several buffers may begin: as far apart as torch's own allocations

# Places by the tensors' names, and constants by theirs.
Plan = Callable[..., LaunchPlan]


def place_of(tensor: Tensor) -> Place:
    return Place(tuple(tensor.shape), tensor.stride(), dtype_name(tensor.dtype), aligned=tensor.data_ptr() % 16 == 0)


def compiled(plan: Plan, tensors: Mapping[str, Tensor], written: Sequence[str], **constants: Any) -> Launched:
    """Run what `plan(places, **constants)` says on the tensors' GPU, on its current stream.

    Returns what was launched, for other tensors that lie in memory as these do.
    """
    if (rehearse := context.rehearsal.get()) is not None:
        return rehearse(plan, tensors, **constants)
    addresses, key = [], [plan, *tensors, *constants.values()]  # by name: one left out may look like another
    for tensor in tensors.values():
        address = tensor.data_ptr()
        addresses.append(address)
        key += (tensor.shape, tensor.stride(), tensor.dtype, address & 15)
    device = tensor.device
    key.append(device)
    runners = context.current.runners
    signature = tuple(key)
    program: Launched | None = runners.recent.get(signature)
    if program is None:
        program = runners.older.get(signature) or _compile(plan, tensors, device, constants)
        runners.keep(signature, program)
    program.launch(addresses)
    return program


class Launched:
    """A plan compiled for one signature of tensors. `names`: of the tensors, in the order their addresses are given.

    Both dispatches end here: `@operator`'s, which looks a plan up for each launch, and the fused matmul's, which looks
    a whole call up (matmul/op.py says why).
    """

    def __init__(
        self, plan: LaunchPlan, operands: Mapping[str, Operand], names: Sequence[str], device: torch.device
    ) -> None:
        from tilemesh.kernels.launch.program import LaunchProgram

        self.device, self.index = device, device_index(device)
        self.several = torch.cuda.device_count() > 1
        self.scratch_begins: list[int] = []
        self.scratch_bytes = 0
        for buffer in plan.buffers.values():
            self.scratch_begins.append(self.scratch_bytes)
            size = buffer.elements * getattr(torch, buffer.dtype).itemsize
            self.scratch_bytes += -(-size // SCRATCH_ALIGNMENT_BYTES) * SCRATCH_ALIGNMENT_BYTES
        check_names(plan, operands)
        with torch.cuda.device(self.index):
            self.program = LaunchProgram(plan, operands, [*names, *plan.buffers])
        self.known = self.program.known

    def launch(self, addresses: Sequence[int]) -> None:
        """On the current stream of the plan's GPU; scratch memory is fresh each time, so streams do not race for it.

        All of it is one allocation: each takes as long as a launch.
        """
        if self.scratch_begins:
            scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=self.device)
            begin = scratch.data_ptr()
            addresses = [*addresses, *[begin + offset for offset in self.scratch_begins]]
        # A launch belongs to the current device's context; with one GPU there is no other.
        if self.several and torch.cuda.current_device() != self.index:
            with torch.cuda.device(self.index):
                self.program(current_stream(self.index), *addresses)
            return
        place = (current_stream(self.index), *addresses)
        for launch, arguments in self.known.get(place) or self.program.calls(place):
            launch(*arguments)


class RepeatedLaunches:
    """Launches that are made once by `launch`, and again on the same memory by a call."""

    def __init__(self, launch: Callable[..., Any]) -> None:
        self._launch = launch
        self._made: list[tuple[Launched, list[int]]] = []
        self._held: list[Tensor] = []  # so that their memory stays theirs

    def launch(self, plan: Plan, tensors: Mapping[str, Tensor], written: Sequence[str], **constants: Any) -> None:
        program = self._launch(plan, tensors, written, **constants)
        self._made.append((program, [tensor.data_ptr() for tensor in tensors.values()]))
        self._held += tensors.values()

    def __call__(self) -> None:
        for program, addresses in self._made:
            program.launch(addresses)


def _compile(plan: Plan, tensors: Mapping[str, Tensor], device: torch.device, constants: Mapping[str, Any]) -> Launched:
    places = {name: place_of(tensor) for name, tensor in tensors.items()}
    planned = plan(places, **constants)
    return Launched(planned, operands_of(planned, places), list(places), device)


def operands_of(plan: LaunchPlan, places: Mapping[str, Place]) -> dict[str, Operand]:
    """What compiling needs to know of a plan's tensors and buffers."""
    from tilemesh.kernels.launch.program import Operand

    operands = {name: Operand(place.dtype, place.aligned) for name, place in places.items()}
    return operands | {name: Operand(buffer.dtype) for name, buffer in plan.buffers.items()}


def scratch_of(buffers: Mapping[str, Buffer], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Memory for one call: kept from one to the next it would race between streams."""
    return {
        name: torch.empty(buffer.elements, dtype=getattr(torch, buffer.dtype), device=device)
        for name, buffer in buffers.items()
    }


def interpreted(plan: Plan, tensors: Mapping[str, Tensor], written: Sequence[str], **constants: Any) -> Interpreted:
    """The same, by Triton's interpreter."""
    if (rehearse := context.rehearsal.get()) is not None:
        return rehearse(plan, tensors, **constants)
    planned = plan({name: place_of(tensor) for name, tensor in tensors.items()}, **constants)
    program = Interpreted(planned, tuple(tensors), tuple(written))
    program.launch(list(tensors.values()))
    return program


@dataclass(frozen=True)
class Interpreted:
    """A plan for one signature of tensors, to be interpreted. `names`: of the tensors, in the order they are given."""

    plan: LaunchPlan
    names: tuple[str, ...]
    written: tuple[str, ...]

    def launch(self, tensors: Sequence[Tensor]) -> None:
        from tilemesh.kernels.launch import interpret

        given = dict(zip(self.names, tensors, strict=True))
        interpret.run(self.plan, {**given, **scratch_of(self.plan.buffers)}, self.written)
