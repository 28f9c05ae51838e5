"""Launching a plan on tensors: `launch(plan, tensors, ...)`, compiled on a GPU or interpreted on the CPU.

An operator's kernel.py is ordinary torch code that calls `launch`. The plan is a function of how the tensors lie in
memory, not of the tensors: it is called, and what it plans is compiled, once per signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilemesh.kernels import context
from tilemesh.kernels.launch.gpu import current_stream, device_index
from tilemesh.kernels.launch.steps import INT32_LIMIT, LaunchPlan, check_names
from tilemesh.kernels.launch.tensors import dtype_name


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


# Places by the tensors' names, and constants by theirs.
Plan = Callable[..., LaunchPlan]


def place_of(tensor: Tensor) -> Place:
    return Place(tuple(tensor.shape), tensor.stride(), dtype_name(tensor.dtype), aligned=tensor.data_ptr() % 16 == 0)


def compiled(plan: Plan, tensors: Mapping[str, Tensor], written: Sequence[str], **constants: Any) -> Any:
    """Run what `plan(places, **constants)` says on the tensors' GPU, on its current stream.

    Returns what was launched: a function of addresses, for tensors that lie in memory as these do.
    """
    addresses, key = [], [plan, *constants.values()]
    for tensor in tensors.values():
        address = tensor.data_ptr()
        addresses.append(address)
        key += (tensor.shape, tensor.stride(), tensor.dtype, address & 15)
    device = tensor.device
    key.append(device)
    runners = context.current.runners
    signature = tuple(key)
    program = runners.recent.get(signature)
    if program is None:
        program = runners.older.get(signature) or _Compiled(plan, tensors, device, constants)
        runners.keep(signature, program)
    program(addresses)
    return program


class _Compiled:
    """A plan compiled for one signature; scratch memory is fresh at each call, so that streams do not race for it."""

    def __init__(
        self, plan: Plan, tensors: Mapping[str, Tensor], device: torch.device, constants: Mapping[str, Any]
    ) -> None:
        from tilemesh.kernels.launch.program import Operand, Program

        self.device, self.index = device, device_index(device)
        self.several = torch.cuda.device_count() > 1
        places = {name: place_of(tensor) for name, tensor in tensors.items()}
        planned = plan(places, **constants)
        self.buffers = [(buffer.elements, getattr(torch, buffer.dtype)) for buffer in planned.buffers.values()]
        operands = {name: Operand(place.dtype, place.aligned) for name, place in places.items()}
        operands |= {name: Operand(buffer.dtype) for name, buffer in planned.buffers.items()}
        check_names(planned, operands)
        with torch.cuda.device(self.index):
            self.program = Program(planned, operands, list(operands))

    def __call__(self, addresses: Sequence[int]) -> None:
        if self.buffers:
            scratch = [torch.empty(elements, dtype=dtype, device=self.device) for elements, dtype in self.buffers]
            addresses = [*addresses, *(buffer.data_ptr() for buffer in scratch)]
        if self.several and torch.cuda.current_device() != self.index:
            with torch.cuda.device(self.index):
                self.program(current_stream(self.index), *addresses)
        else:
            self.program(current_stream(self.index), *addresses)


def interpreted(plan: Plan, tensors: Mapping[str, Tensor], written: Sequence[str], **constants: Any) -> Interpreted:
    """The same, by Triton's interpreter; returns a function of the tensors."""
    planned = plan({name: place_of(tensor) for name, tensor in tensors.items()}, **constants)
    program = Interpreted(planned, tuple(tensors), tuple(written))
    program(list(tensors.values()))
    return program


@dataclass(frozen=True)
class Interpreted:
    """A plan for one signature, to be interpreted; `names` is the order in which a call gives the tensors."""

    planned: LaunchPlan
    names: tuple[str, ...]
    written: tuple[str, ...]

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        from tilemesh.kernels.launch import interpret

        scratch = {
            name: torch.empty(buffer.elements, dtype=getattr(torch, buffer.dtype))
            for name, buffer in self.planned.buffers.items()
        }
        interpret.run(self.planned, {**dict(zip(self.names, tensors, strict=True)), **scratch}, self.written)
