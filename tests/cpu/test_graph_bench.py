"""`tilemesh bench graph`, drawings and breaks: commands on small programs."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from tilemesh.bench.graph.blocks import BLOCKS, make_pass
from tilemesh.cli.main import main
from tilemesh.graph.backend import Backend

MODEL = """
import torch
from torch import nn

class Branching(nn.Module):
    def forward(self, x):
        y = torch.tanh(x) * 2.0
        if y.sum().item() > 0:
            y = y + 1
        return torch.softmax(y, -1)

def make():
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Softmax(-1)), [torch.randn(8, 4)]

class Ending(nn.Module):
    def forward(self, x):
        y = torch.tanh(x)
        return y.sum().item()

def ending():
    return Ending(), [torch.ones(3, 4)]

def branching():
    return Branching(), [torch.ones(3, 4)]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


@pytest.mark.parametrize("model", ["gpt2-blocks", pytest.param("lstm", marks=pytest.mark.slow)])
def test_rows_of_a_model(tmp_path: Path, model: str) -> None:
    target = tmp_path / "rows.jsonl"
    command = ["bench", "graph", model, "--size", "tiny", "--peers", "eager", "--repeats", "3", "--seconds", "1"]
    assert main([*command, "--json", str(target)]) == 0
    step, first, values, *roof = (json.loads(line) for line in target.read_text().splitlines())
    assert step["name"] == "graph step"
    assert step["case"]["launches"] < step["case"]["operators"]
    assert step["peers"]["eager"]["median"] > 0
    assert first["measured"]["median"] > 0
    assert values["limit"] <= values["case"]["arena"] <= 1.05 * values["limit"]
    # An operator of torch's own may return more than is read (an LSTM its workspace), which liveness does not count.
    assert values["measured"]["median"] > 0.5 * values["predicted"]
    for row in roof:  # where the machine is calibrated
        assert row["case"]["roof_s"] < row["case"]["roof_s before"]


@pytest.mark.parametrize(
    "name", [name if name == "recommender" else pytest.param(name, marks=pytest.mark.slow) for name in BLOCKS]
)
@pytest.mark.parametrize("step", [False, True])
def test_each_of_the_twelve_models_is_what_eager_computes(name: str, step: bool) -> None:
    torch._dynamo.config.allow_rnn = True
    block = make_pass(name, step)
    block.module.double()
    inputs = tuple(value.double() if value.is_floating_point() else value for value in block.inputs)
    block = dataclasses.replace(block, inputs=inputs)
    kept = {key: value.clone() for key, value in block.module.state_dict().items()}
    results = []
    for call in (block.module, torch.compile(block.module, backend=Backend())):
        block.module.load_state_dict(kept)  # a batch norm counts its batches
        value = block.run(call)
        results.append([value, *(weight.grad for weight in block.module.parameters() if weight.grad is not None)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gtp2"], "gpt2"),
        ([], "give some of"),
        (["gpt2", "--size", "huge"], "size"),
        (["--study", "symbolc"], "study"),
    ],
)
def test_what_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "graph", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_drawing_and_a_page(file: Path, tmp_path: Path) -> None:
    svg, page = tmp_path / "graph.svg", tmp_path / "graph.html"
    assert main(["graph", "explain", f"{file}:make", "--svg", str(svg), "--html", str(page)]) == 0
    root = ET.fromstring(svg.read_text())
    words = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "as traced" in words
    assert any(word.startswith("one kernel of") for word in words)
    assert "<svg" in page.read_text()


def test_a_break_is_listed_with_its_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", "breaks", f"{file}:branching"]) == 0
    said = capsys.readouterr().out
    assert "2 pieces, 1 break, 5 operators" in said
    assert "model.py:8" in said
    assert ".item()" in said
    assert main(["graph", "breaks", f"{file}:make"]) == 0
    assert "1 piece, 0 breaks, 3 operators" in capsys.readouterr().out
    assert main(["graph", "breaks", f"{file}:ending"]) == 0  # nothing follows the cut
    first, *listed = capsys.readouterr().out.splitlines()
    assert first.startswith("1 piece, 1 break, 2 operators")
    assert len([line for line in listed if line[0].isdigit()]) == 1
