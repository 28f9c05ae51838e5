"""What a planted bug is, and those that are no matter of layout: of loss scales, norms, optimizers, of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilemesh.model.config import ModelConfig
from tilemesh.parallel.gate.cases import Case
from tilemesh.parallel.gate.rules import GateOptimizer
from tilemesh.parallel.gradients import Exchanging
from tilemesh.parallel.laid import Laid


def _nothing(laid: Laid) -> None:
    return None


@dataclass(frozen=True)
class Plant:
    """A bug. `names`: what the gate must say of it; `applies`: the cases in which it is one; `put`: puts it into a laid
    model, `steps` into an optimizer, `shared` into the model's configuration, on all ranks and in one process alike."""

    name: str
    kind: str
    names: str
    applies: Callable[[Case], bool]
    put: Callable[[Laid], None] = _nothing
    steps: Callable[[GateOptimizer], GateOptimizer] = lambda optimizer: optimizer
    shared: Callable[[ModelConfig], ModelConfig] = lambda config: config


def _scaled_once(laid: Laid) -> None:
    """The first microbatch of a step is scaled, the others are not; what is counted is right."""
    gradients, right = laid.gradients, laid.gradients.backward
    turn = 0

    def backward(loss_sum: Tensor, count: Tensor, *, last: bool = True, scale: float = 1.0) -> None:
        nonlocal turn
        if turn:
            loss_sum = loss_sum / scale + (loss_sum - loss_sum / scale).detach()
        turn = 0 if last else turn + 1
        right(loss_sum, count, last=last, scale=scale)

    gradients.backward = backward  # type: ignore[assignment, method-assign]


def _totals(change: Callable[[float, float], float]) -> Callable[[Laid], None]:
    """`change`: of the sum of squares that a norm is made of, and the loss scale."""

    def put(laid: Laid) -> None:
        gradients = laid.gradients
        assert isinstance(gradients, Exchanging)
        right = gradients.totals

        def totals(squares: Tensor) -> tuple[float, int, float]:
            loss_sum, tokens, whole = right(squares)
            return loss_sum, tokens, change(whole, gradients._scale)

        gradients.totals = totals  # type: ignore[method-assign]

    return put


def _in_16_bits(squares: float, scale: float) -> float:
    return float(torch.tensor(squares).sqrt().bfloat16()) ** 2


@dataclass(frozen=True)
class _Stepping:
    """An optimizer that steps in another way than it should."""

    right: GateOptimizer
    times: int = 1
    divides: bool = True

    def step(self, rate: float, divisor: Tensor | None = None) -> None:
        for _ in range(self.times):
            self.right.step(rate, divisor if self.divides else None)


def _turned_otherwise(config: ModelConfig) -> ModelConfig:
    return config.replace(rotary_base=config.rotary_base / 2)


def _is_scaled(case: Case) -> bool:
    return case.scale != 1


def _is_narrow(case: Case) -> bool:
    return case.precision == "bf16-master"


_LATE = "what differs comes with the update"
NUMERIC = (
    Plant(
        "scale-first-microbatch", "scale", "backward differs first at",
        lambda case: case.scale != 1 and case.layout.accumulation > 1 and case.layout.pp == 1, _scaled_once,
    ),
    Plant(
        "scale-left-in-norm", "scale", "their norm differs", _is_scaled,
        _totals(lambda squares, scale: squares * scale**2),
    ),
    Plant("norm-in-16-bits", "masters", "the norm is not theirs", _is_narrow, _totals(_in_16_bits)),
    Plant("update-undivided", "masters", _LATE, _is_narrow, steps=lambda right: _Stepping(right, divides=False)),
    Plant(
        "update-twice", "optimizer", _LATE, lambda case: case.optimizer == "adamw",
        steps=lambda right: _Stepping(right, times=2),
    ),
    Plant(
        "rotary-angles-everywhere", "papers", "forward differs first at layers.0.attention",
        lambda case: case.by_papers and case.config.positions == "rotary", shared=_turned_otherwise,
    ),
)  # fmt: skip
