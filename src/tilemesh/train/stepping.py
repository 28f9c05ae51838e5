"""AdamW's arithmetic by tilemesh's kernels: all parameters in few launches, gradients divided on the way.

It remembers the same of each parameter as torch's functions do (`update.py`), so a checkpoint of one is read by the
other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tilemesh.core.errors import RunError
from tilemesh.kernels.adamw.reference import AdamW
from tilemesh.model.kernels import TORCH
from tilemesh.train.config import OptimizerConfig
from tilemesh.train.rules import KINDS

Parameters = Mapping[str, nn.Parameter]


def is_stepped_by_kernels(kernels: str, config: OptimizerConfig, stepped: Parameters) -> bool:
    """Whether tilemesh's kernels do the arithmetic: they have AdamW, and on a CPU torch's own is the quicker one."""
    if kernels == TORCH or config.name != "adamw" or config.fused is False or not stepped:
        return False
    on_gpu = all(value.is_cuda and value.is_contiguous() for value in stepped.values())
    return on_gpu or kernels == "interpret"


class KernelUpdate:
    """By `tilemesh.kernels.AdamW`: one launch for all parameters of a combination of dtypes, which also divides.

    16-bit gradients are read as they are, and a 16-bit parameter is written beside its master. The number of steps is
    on the device, so that a captured step counts by itself. To an optimizer it is a group of parameters
    (`update.UpdateGroup`) that has all of them.
    """

    is_fused = True
    is_capturing = False

    def __init__(
        self,
        config: OptimizerConfig,
        weights: Parameters,
        stepped: Parameters,
        decays: Mapping[str, float],
        implementation: str,
    ) -> None:
        self.config, self.weights, self.parameters, self.decays = config, weights, stepped, decays
        self.implementation = implementation
        self.state: dict[str, dict[str, Tensor]] = {}
        self._kernel: AdamW | None = None
        self._count: Tensor | None = None

    def step(self, rate: float | Tensor, divisor: Tensor | None) -> None:
        """Move the parameters along their gradients, divided by `divisor`."""
        kernel, count = self._begun()
        without = [name for name, weight in self.weights.items() if weight.grad is None]
        if without:
            raise RunError(f"{without[0]} has no gradient: train.kernels=torch steps the other parameters without it")
        count.add_(1)
        gradients: Sequence[Tensor] = [weight.grad for weight in self.weights.values()]  # type: ignore[misc]
        kernel.step(gradients, rate=rate, step=count, divisor=1.0 if divisor is None else divisor)

    def put(self, steps: int, states: Mapping[str, dict[str, Tensor]]) -> None:
        """Go on from there, after so many steps."""
        _, count = self._begun()
        count.fill_(steps)
        for name, kinds in self.state.items():
            for kind, moment in kinds.items():
                moment.copy_(states[name][kind])

    def _begun(self) -> tuple[AdamW, Tensor]:
        """The averages and the count, made when they are first needed: as torch's functions do."""
        if self._kernel is None or self._count is None:
            weights, wide = list(self.weights.values()), list(self.parameters.values())
            masters = [None if weight is master else master for weight, master in zip(weights, wide, strict=True)]
            self.state = {
                name: {kind: torch.zeros_like(value.detach()) for kind in KINDS["adamw"]}
                for name, value in self.parameters.items()
            }
            self._kernel = AdamW(
                weights,
                *([state[kind] for state in self.state.values()] for kind in KINDS["adamw"]),
                masters=masters,
                betas=self.config.betas,
                eps=self.config.epsilon,
                weight_decay=[self.decays[name] for name in self.parameters],
                implementation=self.implementation,
            )
            self._count = torch.zeros((), dtype=torch.float64, device=wide[0].device)
        return self._kernel, self._count
