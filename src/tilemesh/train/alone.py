"""Gradients of a model that lies on one GPU alone: nothing to exchange, and nothing that makes the host wait.

The exchange over a mesh ends in numbers that every rank must know before it goes on. Alone, mean and clipping stay on
the device: the next step is on its way while this one computes, and what the loss was is read some steps later.
Same calls as `parallel.data.Gradients`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

AHEAD = 4
"""Steps that the host may be ahead of the device: enough for the device never to wait, few enough to stop soon."""
_EPSILON = 1e-6  # as torch's clip_grad_norm_ has it


@dataclass(frozen=True)
class LateStep:
    """What one step came to; tensors that the device may still be computing."""

    loss: Tensor
    tokens: int
    norm: Tensor
    divisor: Tensor | None = None
    """What gradients are yet to be divided by, where clipping was left to the optimiser."""


class LocalGradients:
    """`backward` for each microbatch, `finish` once a step; `tokens`: targets of a whole step, all of which count."""

    def __init__(self, parameters: Iterable[nn.Parameter], tokens: int) -> None:
        self.parameters = list(parameters)
        self.tokens = tokens
        self._total: Tensor | None = None

    def backward(self, loss_sum: Tensor, count: Tensor | int, *, last: bool = True, scale: float = 1.0) -> None:
        mean = loss_sum / self.tokens
        self._total = mean.detach() if self._total is None else self._total + mean.detach()
        torch.autograd.backward(mean)

    def finish(self, max_norm: float | None = None, *, divide: bool = True) -> LateStep:
        """Mean loss and norm; gradients clipped, or without `divide` what remains to divide them by.

        An optimiser that divides on its way saves a pass over all gradients.
        """
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        # At least float32: the squares of 16-bit gradients do not fit into 16 bits.
        wide = torch.promote_types(gradients[0].dtype, torch.float32)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=wide)))
        divisor = None if max_norm is None else ((norm + _EPSILON) / max_norm).clamp(min=1.0)
        if divide and divisor is not None:
            torch._foreach_mul_(gradients, divisor.reciprocal().to(gradients[0].dtype))
            divisor = None
        assert self._total is not None
        total, self._total = self._total, None
        return LateStep(total, self.tokens, norm, divisor)

    def clear(self) -> None:
        """Before the next step: autograd then hands over its own tensors instead of adding to old ones."""
        for parameter in self.parameters:
            parameter.grad = None


class Mark(Protocol):
    """A place in what the device has been given to do, such as a CUDA event."""

    def synchronize(self) -> object: ...


class Pace:
    """Keeps the host at most `AHEAD` steps ahead of the device.

    A device's queue takes a thousand launches. A step of that many fills it; of steps that are one launch each, a
    hundred fit, and whoever asks the run to stop, or reads a loss, would wait for them all.
    """

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque()

    def __call__(self, mark: Mark) -> None:
        """`mark` ends the step that was handed over last; waits for the one `AHEAD` before it."""
        self._marks.append(mark)
        if len(self._marks) > AHEAD:
            self._marks.popleft().synchronize()
