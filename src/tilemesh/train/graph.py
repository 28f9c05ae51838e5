"""A training step as one CUDA graph: its kernels are launched once, and from then on replayed by a single call.

The one idea: on one GPU alone every step is the same kernels on the same memory. What differs (the batch, the rate, the
seed of dropout) is written into tensors that stay before each step, what the step came to is read from tensors that
stay. Python's time to launch a step, which a small batch has to wait for, is then paid once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tilemesh.core.errors import RunError
from tilemesh.core.plan import REPLAY_ROOM
from tilemesh.train.alone import LateStep

PLAIN_STEPS = 2
"""Steps launched one kernel at a time before one is captured: the first compiles and makes the optimiser's state."""


class Captured(NamedTuple):
    """A step that can be repeated, and where it leaves what it came to."""

    replay: Callable[[], None]
    result: LateStep


class StepGraph:
    """Calls `body`, a whole step, again and again: as it is at first, then out of a graph.

    `body` reads all that differs from step to step out of tensors that stay, and never waits for the device.
    `capturing` is told when a capture begins and ends. `always`: also where little memory is left.
    """

    def __init__(
        self, body: Callable[[], LateStep], capturing: Callable[[bool], None] = lambda now: None, always: bool = False
    ) -> None:
        self.body, self.capturing, self.always = body, capturing, always
        self.captured: Captured | None = None
        self._calls = 0
        # The plain steps run where the capture will: autograd and cuBLAS remember the stream they were first used on.
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self) -> LateStep:
        self._calls += 1
        if self._calls == PLAIN_STEPS + 1 and (self.always or has_room()):
            self.captured = self._capture()
        if self.captured is None:
            return self._plain()
        self.captured.replay()
        done = self.captured.result
        # Copies: the next replay writes over what this one left.
        return LateStep(done.loss.clone(), done.tokens, done.norm.clone())

    def _plain(self) -> LateStep:
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            done = self.body()
        caller.wait_stream(self._stream)
        return done

    def _capture(self) -> Captured:
        graph, caller = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self.capturing(True)
        try:
            # Of this thread alone: others may be reading data or writing a checkpoint.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                result = self.body()
        except RuntimeError as error:
            torch.cuda.set_stream(caller)
            raise RunError(
                f"the step cannot be captured as a CUDA graph ({reason_of(error)}): set train.graph=false to launch it "
                "kernel by kernel"
            ) from error
        finally:
            self.capturing(False)
        return Captured(graph.replay, result)


def has_room() -> bool:
    """Whether what steps have taken so far leaves enough of the GPU for what is not a step."""
    free, _ = torch.cuda.mem_get_info()  # what other processes hold is not free
    return torch.cuda.max_memory_allocated() <= REPLAY_ROOM * (free + torch.cuda.memory_reserved())


def reason_of(error: RuntimeError) -> str:
    """What went wrong first, in a line: ending a capture that has failed raises an error of its own on the way out."""
    first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
    return next(iter(str(first).splitlines()), type(first).__name__)
