"""A placed module on a GPU: one rank, both passes by the program that was written for it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tilemesh.comm.connection import connect
from tilemesh.parallel import Mesh, place

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_placed_module_trains_on_a_gpu() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    module = module.to("cuda", torch.float64)
    x, single = torch.randn(4, 3, 8, 8, dtype=torch.float64, device="cuda"), copy.deepcopy(module)
    with connect("alone") as comm:
        placed = place(module, Mesh(comm, tp=1), {}, x)
        for each in (placed, single):
            optimizer = torch.optim.SGD(each.parameters(), 0.1)
            for _ in range(3):
                optimizer.zero_grad()
                each(x).square().mean().backward()
                optimizer.step()
        state = placed.gather()
    assert state is not None
    for name, value in single.state_dict().items():
        torch.testing.assert_close(state[name], value.cpu(), atol=1e-10, rtol=1e-10)
