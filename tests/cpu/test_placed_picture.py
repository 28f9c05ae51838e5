"""The picture of a placed graph: few boxes that hold every operator, lines that lead down, all that is exchanged."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tilemesh.cli.chosen import PlacingOptions
from tilemesh.cli.main import main
from tilemesh.cli.placed_picture import _condensed, placed_picture
from tilemesh.cli.run_placed import traced_space
from tilemesh.graph.ir import ordered

PROGRAM = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        q, k, v = (f(self.norm(x)).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o((torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(x)))


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Dropout(0.1), Block(), nn.Dropout(0.1)), [torch.randn(4, 16, 32)]


def counted():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), [torch.randn(4, 3, 8, 8)]
"""


def test_a_picture_has_few_boxes_and_every_exchange(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("nn.Dropout(0.1), ", "").replace(", nn.Dropout(0.1)", ""))
    space, _ = traced_space(f"{tmp_path}/program.py:make", PlacingOptions(mesh="dp=2,tp=2", choose="greedy"))
    random = np.random.default_rng(0)
    placed = space.placed([int(random.integers(len(own))) for own in space.problem.seconds])
    graph, groups = _condensed(placed)
    order = ordered(placed.graph.outputs[:1])
    inside = [node for group in groups.values() for node in group.nodes if node.launched]
    computing = {node for node in order if node.launched}
    assert computing - set(inside) <= {node for node in computing if node.op == "broadcast"}, "every operator has a box"
    assert len(graph.nodes()) < len(order) / 3
    titles = [str(box["target"]).strip() for box in graph.nodes() if box.op == "opaque"]
    assert sum(title.startswith("product") for title in titles) == 8
    assert {"norm", "product, softmax"} & set(titles)
    assert "product, gelu" in titles or "gelu" in titles
    picture = placed_picture(placed)
    there = {(each.collective, each.axis) for each in placed.exchanges if each.nbytes and each.reader in set(order)}
    assert there
    for collective, axis in there:
        assert re.search(f"{collective} {axis} [0-9]", picture), (collective, axis)
    for name in ("q.weight", "down.weight"):
        assert name in picture


def test_pages_of_modules_with_dropout_and_counters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dropout is drawn alike by all ranks; an input that nothing reads (a batch norm's counter) is whole."""
    (tmp_path / "program.py").write_text(PROGRAM)
    for name, pin in (("make", "*.up.weight=tp:S0"), ("counted", "input0=tp:S0")):
        page = tmp_path / f"{name}.html"
        assert (
            main(
                [
                    "graph",
                    "explain",
                    f"{tmp_path}/program.py:{name}",
                    "--mesh",
                    "tp=2",
                    "--pin",
                    pin,
                    "--html",
                    str(page),
                ]
            )
            == 0
        )
        assert "each rank sends" in capsys.readouterr().out
        assert "whole on every rank" in page.read_text()
