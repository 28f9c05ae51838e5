"""torch's own pipelining, as a peer: stages of our model in plain PyTorch, under its schedule of the same name.

Stages, placements and the split of backward passes are torch's (`torch.distributed.pipelining`); the loss is divided by
the microbatches there. On a mesh with dp and tp a stage is cut by DTensor's parallel styles and by `fully_shard`
(FSDP2). The optimizer's step and the norm over all ranks are what a user adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn import functional

from tilemesh.bench.train.peers import adamw_options, decay_groups, drop_plainly, set_rate
from tilemesh.bench.train.torch_zero import shard_fully
from tilemesh.core.errors import RunError
from tilemesh.core.step.program import chunk_layers
from tilemesh.model.kernels import PLAIN
from tilemesh.model.part import cut_parts
from tilemesh.model.transformer import Transformer
from tilemesh.train.config import TrainConfig

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
    name: str,
    modules: dict[int, nn.Module],
    stages: int,
    microbatches: int,
    loss: Callable[[Any, Any], Tensor],
    group: Any = None,
) -> Any:
    """torch's schedule over this rank's modules, by the number of their chunk. `group`: of the stages."""
    if name not in SCHEDULES:
        raise RunError(f"torch's pipelining has no schedule {name}; it has {', '.join(SCHEDULES)}")
    cpu = torch.device("cpu")
    pipe_stages = [
        pipelining.PipelineStage(module, chunk, stages, cpu, group=group) for chunk, module in sorted(modules.items())
    ]
    maker = getattr(torch_schedules, SCHEDULES[name])
    single = name in ("gpipe", "1f1b")
    return maker(pipe_stages[0] if single else pipe_stages, microbatches, loss_fn=loss)


class _StageModule(nn.Module):
    """A part of our Transformer that takes tokens or activations."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        is_tokens = not x.is_floating_point()
        tokens_BT = x if is_tokens else torch.zeros(x.shape[:2], dtype=torch.int64)
        y: Tensor = self.model(tokens_BT) if is_tokens else self.model(tokens_BT, x_BTD=x)
        return y


class TorchPipelineStep:
    """A training step of this rank's stages under torch's schedule of the same name."""

    def __init__(self, config: TrainConfig, rank: int, *, is_meshed: bool = False) -> None:
        """`is_meshed`: dp and tp as well, by FSDP2 and DTensor."""
        plan = config.plan
        if plan.precision not in ("fp32", "fp64") or config.model.dropout or config.model.tied:
            raise RunError("the pipelining peer is written for fp32 or fp64, untied tables and no dropout")
        if plan.dp * plan.tp > 1 and not is_meshed:
            raise RunError("torch's pipelining alone knows no dp and tp: the peer for these is fsdp-pipeline")
        if is_meshed and plan.zero == 1:
            raise RunError("fully_shard cuts gradients too: it is compared with plan.zero=2 or 3, or with none")
        counts = chunk_layers(plan, config.model.layers)
        parts = cut_parts(config.model, counts)
        dtype = torch.float64 if plan.precision == "fp64" else torch.float32
        mesh = _device_mesh(plan.pp, plan.dp, plan.tp) if is_meshed else None
        place = rank // (plan.dp * plan.tp)
        modules: dict[int, nn.Module] = {}
        for chunk in plan.placement.held[place]:
            model = Transformer(config.model, seed=config.train.seed, dtype=dtype, kernels=PLAIN, part=parts[chunk])
            drop_plainly(model)
            modules[chunk] = _StageModule(model.train())
            if mesh is not None:
                _lay_stage(modules[chunk], model, mesh, plan.zero)
        self.config, self.rank = config, rank
        self.parameters = [p for module in modules.values() for p in module.parameters()]
        self.optimizer = torch.optim.AdamW(decay_groups(config, self.parameters), **adamw_options(config))
        self.has_first, self.has_last = 0 in modules, len(parts) - 1 in modules
        group = None if mesh is None else mesh["pp"].get_group()
        self.schedule = torch_schedule(plan.schedule, modules, len(parts), plan.accumulation, _loss, group)
        self.steps = 0

    def __call__(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        tokens = torch.cat([tokens for tokens, _ in batches])
        targets = torch.cat([targets for _, targets in batches])
        losses: list[Tensor] = []
        inputs = (tokens,) if self.has_first else ()
        more = {"target": targets, "losses": losses} if self.has_last else {}
        self.schedule.step(*inputs, **more)
        if self.config.optimizer.clip:
            self._clip(self.config.optimizer.clip)
        set_rate(self.optimizer, self.steps, self.config)
        self.optimizer.step()
        self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    def _clip(self, most: float) -> None:
        """By the norm over all ranks, every number counted once, with one exchange."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        squares = torch.stack(
            [_local(gradient).square().sum() / _copies(gradient, self.config) for gradient in gradients]
        ).sum()
        dist.all_reduce(squares)
        scale = torch.clamp(most / (squares.sqrt() + 1e-6), max=1.0)
        for gradient in gradients:
            _local(gradient).mul_(scale)


def _device_mesh(pp: int, dp: int, tp: int) -> Any:
    """The axes in our order: ranks vary fastest along tp, then dp, then pp."""
    return init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))


def _lay_stage(stage: nn.Module, model: Transformer, mesh: Any, zero: int) -> None:
    """Cut a stage over tp by DTensor's styles, then over dp by `fully_shard`."""
    tp = mesh["tp"].size()
    if tp > 1:
        styles: dict[str, Any] = {}
        for layer in model.layers._modules:
            # A block's input is made a DTensor once, so that one sum serves the gradients of all its projections.
            replicated, beside = Replicate(), None
            for block, inputs in (("attention", (replicated, beside)), ("mlp", (replicated,))):
                styles[f"layers.{layer}.{block}"] = PrepareModuleInput(
                    input_layouts=inputs, desired_input_layouts=inputs
                )
            for name in ("attention.fc_q", "attention.fc_k", "attention.fc_v", "mlp.fc_in", "mlp.fc_gate"):
                styles[f"layers.{layer}.{name}"] = ColwiseParallel()
            for name in ("attention.fc_o", "mlp.fc_out"):
                styles[f"layers.{layer}.{name}"] = RowwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate())
        if model.part.embedding:
            styles["token_embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        if model.part.head:
            styles["output"] = ColwiseParallel(output_layouts=Replicate())
        names = {name for name, _ in model.named_modules()}
        parallelize_module(model, mesh["tp"], {name: style for name, style in styles.items() if name in names})
    if mesh["dp"].size() > 1:
        shard_fully(stage, model, mesh["dp"], zero)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copies(tensor: Tensor, config: TrainConfig) -> int:
    """How many ranks of a stage hold the same numbers of this gradient."""
    ranks = config.plan.dp * config.plan.tp
    if not isinstance(tensor, DTensor):
        return ranks
    # Cut over both axes along one dim, a placement is neither a replica nor what `is_shard` calls a shard.
    cut = [
        tensor.device_mesh.size(axis)
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    ]
    return ranks // math.prod(cut)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten())
