"""The arithmetic of an update on a group of parameters: AdamW's and SGD's by torch's functions of these names; Lion and
Muon.

The one idea: torch's `Optimizer` classes are left out, because making one imports everything that compiles
(torch._dynamo, sympy, Triton), which takes a rank as long as `import torch`. They call the same functions with the same
arguments, so a step gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from tilemesh.parallel.matrices import MatrixRound
from tilemesh.train.config import OptimizerConfig
from tilemesh.train.rules import KINDS

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial a x + b x³ + c x⁵ that takes singular values from (0, 1] towards 1 (Jordan 2024)."""
NEWTON_SCHULZ_STEPS = 5
UPDATE_SIZE = 0.2
"""The root mean square of an AdamW update, to which Muon's is scaled."""
_LEAST_NORM = 1e-7


@dataclass
class UpdateGroup:
    """Parameters by name that are stepped together by one rule, with one weight decay; `state` is what is remembered of
    each. `rule`: by default the optimizer's own."""

    config: OptimizerConfig
    parameters: dict[str, nn.Parameter]
    weight_decay: float
    is_fused: bool
    is_capturing: bool = False  # what torch's AdamW wants to be told before it is captured as a CUDA graph, and after
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    rule: str = ""
    matrices: MatrixRound | None = None
    """Of Muon, where ranks hold parts of these parameters: how functions of the whole ones are computed."""
    share: float = 1.0
    """The part of all workers whose mean gradient this is, which a sign does not say; `rate` has it in it."""

    def __post_init__(self) -> None:
        self.rule = self.rule or self.config.name
        # torch has no fused function for the others; a sign is the same whatever a gradient is divided by
        self.is_fused = self.rule == "sign" or (self.is_fused and self.rule in ("adamw", "sgd"))

    def step(self, rate: float | Tensor, divisor: Tensor | None) -> None:
        """Move the parameters that have a gradient; the fused functions divide it by `divisor` on their way."""
        stepped = {name: value for name, value in self.parameters.items() if value.grad is not None}
        gradients = [value.grad for value in stepped.values() if value.grad is not None]
        if self.rule == "sign":
            for value, gradient in zip(stepped.values(), gradients, strict=True):
                value.sub_(gradient.sign(), alpha=self.config.balance_rate * self.share)
        elif self.rule == "sgd":
            self._sgd(stepped, gradients, rate, divisor)
        elif self.rule == "adamw":
            self._adamw(stepped, gradients, rate, divisor)
        else:
            assert divisor is None
            self._ours(stepped, gradients, rate)

    def put(self, steps: int, states: Mapping[str, dict[str, Tensor]]) -> None:
        """Go on from what is remembered of each parameter after so many steps."""
        for name, value in self.parameters.items():
            self.state[name] = dict(states[name])
            if self.rule == "adamw":
                count = torch.tensor(float(steps), dtype=torch.float32, device=self._step_device(value))
                self.state[name]["step"] = count

    def _ours(self, stepped: dict[str, nn.Parameter], gradients: list[Tensor], rate: float | Tensor) -> None:
        (kind,) = KINDS[self.rule]
        for name, value in stepped.items():
            if name not in self.state:
                self.state[name] = {kind: torch.zeros_like(value)}
        remembered = [self.state[name][kind] for name in stepped]
        values = list(stepped.values())
        if self.rule == "lion":
            lion(values, gradients, remembered, rate=rate, betas=self.config.betas, weight_decay=self.weight_decay)
        else:
            momentum, decay = self.config.momentum, self.weight_decay
            muon(values, gradients, remembered, self.matrices, rate=rate, momentum=momentum, weight_decay=decay)

    def _adamw(
        self, stepped: dict[str, nn.Parameter], gradients: list[Tensor], rate: float | Tensor, divisor: Tensor | None
    ) -> None:
        for name, value in stepped.items():
            if name not in self.state:
                self.state[name] = {kind: torch.zeros_like(value) for kind in ("exp_avg", "exp_avg_sq")}
                self.state[name]["step"] = torch.zeros((), dtype=torch.float32, device=self._step_device(value))
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

    def _step_device(self, value: Tensor) -> torch.device | None:
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


def lion(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    *,
    rate: float | Tensor,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """One step of Lion (Chen et al. 2023), in place: every element moves by the rate, in the direction of a mean."""
    slow, fast = betas
    for parameter, gradient, average in zip(parameters, gradients, averages, strict=True):
        if weight_decay:
            parameter.mul_(1 - rate * weight_decay)
        parameter.sub_(average.lerp(gradient, 1 - slow).sign_() * rate)
        average.lerp_(gradient, 1 - fast)


def muon(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    matrices: MatrixRound | None = None,
    *,
    rate: float | Tensor,
    momentum: float,
    weight_decay: float,
) -> None:
    """One step of Muon, in place: momentum with Nesterov's look ahead, made orthogonal, and scaled to the size that an
    AdamW update typically has, so that one learning rate serves both (Liu et al. 2025).

    matrices: where ranks hold parts of the parameters, which they are and how functions of the whole are computed.
    """
    for gradient, average in zip(gradients, momenta, strict=True):
        average.lerp_(gradient, 1 - momentum)
    ahead = (gradient.lerp(average, momentum) for gradient, average in zip(gradients, momenta, strict=True))
    if matrices is None:
        updates: Iterable[Tensor] = map(orthogonal, ahead)
        longest = [max(parameter.shape) for parameter in parameters]
    else:  # sent in the precision of the products, to which `orthogonal` rounds a matrix first of all
        updates = matrices(orthogonal, [part.to(product_dtype(part)) for part in ahead])
        longest = [max(shard.whole) for shard in matrices.shards]
    for parameter, update, length in zip(parameters, updates, longest, strict=True):
        if weight_decay:
            parameter.mul_(1 - rate * weight_decay)
        parameter.sub_(update.to(parameter.dtype) * (rate * UPDATE_SIZE * math.sqrt(length)))


def orthogonal(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The matrix with all singular values brought near 1, by a few products.

    dtype: of the products.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrix.to(dtype or product_dtype(matrix))
    is_tall = x.shape[0] > x.shape[1]
    x = x.mT if is_tall else x
    x = x / x.norm().clamp(min=_LEAST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def product_dtype(matrix: Tensor) -> torch.dtype:
    """Of Newton-Schulz products: bfloat16 on a GPU, where they are quick, else the matrix's own, at least float32."""
    if matrix.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if matrix.is_cuda else torch.float32
