"""What a user would write for replicas, with and without ZeRO: DDP, torch's own sharding, and DeepSpeed.

Each is `PlainStep` with another layout of the model. What is cut over the replicas is said by the configuration's
`plan.zero`, so that ours and the peer hold the same: optimizer states (1), gradients as well (2), weights as well (3).
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from tilemesh.bench.train.peers import PlainStep, adamw_options, decay_groups, plain_model, set_rate
from tilemesh.core.errors import RunError
from tilemesh.model.transformer import Transformer
from tilemesh.train.config import TrainConfig


def replicas_step(name: str) -> Callable[[TrainConfig, torch.device], Callable[[Any], Tensor]]:
    """Who makes a step of this peer; its library is loaded."""
    if name == "deepspeed":
        _deepspeed()
        return DeepSpeedStep
    return {"ddp": DdpStep, "zero-optimizer": ZeroOptimizerStep, "fsdp": FullyShardedStep}[name]


def require_replicas(config: TrainConfig, peer: str, stages: tuple[int, ...]) -> None:
    """Refuse a plan that a peer for replicas alone cannot run, or that it would run as something else."""
    plan = config.plan
    if cut := [f"{axis} {size}" for axis in ("tp", "cp", "pp") if (size := getattr(plan, axis)) > 1]:
        raise RunError(f"{peer} is run on replicas alone, not with {' and '.join(cut)}")
    if plan.zero not in stages:
        known = " or ".join(str(stage) for stage in stages)
        raise RunError(f"{peer} does what plan.zero={known} does, and the plan has zero={plan.zero}")
    if plan.zero_group not in (0, plan.dp):
        raise RunError(f"{peer} is run over all replicas, not over groups of {plan.zero_group}")


class DdpStep(PlainStep):
    """Replicas that sum their gradients: DistributedDataParallel. Only the last microbatch of a step sums them."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        require_replicas(config, "DistributedDataParallel", (0, 1, 2, 3))  # whatever ours cuts, this one holds whole
        super().__init__(config, device)

    def lay(self, model: Transformer) -> Any:
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def microbatch(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if is_last else self.model.no_sync()


class ZeroOptimizerStep(DdpStep):
    """ZeRO-1: DistributedDataParallel, and ZeroRedundancyOptimizer around AdamW."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        require_replicas(config, "ZeroRedundancyOptimizer", (1,))
        super().__init__(config, device)

    def make_optimizer(self, groups: list[dict[str, Any]]) -> Any:
        options = adamw_options(self.config)
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, parameters_as_bucket_view=True, **options)


class FullyShardedStep(PlainStep):
    """ZeRO-2 and ZeRO-3 by `fully_shard` (FSDP2), layer by layer; under ZeRO-2 weights stay whole after the forward
    pass, until the backward pass has used them."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        require_replicas(config, "fully_shard", (2, 3))
        super().__init__(config, device)

    def lay(self, model: Transformer) -> Any:
        mesh = init_device_mesh(self.device.type, (self.config.plan.dp,))
        return shard_fully(model, model, mesh, self.config.plan.zero)


def shard_fully(root: nn.Module, model: Transformer, mesh: Any, stage: int) -> nn.Module:
    """A module with a Transformer in it, cut over the replicas layer by layer."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=stage == 3)
    fully_shard(root, mesh=mesh, reshard_after_forward=stage == 3)
    return root


class DeepSpeedStep:
    """DeepSpeed's ZeRO 1 to 3 on a CPU, over gloo, with torch's AdamW as its optimizer."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        require_replicas(config, "DeepSpeed", (1, 2, 3))
        if config.plan.precision != "fp32" or config.model.dropout:
            raise RunError("the DeepSpeed peer is written for fp32 and no dropout")
        deepspeed = _deepspeed()
        self.config = config
        model = plain_model(config, device)
        groups = decay_groups(config, list(model.parameters()))
        plan = config.plan
        accumulation = max(1, config.batch // plan.dp // plan.microbatch)
        settings = {
            "train_micro_batch_size_per_gpu": plan.microbatch,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": config.optimizer.clip,
            "zero_optimization": {"stage": plan.zero},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(groups, **adamw_options(config))
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
        self.steps = 0

    def __call__(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        total = torch.zeros(())
        for tokens, targets in batches:
            logits = self.engine(tokens)[..., : self.config.model.vocabulary]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            self.engine.backward(loss)  # divides by the microbatches itself
            set_rate(self.engine.optimizer, self.steps, self.config)
            self.engine.step()  # which does nothing before the last microbatch
            total += loss.detach() / len(batches)
        self.steps += 1
        return total


def _deepspeed() -> Any:
    """The library, told that it has a CPU alone."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise RunError(f"DeepSpeed cannot be imported ({error}): pip install deepspeed") from None
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    return deepspeed
