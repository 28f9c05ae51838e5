"""Bytes alive in a pipeline's step are those of the liveness curve, to the byte, at the boundaries of actions."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.action import COMPUTE, Action, StepProgram
from tilemesh.core.step.memory import StepBytes, memory_curve
from tilemesh.core.step.program import chunk_layers
from tilemesh.launch.start import source_path
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.parallel import Mesh, lay
from tilemesh.parallel.laid import StepPiece
from tilemesh.parallel.pipeline import Pipeline
from tilemesh.plan.memory import Room
from tilemesh.train.memory import SavedBytes, storage_bytes

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
    # What a stage hands on is held until it has arrived: of the two that it sends before the first backward comes, any
    # number may still be there at the fullest moment.
    message = 4 * plans["first"].microbatch * LLAMA.context * LLAMA.width
    assert abs(most["first"][0] - most["all"][0]) in (0, message, 2 * message)
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


def in_the_order_run(laid: Pipeline) -> StepProgram:
    """The step's program with this rank's actions as they are done: of neighbouring messages those that leave first."""
    program, rank = laid.step.program, laid.mesh.pp.index
    actions = list(program.actions)
    actions[rank] = tuple(action for action, _ in laid.runner.actions)
    return dataclasses.replace(program, actions=tuple(actions))


def watched(laid: Pipeline, plan: ParallelPlan, live: Callable[[], int]) -> list[float]:
    """What is alive after each action of a step; of two, since the second begins where the first has left off."""
    config = laid.config
    tokens = torch.arange(plan.microbatch * config.context).reshape(plan.microbatch, -1) % config.vocabulary
    for _ in range(2):
        found: list[float] = []

        def around(action: Action, do: Any, found: list[float] = found) -> None:
            do()
            found.append(float(live()))

        laid.watch_actions(lambda text: None, around)
        laid.passes([StepPiece(tokens.clone(), tokens.roll(-1, 1).clone(), 0) for _ in range(plan.accumulation)])
        laid.gradients.finish()
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-v", "dualpipe"])
def test_buffers_of_messages_are_the_curve(schedule: str) -> None:
    """A pass's result until it is sent or used, and a buffer from RECV until its pass, after every action."""
    more = {"interleave": 2} if schedule == "interleaved" else {}
    plan = ParallelPlan(pp=2, schedule=schedule, accumulation=4, microbatch=2, precision="fp32", **more)
    message = 4.0 * plan.microbatch * LLAMA.context * LLAMA.width

    def main(comm: Communicator) -> None:
        laid = lay(Transformer(LLAMA, seed=3), Mesh(comm, **plan.axes), plan)
        assert isinstance(laid, Pipeline)
        runner = laid.runner

        def live() -> int:
            return storage_bytes([*runner.here.values(), *(one.buffer for one in runner.arrivals.values())])

        found = watched(laid, plan, live)
        program = in_the_order_run(laid)
        curve = memory_curve(program, StepBytes(outputs=[message] * program.chunks))[comm.rank]
        assert found == curve[1:]
        assert max(found) >= message
        laid.gradients.close()

    run_threads(plan.world, main)


@pytest.mark.parametrize(
    ("zero", "schedule"), [(1, "1f1b"), (1, "gpipe"), (2, "1f1b"), (2, "interleaved"), (1, "zb-v"), (2, "zb-v")]
)
def test_gradients_are_the_curve(zero: int, schedule: str) -> None:
    """Under ZeRO a chunk's gradients live from its first backward pass (its first W, where that is split) to REDUCE."""
    more = {"interleave": 2} if schedule == "interleaved" else {}
    plan = ParallelPlan(
        dp=2, pp=2, zero=zero, schedule=schedule, accumulation=4, microbatch=2, precision="fp32", **more
    )

    def main(comm: Communicator) -> None:
        laid = lay(Transformer(LLAMA, seed=3), Mesh(comm, **plan.axes), plan)
        assert isinstance(laid, Pipeline)
        # Of a split backward pass only products of the layers' projections are put off until W.
        counted = {
            number: [
                p
                for name, p in part.module.named_parameters()
                if schedule != "zb-v" or (name.startswith("layers.") and p.ndim == 2)
            ]
            for number, part in laid.parts.items()
        }
        sizes = [0.0] * laid.step.program.chunks
        for number, parameters in counted.items():
            sizes[number] = float(storage_bytes(parameters))
        found = watched(laid, plan, lambda: storage_bytes(p.grad for each in counted.values() for p in each))
        curve = memory_curve(in_the_order_run(laid), StepBytes(gradients=sizes))[laid.mesh.pp.index]
        assert found == curve[1:]
        assert max(found) > 0 == found[-1]
        laid.gradients.close()

    run_threads(plan.world, main)


def test_gradients_without_zero_are_there_all_the_time() -> None:
    """Their buffers are the planner's count of them, whatever a step is at."""
    plan = ParallelPlan(dp=2, pp=2, schedule="1f1b", accumulation=4, microbatch=2, precision="fp32")
    counts = chunk_layers(plan, LLAMA.layers)
    planned = Room(LLAMA, parse_cluster("4xcpu"), LLAMA.context, "eager").stages(plan, counts)

    def main(comm: Communicator) -> None:
        laid = lay(Transformer(LLAMA, seed=3), Mesh(comm, **plan.axes), plan)
        assert isinstance(laid, Pipeline)
        found = watched(laid, plan, lambda: storage_bytes(laid.gradients.buffers))
        assert {*found} == {float(planned[laid.mesh.pp.index].gradients_bytes)}
        laid.gradients.close()

    run_threads(plan.world, main)


_STEPS_OF_TWO_STAGES = """
import sys
import torch
from tilemesh.comm import run_threads
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.parallel import Mesh, lay
from tilemesh.parallel.laid import StepPiece

def main(comm):
    model = Transformer(ModelConfig(layers=2, width=16, heads=2, vocabulary=19, context=8))
    laid = lay(model, Mesh(comm, pp=2), ParallelPlan(pp=2, microbatch=1, accumulation=2, precision="fp32"))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    laid.passes([StepPiece(tokens, tokens, 0), StepPiece(tokens, tokens, 1)])

run_threads(2, main)
print(*(name for name in ("sympy", "torch._dynamo", "torch.distributed.pipelining") if name in sys.modules))
"""


def test_a_stage_loads_nothing_that_takes_memory_for_its_backward_pass() -> None:
    """torch's own `backward` loads sympy to compare the shapes of what a stage is given: 62 MiB of every rank."""
    done = subprocess.run(
        [sys.executable, "-c", _STEPS_OF_TWO_STAGES], capture_output=True, text=True,
        env=os.environ | source_path(os.environ) | {"OMP_NUM_THREADS": "1"}, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
