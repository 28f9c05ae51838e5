"""Compiling kernels while torch.compile is still at work: by threads, from what its tracing tells.

The one idea: which kernels an operator launches depends on how tensors lie in memory, not on their memory. So when
torch.compile asks an operator what its results look like, the operator's launches are planned on the tensors without
memory that it asks with, and their kernels are compiled in the background. When the compiled code first runs, they are
there; otherwise each would be compiled when it is first launched, one after the other. A kernel that was compiled for
nothing, because a tensor came to lie otherwise, costs no more than that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilemesh.kernels import context
from tilemesh.kernels.launch.call import Plan, place_of
from tilemesh.kernels.launch.steps import LaunchPlan

if TYPE_CHECKING:
    from tilemesh.kernels.launch.program import Operand

WORKERS = 8


class KernelsAhead:
    """Compiles the kernels of plans by the threads of an executor; `launch` takes the place of a real one."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.seen: set[object] = set()
        """Calls that were planned: a model's layers make the same ones."""

    def compile(self, plan: LaunchPlan, operands: Mapping[str, Operand]) -> None:
        """Begin with all kernels of a plan."""
        from tilemesh.kernels.launch.program import compile_later

        for step in plan.steps:
            compile_later(step, operands, self.executor)

    def launch(self, plan: Plan, tensors: Mapping[str, Tensor], written: Sequence[str] = (), **constants: Any) -> None:
        """As `call.compiled`, up to the launch."""
        from tilemesh.kernels.launch.program import Operand

        places = {name: place_of(tensor) for name, tensor in tensors.items()}
        planned = plan(places, **constants)
        operands = {name: Operand(place.dtype, place.aligned) for name, place in places.items()}
        self.compile(planned, operands | {name: Operand(made.dtype) for name, made in planned.buffers.items()})


def plan_call(
    name: str,
    how: str,
    run: Callable[[Any, list[Any]], object],
    tensors: Sequence[Tensor | None],
    options: Sequence[object],
) -> None:
    """Plan an operator's call on tensors without memory, where kernels are compiled ahead.

    `run` is the call, given what launches and tensors that lie as these do; `options`: its arguments that are no
    tensors. Whatever it raises, the call itself will raise when it is made.
    """
    ahead = context.current.ahead
    given = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    if ahead is None or how != "triton" or not given or not all(map(_is_fixed, given)):
        return
    key = (name, *options, *((tuple(t.shape), t.stride(), t.dtype) for t in given))
    if key in ahead.seen:
        return
    ahead.seen.add(key)
    with torch.no_grad(), contextlib.suppress(Exception):
        # Others than those that are traced: nothing that the call does to them is seen there.
        fresh = [None if t is None else t.new_empty_strided(t.shape, t.stride()) for t in tensors]
        run(ahead.launch, fresh)


def _is_fixed(tensor: Tensor) -> bool:
    """Whether it has numbers for sizes: asking a symbol for its value would tie the compiled code to it."""
    return tensor.is_cuda and all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride()))


@contextlib.contextmanager
def compiling_ahead(workers: int = WORKERS) -> Iterator[None]:
    """Compile kernels ahead in this block, in which torch.compile's code is to run for the first time."""
    with ThreadPoolExecutor(workers) as executor:
        before, context.current.ahead = context.current.ahead, KernelsAhead(executor)
        try:
            yield
        finally:
            context.current.ahead = before
