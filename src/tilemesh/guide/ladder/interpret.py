"""Runs CUDA text on the CPU, all threads of a grid at once, and counts what it reads and writes.

Every variable holds one value if all threads agree (loop counters, mostly) or an array with one value for each thread.
A branch that threads take differently runs both ways, each with a mask, as a warp does.

Not modelled: overflow of `int`. Refused: division of negative integers, `return` from the middle of a kernel.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilemesh.core.errors import UsageError
from tilemesh.guide.ladder.closures import KernelCompiler
from tilemesh.guide.ladder.memory import Accesses, GlobalArray, Lanes, Observer, SharedArray
from tilemesh.guide.ladder.parse import parse
from tilemesh.guide.ladder.threads import CudaPointer, CudaThreads


@dataclass
class Counted:
    """What one launch did: traffic by array, and how many of the lanes of issued warps took part."""

    reads: dict[str, Accesses]
    writes: dict[str, Accesses]
    shared: tuple[str, ...]
    issued_lanes: int  # 32 for each warp and statement
    active_lanes: int
    barriers: int

    def total(self, shared: bool) -> Accesses:
        """All reads of shared or of global memory."""
        return sum((traffic for name, traffic in self.reads.items() if (name in self.shared) == shared), Accesses())

    def stored(self, shared: bool) -> Accesses:
        return sum((traffic for name, traffic in self.writes.items() if (name in self.shared) == shared), Accesses())

    @property
    def lanes_used(self) -> float:
        return self.active_lanes / self.issued_lanes


def launch(
    text: str,
    kernel: str,
    grid: tuple[int, int],
    block: tuple[int, int],
    arguments: Mapping[str, Any],
    dynamic: int = 0,
    observer: Observer | None = None,
) -> Counted:
    """Runs `kernel` of the text. Arguments: numpy arrays (written in place) for pointers, ints and floats.

    dynamic: elements of `extern __shared__`. observer: told of every access to global memory.
    """
    program = parse(text)
    if kernel not in program.functions:
        raise UsageError(f"kernel {kernel}: the text has {', '.join(program.functions)}")
    if block[0] * block[1] > 1024:
        raise UsageError(f"block {block}: a block has at most 1,024 threads")
    lanes = Lanes(grid, block)
    state = CudaThreads(lanes, dynamic)
    compiler = KernelCompiler(program, lanes)
    function = program.functions[kernel]
    arrays: dict[str, GlobalArray] = {}
    values = []
    for parameter in function.parameters:
        if parameter.name not in arguments:
            raise UsageError(f"kernel {kernel} wants an argument {parameter.name}")
        value = arguments[parameter.name]
        if parameter.pointer:
            arrays[parameter.name] = GlobalArray(parameter.name, value.reshape(-1), lanes, observer=observer)
            value = CudaPointer(arrays[parameter.name], 0, (1,))
        values.append(value)
    with np.errstate(over="ignore", invalid="ignore"):
        compiler.function(function)(state, values)
    if state.open_copies or state.groups:
        raise UsageError(f"kernel {kernel} ends with copies under way that nothing waited for")
    everything: list[GlobalArray | SharedArray] = [*arrays.values(), *state.shared.values()]
    return Counted(
        {array.name: array.read for array in everything},
        {array.name: array.written for array in everything},
        tuple(state.shared),
        state.issued,
        state.active,
        state.barriers,
    )
