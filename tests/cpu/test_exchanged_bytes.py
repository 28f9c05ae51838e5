"""The planner's bytes by axis and collective are those that a recorder counts in a step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.plan import ParallelPlan, Precision
from tilemesh.measure.trace import Trace
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.task import Task
from tilemesh.parallel.apply import lay
from tilemesh.parallel.mesh import Mesh
from tilemesh.plan.clock import exchanged
from tilemesh.train.record import CONTROL, Recorder, observe_mesh

TIMEOUT_S = 60.0
TOKENS = 8


SIZES = [(2, 2, 1), (4, 2, 1), (4, 1, 1), (8, 2, 1), (4, 2, 2)]  # tp, key/value heads, dp


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(
    ("sizes", "precision"),
    [
        *((sizes, "fp32") for sizes in SIZES),
        # In 16 bits one tensor-parallel layout and one of both axes: the counts are the same, the bytes half.
        *(pytest.param(sizes, "bf16", marks=[] if sizes in SIZES[::4] else pytest.mark.slow) for sizes in SIZES),
    ],
)
def test_what_is_predicted_is_what_is_recorded(
    sizes: tuple[int, int, int], precision: Precision, sequence: bool
) -> None:
    tp, kv_heads, dp = sizes
    config = ModelConfig(layers=2, width=32, heads=8, kv_heads=kv_heads, mlp_width=64, vocabulary=64, context=TOKENS)
    plan = ParallelPlan(dp=dp, tp=tp, sequence_parallel=sequence, precision=precision, microbatch=2, accumulation=3)

    def main(comm: Communicator) -> dict[str, dict[str, int]]:
        mesh, recorder = Mesh(comm, dp=dp, tp=tp), Recorder(Trace(None))
        laid = lay(Transformer(config), mesh, plan)
        observe_mesh(mesh, recorder)
        for microbatch in range(plan.accumulation):
            tokens = torch.randint(0, 64, (plan.microbatch, TOKENS + 1), generator=torch.Generator().manual_seed(0))
            loss, count = laid.loss(tokens[:, :-1], tokens[:, 1:])
            laid.gradients.backward(loss, count, last=microbatch + 1 == plan.accumulation)
        laid.gradients.finish()
        return recorder.bytes_by_axis()

    recorded = run_threads(dp * tp, main, timeout_s=TIMEOUT_S)[0]
    recorded.pop(CONTROL, None)
    assert recorded == exchanged(config, plan, Task.of(plan, TOKENS, "eager"), (config.layers,))


@pytest.mark.parametrize("recompute", ["operators", "full"])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_is_computed_again_is_exchanged_again(recompute: Any, sequence: bool, dropout: float) -> None:
    config = ModelConfig(
        layers=3, width=32, heads=8, mlp_width=64, vocabulary=64, context=TOKENS, dropout=dropout, norm="rmsnorm"
    )
    plan = ParallelPlan(tp=2, sequence_parallel=sequence, precision="fp32", microbatch=2, recompute=recompute)

    def main(comm: Communicator) -> dict[str, dict[str, int]]:
        mesh, recorder = Mesh(comm, dp=1, tp=2), Recorder(Trace(None))
        laid = lay(Transformer(config), mesh, plan)
        observe_mesh(mesh, recorder)
        tokens = torch.randint(0, 64, (plan.microbatch, TOKENS + 1), generator=torch.Generator().manual_seed(0))
        loss, count = laid.loss(tokens[:, :-1], tokens[:, 1:], dropout_seed=1 if dropout else None)
        laid.gradients.backward(loss, count)
        laid.gradients.finish()
        return recorder.bytes_by_axis()

    recorded = run_threads(2, main, timeout_s=TIMEOUT_S)[0]
    recorded.pop(CONTROL, None)
    assert recorded == exchanged(config, plan, Task.of(plan, TOKENS, "eager"), (config.layers,))
