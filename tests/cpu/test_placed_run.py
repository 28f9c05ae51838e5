"""Placements that were chosen, run: they compute what one process does, and send what was predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tilemesh.cli.chosen import PlacingOptions
from tilemesh.cli.main import main
from tilemesh.cli.run_placed import PlacementProgram, PlacementRun, run_words, traced_space
from tilemesh.comm.connection import run_threads
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.calibration import Calibration, Rates
from tilemesh.graph.emit import program
from tilemesh.measure.machine import this_machine
from tilemesh.measure.sample import Sample
from tilemesh.parallel.choose import race
from tilemesh.parallel.choose.recipes import with_recipes
from tilemesh.plan.place.problem import PlacementFigures
from tilemesh.plan.place.space import PlacementSpace
from tilemesh.train.programs import load_program

PROGRAM = """
import torch
from torch import nn


def make():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16)]
    return nn.Sequential(*layers).double(), [torch.randn(12, 16).double()]


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.names, self.picture = nn.Embedding(20, 8), nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.top = nn.Linear(12, 1)

    def forward(self, names, picture, clicked):
        first, second = self.names(names).unbind(1)
        x = torch.cat([first * second, self.picture(picture).mean((2, 3))], 1)
        return nn.functional.binary_cross_entropy(self.top(x).squeeze(1).sigmoid(), clicked)


def clicks():
    torch.manual_seed(0)
    inputs = [torch.randint(0, 20, (8, 2)), torch.randn(8, 2, 6, 6).double(), torch.rand(8).round().double()]
    return Clicks().double(), inputs
"""


@pytest.mark.parametrize(
    ("name", "mesh", "ranks", "optimizer"), [("make", "tp=2", 2, "sgd"), ("clicks", "dp=2,tp=2", 4, "adamw")]
)
def test_what_choosers_chose_sends_what_was_predicted(
    tmp_path: Path, name: str, mesh: str, ranks: int, optimizer: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = PlacingOptions(mesh=mesh, choose="all", train=True, optimizer=optimizer)
    space, values = traced_space(f"{tmp_path}/program.py:{name}", words)
    answers = with_recipes(space, race(space.problem, ("greedy", "random", "mcmc")))
    wholes = program(space.graph)(*values)
    require_step_of_torch(f"{tmp_path}/program.py:{name}", optimizer, space, values, wholes)
    choices = [each.choice for each in answers if each.choice is not None]

    def rank(comm: Communicator) -> list[float]:
        placements = [PlacementProgram(space, choice, comm, values) for choice in choices]
        for each in placements:
            each.require_equal(wholes)
        return [each.sent_bytes() for each in placements]

    counted = run_threads(ranks, rank)
    for at, each in enumerate(answers):
        assert each.figures is not None
        assert sum(sent[at] for sent in counted) / ranks == pytest.approx(each.figures.sent_bytes), each.chooser
    sizes = {each.chooser: each.figures.sent_bytes for each in answers if each.figures}
    assert name == "clicks" or sizes["fsdp"] > sizes["ddp"] > 0, "weights that are cut are gathered in either pass"


def require_step_of_torch(
    file: str, optimizer: str, space: PlacementSpace, values: list[Tensor], wholes: tuple[Tensor, ...]
) -> None:
    """New weights, and what a batch norm has averaged, are those of torch's own step."""
    module, inputs = load_program(file)
    own: Any = torch.optim.AdamW if optimizer == "adamw" else torch.optim.SGD
    own = own(module.parameters(), lr=0.001)
    output = module(*inputs)
    [slope] = [value for node, value in zip(space.graph.inputs, values, strict=True) if node["name"] == "d output0"]
    output.backward(slope)
    own.step()
    state = module.state_dict()
    new = {space.carried[node]["name"]: at for at, node in enumerate(space.graph.outputs) if node in space.carried}
    assert set(state) <= set(new)
    for name, value in state.items():
        torch.testing.assert_close(wholes[new[name]], value, atol=1e-12, rtol=1e-10)


def test_a_placement_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    space, values = traced_space(f"{tmp_path}/program.py:make", PlacingOptions(mesh="tp=2", choose="greedy"))
    [answer] = race(space.problem, ("greedy",))
    assert answer.choice is not None
    wholes = [value + 1e-3 for value in program(space.graph)(*values)]
    with pytest.raises(Exception, match="result 0 on ranks differs from that of one process"):
        run_threads(2, lambda comm: PlacementProgram(space, answer.choice or (), comm, values).require_equal(wholes))


def test_predictions_are_judged_by_the_best_five_and_the_worst() -> None:
    def run(predicted_s: float, measured_s: float, sent: float = 8.0) -> PlacementRun:
        return PlacementRun(("ilp",), PlacementFigures(predicted_s, 8.0, 1.0), Sample.of([measured_s]), sent, "")

    # Closer than 2 % is equal; the sixth of seven is not judged.
    runs = [*(run(t, 1.1 * t) for t in (1.0, 1.0001, 1.2, 1.4, 1.6)), run(1.8, 9.0), run(2.0, 2.2)]
    [words] = run_words(runs)
    assert words.endswith("worst: rank correlation 1.00, errors up to 9%; bytes sent are as predicted")
    assert "rank correlation -" in run_words([run(t, 3 - t) for t in (1.0, 1.5, 2.0)])[0]
    assert "not as predicted" in run_words([run(1.0, 1.0, sent=9.0)])[0]


def test_a_run_is_suggested_where_the_machine_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["graph", "explain", f"{tmp_path}/program.py:make", "--mesh", "tp=2"]
    assert main(command) == 0
    assert "tilemesh calibrate\n" in capsys.readouterr().out
    monkeypatch.setattr("tilemesh.core.calibration.find", lambda machine: machine)
    assert main(command) == 0
    assert "--choose all --device local --run" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_runs_what_it_chose_on_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rates = Rates(matmul_flops_per_s={"fp32": 3e10, "fp64": 1.5e10}, copy_bytes_per_s=2e10, operation_s=8e-6)
    machine = this_machine()
    Calibration(machine.id, machine.words, "2026-01-01T00:00:00+00:00", one_core=rates, all_cores=rates).save()
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["graph", "explain", f"{tmp_path}/program.py:make", "--mesh", "tp=2", "--train", "--choose", "all"]
    run = [*command, "--device", "local", "--run", "--json", f"{tmp_path}/rows", "--html", f"{tmp_path}/page.html"]
    assert main(run) == 0
    assert "rank correlation" in capsys.readouterr().out
    _, *rows = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    for row in rows:
        is_time = row["name"] == "step"
        assert row["measured"]["median"] > 0 if is_time else row["measured"]["median"] == row["predicted"]
    assert {row["name"] for row in rows} == {"step", "sent per rank"}
    assert "Predicted and measured" in (tmp_path / "page.html").read_text()
    assert main([*command, "--run"]) == 2
    assert "give --choose all --device local too" in capsys.readouterr().err
