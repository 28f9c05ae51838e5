"""Training in fp16: the loss scale is of what does not grow with the batch, and overflow costs no batch and no step."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_run import made, state, trained

from tilemesh.core.errors import RunError
from tilemesh.runs.metrics import STEP, WARNING
from tilemesh.runs.names import CHECKPOINTS, METRICS
from tilemesh.runs.reader import Reader
from tilemesh.train import steps
from tilemesh.train.optimizer import LossScale
from tilemesh.train.schedule import rate

TINY = (
    "model.layers=1,model.width=8,model.heads=2,model.kv_heads=1,model.mlp_width=16,model.context=8,train.batch=4,"
    "train.steps=3,checkpoint.every=0,evaluate.every=0,sample.tokens=0,train.trace_steps=0,optimizer.warmup=3"
)
HALF = TINY + ",plan.precision=fp16"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {number}: {number * 7} dogs and {number * 13} foxes\n" for number in range(400)))
    return str(path)


def lines(folder: Path, kind: str = STEP) -> list[dict[str, Any]]:
    written = map(json.loads, (folder / METRICS).read_text().splitlines())
    return [line for line in written if line["kind"] == kind]


def test_it_does_not_depend_on_how_the_batch_is_cut(text: str, tmp_path: Path) -> None:
    """All microbatches and replicas take the steps that fp32 takes, at the rates of the schedule."""
    trained(made(text, "dp=1,tp=1", TINY), tmp_path / "fp32")
    exact = lines(tmp_path / "fp32")
    # A layer's products round to 11 bits, about 30 of them forward and backward, and so does each step before.
    bound = 30 * 2.0**-11
    for mesh, accumulation in (("dp=1,tp=1", 1), ("dp=1,tp=1", 4), ("dp=2,tp=1", 2)):
        folder = tmp_path / f"{mesh} {accumulation}"
        config = made(text, mesh, HALF, f"plan.accumulation={accumulation}")
        trained(config, folder)
        assert [line for line in lines(folder, WARNING) if not line["text"].startswith("SLOW")] == []
        for ours, theirs in zip(lines(folder), exact, strict=True):
            assert ours["norm"] == pytest.approx(theirs["norm"], rel=bound)
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=bound)
            assert ours["rate"] == rate(ours["step"] - 1, 3, config.optimizer)


def test_a_step_that_overflows_is_said_and_made_again(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same batch at the same rate: but for the scale, it is the run that began with the right scale."""
    config = made(text, "dp=2,tp=1", HALF)
    monkeypatch.setattr(steps, "LossScale", functools.partial(LossScale, value=2.0**26))
    _, said = trained(config, tmp_path / "high")
    (told,) = [words for words in said if words.startswith("OVERFLOW")]
    scale = Reader(tmp_path / "high" / CHECKPOINTS / "step-00000003").manifest.values["scale"]["scale"]
    assert told.startswith(
        "OVERFLOW: gradients of step 1 overflowed in fp16 at a loss scale of 67,108,864 and 33,554,4"
    )
    assert told.endswith(f"; it was made again at {scale:,.0f}")
    assert [(line["step"], line["text"]) for line in lines(tmp_path / "high", WARNING)][-1] == (1, told)
    monkeypatch.setattr(steps, "LossScale", functools.partial(LossScale, value=scale))
    _, said = trained(config, tmp_path / "right")
    assert not any(words.startswith("OVERFLOW") for words in said)
    high, right = state(tmp_path / "high", 3), state(tmp_path / "right", 3)
    assert all(torch.equal(high[name], right[name]) for name in right)
    assert [line["norm"] for line in lines(tmp_path / "high")] == [line["norm"] for line in lines(tmp_path / "right")]


def test_gradients_that_overflow_at_any_scale_end_the_run(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "LossScale", functools.partial(LossScale, value=2.0))
    monkeypatch.setattr(LossScale, "factor", property(lambda scale: float("inf")))
    with pytest.raises(RunError, match="step 1: the gradient's norm is"):
        trained(made(text, "dp=1,tp=1", HALF), tmp_path)


@pytest.mark.parametrize("before", ["fp32", "older"])
def test_a_run_that_goes_on_in_fp16_begins_with_a_scale(
    text: str, tmp_path: Path, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another precision has none, and that of older versions was of a microbatch's summed loss."""
    if before == "older":
        monkeypatch.setattr(LossScale, "state", lambda scale: {"scale": 1.0, "good": 7})
    trained(made(text, "dp=1,tp=1", TINY if before == "fp32" else HALF), tmp_path, stop_after=1)
    monkeypatch.undo()
    trained(made(text, "dp=1,tp=1", HALF), tmp_path, resume=True)
    values = Reader(tmp_path / CHECKPOINTS / "step-00000003").manifest.values
    assert values["scale"] == {"scale": 2.0**16, "good": 2, "of_mean": 1}


def test_the_scale_is_of_the_mean_and_a_power_of_two() -> None:
    scale = LossScale(True, tokens=1000, patience=2)
    assert (scale.value, scale.factor) == (2.0**16, 2.0**6)
    assert scale.halve()
    scale.grow()
    assert (scale.value, scale.good) == (2.0**15, 1)
    scale.grow()
    assert scale.value == 2.0**16
    kept = LossScale(True, tokens=1)
    kept.load(scale.state())
    assert (kept.value, kept.good) == (2.0**16, 2)
    while scale.halve():
        assert scale.value >= 1
    off = LossScale(False, tokens=1000)
    off.grow()
    off.load(kept.state())
    assert (off.value, off.factor, off.good, off.halve()) == (1.0, 1.0, 0, False)
