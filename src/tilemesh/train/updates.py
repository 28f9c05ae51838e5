"""Who does an optimiser's arithmetic: torch's own optimisers, or tilemesh's AdamW over all parameters in few launches.

Both step the same tensors by the same rule and remember the same of each (`exp_avg`, `exp_avg_sq`), so a checkpoint of
one is read by the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from tilemesh.core.errors import RunError
from tilemesh.kernels.adamw.reference import AdamW
from tilemesh.train.config import OptimizerConfig

Parameters = Mapping[str, nn.Parameter]


class Update(Protocol):
    """Moves parameters along their gradients."""

    @property
    def divides(self) -> bool:
        """Whether `move` can divide gradients on its way."""

    @property
    def divides_in_passing(self) -> bool:
        """Whether it does so for nothing: then gradients are not divided before, whoever reduced them."""

    @property
    def is_capturable(self) -> bool:
        """Whether `move` can be captured as a CUDA graph: the rate is then on the device."""

    def capturing(self, now: bool) -> None:
        """Told before `move` is captured, and after."""

    def move(self, rate: float | Tensor, divisor: Tensor | None) -> None: ...

    def state(self, name: str) -> dict[str, Tensor]:
        """What is remembered of a parameter, by kind; after the first step."""

    def put(self, steps: int, states: Mapping[str, dict[str, Tensor]]) -> None:
        """Go on from there, after so many steps."""

    def kept(self) -> Iterator[Tensor]:
        """Every tensor that is remembered."""


class TorchUpdate:
    """By torch's optimisers, fused into one kernel where torch has that.

    `masters`: float32 copies of 16-bit weights are what is stepped, one parameter at a time, so that no second copy of
    all gradients exists.
    """

    divides_in_passing = False

    def __init__(
        self, config: OptimizerConfig, parameters: Parameters, stepped: Parameters, decays: Mapping[str, float]
    ) -> None:
        self.config, self.parameters, self.stepped = config, parameters, stepped
        self.has_masters = parameters is not stepped
        if self.has_masters:
            # One optimiser a parameter: its float32 gradient lives only while it is stepped.
            self._inner = {
                name: self._make([{"params": [value], "weight_decay": decays[name]}]) for name, value in stepped.items()
            }
        else:
            by_decay: dict[float, list[nn.Parameter]] = {}
            for name, value in stepped.items():
                by_decay.setdefault(decays[name], []).append(value)
            ordered = sorted(by_decay.items(), reverse=True)
            self._inner = {"": self._make([{"params": group, "weight_decay": decay} for decay, group in ordered])}

    def _make(self, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        config, fused = self.config, self.config.fused
        if fused is None:
            fused = all(value.device.type in ("cpu", "cuda") for value in self.stepped.values())
        if config.name == "sgd":
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.epsilon, fused=fused)

    @property
    def divides(self) -> bool:
        """torch's fused kernels can, by what they call a scale."""
        return not self.has_masters and all(group["fused"] for group in self._inner[""].param_groups)

    @property
    def is_capturable(self) -> bool:
        return all(group["fused"] for inner in self._inner.values() for group in inner.param_groups)

    def capturing(self, now: bool) -> None:
        for inner in self._inner.values():
            for group in inner.param_groups:
                group["capturable"] = now

    def move(self, rate: float | Tensor, divisor: Tensor | None) -> None:
        for inner in self._inner.values():
            for group in inner.param_groups:
                group["lr"] = rate
        if not self.has_masters:
            inner = self._inner[""]
            inner.grad_scale = divisor  # type: ignore[attr-defined]  # where torch's own loss scaling leaves it
            inner.step()
            return
        assert divisor is None
        for name, inner in self._inner.items():
            master, parameter = self.stepped[name], self.parameters[name]
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            inner.step()
            master.grad = None
            parameter.copy_(master)

    def state(self, name: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._optimizer(name).state[self.stepped[name]]
        return found

    def put(self, steps: int, states: Mapping[str, dict[str, Tensor]]) -> None:
        for name, state in states.items():
            value = self.stepped[name]
            if self.config.name == "adamw":
                state = {**state, "step": torch.tensor(float(steps), device=value.device if value.is_cuda else None)}
            self._optimizer(name).state[value] = state

    def kept(self) -> Iterator[Tensor]:
        for inner in self._inner.values():
            for state in inner.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def _optimizer(self, name: str) -> torch.optim.Optimizer:
        return self._inner[name if self.has_masters else ""]


class KernelUpdate:
    """By `tilemesh.kernels.AdamW`: one launch for all parameters of a combination of dtypes, which also divides.

    Masters and 16-bit gradients are read as they are. The number of steps is on the device, so that a captured step
    counts by itself.
    """

    divides = divides_in_passing = is_capturable = True

    def __init__(
        self,
        config: OptimizerConfig,
        parameters: Parameters,
        stepped: Parameters,
        decays: Mapping[str, float],
        implementation: str,
    ) -> None:
        self.config, self.parameters, self.stepped, self.decays = config, parameters, stepped, decays
        self.implementation = implementation
        self._kernel: AdamW | None = None
        self._count: Tensor | None = None

    def capturing(self, now: bool) -> None:
        return None

    def move(self, rate: float | Tensor, divisor: Tensor | None) -> None:
        kernel, count = self._begun()
        without = [name for name, parameter in self.parameters.items() if parameter.grad is None]
        if without:
            raise RunError(f"{without[0]} has no gradient: train.kernels=torch steps the other parameters without it")
        count.add_(1)
        gradients: Sequence[Tensor] = [parameter.grad for parameter in self.parameters.values()]  # type: ignore[misc]
        kernel.step(gradients, rate=rate, step=count, divisor=1.0 if divisor is None else divisor)

    def state(self, name: str) -> dict[str, Tensor]:
        kernel, _ = self._begun()
        at = list(self.stepped).index(name)
        return {"exp_avg": kernel.exp_avgs[at], "exp_avg_sq": kernel.exp_avg_sqs[at]}

    def put(self, steps: int, states: Mapping[str, dict[str, Tensor]]) -> None:
        _, count = self._begun()
        count.fill_(steps)
        for name, state in states.items():
            for kind, held in self.state(name).items():
                held.copy_(state[kind])

    def kept(self) -> Iterator[Tensor]:
        if self._kernel is not None:
            yield from (*self._kernel.exp_avgs, *self._kernel.exp_avg_sqs)

    def _begun(self) -> tuple[AdamW, Tensor]:
        """The averages and the count, made when they are first needed: as torch's optimisers do."""
        if self._kernel is None or self._count is None:
            has_masters = self.parameters is not self.stepped
            values, wide = list(self.parameters.values()), list(self.stepped.values())
            averages, squares = ([torch.zeros_like(value.detach()) for value in wide] for _ in range(2))
            self._kernel = AdamW(
                values,
                averages,
                squares,
                masters=wide if has_masters else None,
                betas=self.config.betas,
                eps=self.config.epsilon,
                weight_decay=[self.decays[name] for name in self.stepped],
                implementation=self.implementation,
            )
            self._count = torch.zeros((), dtype=torch.float64, device=wide[0].device)
        return self._kernel, self._count
