"""What a user would write instead: the same model and step in plain PyTorch, eager, compiled, or under DDP.

The peers get torch's own best: a fused optimiser, autocast, torch.compile over the model; gradients set to None. The
model is ours with every fused projection replaced by torch's linear and activation, and dropout by torch's own, so
shapes and weights are equal. So is the learning rate's schedule: how fast a GPU multiplies hangs on the numbers (they
decide the power it draws, and so its clock), and weights that were trained alike are alike.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.core.errors import RunError
from tilemesh.model.kernels import PLAIN
from tilemesh.model.transformer import Dropout, Pass, Transformer
from tilemesh.train.config import TrainConfig
from tilemesh.train.optimizer import autocast_dtype, stored_dtype
from tilemesh.train.rules import decays
from tilemesh.train.schedule import rate


def plain_model(config: TrainConfig, device: torch.device) -> Transformer:
    """Our model with nothing of ours in it but its shape."""
    dtype = stored_dtype(config.plan.precision)
    model = Transformer(config.model, seed=config.train.seed, device=device, dtype=dtype, kernels=PLAIN)
    drop_plainly(model)
    return model.train()


class PlainDropout(nn.Module):
    """torch's dropout, whose mask comes from a generator."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor, now: Pass) -> Tensor:
        return functional.dropout(x, self.rate, training=now.dropout_seed is not None)


def drop_plainly(model: nn.Module) -> None:
    """torch's dropout in place of ours: as quick as a user's own, and another mask in every layout."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Dropout):
                setattr(module, name, PlainDropout(child.rate))


class PlainStep:
    """One training step as a PyTorch user writes it. `replicas`: under DDP, how many share the batch."""

    def __init__(self, config: TrainConfig, device: torch.device, *, compiled: bool = False, ddp: bool = False) -> None:
        if config.plan.precision not in ("fp32", "bf16", "fp64"):
            raise RunError(f"peers are written for fp32, bf16 and fp64, not for {config.plan.precision}")
        self.config, self.device = config, device
        model: Any = plain_model(config, device)
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if decays(p.shape)], "weight_decay": config.optimizer.weight_decay},
            {"params": [p for p in parameters if not decays(p.shape)], "weight_decay": 0.0},
        ]
        chosen = config.optimizer
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=chosen.lr,
            betas=chosen.betas,
            eps=chosen.epsilon,
            fused=True,
        )
        self.parameters, self.steps = parameters, 0
        self.seed = torch.zeros((), dtype=torch.int64, device=device) if config.model.dropout else None
        if ddp:
            model = nn.parallel.DistributedDataParallel(model)
        self.model = model
        # Loss and model in one graph: the compiler then never writes the logits in float32.
        self.forward: Any = torch.compile(self._loss) if compiled else self._loss

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        dtype = autocast_dtype(self.config.plan.precision)
        context = contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)
        with context:
            logits = self.model(tokens, dropout_seed=self.seed)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def __call__(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        total = torch.zeros((), device=self.device)
        for tokens, targets in batches:
            loss = self.forward(tokens, targets)
            torch.autograd.backward(loss / len(batches))
            total += loss.detach() / len(batches)
        if self.config.optimizer.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.config.optimizer.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.steps, self.config.train.steps, self.config.optimizer)
        self.optimizer.step()
        self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return total
