"""Learning from feedback on a GPU: the engine and training agree, a resumed run is the run that never stopped."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tilemesh.align.config import load
from tilemesh.align.formulas.rollout import Segment, pack
from tilemesh.align.job import fit
from tilemesh.align.shared import padded_rows, shared_rows
from tilemesh.model.loss import IGNORED
from tilemesh.model.shared_prompts import SharedPrompts
from tilemesh.model.transformer import Transformer
from tilemesh.runs.metrics import STEP, latest
from tilemesh.runs.reader import open_checkpoint

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from align_start import SMALL, write_start

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

QUICK = (
    "align.task=sort", "align.prompts=8", "align.answers=8", "align.held_out=4", "evaluate.every=0",
    "checkpoint.every=0", "train.trace_steps=0", "optimizer.lr=1e-3", "train.device=cuda", "train.steps=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("start") / "model", "sort", 50)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [line for line in latest(folder) if line["kind"] == STEP]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "rloo"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_engine_and_training_agree(start: Path, tmp_path: Path, precision: str, algorithm: str) -> None:
    """By as much as the dtypes explain: `checks.check_mismatch` would end the run. Weights come after every sleep."""
    config = load(
        start, sets=[*QUICK, f"plan.precision={precision}", f"align.algorithm={algorithm}", "evaluate.every=2"]
    )
    lines = steps_of(fit(config, start, run=tmp_path / "run").folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["age"] < config.align.steps_per_batch for line in lines)
    assert all(line["mismatch"] < (1e-3 if precision == "fp32" else 0.1) for line in lines)
    assert any(line["norm"] > 0 for line in lines)


def test_a_resumed_run_is_the_run_that_never_stopped(start: Path, tmp_path: Path) -> None:
    config = load(start, sets=[*QUICK, "train.deterministic=true", "align.epochs=2", "align.invariant=true"])
    whole = fit(config, start, run=tmp_path / "whole").folder
    parts = fit(config, start, run=tmp_path / "parts", stop_after=3).folder
    fit(None, resume=parts)
    readers = [open_checkpoint(folder, None, lambda text: None) for folder in (whole, parts)]
    assert [line["mismatch"] for line in steps_of(whole)] == [0.0] * 4  # exact
    for name in readers[0].names:
        assert torch.equal(readers[0].whole(name), readers[1].whole(name)), name


@pytest.mark.parametrize("length", [40, 3])
def test_one_copy_of_a_prompt_gives_what_a_row_for_each_answer_gives(length: int) -> None:
    """Of prompts of 40 tokens; short ones stay in rows of their own. The error against float64 is that of rows."""
    chance = np.random.default_rng(0)
    prompt = Segment(chance.integers(0, 256, length).tolist())
    drawn = [chance.integers(0, 256, 2 + answer).tolist() for answer in range(6)]
    answers = [Segment(tokens, [-1.0] * len(tokens), [1] * len(tokens)) for tokens in drawn]
    rollout = pack([[prompt, answer] for answer in answers], [0] * 6, ["stop"] * 6)
    config = dataclasses.replace(SMALL, context=64)
    results = []
    for make, device, dtype in (
        (padded_rows, "cpu", torch.float64), (padded_rows, "cuda", torch.float32), (shared_rows, "cuda", torch.float32),
    ):  # fmt: skip
        place = torch.device(device)
        model = Transformer(config, seed=1, dtype=dtype).to(place)
        tokens_BT, targets_BT, places_S4 = make(rollout, range(6), place)
        cache = SharedPrompts(places_S4, place) if len(places_S4) else None
        is_trained = targets_BT != IGNORED
        logprob_N = model(tokens_BT, cache=cache).log_softmax(-1)[is_trained].gather(1, targets_BT[is_trained][:, None])
        logprob_N.sum().backward()
        results.append((len(places_S4), logprob_N.detach().double().cpu(), model.output_weight.grad.double().cpu()))
    assert [bool(count) for count, _, _ in results] == [False, False, length == 40]
    for exact, rows, shared in zip(*(result[1:] for result in results), strict=True):
        assert (shared - exact).abs().max() <= 4 * (rows - exact).abs().max() + 1e-6


def test_it_learns_to_sort(start: Path, tmp_path: Path) -> None:
    sets = [
        *QUICK,
        "align.prompts=16",
        "align.answers=16",
        "optimizer.lr=5e-4",
        "train.steps=60",
        "align.kl_coefficient=0",
    ]
    rewards = [line["reward"] for line in steps_of(fit(load(start, sets=sets), start, run=tmp_path / "run").folder)]
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 1.0
