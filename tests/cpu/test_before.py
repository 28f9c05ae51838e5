"""Runs, models and configurations that an earlier version wrote (`tests/data/before`) are read as what they were.

Logits are computed in float64 from the numbers that are stored, so they are those of then but for the order of sums.
Each run also goes on for two steps in float64: the first one's loss shows the weights, the second's what an optimizer
or a method of exchange had kept.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from tilemesh.comm import run_threads
from tilemesh.core.config import to_dict
from tilemesh.model import huggingface
from tilemesh.runs.metrics import latest
from tilemesh.train import load_config
from tilemesh.train.config import of_run
from tilemesh.train.export import export
from tilemesh.train.rank import train_here

BEFORE = Path(__file__).parents[1] / "data" / "before"
EXPECTED: dict[str, dict[str, Any]] = json.loads((BEFORE / "expected.json").read_text())
RUNS = [name for name, known in EXPECTED.items() if "losses" in known]
BOUND = 1e-11
"""Relative: a few hundred roundings of float64 one after the other, in another order."""
STEP = 3


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, which a run may write into; paths in the files are relative to it."""
    shutil.copytree(BEFORE, tmp_path / "before")
    monkeypatch.chdir(tmp_path / "before")
    return tmp_path / "before"


def logits(folder: Path) -> list[float]:
    model = huggingface.load(folder).double().eval()
    with torch.no_grad():
        return [float(value) for value in model(torch.arange(65, 81)[None])[0, -1, ::16]]


@pytest.mark.parametrize("name", ["exported", "int4", "factored"])
def test_a_folder_computes_what_it_did(name: str) -> None:
    assert logits(BEFORE / name) == pytest.approx(EXPECTED[name]["logits"], rel=BOUND)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_exported_and_goes_on(name: str, before: Path) -> None:
    known = EXPECTED[name]
    export(before / name, before / "now")
    assert logits(before / "now") == pytest.approx(known["logits"], rel=BOUND)
    steps = range(STEP + 1, STEP + 1 + len(known["losses"]))
    config = load_config(resume=before / name, sets=["plan.precision=fp64", f"train.steps={steps[-1]}"])
    run_threads(config.ranks, lambda comm: train_here(config, before / name, comm, resume=True))
    losses = {line["step"]: line["loss"] for line in latest(before / name) if line["kind"] == "step"}
    assert [losses[step] for step in steps] == pytest.approx(known["losses"], rel=BOUND)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_still_what_its_configuration_says(name: str, before: Path) -> None:
    now = to_dict(of_run(before / name))
    for section, keys in tomllib.loads((before / name / "config.toml").read_text()).items():
        for key, value in keys.items():
            assert now[section][key] in (value, None if value == "none" else value), f"{section}.{key}"


def test_a_saved_plan_is_laid_out_as_it_says() -> None:
    saved = tomllib.loads((BEFORE / "plan.toml").read_text())
    config = load_config(plan=BEFORE / "plan.toml")
    assert config.context == saved.pop("train")["context"]
    assert to_dict(config.model).items() >= saved.pop("model").items()
    assert to_dict(config.plan).items() >= saved.items()
