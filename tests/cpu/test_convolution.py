"""Conv2d on a mesh by batch, output channels and input channels: the outputs and gradients of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilemesh.comm import run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.parallel.apply import lay
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.shard import ColumnSplit, split_data


class Images(nn.Module):
    """Two convolutions and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular")
        self.second = nn.Conv2d(8, 6, 3, stride=2, dilation=1)
        self.out = nn.Linear(6, 5)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = self.second(torch.relu(self.first(x_BCHW)))
        made: Tensor = self.out(y_BCHW.mean((2, 3)))
        return made


def whole() -> Images:
    torch.manual_seed(3)
    return Images().double()


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    return torch.randn(4, 3, 9, 9, generator=draw, dtype=torch.float64), torch.randint(5, (4,), generator=draw)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, targets, reduction="sum")


SPLITS = {
    "batch": ({}, 2, 1),
    "output and input channels": ({"first": "column", "second": "row"}, 1, 2),
    "output channels, joined": ({"first": ColumnSplit(joins=True), "second": ColumnSplit(joins=True)}, 1, 2),
}


@pytest.mark.parametrize("name", ["batch", "output and input channels", "output channels, joined"])
def test_every_split_computes_what_one_process_computes(name: str) -> None:
    splits, dp, tp = SPLITS[name]
    model, alone = whole(), whole()
    x, y = batch()
    total = loss_of(alone(x), y)
    (total / 4).backward()
    expected = {key: value.grad for key, value in alone.named_parameters()}

    def main(comm: Any) -> tuple[float, dict[str, Tensor] | None]:
        mesh, plan = Mesh(comm, dp=dp, tp=tp), ParallelPlan(dp=dp, tp=tp, precision="fp64")
        laid = lay(copy.deepcopy(model), mesh, plan, splits)
        mine, targets = split_data(x, y, dp, mesh.dp.index)
        laid.gradients.backward(loss_of(laid.module(mine), targets), len(targets))
        done = laid.gradients.finish()
        return float(done.loss), laid.gather_gradients()

    for loss, gradients in run_threads(dp * tp, main):
        assert loss == pytest.approx(float(total.detach()) / 4, rel=1e-12)
        for key, value in (gradients or {}).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-12)


def test_groups_and_whole_inputs_are_refused() -> None:
    def laid(model: nn.Module, splits: Any) -> Any:
        return lambda comm: lay(
            copy.deepcopy(model), Mesh(comm, tp=2), ParallelPlan(tp=2, precision="fp64"), splits
        ).module(batch()[0])

    grouped = nn.Sequential(nn.Conv2d(3, 6, 3, groups=3)).double()
    with pytest.raises(UsageError, match=r"has 3 groups: .* leave it whole"):
        run_threads(2, laid(grouped, {"0": "column"}))
    even = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)).double()
    with pytest.raises(UsageError, match="a row-split convolution of 4 channels got 4: this rank's part takes 2"):
        run_threads(2, laid(even, {"1": "row"}))
