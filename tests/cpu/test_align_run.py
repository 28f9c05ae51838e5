"""Runs that learn from feedback: their folders, what they are equal to, and how they go on after anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from align_start import write_start

from tilemesh.align.checks import check_position
from tilemesh.align.config import AlignConfig, load, of_run
from tilemesh.align.generate import unpacked_bytes
from tilemesh.align.job import fit
from tilemesh.align.lessons import FeedbackLessons
from tilemesh.align.rank import train_here
from tilemesh.comm import run_threads
from tilemesh.core.errors import RunError, UsageError
from tilemesh.runs.files import write_text
from tilemesh.runs.folder import new_run
from tilemesh.runs.kind import ALIGN
from tilemesh.runs.metrics import STEP, latest
from tilemesh.runs.names import FEEDBACK, ROLLOUTS, SAMPLES
from tilemesh.runs.reader import open_checkpoint
from tilemesh.serve.engine import Engine
from tilemesh.serve.request import Sampling
from tilemesh.train.export import export

QUICK = (
    "align.task=sort", "align.prompts=4", "align.answers=4", "align.held_out=2", "align.pass_k=2", "train.steps=4",
    "evaluate.every=0", "checkpoint.every=0", "train.trace_steps=0", "optimizer.lr=1e-3", "train.device=cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("start") / "model", "sort", 12)


def made(start: Path, *sets: str, mesh: str | None = None) -> AlignConfig:
    return load(start, sets=[*QUICK, *sets], mesh=mesh)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [line for line in latest(folder) if line["kind"] == STEP]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    reader = open_checkpoint(folder, None, lambda text: None)
    return {name: reader.whole(name) for name in reader.names if name.startswith("weight:")}


def assert_same(first: Path, second: Path) -> None:
    ours, theirs = weights_of(first), weights_of(second)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def on_ranks(config: AlignConfig, start: Path, folder: Path) -> Path:
    """By threads as ranks."""
    new_run(ALIGN, config.training.to_toml(), folder, init=start)
    write_text(folder / FEEDBACK, config.file)
    run_threads(config.training.ranks, lambda comm: train_here(config.training, folder, comm, init=start))
    return folder


def test_a_run_is_a_training_run_that_can_be_served_exported_and_shown(start: Path, tmp_path: Path) -> None:
    folder = fit(made(start, "evaluate.every=2"), start, run=tmp_path / "run").folder
    lines = steps_of(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert {"reward", "reward/task", "kl", "entropy", "mismatch", "clipped_low", "clipped_high", "answer_tokens",
            "truncated", "groups_alike", "age"} <= lines[0].keys()  # fmt: skip
    assert all(line["age"] == 0 for line in lines)
    assert all(line["mismatch"] < 1e-4 for line in lines)
    assert {"held_out_reward", "pass_at_k"} <= lines[1].keys()
    assert lines[1]["held_out"] == pytest.approx(-lines[1]["held_out_reward"])
    samples = [json.loads(line) for line in (folder / SAMPLES).read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {2, 4}
    assert of_run(folder).align.task == "sort"
    export(folder, tmp_path / "exported")
    prompts = [list(b"314159>"), list(b"271828>")]
    greedy = Sampling(max_tokens=6, temperature=0)
    with Engine(folder) as ours, Engine(tmp_path / "exported") as theirs:
        answers = [[each.answers[0].tokens for each in engine.generate(prompts, greedy)] for engine in (ours, theirs)]
    assert answers[0] == answers[1]


def test_answers_after_an_update_are_those_of_a_fresh_engine_bit_for_bit(start: Path, tmp_path: Path) -> None:
    """The last batch of rollouts, kept by a run that uses it twice, drawn again by an engine that never saw another."""
    config = made(start, "align.epochs=2", "train.steps=5", "align.invariant=true")
    folder = fit(config, start, run=tmp_path / "run", stop_after=4).folder
    fit(None, resume=folder)
    rollout, _, _ = unpacked_bytes((folder / ROLLOUTS / "batch-00000002.safetensors").read_bytes())
    lessons = FeedbackLessons(config, folder)
    lessons.open()
    assert lessons.prompts is not None
    asked = [lessons.prompts.at(8 + place) for place in range(4)]
    with Engine(folder, step=4, invariant=True) as engine:
        fresh = list(
            engine.generate([each.tokens for each in asked], [lessons.prompts.sampling(each, 4) for each in asked])
        )
    tokens = [token for each in fresh for answer in each.answers for token in (*each.prompt_tokens, *answer.tokens)]
    sampled = [logprob.sampled for each in fresh for answer in each.answers for logprob in answer.logprobs]
    assert rollout.tokens.tolist() == tokens
    assert rollout.logprobs[rollout.trainable].tolist() == sampled
    assert set(rollout.versions[rollout.trainable]) == {5}


@pytest.mark.parametrize(
    "sets",
    [("align.algorithm=grpo",), ("align.algorithm=ppo", "align.minibatches=2", "align.epochs=2", "train.steps=7")],
    ids=["grpo", "ppo"],
)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(start: Path, tmp_path: Path, sets: Sequence[str]) -> None:
    """PPO is stopped in the middle of a batch that is good for four steps."""
    config = made(start, *sets)
    whole = fit(config, start, run=tmp_path / "whole").folder
    parts = fit(config, start, run=tmp_path / "parts", stop_after=2).folder
    fit(None, resume=parts)
    assert_same(whole, parts)
    for ours, theirs in zip(steps_of(whole), steps_of(parts), strict=True):
        assert {key: ours[key] for key in ("loss", "reward", "norm", "entropy")} == {
            key: theirs[key] for key in ("loss", "reward", "norm", "entropy")
        }


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "dapo"])
def test_ranks_and_microbatches_change_nothing(start: Path, tmp_path: Path, algorithm: str) -> None:
    """dp x tp, in float64: the same answers, losses and weights as one process, to 1e-10."""
    sets = (f"align.algorithm={algorithm}", "plan.precision=fp64", "train.steps=3", "align.kl_coefficient=0.05",
            "optimizer.name=sgd", "optimizer.lr=0.05", "optimizer.momentum=0")  # fmt: skip
    alone = on_ranks(made(start, *sets, "plan.microbatch=16"), start, tmp_path / "alone")
    others = {
        "cut": made(start, *sets, "plan.microbatch=2"),
        "dp2tp2": made(start, *sets, "plan.microbatch=4", mesh="dp=2,tp=2"),
    }
    if algorithm == "ppo":
        others["sequence"] = made(start, *sets, "plan.zero=2", "plan.sequence_parallel=true", mesh="dp=2,tp=2")
    for name, config in others.items():
        folder = on_ranks(config, start, tmp_path / name)
        for ours, theirs in zip(steps_of(folder), steps_of(alone), strict=True):
            for key in ("loss", "reward", "norm", "kl", "entropy", "value", "answer_tokens"):
                assert ours[key] == pytest.approx(theirs[key], abs=1e-10), (name, key)
        expected = weights_of(alone)
        for key, tensor in weights_of(folder).items():
            np.testing.assert_allclose(tensor.numpy(), expected[key].numpy(), atol=1e-10, err_msg=f"{name} {key}")


def test_what_does_not_go_together_is_refused_in_a_line(start: Path) -> None:
    for sets, words in [
        (("plan.pp=2",), "not handed from stage to stage"),
        (("plan.zero=3", "plan.dp=2"), "whole weights"),
        (("align.minibatches=3",), "expected a divisor of the 16 answers"),
        (("align.algorithm=dpo",), "no file of pairs"),
        (("align.task=check.py:score",), "names no prompts"),
        (("align.task=srot",), "did you mean 'sort'"),
        (("align.kl=lost",), "did you mean 'loss'"),
    ]:
        with pytest.raises(UsageError, match=words):
            made(start, *sets)
    with pytest.raises(RunError, match="prompts would be skipped"):
        check_position(3, 40, 16)
