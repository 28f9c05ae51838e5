"""Activations and weights that go to the host's memory and back: really moved, as the step's list says, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.action import COMPUTE, Action
from tilemesh.core.step.check import check
from tilemesh.core.step.memory import StepBytes, memory_curve
from tilemesh.core.step.program import step_program
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.parallel import Mesh, lay
from tilemesh.parallel.host import HostMemory, packed_bytes
from tilemesh.parallel.laid import StepPiece
from tilemesh.parallel.offload import NotHereError
from tilemesh.parallel.pipeline import Pipeline
from tilemesh.plan.memory import Room

LLAMA = ModelConfig(
    layers=6, width=32, heads=4, kv_heads=2, mlp_width=48, vocabulary=72, context=16, norm="rmsnorm",
    positions="rotary", activation="swiglu", biases=False, tied=False,
)  # fmt: skip


def pieces_of(plan: ParallelPlan, config: ModelConfig) -> list[StepPiece]:
    tokens = torch.arange(plan.microbatch * config.context).reshape(plan.microbatch, -1) % config.vocabulary
    return [StepPiece(tokens.clone(), tokens.roll(-1, 1).clone(), 0) for _ in range(plan.accumulation)]


def stage_of(comm: Communicator, config: ModelConfig, plan: ParallelPlan) -> Pipeline:
    laid = lay(Transformer(config, seed=3), Mesh(comm, **plan.axes), plan)
    assert isinstance(laid, Pipeline)
    return laid


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        (ParallelPlan(offload="activations", accumulation=2, microbatch=2, precision="fp32"), 1),
        (ParallelPlan(offload="activations", prefetch=2, accumulation=1, microbatch=2, precision="fp32"), 1),
        (ParallelPlan(pp=2, schedule="gpipe", offload="activations", accumulation=4, precision="fp32"), 2),
        (ParallelPlan(pp=2, schedule="zb-v", offload="activations", accumulation=4, precision="fp32"), 2),
    ],
    ids=["one stage", "two ahead", "gpipe", "zb-v"],
)
def test_live_bytes_are_the_curve_of_the_list(plan: ParallelPlan, ranks: int) -> None:
    step = step_program(plan, LLAMA.layers)
    check(step.program)
    room = Room(LLAMA, parse_cluster(f"{ranks}xcpu"), LLAMA.context, "eager")
    sizes = room.step_bytes(plan, tuple(len(layers) for layers in step.layers))

    def measured(comm: Communicator) -> list[tuple[str, float]]:
        laid, found = stage_of(comm, LLAMA, plan), []

        def around(action: Action, do: Any) -> None:
            do()
            seen = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in laid.kept()}
            found.append((str(action), float(sum(seen.values()))))

        laid.watch_actions(lambda text: None, around)
        laid.passes(pieces_of(plan, LLAMA))
        laid.gradients.close()
        # What went to the host is given back: on a CPU that is memory which evaluation and the update can use.
        moved = laid.host_activations
        assert moved is not None
        assert (moved.link.memory.nbytes, [*moved.here()]) == (0, [])
        return found

    for rank, found in enumerate(run_threads(ranks, measured)):
        wanted = memory_curve(step.program, StepBytes(kept=sizes.kept, kept_for_weights=sizes.kept_for_weights))[rank]
        actions = step.program.actions[rank]
        own = [action for action in actions if action.kind in (*COMPUTE, "OUT", "IN")]
        curve = {str(action): after for action, after in zip(actions, wanted[1:], strict=True) if action in own}
        assert any(action.kind == "OUT" for action in own)
        assert {name: live for name, live in found if name in curve} == curve


def test_weights_are_on_the_device_as_the_list_says() -> None:
    plan = ParallelPlan(offload="weights", accumulation=2, precision="fp32")
    step = step_program(plan, LLAMA.layers)
    check(step.program)

    def main(comm: Communicator) -> None:
        laid, seen = stage_of(comm, LLAMA, plan), []
        sizes = [
            float(sum(p.numel() * p.element_size() for p in laid.parts[chunk].module.parameters()))
            for chunk in range(LLAMA.layers)
        ]

        def held() -> float:
            return float(sum(parameter.untyped_storage().nbytes() for parameter in laid.module.parameters()))

        def around(action: Action, do: Any) -> None:
            do()
            seen.append(held())

        laid.watch_actions(lambda text: None, around)
        before = held()
        for _ in range(2):  # the second step writes its weights to the host anew
            seen.clear()
            laid.passes(pieces_of(plan, LLAMA))
            # Every chunk is moved but the last, which two passes follow each other through.
            stays = sum(sizes) - memory_curve(step.program, StepBytes(weights=sizes))[0][0]
            assert seen == [stays + held for held in memory_curve(step.program, StepBytes(weights=sizes))[0][1:]]
            assert seen[-1] == before == sum(sizes)
            assert min(seen) <= 3 * max(sizes)
            # Copies that stay on the host, which a CPU's plan counts (`plan/memory.py`).
            assert laid.host_weights is not None
            assert sum(home.numel() for home in laid.host_weights._homes.values()) == sum(sizes)
            laid.gradients.finish()
            with torch.no_grad():
                for parameter in laid.module.parameters():
                    parameter.mul_(1.01)
        laid.gradients.close()

    run_threads(1, main)


@pytest.mark.parametrize(("what", "kind"), [("activations", "IN"), ("weights", "IN")])
def test_a_list_without_an_in_is_named_when_it_is_run(what: str, kind: str) -> None:
    plan = ParallelPlan(offload=what, accumulation=1, precision="fp32")

    def main(comm: Communicator) -> None:
        laid = stage_of(comm, LLAMA, plan)
        gone = next(place for place, (action, _) in enumerate(laid.runner.actions) if action.kind == kind)
        chunk = laid.runner.actions.pop(gone)[0].chunk
        with pytest.raises(NotHereError, match=f"chunk {chunk}"):
            laid.passes(pieces_of(plan, LLAMA))
        laid.gradients.close()

    run_threads(1, main)


def test_memory_on_the_host_is_packed_and_not_rounded_up() -> None:
    tensors = [torch.empty(3, 5), torch.empty(7, dtype=torch.float64), torch.empty(1000, dtype=torch.bfloat16)]
    memory = HostMemory(is_locked=False)
    made = memory.like(tensors)
    assert [(one.shape, one.dtype) for one in made] == [(one.shape, one.dtype) for one in tensors]
    assert all(one.data_ptr() % 16 == 0 and one.is_contiguous() for one in made)
    assert memory.nbytes == packed_bytes(tensors) <= sum(one.numel() * one.element_size() for one in tensors) + 3 * 256


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"offload": "weights", "zero": 3, "dp": 2}, "ZeRO-3"),
        ({"offload": "weights", "pp": 2, "accumulation": 4}, "no weights would move"),
    ],
)
def test_what_cannot_be_moved_together_is_refused_in_one_line(plan: dict[str, Any], words: str) -> None:
    made = ParallelPlan(**plan, precision="fp32")
    with pytest.raises(UsageError, match=words):
        run_threads(made.world, lambda comm: stage_of(comm, LLAMA, made))
