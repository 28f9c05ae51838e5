"""Placements that run: ranks that only draw answers change nothing; one batch ahead is what a serial replay does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from align_start import write_start

from tilemesh.align import placement
from tilemesh.align.config import AlignConfig, load
from tilemesh.align.job import fit
from tilemesh.align.rank import train_here
from tilemesh.cli.commands.plan.grade import grade_run
from tilemesh.cli.main import main
from tilemesh.comm import run_threads
from tilemesh.core.calibration import Calibration, Rates
from tilemesh.core.errors import UsageError
from tilemesh.core.units import format_seconds
from tilemesh.plan.local import local_cpu
from tilemesh.report import run, run_page
from tilemesh.report.kind_page import Beside
from tilemesh.runs.files import write_text
from tilemesh.runs.folder import new_run, read_summary, write_prediction
from tilemesh.runs.kind import ALIGN
from tilemesh.runs.metrics import STEP, latest
from tilemesh.runs.names import FEEDBACK, SAMPLES, SUMMARY
from tilemesh.runs.phases import predicted_phases
from tilemesh.runs.reader import open_checkpoint

QUICK = (
    "align.task=sort", "align.prompts=4", "align.answers=4", "align.held_out=2", "align.pass_k=2", "train.steps=4",
    "evaluate.every=2", "checkpoint.every=0", "train.trace_steps=0", "train.device=cpu", "plan.precision=fp64",
    "optimizer.name=sgd", "optimizer.lr=0.05", "optimizer.momentum=0",
)  # fmt: skip
SPLIT = "align.placement=split"
AHEAD = "align.placement=one-step-off"
SERIAL = "align.ahead=1"
KEYS = ("loss", "reward", "norm", "kl", "entropy", "age", "answer_tokens", "mismatch")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("start") / "model", "sort", 50)


def on_ranks(start: Path, folder: Path, *sets: str, mesh: str | None = None, **options: Any) -> Path:
    """By threads as ranks: those that train, and those that draw."""
    config: AlignConfig = load(start, sets=[*QUICK, *sets], mesh=mesh)
    if not options.get("resume"):
        new_run(ALIGN, config.training.to_toml(), folder, init=start)
        write_text(folder / FEEDBACK, config.file)
    ranks = config.training.ranks + config.align.ranks_beside
    run_threads(ranks, lambda comm: train_here(config.training, folder, comm, init=start, **options))
    return folder


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [line for line in latest(folder) if line["kind"] == STEP]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    reader = open_checkpoint(folder, None, lambda text: None)
    return {name: reader.whole(name) for name in reader.names if name.startswith("weight:")}


def assert_alike(first: Path, second: Path, exact: bool = False) -> None:
    """Rollouts, losses and weights: to 1e-10 in float64, or bit for bit."""
    ours, theirs = steps_of(first), steps_of(second)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for one, other in zip(ours, theirs, strict=True):
        for key in KEYS:
            assert one[key] == (other[key] if exact else pytest.approx(other[key], abs=1e-10)), (one["step"], key)
    samples = [[{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in
                (folder / SAMPLES).read_text().splitlines()] for folder in (first, second)]  # fmt: skip
    assert samples[0] == samples[1]
    expected = weights_of(second)
    for name, tensor in weights_of(first).items():
        np.testing.assert_allclose(tensor.numpy(), expected[name].numpy(), rtol=0, atol=0 if exact else 1e-10)


def test_ranks_that_only_draw_answers_change_nothing(start: Path, tmp_path: Path) -> None:
    alone = on_ranks(start, tmp_path / "alone")
    assert all(line["norm"] > 0 for line in steps_of(alone))
    split = on_ranks(start, tmp_path / "split", SPLIT)
    assert_alike(split, alone, exact=True)
    assert_alike(on_ranks(start, tmp_path / "more", SPLIT, "align.rollout_ranks=2", mesh="dp=2"), alone)


@pytest.mark.slow
@pytest.mark.parametrize("sets", [("align.algorithm=ppo", "align.minibatches=2", "train.steps=9"), ("lora.rank=4",)])
def test_split_ranks_with_a_critic_tp_and_adapters(start: Path, tmp_path: Path, sets: tuple[str, ...]) -> None:
    alone = on_ranks(start, tmp_path / "alone", *sets)
    assert_alike(on_ranks(start, tmp_path / "split", SPLIT, *sets, mesh="dp=2,tp=2"), alone)


def test_a_batch_ahead_is_what_a_serial_replay_does(start: Path, tmp_path: Path) -> None:
    """Step n trains on answers of the weights before step n - 1, whoever draws them and when."""
    replay = on_ranks(start, tmp_path / "replay", SERIAL)
    assert [line["age"] for line in steps_of(replay)] == [0, 1, 1, 1]
    ahead = on_ranks(start, tmp_path / "ahead", AHEAD)
    assert_alike(ahead, replay, exact=True)
    fresh = on_ranks(start, tmp_path / "fresh")
    assert steps_of(fresh)[-1]["loss"] != steps_of(ahead)[-1]["loss"]


def test_a_run_ahead_that_was_stopped_goes_on_as_if_it_had_not_been(start: Path, tmp_path: Path) -> None:
    """What was being drawn is kept: the weights that drew it are gone."""
    whole = on_ranks(start, tmp_path / "whole", AHEAD)
    parts = on_ranks(start, tmp_path / "parts", AHEAD, stop_after=2)
    on_ranks(start, parts, AHEAD, resume=True)
    ours, theirs = weights_of(parts), weights_of(whole)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert [line["age"] for line in steps_of(parts)] == [0, 1, 1, 1]


@pytest.mark.slow
def test_processes_draw_for_one_another(start: Path, tmp_path: Path) -> None:
    """As `tilemesh align --placement` starts them: one trains, one draws."""
    config = load(start, sets=[*QUICK, AHEAD, "train.steps=2", "evaluate.every=0"])
    folder = fit(config, start, run=tmp_path / "run").folder
    assert [line["age"] for line in steps_of(folder)] == [0, 1]


def test_pairs_are_drawn_by_nobody(start: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    with pytest.raises(UsageError, match=r"align\.placement.*nobody draws answers"):
        load(start, sets=["align.algorithm=dpo", f"align.preferences={file}", SPLIT])


ONE = Rates(matmul_flops_per_s={"fp32": 40e9, "fp64": 20e9}, copy_bytes_per_s=9e9, elementwise_bytes_per_s=8e9,
            exponentials_per_s=2e8, launch_s=8e-6)  # fmt: skip
MACHINE = local_cpu(Calibration("id", "a box", "today", one_core=ONE, all_cores=ONE), 2, 2, 8 << 30)


@pytest.mark.parametrize("sets", [(), (SPLIT,), (AHEAD,)], ids=["colocated", "split", "ahead"])
def test_a_run_is_predicted_shown_beside_its_prediction_and_graded(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...]
) -> None:
    """Seconds by phase and memory of its own placement. Those of ranks that train add up to a step."""
    monkeypatch.setattr(placement, "local_machine", lambda text, machine: MACHINE)
    mesh = None if sets else "dp=2"
    told = placement.predict_feedback(load(start, sets=[*QUICK, *sets], mesh=mesh), ())
    phases = predicted_phases(told)
    assert sum(phases.values()) == pytest.approx(told["step_time_s"])
    assert min(phases["passes"], phases["update"], told["limit_s"]) > 0
    folder = on_ranks(start, tmp_path / "run", *sets, mesh=mesh)
    write_prediction(folder, told)
    page = run_page.render(run.read(folder), Beside())
    assert all(word in page for word in ("predicted", format_seconds(told["step_time_s"])))
    summary = {**read_summary(folder, ALIGN), "predicted": told}
    (folder / SUMMARY).write_text(json.dumps(summary))
    graded = grade_run(str(folder))
    names = {grade.name for grade in graded.grades if grade.measured is not None and grade.predicted is not None}
    assert {"rollout", "update", "peak memory"} <= names
    assert ("peak memory, drawing" in names) == (sets != ())
    assert graded.find("step time").predicted == told["step_time_s"]
    assert (graded.find("step time").bound, graded.find("peak memory").bound) == (0.15, 0.05)


def test_the_best_placement_is_one_that_runs(
    start: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`auto` on two ranks: what it chooses is a run on as many, with the predicted quickest placement."""
    monkeypatch.setattr(placement, "local_machine", lambda text, machine: MACHINE)
    config = load(start, sets=[*QUICK], mesh="dp=2")
    ranked = placement.rank_placements(config, ())
    assert {each.placement.kind for each in ranked} == {"colocated", "split", "one-step-off"}
    for each in ranked:
        chosen = load(start, sets=[*QUICK, *placement.settings_of(each.placement)], mesh="dp=2")
        assert chosen.plan.world + chosen.align.ranks_beside == 2
        assert placement.placement_words(chosen).startswith(each.placement.kind)
    words = ["align", str(start), "--placement", "auto", "--mesh", "dp=2", "--dry-run"]
    assert main([*words, "--set", ",".join(QUICK)]) == 0
    assert f"placement: {ranked[0].placement.kind}" in " ".join(capsys.readouterr().out.split())
