"""Experts that take so many picks of a sequence: beside a count by hand, on every layout, in training alone."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.model import huggingface
from tilemesh.model.capacity import most_taken
from tilemesh.model.config import ModelConfig
from tilemesh.model.experts import Experts, Routing
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.routing import busiest_rows, imbalance
from tilemesh.model.work.task import Task
from tilemesh.parallel.apply import lay
from tilemesh.parallel.gate.alone import batch, papers_loss, start, step_loss
from tilemesh.parallel.gate.cases import MODELS
from tilemesh.parallel.laid import StepPiece
from tilemesh.parallel.mesh import Mesh
from tilemesh.report.routing_part import routing
from tilemesh.report.run import Run
from tilemesh.train.routers import RouterWatch

CONFIG = MODELS["dropped"].replace(dropout=0.0)


@pytest.mark.parametrize(
    "changes", [{}, {"router_renormalized": False}, {"expert_capacity": 0.3}, {"experts": 1, "experts_per_token": 1}]
)
def test_a_model_that_drops_is_the_papers_one(changes: dict[str, Any]) -> None:
    """Its loss and gradients in float64 beside a loop over tokens, which shares no line with it."""
    config = CONFIG.replace(**changes)
    model = Transformer(config, dtype=torch.float64)
    model.load_state_dict(start(config, "fp64"))
    tokens_BT, targets_BT = batch(config, 0)
    weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    wanted, _ = papers_loss(config, weights, tokens_BT, targets_BT)
    wanted.backward()
    total, _ = step_loss(model, targets_BT, lambda: model(tokens_BT))
    total.backward()
    assert total.item() == pytest.approx(wanted.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-10, atol=1e-10, msg=name)
    model.eval()
    whole = Transformer(config.replace(expert_capacity=0.0), dtype=torch.float64).eval()
    whole.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens_BT), whole(tokens_BT))  # held-out text, generation, serving


@pytest.mark.parametrize(
    ("capacity", "tokens", "most"), [(1.0, 12, 3), (1.25, 12, 4), (0.1, 10, 1), (1.1, 40, 11), (1e9, 7, 1_750_000_000)]
)
def test_how_many_an_expert_takes(capacity: float, tokens: int, most: int) -> None:
    """1.1 is eleven tenths, as it is typed: ten times it is 11, of which no part is left to be rounded up."""
    config = CONFIG.replace(expert_capacity=capacity)
    assert most_taken(config, tokens) == most


def dropped(plan: dict[str, Any]) -> list[list[float]]:
    """By rank the part of each layer's picks that one step of 8 sequences drops."""

    def main(comm: Communicator) -> list[float]:
        layout = ParallelPlan(precision="fp64", microbatch=8 // plan.get("dp", 1), **plan)
        laid = lay(Transformer(CONFIG, seed=1, dtype=torch.float64), Mesh(comm, **layout.axes), layout)
        watch = RouterWatch(laid)
        text = torch.randint(60, (8, 12), generator=torch.Generator().manual_seed(5))
        mine = text[layout.microbatch * laid.mesh.dp.index :][: layout.microbatch]
        laid.passes([StepPiece(mine[:, :-1], mine[:, 1:], 0)])
        drops: list[float] = watch.figures(CONFIG.expert_layers, CONFIG.experts)["dropped_picks"]
        return drops

    return run_threads(math.prod(plan.get(axis, 1) for axis in ("dp", "tp", "pp", "cp")), main)


def test_every_layout_drops_the_same() -> None:
    model, parts = Transformer(CONFIG, seed=1, dtype=torch.float64), []

    def count(module: Any, args: Any, routing: Routing) -> None:
        picks, lost = routing.experts_NC.view(8, -1, 2), 0
        for row in picks.tolist():
            for expert in range(CONFIG.experts):
                lost += max(0, sum(expert in token for token in row) - math.ceil(1.1 * 11 * 2 / 8))
        parts.append(lost / picks.numel())

    for module in model.modules():
        if isinstance(module, Experts):
            module.router.register_forward_hook(count)
    model(torch.randint(60, (8, 12), generator=torch.Generator().manual_seed(5))[:, :-1])
    assert all(0 < part < 1 for part in parts)
    for plan in ({}, {"recompute": "full"}, {"dp": 2, "ep": 2, "zero": 1}, {"pp": 2}, {"cp": 2, "ep": 2}, {"tp": 2}):
        for drops in dropped(plan):
            assert drops == pytest.approx(parts, abs=1e-4), plan


def test_slices_of_sequences_are_refused() -> None:
    plan = ParallelPlan(pp=2, schedule="terapipe", slices=2, accumulation=2)
    config = CONFIG.replace(balance_loss=0.0)

    def main(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=r"slices is 2 and expert_capacity 1\.1: what an expert has taken"):
            lay(Transformer(config, device="meta"), Mesh(comm, pp=2), plan)

    run_threads(2, main)


def test_capacity_bounds_what_comes_to_the_busiest_rank() -> None:
    plan = ParallelPlan(dp=4, ep=4)
    model = CONFIG.replace(balance_loss=0.0, context=12)
    task = Task.of(plan, 1024)
    free = model.replace(expert_capacity=0.0)
    assert imbalance(free, task) > 1.1 == imbalance(model, task)
    told = dataclasses.replace(task, imbalance=3.0)
    assert busiest_rows(free, told) == 3 * 2048
    assert busiest_rows(model, told) == math.ceil(1.1 * 2048)
    alone = Task.of(ParallelPlan(), 1024)
    assert busiest_rows(model.replace(expert_capacity=0.5), alone) == 1024


def test_capacity_is_of_training_alone(tmp_path: Path) -> None:
    config = ModelConfig(
        layers=2, width=16, heads=4, vocabulary=40, context=32, norm="rmsnorm", positions="rotary", mlp_width=24,
        activation="swiglu", biases=False, tied=False, experts=4, expert_capacity=1.25, family="mixtral",
    )  # fmt: skip
    huggingface.save(Transformer(config, seed=1), tmp_path)
    assert huggingface.read_config(tmp_path) == config.replace(expert_capacity=0.0, family="")


def test_the_page_says_what_was_dropped() -> None:
    step = {"step": 2, "expert_load": [[1.5, 0.5]], "router_entropy": [0.5], "dropped_picks": [0.125]}
    page = str(routing(Run("r", "/r", "done", steps=[step])))
    assert "12.5 %" in page
    assert "Picks beyond model.expert_capacity were dropped." in page
    assert "No token was dropped." in str(routing(Run("r", "/r", "done", steps=[{**step, "dropped_picks": [0.0]}])))
