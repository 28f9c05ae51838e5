"""Modules that choosers have placed train on ranks as one process does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.comm.connection import run_threads
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.axes import ordered, ranks_of
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.tensor_placement import parse
from tilemesh.graph.joint import ModuleCall, trace_joint
from tilemesh.parallel import Mesh, place
from tilemesh.parallel.choose.joint import choose_joint
from tilemesh.plan.place.problem import Chosen, PlacementProblem

D = torch.float64
STEPS = 3


class Block(nn.Module):
    """Attention of four heads and an MLP, with norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, dtype=D)
        self.qkv, self.out = (nn.Linear(16, size, dtype=D) for size in (48, 16))
        self.up, self.down = nn.Linear(16, 32, dtype=D), nn.Linear(32, 16, dtype=D)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return functional.mse_loss(x + self.down(functional.gelu(self.up(x))), y)


def train(module: nn.Module, batch: list[Tensor]) -> list[float]:
    optimizer, losses = torch.optim.AdamW(module.parameters(), 0.01), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("sizes", "chooser", "pins"),
    [
        pytest.param({"tp": 2}, "greedy", {}, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, "drawn0", {}, marks=pytest.mark.slow),
        ({"dp": 2, "tp": 2}, "greedy", {"input0": "dp:S0", "up.weight": "tp:S0"}),
        ({"dp": 2, "tp": 2}, "drawn1", {}),
        pytest.param({"dp": 2, "tp": 2}, "drawn2", {}, marks=pytest.mark.slow),
    ],
)
def test_what_was_chosen_trains_as_one_process(
    sizes: dict[str, int], chooser: str, pins: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilemesh.parallel import choose

    def drawn(problem: PlacementProblem) -> Chosen:
        return choose.at_random(problem, 1, int(chooser[-1]))

    if chooser.startswith("drawn"):
        monkeypatch.setattr(choose, "CHOOSERS", choose.CHOOSERS | {chooser: drawn})
    torch.manual_seed(0)
    module = Block()
    batch = [torch.randn(4, 4, 16, dtype=D) for _ in range(2)]
    axes = ordered({"dp": 1, "tp": 1} | sizes)
    trace = trace_joint(module, ModuleCall.example(batch))
    placements = {name: parse(words) for name, words in pins.items()}
    joint = choose_joint(trace, axes, parse_cluster("4xh100"), chooser, pins=placements)
    for name, placement in placements.items():
        assert joint.placement(name) == placement

    def rank(comm: Communicator) -> Any:
        laid = place(module, Mesh(comm, **sizes), example=batch, joint=joint)
        return train(laid, batch), laid.gather()

    (losses, state), *_ = run_threads(ranks_of(axes), rank)
    single = copy.deepcopy(module)
    assert losses == pytest.approx(train(single, batch), rel=1e-10, abs=1e-10)
    for name, value in single.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-10, rtol=1e-10, msg=name)
