"""A training step as one CUDA graph: its kernels are launched once, and from then on replayed by a single call.

The one idea: on one GPU alone every step is the same kernels on the same memory. What differs (the batch, the rate, the
seed of dropout) is written into tensors that stay before each step, what the step came to is read from tensors that
stay. Python's time to launch a step, which a small batch has to wait for, is then paid once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from tilemesh.core.errors import RunError
from tilemesh.core.plan import REPLAY_ROOM
from tilemesh.measure.gpu import CudaGraphs
from tilemesh.parallel.gradients import GradientStep

PLAIN_STEPS = 2
"""Steps launched one kernel at a time before one is captured: the first compiles and makes the optimiser's state."""


class CapturedStep(Protocol):
    """A step that can be repeated, and where it leaves its results."""

    result: Any

    def replay(self) -> None: ...


class StepGraphs(Protocol):
    """What this needs of `measure.gpu.CudaGraphs`; a test puts its own in place."""

    def run(self, body: Callable[[], GradientStep]) -> GradientStep: ...

    def capture(self, body: Callable[[], GradientStep]) -> CapturedStep: ...


class StepGraph:
    """Calls `body`, a whole step, again and again: as it is at first, then out of a graph.

    `body` reads all that differs from step to step out of tensors that stay, and never waits for the device.
    `capturing` is told when a capture begins and ends. `always`: also where little memory is left.
    """

    def __init__(
        self,
        body: Callable[[], GradientStep],
        capturing: Callable[[bool], None] = lambda now: None,
        always: bool = False,
        graphs: StepGraphs | None = None,
    ) -> None:
        self.body, self.capturing, self.always = body, capturing, always
        self.graphs = graphs or CudaGraphs()
        self.captured: CapturedStep | None = None
        self._calls = 0

    def __call__(self) -> GradientStep:
        self._calls += 1
        if self._calls == PLAIN_STEPS + 1 and (self.always or has_room()):
            self.captured = self._capture()
        if self.captured is None:
            return self.graphs.run(self.body)
        self.captured.replay()
        done: GradientStep = self.captured.result
        return done.copied()

    def _capture(self) -> CapturedStep:
        self.capturing(True)
        try:
            return self.graphs.capture(self.body)
        except RunError as error:
            raise RunError(f"the step {error}; set train.graph=false to launch it kernel by kernel") from error
        finally:
            self.capturing(False)


def has_room() -> bool:
    """Whether what steps have taken so far leaves enough of the GPU for what is not a step."""
    free, _ = torch.cuda.mem_get_info()  # what other processes hold is not free
    return torch.cuda.max_memory_allocated() <= REPLAY_ROOM * (free + torch.cuda.memory_reserved())
