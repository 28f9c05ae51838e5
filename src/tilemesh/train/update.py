"""AdamW's and SGD's arithmetic on a group of parameters, by torch's functions of these names.

The one idea: torch's `Optimizer` classes are left out, because making one imports everything that compiles
(torch._dynamo, sympy, Triton), which takes a rank as long as `import torch`. They call the same functions with the same
arguments, so a step gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from tilemesh.train.config import OptimizerConfig


@dataclass
class UpdateGroup:
    """Parameters by name that are stepped together, with one weight decay; `state` is what is remembered of each."""

    config: OptimizerConfig
    parameters: dict[str, nn.Parameter]
    weight_decay: float
    is_fused: bool
    is_capturing: bool = False  # what torch's AdamW wants to be told before it is captured as a CUDA graph, and after
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def step(self, rate: float | Tensor, divisor: Tensor | None) -> None:
        """Move the parameters that have a gradient; the fused functions divide it by `divisor` on their way."""
        stepped = {name: value for name, value in self.parameters.items() if value.grad is not None}
        gradients = [value.grad for value in stepped.values() if value.grad is not None]
        if self.config.name == "sgd":
            self._sgd(stepped, gradients, rate, divisor)
        else:
            self._adamw(stepped, gradients, rate, divisor)

    def _adamw(
        self, stepped: dict[str, nn.Parameter], gradients: list[Tensor], rate: float | Tensor, divisor: Tensor | None
    ) -> None:
        for name, value in stepped.items():
            if name not in self.state:
                self.state[name] = {kind: torch.zeros_like(value) for kind in ("exp_avg", "exp_avg_sq")}
                self.state[name]["step"] = torch.zeros((), dtype=torch.float32, device=self.step_device(value))
        state = [self.state[name] for name in stepped]
        beta1, beta2 = self.config.betas
        adamw(
            list(stepped.values()),
            gradients,
            [kept["exp_avg"] for kept in state],
            [kept["exp_avg_sq"] for kept in state],
            [],
            [kept["step"] for kept in state],
            fused=self.is_fused,
            capturable=self.is_capturing,
            grad_scale=divisor,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=rate,
            weight_decay=self.weight_decay,
            eps=self.config.epsilon,
            maximize=False,
        )

    def step_device(self, value: Tensor) -> torch.device | None:
        """Where AdamW's count of steps lies: beside the parameter where a fused function reads it, else on the host."""
        return value.device if self.is_fused or self.is_capturing else None

    def _sgd(
        self, stepped: dict[str, nn.Parameter], gradients: list[Tensor], rate: float | Tensor, divisor: Tensor | None
    ) -> None:
        momentum = self.config.momentum
        buffers = [self.state.get(name, {}).get("momentum_buffer") for name in stepped] if momentum else []
        sgd(
            list(stepped.values()),
            gradients,
            buffers,  # filled where there was none, as at the first step
            fused=self.is_fused,
            grad_scale=divisor,
            weight_decay=self.weight_decay,
            momentum=momentum,
            lr=rate,  # type: ignore[arg-type]  # torch says float and takes a tensor
            dampening=0,
            nesterov=False,
            maximize=False,
        )
        for name, buffer in zip(stepped, buffers, strict=False):
            if buffer is not None:
                self.state[name] = {"momentum_buffer": buffer}
