"""Training on a GPU: resumed bit for bit with deterministic=true, compiled or not; a bad loss names its step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tilemesh.core.errors import RunError
from tilemesh.train.config import TrainConfig, load
from tilemesh.train.folder import CHECKPOINTS, metrics
from tilemesh.train.job import fit
from tilemesh.train.manifest import Manifest, folder_name

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SMALL = (
    "model.layers=3,model.width=256,model.heads=4,model.context=128,train.steps=12,train.batch=8,plan.microbatch=4,"
    "checkpoint.every=6,evaluate.every=6,sample.tokens=16,optimizer.warmup=2,train.deterministic=true"
)


def made(*sets: str) -> TrainConfig:
    return load(mesh="dp=1", sets=[SMALL, *sets], gpus=1)


def digests(folder: Path, step: int) -> list[str]:
    return [one.sha256 for one in Manifest.read(folder / CHECKPOINTS / folder_name(step)).files]


@pytest.mark.parametrize(
    "sets",
    [
        "plan.precision=bf16",
        "plan.precision=bf16-master,train.recompute_every=2",
        "plan.precision=bf16,train.compile=true",
        "plan.precision=fp16",
        "plan.precision=bf16,model.dropout=0.1",
    ],
)
def test_stopped_and_resumed_is_never_stopped(sets: str, tmp_path: Path) -> None:
    config = made(sets)
    whole = fit(config, run=tmp_path / "whole")
    fit(config, run=tmp_path / "parts", stop_after=5)
    parts = fit(resume=tmp_path / "parts")
    assert (whole.step, parts.step) == (12, 12)
    assert digests(tmp_path / "whole", 12) == digests(tmp_path / "parts", 12)
    ours, theirs = (
        [line["loss"] for line in metrics(tmp_path / name) if line["kind"] == "step"] for name in ("whole", "parts")
    )
    assert ours == theirs
    assert whole.loss < 5.0


def test_a_bad_loss_is_found_and_its_step_named_though_steps_are_not_waited_for(tmp_path: Path) -> None:
    config = made("plan.precision=bf16,optimizer.lr=1e30,optimizer.warmup=0,optimizer.clip=0")
    with pytest.raises(RunError, match=r"step [23]: (loss|the gradient)"):
        fit(config, run=tmp_path / "run")
    assert list((tmp_path / "run").glob("bad-batch-step-*"))
