"""torch's own pipelining, as a peer: stages of our model in plain PyTorch, under its schedule of the same name.

Stages, placements and the split of backward passes are torch's (`torch.distributed.pipelining`); the loss is divided by
the microbatches there. The optimizer's step and the norm over all stages are what a user adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn import functional

from tilemesh.bench.train.peers import drop_plainly
from tilemesh.core.errors import RunError
from tilemesh.core.step.book import chunk_placement
from tilemesh.core.step.program import chunk_layers
from tilemesh.model.kernels import PLAIN
from tilemesh.model.part import cut_parts
from tilemesh.model.transformer import Transformer
from tilemesh.train.config import TrainConfig
from tilemesh.train.rules import decays
from tilemesh.train.schedule import rate

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "breadth-first": "ScheduleLoopedBFS",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""Ours by torch's names."""


def torch_schedule(
    name: str, modules: dict[int, nn.Module], stages: int, microbatches: int, loss: Callable[[Any, Any], Tensor]
) -> Any:
    """torch's schedule over this rank's modules, by the number of their chunk."""
    if name not in SCHEDULES:
        raise RunError(f"torch's pipelining has no schedule {name}; it has {', '.join(SCHEDULES)}")
    cpu = torch.device("cpu")
    made = [pipelining.PipelineStage(module, chunk, stages, cpu) for chunk, module in sorted(modules.items())]
    maker = getattr(torch_schedules, SCHEDULES[name])
    single = name in ("gpipe", "1f1b")
    return maker(made[0] if single else made, microbatches, loss_fn=loss)


class _StageModule(nn.Module):
    """A part of our Transformer that takes tokens or activations."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: Tensor) -> Tensor:
        is_tokens = not given.is_floating_point()
        tokens_BT = given if is_tokens else torch.zeros(given.shape[:2], dtype=torch.int64)
        made: Tensor = self.model(tokens_BT) if is_tokens else self.model(tokens_BT, x_BTD=given)
        return made


class TorchPipelineStep:
    """A training step of this rank's stages under torch's schedule of the same name."""

    def __init__(self, config: TrainConfig, rank: int) -> None:
        plan = config.plan
        if plan.precision not in ("fp32", "fp64") or config.model.dropout or plan.dp * plan.tp > 1 or config.model.tied:
            raise RunError("the pipelining peer is written for pp alone, fp32 or fp64, untied tables and no dropout")
        counts = chunk_layers(plan, config.model.layers)
        parts = cut_parts(config.model, counts)
        dtype = torch.float64 if plan.precision == "fp64" else torch.float32
        modules: dict[int, nn.Module] = {}
        for chunk in chunk_placement(plan.schedule, plan.pp, plan.interleave).held[rank]:
            model = Transformer(config.model, seed=config.train.seed, dtype=dtype, kernels=PLAIN, part=parts[chunk])
            drop_plainly(model)
            modules[chunk] = _StageModule(model.train())
        self.config, self.rank = config, rank
        self.parameters = [p for module in modules.values() for p in module.parameters()]
        groups = [
            {"params": [p for p in self.parameters if decays(p.shape)], "weight_decay": config.optimizer.weight_decay},
            {"params": [p for p in self.parameters if not decays(p.shape)], "weight_decay": 0.0},
        ]
        chosen = config.optimizer
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=chosen.lr, betas=chosen.betas, eps=chosen.epsilon, fused=True,
        )  # fmt: skip
        self.has_first, self.has_last = 0 in modules, len(parts) - 1 in modules
        self.schedule = torch_schedule(plan.schedule, modules, len(parts), plan.accumulation, _loss)
        self.steps = 0

    def __call__(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        tokens = torch.cat([tokens for tokens, _ in batches])
        targets = torch.cat([targets for _, targets in batches])
        losses: list[Tensor] = []
        given = (tokens,) if self.has_first else ()
        more = {"target": targets, "losses": losses} if self.has_last else {}
        self.schedule.step(*given, **more)
        if self.config.optimizer.clip:
            squares = torch.stack([p.grad.square().sum() for p in self.parameters if p.grad is not None]).sum()
            dist.all_reduce(squares)
            scale = torch.clamp(self.config.optimizer.clip / (squares.sqrt() + 1e-6), max=1.0)
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.steps, self.config.train.steps, self.config.optimizer)
        self.optimizer.step()
        self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
