"""`tilemesh graph explain` on a file of the user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilemesh.cli.main import main
from tilemesh.core.calibration import Calibration, Rates
from tilemesh.measure.machine import this_machine

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

class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.eye, self.one = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(24, 24)
        self.other = nn.Linear(24, 24)

    def forward(self, x):
        rows = self.eye(x).transpose(1, 2).flatten(2).flatten(0, 1)
        rows = self.other(torch.tanh(self.one(rows)))
        return self.other(torch.tanh(rows))

def picture():
    return Picture(), [torch.randn(2, 3, 6, 6)]

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


def test_a_graph_on_a_mesh_says_where_tensors_lie_and_what_is_sent(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, record = tmp_path / "placed.svg", tmp_path / "placed.json"
    words = ["--mesh", "dp=2,tp=2", "--pin", "inner.*=tp:S0", "--pin", "input0=dp:S0"]
    assert main(["graph", "explain", f"{file}:make", *words, "--svg", str(picture), "--json", str(record)]) == 0
    said = capsys.readouterr().out
    assert "inner.weight: float32[4, 4] tp:S(0), inner.bias: float32[4] tp:S(0), input0: float32[8, 4] dp:S(0)" in said
    assert "# float32[8, 4] dp:S(0) tp:S(1)" in said
    assert "nothing is sent" in said
    placed = json.loads(record.read_text())["placed"]
    assert placed["bytes_per_rank"] == 0
    assert placed["placements"]["inner.weight"] == "tp:S(0)"
    assert "dp:S(0) tp:S(1)" in picture.read_text()
    assert (
        main(["graph", "explain", f"{file}:make", "--mesh", "tp=2", "--pin", "input0=tp:S1", "--svg", str(picture)])
        == 0
    )
    said = capsys.readouterr().out
    assert "P to S(0) over tp" in said or "P to R over tp" in said
    assert "reduce_scatter tp" in picture.read_text() or "all_reduce tp" in picture.read_text()


def test_choosers_race_in_a_table_and_on_a_page(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, record = tmp_path / "chosen.html", tmp_path / "chosen.json"
    words = ["--mesh", "dp=2", "--train", "--html", str(page), "--json", str(record)]
    assert main(["graph", "explain", f"{file}:make", *words, "--choose", "all"]) == 0
    said = capsys.readouterr().out
    assert "chooser  predicted time  overlapped  memory per rank" in said
    chosen = json.loads(record.read_text())["chosen"]
    assert {each["chooser"] for each in chosen} >= {"random", "greedy", "dp", "mcmc", "learned"}
    assert chosen[0]["predicted_s"] == min(each["predicted_s"] for each in chosen)
    assert "evaluations of the cost" in page.read_text()
    placed = json.loads(record.read_text())["placed"]["placements"]
    assert main(["graph", "explain", f"{file}:make", *words, "--choose", "greedy", "--pin", "inner.weight=dp:S1"]) == 0
    assert json.loads(record.read_text())["placed"]["placements"]["inner.weight"] == "dp:S(1)" != placed["inner.weight"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pin", "input0=tp:S0"], "without --mesh"),
        (["--choose", "greedy"], "--choose without --mesh"),
        (["--mesh", "tp=2", "--choose", "gredy"], "did you mean 'greedy'"),
        (["--mesh", "tp=2", "--memory", "1GiB"], "--memory without --choose"),
        (["--mesh", "tp=2", "--choose", "greedy", "--memory", "1B"], "greedy found no placement within"),
        (["--mesh", "tp=2", "--choose", "greedy", "--pin", "input0=tp:P"], "none of its choices is as it is pinned"),
        (["--mesh", "tp"], "expected axes and their sizes, such as tp=2"),
        (["--mesh", "tp=2,tp=2"], "tp is there twice"),
        (["--mesh", "tp=2", "--pin", "input0"], "expected NAME=AXIS:PLACEMENT, such as inner.weight=tp:S0"),
        (["--mesh", "tp=2", "--pin", "imput0=tp:S0"], "did you mean 'input0'"),
        (["--mesh", "tp=2", "--pin", "input0=tp:S2"], "has no dim 2 to cut over tp"),
        (["--mesh", "tp=2", "--pin", "input0=dp:S0"], "axis 'dp'"),
        (["--mesh", "tp=2", "--pin", "input0=tp:X"], "expected AXIS:R, AXIS:P, AXIS:V or AXIS:S0"),
        (["--mesh", "tp=16", "--pin", "input0=tp:S0"], "8 along dim 0 cannot be cut for 16 ranks"),
    ],
)
def test_meshes_and_pins_that_cannot_be_are_one_line(
    words: list[str], message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["graph", "explain", f"{file}:make", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_each_operator_is_timed_beside_its_prediction(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rates = Rates(matmul_flops_per_s={"fp32": 3e10, "fp64": 1.5e10}, copy_bytes_per_s=2e10, operation_s=8e-6)
    machine = this_machine()
    Calibration(machine.id, machine.words, "2026-01-01T00:00:00+00:00", one_core=rates, all_cores=rates).save()
    command = ["graph", "explain", f"{file}:picture", "--time"]
    assert main([*command, "--device", "local", "--json", f"{tmp_path}/out.json"]) == 0
    printed = capsys.readouterr().out
    times = json.loads((tmp_path / "out.json").read_text())["times"]
    assert [each["measured_s"] or each["predicted_s"] for each in times] == sorted(
        [each["measured_s"] or each["predicted_s"] for each in times], reverse=True
    )
    by_name = {each["operator"].split(" of ")[0]: each for each in times}
    dots = sorted(each["count"] for each in times if each["operator"] == "dot")
    assert dots == [1, 2], "two products that read the same kind of operand are one line"
    assert by_name["conv"]["shape"] == [2, 4, 6, 6]
    assert all(each["predicted_s"] > 0 and (each["measured_s"] or each["why"]) for each in times)
    assert by_name["conv"]["measured_s"] > 0
    assert "(predicted | measured)" in printed
    assert "by kind:\n" in printed
    assert "dot [12, 24] 2 times" in printed
    assert main([*command, "--device", "h100"]) == 2
    assert (
        "--time measures on this machine, --device h100 predicts another: give --device local too"
        in capsys.readouterr().err
    )
