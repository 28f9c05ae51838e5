"""What a user would write instead: the same model and step in plain PyTorch, eager or compiled.

The peers get torch's own best: a fused optimiser, autocast, torch.compile over the model; gradients set to None. The
model is ours with every fused projection replaced by torch's linear and activation, and dropout by torch's own, so
shapes and weights are equal; on a GPU tables have a multiple of 64 rows, as ours are computed with. So is the learning
rate's schedule: how fast a GPU multiplies hangs on the numbers (they decide the power it draws, and so its clock), and
weights that were trained alike are alike.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.core.errors import RunError
from tilemesh.model.dropout import Dropout
from tilemesh.model.kernels import PLAIN
from tilemesh.model.transformer import Pass, Transformer
from tilemesh.train.config import TrainConfig
from tilemesh.train.optimizer import autocast_dtype, stored_dtype
from tilemesh.train.rules import decays
from tilemesh.train.schedule import rate

_ROWS = 64  # of a table whose products a GPU's library does quickly


def plain_model(config: TrainConfig, device: torch.device) -> Transformer:
    """Our model with nothing of ours in it but its shape."""
    dtype = stored_dtype(config.plan.precision)
    model = Transformer(config.model, seed=config.train.seed, device=device, dtype=dtype, kernels=PLAIN)
    drop_plainly(model)
    if device.type == "cuda":
        pad_vocabulary(model)
    return model.train()


def pad_vocabulary(model: Transformer) -> None:
    """Tables of a multiple of 64 rows, as our own loss computes with: the rows beside the vocabulary stay 0, and
    `PlainStep` leaves their logits out."""
    for table in (model.token_embedding, model.output):
        if table is not None and (missing := -table.weight.shape[0] % _ROWS):
            table.weight = nn.Parameter(functional.pad(table.weight.detach(), (0, 0, 0, missing)))


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
    """One training step as a PyTorch user writes it, in one process.

    Peers on several ranks differ from it in how the model is laid out, in who steps it, and in what a microbatch but
    the last one of a step leaves out.
    """

    def __init__(self, config: TrainConfig, device: torch.device, *, compiled: bool = False) -> None:
        if config.plan.precision not in ("fp32", "bf16", "fp64"):
            raise RunError(f"peers are written for fp32, bf16 and fp64, not for {config.plan.precision}")
        self.config, self.device = config, device
        self.seed = torch.zeros((), dtype=torch.int64, device=device) if config.model.dropout else None
        self.model: Any = self.lay(plain_model(config, device))
        self.parameters = list(self.model.parameters())
        self.optimizer: Any = self.make_optimizer(decay_groups(config, self.parameters))
        self.steps = 0
        # Loss and model in one graph: the compiler then never writes the logits in float32.
        self.forward: Any = torch.compile(self._loss) if compiled else self._loss

    def lay(self, model: Transformer) -> Any:
        """The model as it is trained."""
        return model

    def make_optimizer(self, groups: list[dict[str, Any]]) -> Any:
        return torch.optim.AdamW(groups, **adamw_options(self.config))

    def microbatch(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around the passes of each microbatch."""
        return contextlib.nullcontext()

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        dtype = autocast_dtype(self.config.plan.precision)
        context = contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)
        with context:
            logits = self.model(tokens, dropout_seed=self.seed)[..., : self.config.model.vocabulary]
        wide = torch.promote_types(logits.dtype, torch.float32)
        return functional.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten())

    def __call__(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        total = torch.zeros((), dtype=stored_dtype(self.config.plan.precision), device=self.device)
        for turn, (tokens, targets) in enumerate(batches):
            with self.microbatch(turn == len(batches) - 1):
                loss = self.forward(tokens, targets)
                torch.autograd.backward(loss / len(batches))
            total += loss.detach() / len(batches)
        if self.config.optimizer.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.config.optimizer.clip)
        set_rate(self.optimizer, self.steps, self.config)
        self.optimizer.step()
        self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return total


def decay_groups(config: TrainConfig, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameters with weight decay and those without, as torch's optimizers take them."""
    groups = [
        {"params": [p for p in parameters if decays(p.shape)], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for p in parameters if not decays(p.shape)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw_options(config: TrainConfig) -> dict[str, Any]:
    chosen = config.optimizer
    return {"lr": chosen.lr, "betas": chosen.betas, "eps": chosen.epsilon, "fused": True}


def set_rate(optimizer: Any, steps: int, config: TrainConfig) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate(steps, config.train.steps, config.optimizer)
