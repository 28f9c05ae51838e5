"""How far the host may run ahead of the device where steps are not waited for."""

from __future__ import annotations

from collections import deque
from typing import Protocol

AHEAD = 4
"""Steps that the host may be ahead of the device: enough for the device never to wait, few enough to stop soon."""


class PaceMark(Protocol):
    """A place in what the device has been given to do, such as a CUDA event."""

    def synchronize(self) -> object: ...


class Pace:
    """Keeps the host at most `AHEAD` steps ahead of the device.

    A device's queue takes a thousand launches. A step of that many fills it; of steps that are one launch each, a
    hundred fit, and whoever asks the run to stop, or reads a loss, would wait for them all.
    """

    def __init__(self) -> None:
        self._marks: deque[PaceMark] = deque()

    def __call__(self, mark: PaceMark) -> None:
        """`mark` ends the step that was handed over last; waits for the one `AHEAD` before it."""
        self._marks.append(mark)
        if len(self._marks) > AHEAD:
            self._marks.popleft().synchronize()
