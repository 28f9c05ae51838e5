"""`tilemesh train` of a module that is not ours: the same numbers on every mesh, stopped and gone on with too."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tilemesh as tm
from tilemesh.cli.main import main
from tilemesh.comm.connection import run_threads
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.parallel.placed import PlacedModule
from tilemesh.runs.folder import new_run
from tilemesh.runs.kind import MODULE
from tilemesh.runs.metrics import latest
from tilemesh.train import load_config
from tilemesh.train.config import TrainConfig, of_run
from tilemesh.train.export import STATE_FILE, export
from tilemesh.train.module_rank import train_here
from tilemesh.train.programs import read_program
from tilemesh.train.schedule import rate

PROGRAM = """
import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(6, 16)
        layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout({dropout}), nn.Linear(16, 4)]
        self.body = nn.Sequential(*layers)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.body(x), y)


def batch(step):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return {{"x": x, "y": x[:, :4].argmax(1)}}


def make():
    module, generator = Classifier().double(), torch.Generator().manual_seed(0)  # ranks here are threads
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
    return module, batch, [batch(1001), batch(1002)]
"""
PINS = ("x=dp:S0", "y=dp:S0", "body.0.*=tp:S0")
STEPS = 4


def configured(tmp_path: Path, mesh: str, dropout: float = 0.0, **options: Any) -> TrainConfig:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(dropout=dropout))
    sets = [f"train.steps={STEPS}", "optimizer.lr=0.01", "optimizer.clip=0.5", "evaluate.every=2", "checkpoint.every=2"]
    return load_config(f"{file}:make", mesh=mesh, pins=PINS, sets=[*sets, "train.trace_steps=0"], **options)


def trained(config: TrainConfig, folder: Path, stop_after: int | None = None, resume: bool = False) -> dict[str, Any]:
    """Whole weights and buffers after it."""
    if not resume:
        new_run(MODULE, config.to_toml(), folder)
    assert dataclasses.replace(of_run(folder), plan=ParallelPlan()) == dataclasses.replace(config, plan=ParallelPlan())

    def rank(comm: Communicator) -> None:
        train_here(config, folder, comm, stop_after=stop_after, resume=resume)

    run_threads(config.ranks, rank)
    export(folder, out := folder.parent / f"{folder.name}-{stop_after}")
    return dict(load_file(out / STATE_FILE))


def plain(config: TrainConfig, tmp_path: Path) -> dict[str, Any]:
    """The same by a loop of torch's own."""
    torch.manual_seed(config.train.seed)
    program = read_program(f"{tmp_path}/program.py:make")
    module, options = program.module, config.optimizer
    matrices = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=options.betas, eps=options.epsilon)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        module(**program.call(step)).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), options.clip)
        for group in optimizer.param_groups:
            group["lr"] = float(np.float32(rate(step - 1, STEPS, options)))
        optimizer.step()
    return dict(module.state_dict())


def test_every_mesh_trains_as_one_process_and_goes_on_elsewhere(tmp_path: Path) -> None:
    config = configured(tmp_path, "dp=2,tp=2")
    want = plain(config, tmp_path)
    whole = trained(config, tmp_path / "run")
    first = trained(configured(tmp_path, "tp=2"), tmp_path / "cut", stop_after=2)
    then = trained(configured(tmp_path, "dp=2"), tmp_path / "cut", resume=True)
    for name, value in want.items():
        torch.testing.assert_close(whole[name], value, atol=1e-10, rtol=1e-10, msg=name)
        torch.testing.assert_close(then[name], whole[name], atol=1e-10, rtol=1e-10, msg=name)
    assert not torch.equal(first["body.0.weight"], then["body.0.weight"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["kind"] == "module"
    assert summary["module"]["placements"]["body.0.weight"] == "tp:S0"
    assert summary["held_out"] > 0
    assert summary["step"] == STEPS


def test_dropout_goes_on_where_it_was_on_another_mesh(tmp_path: Path) -> None:
    whole = trained(configured(tmp_path, "tp=1", dropout=0.4), tmp_path / "whole")
    trained(configured(tmp_path, "dp=2", dropout=0.4), tmp_path / "cut", stop_after=2)
    then = trained(configured(tmp_path, "tp=2", dropout=0.4), tmp_path / "cut", resume=True)
    for name, value in whole.items():
        torch.testing.assert_close(then[name], value, atol=1e-10, rtol=1e-10, msg=name)


TIED = """
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("mask", torch.arange(8) != 3)
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(self.table(x) * self.scale) * self.mask.float(), y)


def make():
    return Tied(), {"x": torch.arange(8), "y": torch.arange(8)}
"""


def test_what_is_exported_is_the_modules_state(tmp_path: Path) -> None:
    """With tied weights under both names, buffers of any dtype, and without those that are not persistent."""
    (tmp_path / "program.py").write_text(TIED)
    config = load_config(f"{tmp_path}/program.py:make", mesh="tp=1", sets=["train.steps=1", "train.trace_steps=0"])
    state = trained(config, tmp_path / "run")
    module = read_program(config.module.program).module
    module.load_state_dict(state)
    assert torch.equal(module.mask, torch.arange(8) != 3)


def test_a_run_of_one_rank_from_python(tmp_path: Path) -> None:
    """Through the one door, and with its page's rows."""
    config = configured(tmp_path, "tp=1")
    result = tm.train.fit(config, run=tmp_path / "run", in_process=True)
    assert result.step == result.saved_step == STEPS
    assert [row.name for row in result.rows] == ["step time", "sent per rank", "peak memory per rank"]
    assert main(["report", str(tmp_path / "run"), "--html", str(tmp_path / "page.html")]) == 0
    assert "step time" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("sets", "options", "words"),
    [
        (["model.layers=3"], {}, "model.layers says nothing of a run that trains a module"),
        (["plan.zero=3"], {}, "plan.zero says nothing"),
        (["optimizer.name=muon"], {}, "makes whole matrices of layers orthogonal"),
        (["module.choose=fastest"], {}, "fastest"),
        (["module.pins=[\"x\"]"], {}, "expected NAME=AXIS:PLACEMENT"),
        (["module.pins=[\"x=dp:Q0\"]"], {}, "a placement of 'dp:Q0'"),
        (["module.pins=[\"x=cp:S0\"]"], {}, "unknown axis 'cp'"),
        ([], {"mesh": "cp=2"}, "cp is none of these"),
        ([], {"init": "somewhere"}, "is of Transformers"),
        ([], {"ranks": 3, "mesh": "dp=2"}, "make them agree"),
    ],
)  # fmt: skip
def test_what_says_nothing_of_a_module_is_refused(
    tmp_path: Path, sets: list[str], options: dict[str, Any], words: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(dropout=0.0))
    with pytest.raises(UsageError, match=words):
        load_config(f"{tmp_path}/program.py:make", sets=sets, **options)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("manual_seed(step)", "manual_seed(torch.seed() % 2**40)", "two different batches for step 1"),
        ("nn.functional.cross_entropy(self.body(x), y)", "self.body(x)", r"returns a tensor of \[8, 4\]: expected its"),
        ("return {{", "return {{**({{'z': x}} if step > 1 else {{}}), ", "step 2 is called with z, x, y"),
    ],
)  # fmt: skip
def test_functions_that_give_what_cannot_be_trained_are_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    config = configured(tmp_path, "tp=1")
    (tmp_path / "program.py").write_text(PROGRAM.replace(old, new).format(dropout=0.0))
    with pytest.raises((UsageError, RunError), match=words):
        trained(config, tmp_path / "run")


def test_choosers_place_what_is_trained_and_need_a_measured_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilemesh.core.calibration import Calibration, Rates
    from tilemesh.measure.machine import this_machine

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = configured(tmp_path, "tp=2", choose="greedy")
    with pytest.raises(UsageError, match="tilemesh calibrate"):
        trained(config, tmp_path / "refused")
    rates = Rates(matmul_flops_per_s={"fp32": 3e10, "fp64": 1.5e10}, copy_bytes_per_s=2e10, operation_s=8e-6)
    machine = this_machine()
    Calibration(machine.id, machine.words, "2026-01-01T00:00:00+00:00", one_core=rates, all_cores=rates).save()
    chosen = trained(config, tmp_path / "chosen")
    for name, value in trained(configured(tmp_path, "tp=1"), tmp_path / "one").items():
        torch.testing.assert_close(chosen[name], value, atol=1e-10, rtol=1e-10, msg=name)
    predicted = json.loads((tmp_path / "chosen" / "predicted.json").read_text())
    assert predicted["step_time_s"] > 0


ROW = """
import torch
from torch import nn


class Ending(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 4)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(x), y)


def batch(step):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return {"x": x, "y": x[:, :4].argmax(1)}


def make():
    row = [nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6)) for _ in range(3)] + [Ending()]
    generator = torch.Generator().manual_seed(0)
    for parameter in nn.ModuleList(row).double().parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
    return row, batch, [batch(1001), batch(1002)]


def one():
    row, *others = make()
    return row[0], *others
"""


def staged(tmp_path: Path, mesh: str, *sets: str, function: str = "make") -> TrainConfig:
    file = tmp_path / "program.py"
    file.write_text(ROW)
    pins = ("x=dp:S0", "y=dp:S0", "chunks.[012].0.*=tp:S0")
    usual = [
        f"train.steps={STEPS}",
        "optimizer.lr=0.01",
        "optimizer.clip=0.5",
        "evaluate.every=2",
        "checkpoint.every=2",
    ]
    return load_config(f"{file}:{function}", mesh=mesh, pins=pins, sets=[*usual, "train.trace_steps=0", *sets])


def test_modules_in_a_row_train_on_stages_and_go_on_on_others(tmp_path: Path) -> None:
    want = plain(staged(tmp_path, "tp=1"), tmp_path)
    four = ("plan.accumulation=4",)
    whole = trained(staged(tmp_path, "pp=2,dp=2", *four, "plan.schedule=zb-h1"), tmp_path / "run")
    first = trained(staged(tmp_path, "pp=2,tp=2", *four), tmp_path / "cut", stop_after=2)
    sets = ("plan.schedule=interleaved", "plan.interleave=2")
    trained(staged(tmp_path, "pp=2", *four, *sets), tmp_path / "cut", stop_after=3, resume=True)
    then = trained(staged(tmp_path, "dp=2"), tmp_path / "cut", resume=True)
    for name, value in want.items():
        torch.testing.assert_close(whole[name], value, atol=1e-10, rtol=1e-10, msg=name)
        torch.testing.assert_close(then[name], value, atol=1e-10, rtol=1e-10, msg=name)
    assert not torch.equal(first["chunks.3.head.weight"], then["chunks.3.head.weight"])
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "cut")]
    assert summaries[0]["held_out"] == pytest.approx(summaries[1]["held_out"], abs=1e-10)
    assert summaries[0]["module"]["placements"].keys() == want.keys()
    assert summaries[0]["parameters"] == sum(value.numel() for value in want.values())


DROPPING = """
import torch
from torch import nn


class Dropping(nn.Module):
    def __init__(self, ends):
        super().__init__()
        self.scale, self.ends = nn.Parameter(torch.ones(())), ends

    def forward(self, x):
        x = nn.functional.dropout(x * self.scale, 0.5)
        return x.mean() if self.ends else x


def make():
    return [Dropping(False), Dropping(True)], lambda step: [torch.ones(64, 64)]
"""


def test_stages_of_a_run_drop_other_elements(tmp_path: Path) -> None:
    """A quarter is left and scaled by four. With the same mask twice it would be half."""
    (tmp_path / "program.py").write_text(DROPPING)
    sets = ["train.steps=2", "optimizer.lr=0", "evaluate.every=0", "train.trace_steps=0"]
    trained(load_config(f"{tmp_path}/program.py:make", mesh="pp=2", sets=sets), tmp_path / "run")
    losses = [line["loss"] for line in latest(tmp_path / "run") if line["kind"] == "step"]
    assert losses == pytest.approx([1, 1], abs=0.2)
    assert losses[0] != losses[1]


def test_without_stages_microbatches_pass_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want, rows, forward = plain(staged(tmp_path, "tp=1"), tmp_path), [], PlacedModule.forward

    def seen(self: PlacedModule, *args: Any, **named: Any) -> Any:
        rows.append(len([*args, *named.values()][0]))
        return forward(self, *args, **named)

    monkeypatch.setattr(PlacedModule, "forward", seen)
    config = staged(tmp_path, "tp=1", "plan.accumulation=4")
    for name, value in trained(config, tmp_path / "run").items():
        torch.testing.assert_close(value, want[name], atol=1e-10, rtol=1e-10, msg=name)
    assert rows.count(2) == 4 * STEPS
    losses = [json.loads(line).get("loss") for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained(staged(tmp_path, "tp=1"), tmp_path / "whole")
    whole = [json.loads(line).get("loss") for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [loss for loss in losses if loss] == pytest.approx([loss for loss in whole if loss], abs=1e-10)


@pytest.mark.parametrize(
    ("mesh", "sets", "function", "message"),
    [
        ("tp=2", ("plan.accumulation=3",), "make", "tensors of 8 rows cannot be cut into 3 microbatches"),
        ("pp=2", (), "one", "returns one module: return a list of modules"),
        ("pp=3", (), "make", "4 modules on"),
        ("pp=2", ("plan.accumulation=3",), "make", "tensors of 8 rows cannot be cut into 3 microbatches"),
    ],
)
def test_what_no_stages_can_train_is_refused(
    tmp_path: Path, mesh: str, sets: tuple[str, ...], function: str, message: str
) -> None:
    config = staged(tmp_path, mesh, *sets, function=function)
    with pytest.raises(UsageError, match=message):
        trained(config, tmp_path / "run")


def test_a_parameter_that_some_steps_use_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path, "tp=1")
    file = tmp_path / "program.py"
    text = file.read_text().replace("self.body(x)", "self.body(x) + (self.unused(x)[:, :4] if len(x) == 6 else 0)")
    file.write_text(text.replace("torch.randn(8", "torch.randn(6 if step == 2 else 8"))
    with pytest.raises(UsageError, match=r"the loss depends on unused.bias in some steps alone"):
        trained(config, tmp_path / "run")


def test_held_out_data_in_another_order_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path, "tp=1")
    file = tmp_path / "program.py"
    file.write_text(file.read_text().replace("[batch(1001)", '[dict(y=batch(1)["y"], x=batch(1)["x"])'))
    with pytest.raises(UsageError, match="held-out data is called with y, x and step 1 with x, y"):
        trained(config, tmp_path / "run")
