"""Bytes alive in a pipeline's step are those of the liveness curve, to the byte, after every pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.action import COMPUTE, Action
from tilemesh.core.step.memory import memory_curve
from tilemesh.core.step.program import chunk_layers
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.parallel import Mesh, lay
from tilemesh.parallel.laid import StepPiece
from tilemesh.parallel.pipeline import Pipeline
from tilemesh.plan.memory import Room
from tilemesh.train.memory import SavedBytes

LLAMA = ModelConfig(
    layers=4, width=32, heads=4, kv_heads=2, mlp_width=48, vocabulary=72, context=16, norm="rmsnorm",
    positions="rotary", activation="swiglu", biases=False, tied=False,
)  # fmt: skip
GPT = ModelConfig(layers=4, width=32, heads=4, vocabulary=72, context=16)


def counted(comm: Communicator, config: ModelConfig, plan: ParallelPlan) -> list[int]:
    """On one rank: bytes kept after each of its passes."""
    laid = lay(Transformer(config, seed=3), Mesh(comm, **plan.axes), plan)
    assert isinstance(laid, Pipeline)
    found: list[int] = []
    with SavedBytes(laid.module.parameters()) as saved:

        def around(action: Action, do: Any) -> None:
            do()
            if action.kind in COMPUTE:
                found.append(saved.now(laid.kept()))

        laid.watch_actions(lambda text: None, around)
        tokens = torch.arange(plan.microbatch * config.context).reshape(plan.microbatch, -1) % config.vocabulary
        laid.passes([StepPiece(tokens.clone(), tokens.roll(-1, 1).clone(), 0) for _ in range(plan.accumulation)])
    laid.gradients.close()
    return found


def test_a_stage_that_recomputes_keeps_less_and_the_other_as_much() -> None:
    """Under 1f1b the first stage keeps the most microbatches: `recompute_stages` lets it alone compute them again."""
    fields: dict[str, Any] = {"pp": 2, "accumulation": 4, "microbatch": 2, "precision": "fp32"}
    room, plans = Room(LLAMA, parse_cluster("2xcpu"), LLAMA.context, "eager"), {}
    for name, more in {
        "none": {}, "first": {"recompute": "full", "recompute_stages": (0,)}, "all": {"recompute": "full"},
    }.items():  # fmt: skip
        plans[name] = ParallelPlan(**fields, **more)
    most = {
        name: [max(found) for found in run_threads(2, partial(counted, config=LLAMA, plan=plan))]
        for name, plan in plans.items()
    }
    # What a stage hands on is held until it has arrived: one such tensor may or may not be there at the fullest moment.
    message = 4 * plans["first"].microbatch * LLAMA.context * LLAMA.width
    assert abs(most["first"][0] - most["all"][0]) in (0, message)
    assert most["first"][1] == most["none"][1]
    assert most["first"][0] + message < most["none"][0]
    counts = chunk_layers(plans["first"], LLAMA.layers)
    peaks = {name: room.activation_peaks(plan, counts) for name, plan in plans.items()}
    assert peaks["first"] == [peaks["all"][0], peaks["none"][1]]
    assert peaks["first"][1] == most["first"][1]


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "gpipe"])
def test_live_bytes_are_the_curve(schedule: str, config: ModelConfig) -> None:
    plan = ParallelPlan(pp=2, schedule=schedule, accumulation=4, microbatch=2, precision="fp32")
    room = Room(config, parse_cluster("2xcpu"), config.context, "eager")
    counts = chunk_layers(plan, config.layers)
    measured = run_threads(2, lambda comm: counted(comm, config, plan))
    program = room.program(plan)
    for rank, curve in enumerate(memory_curve(program, room.step_bytes(plan, counts))):
        assert measured[rank] == curve[1:], f"rank {rank}"
