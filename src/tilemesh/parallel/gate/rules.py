"""Update rules as their papers write them, over whole parameters by name: what the gate holds an optimizer against.

Nothing of `train` is in here. Weight decay is of matrices and tables alone; what is not said otherwise is `SETTINGS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from tilemesh.parallel.gate.cases import MOMENTUM, RATE, SETTINGS, rate_of

_MUON = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024, "Muon": x becomes a x + b x³ + c x⁵, five times


class GateOptimizer(Protocol):
    """What steps a layout's parameters by their gradients."""

    def step(self, rate: float, divisor: Tensor | None = None) -> None:
        """`divisor`: what gradients are yet to be divided by."""


class PaperRule:
    """A rule by name; "": the gate's own, gradient descent with momentum and no decay.

    Not Adam where layouts are compared: it divides by the gradient's own size, so where the true gradient is 0 (the
    bias of keys) rounding is a large part of a step, in float32 all of it.
    """

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0
        self.kept: dict[str, dict[str, Tensor]] = {}
        self.beta1: float = SETTINGS["betas"][0]
        self.beta2: float = SETTINGS["betas"][1]
        self.decay: float = SETTINGS["weight_decay"]

    @torch.no_grad()
    def step(self, values: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        self.count += 1
        for name, w in values.items():
            decay = self.decay if w.ndim > 1 else 0.0
            match self.name:
                case "sgd" | "lion" | "muon" | "adamw" if name.endswith("router.bias"):  # DeepSeek-V3, section 2.1.2
                    change = SETTINGS["balance_rate"] * torch.sign(gradients[name])
                case "":
                    change = RATE * self._mean(name, "velocity", gradients[name], MOMENTUM, 1.0)
                case "sgd":  # Polyak 1964; decay as a part of the gradient
                    g = gradients[name] + decay * w
                    change = rate_of("sgd") * self._mean(name, "velocity", g, SETTINGS["momentum"], 1.0)
                case "lion":
                    change = rate_of("lion") * (self._lion(name, gradients[name]) + decay * w)
                case "muon" if name.startswith("layers.") and w.ndim == 2:
                    change = rate_of("muon") * (self._muon(name, gradients[name]) + decay * w)
                case _:
                    change = rate_of(self.name) * (self._adam(name, gradients[name]) + decay * w)
            w -= change

    def _mean(self, name: str, kind: str, new: Tensor, keep: float, take: float) -> Tensor:
        """keep · what was kept + take · what is new."""
        kept = self.kept.setdefault(name, {})
        kept[kind] = keep * kept.get(kind, torch.zeros_like(new)) + take * new
        return kept[kind]

    def _adam(self, name: str, g: Tensor) -> Tensor:
        """Kingma and Ba 2015, algorithm 1; decay beside it: Loshchilov and Hutter 2019."""
        m = self._mean(name, "m", g, self.beta1, 1 - self.beta1) / (1 - self.beta1**self.count)
        v = self._mean(name, "v", g**2, self.beta2, 1 - self.beta2) / (1 - self.beta2**self.count)
        epsilon: float = SETTINGS["epsilon"]
        return m / (torch.sqrt(v) + epsilon)

    def _lion(self, name: str, g: Tensor) -> Tensor:
        """Chen et al. 2023, program 1."""
        before = self.kept.get(name, {}).get("m", torch.zeros_like(g))
        direction = torch.sign(self.beta1 * before + (1 - self.beta1) * g)
        self._mean(name, "m", g, self.beta2, 1 - self.beta2)
        return direction

    def _muon(self, name: str, g: Tensor) -> Tensor:
        """Jordan et al. 2024 with Nesterov's look ahead; as large as an AdamW update: Liu et al. 2025."""
        mu: float = SETTINGS["momentum"]
        x = (1 - mu) * g + mu * self._mean(name, "velocity", g, mu, 1 - mu)
        x = x / torch.sqrt((x**2).sum()).clamp(min=1e-30)  # of an expert that no token picked: 0
        a, b, c = _MUON
        for _ in range(5):
            square = x @ x.T
            x = a * x + b * square @ x + c * square @ square @ x
        return 0.2 * math.sqrt(max(x.shape)) * x
