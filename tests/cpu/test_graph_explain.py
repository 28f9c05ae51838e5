"""`tilemesh graph explain` on a file of the user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilemesh.cli.main import main

MODEL = """
import torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return (-(-self.inner(x)) * 1.0 - 0.0).transpose(0, 1).transpose(0, 1)

def make():
    return Scaled(), [torch.randn(8, 4)]

class Turned(nn.Module):
    def forward(self, x):
        return torch.relu(x.t() * 2.0).t() + 1.0

def turned():
    return Turned(), [torch.randn(8, 4)]

class Branching(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x

def branching():
    return Branching(), [torch.ones(3)]

def narrow():
    return nn.Linear(3, 3), [torch.randn(2, 4)]

def bare():
    return nn.Linear(3, 3), torch.randn(2, 3)

def wrong():
    return 7

def fails():
    raise KeyError("weights")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def test_what_each_rule_saves(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", "explain", f"{file}:make", "--device", "h200"]) == 0
    said = capsys.readouterr().out
    assert "-(-x)" in said
    assert "x * 1" in said
    assert "predicted on h200" in said
    assert main(["graph", "explain", f"{file}:make", "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["after"]["operators"] == 2  # a product and a sum
    fewer = record["before"]["operators"] - record["after"]["operators"]
    assert fewer == sum(rule["launches"] for rule in record["rules"]) == 4
    saved = sum(rule["seconds"] for rule in record["rules"])
    assert record["before"]["seconds"] - record["after"]["seconds"] == pytest.approx(saved)


def test_transposes_meet_wherever_a_model_is_rewritten(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In `explain`, in a frozen graph and in what torch.compile runs."""
    import torch

    import tilemesh as tm

    assert main(["graph", "explain", f"{file}:turned"]) == 0
    before, _, after = capsys.readouterr().out.partition("transposes meet")
    assert before.count("transpose(") == 2
    assert after
    assert "transpose(" not in after

    def turned(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.t() * 2.0).t() + 1.0

    x = torch.randn(8, 4, dtype=torch.float64)
    assert "transpose" not in {node.op for node in tm.graph.trace(turned, [x]).frozen().nodes()}
    backend = tm.graph.Backend()
    torch.testing.assert_close(torch.compile(turned, backend=backend)(x), turned(x), rtol=0, atol=0)
    (piece,) = backend.report.pieces
    assert "transposes meet" in {step.rule for step in piece.steps}


@pytest.mark.parametrize(
    ("program", "code", "message"),
    [
        ("nothing", 2, "give FILE.py:FUNCTION"),
        ("missing.py:make", 2, "there is no file missing.py"),
        ("{file}:mkae", 2, "make"),
        ("{file}:wrong", 2, "returned int; return a model and a list of its inputs"),
        ("{file}:fails", 1, "fails: KeyError: 'weights'"),
        ("{file}:bare", 2, "are Tensor; return a list of tensors"),
        ("{file}:branching", 1, "depends on a tensor's values (tilemesh graph breaks lists where) (model.py:25)"),
        ("{file}:narrow", 1, "the program cannot be traced: RuntimeError: "),
    ],
)
def test_what_is_refused(program: str, code: int, message: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", "explain", program.format(file=file)]) == code
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_breaks_of_a_model_that_fails(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", "breaks", f"{file}:branching"]) == 0
    assert "model.py:25" in capfd.readouterr().out
    assert main(["graph", "breaks", f"{file}:narrow"]) == 1
    said = capfd.readouterr().err
    assert "the model fails with these inputs: RuntimeError: " in said
    assert said.count("\n") == 1
