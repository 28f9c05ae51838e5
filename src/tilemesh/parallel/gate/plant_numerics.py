"""What a planted bug is, and those that are no matter of layout: of loss scales, norms, optimizers, of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilemesh.model.config import ModelConfig
from tilemesh.parallel.gate.cases import Case, GateLayout
from tilemesh.parallel.gate.rules import GateOptimizer
from tilemesh.parallel.gradients import Exchanging
from tilemesh.parallel.laid import Laid


@dataclass(frozen=True)
class Plant:
    """A bug. `names`: what the gate must say of it; `suits`: the layouts and models in which it is one; `piped`: a bug
    of pipelines, and otherwise of models on one stage; `zero`: of ZeRO, and otherwise of whole replicas.

    What is no matter of layout: `only`, the cases in which it is one, of any layout where it is given; `steps`: what
    it makes of an optimizer; `shared`: of the model's configuration, on all ranks and in one process alike."""

    name: str
    kind: str
    names: str
    put: Callable[[Laid], None]
    suits: Callable[[GateLayout, ModelConfig], bool]
    piped: bool = False
    zero: bool = False
    only: Callable[[Case], bool] | None = None
    steps: Callable[[GateOptimizer], GateOptimizer] = lambda optimizer: optimizer
    shared: Callable[[ModelConfig], ModelConfig] = lambda config: config

    def applies(self, case: Case) -> bool:
        layout = case.layout
        is_kind = (layout.pp > 1, layout.zero > 0) == (self.piped, self.zero) if self.only is None else self.only(case)
        return is_kind and self.suits(layout, case.config)


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


def _nothing(laid: Laid) -> None:
    return None


def _everywhere(layout: GateLayout, config: ModelConfig) -> bool:
    return True


NUMERIC = (
    Plant(
        "scale-first-microbatch", "scale", "backward differs first at", _scaled_once,
        lambda layout, config: layout.accumulation > 1 and layout.pp == 1, only=lambda case: case.scale != 1,
    ),
    Plant(
        "scale-left-in-norm", "scale", "their norm differs", _totals(lambda squares, scale: squares * scale**2),
        _everywhere, only=lambda case: case.scale != 1,
    ),
    Plant(
        "norm-in-16-bits", "masters", "the norm is not theirs", _totals(_in_16_bits), _everywhere,
        only=lambda case: case.precision == "bf16-master",
    ),
    Plant(
        "update-undivided", "masters", "what differs comes with the update", _nothing, _everywhere,
        only=lambda case: case.precision == "bf16-master", steps=lambda right: _Stepping(right, divides=False),
    ),
    Plant(
        "update-twice", "optimizer", "what differs comes with the update", _nothing, _everywhere,
        only=lambda case: case.optimizer == "adamw", steps=lambda right: _Stepping(right, times=2),
    ),
    Plant(
        "rotary-angles-everywhere", "papers", "forward differs first at layers.0.attention", _nothing,
        lambda layout, config: config.positions == "rotary", only=lambda case: case.by_papers, shared=_turned_otherwise,
    ),
)  # fmt: skip
