"""It learns: rewards rise where they say something, and do not where they are shuffled. Most of it is slow."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from align_start import write_start

from tilemesh.align.config import load
from tilemesh.align.formulas.algorithms import ALGORITHMS as ALIGN_ROWS
from tilemesh.align.formulas.algorithms import BASELINES
from tilemesh.align.formulas.weights import WEIGHTINGS
from tilemesh.align.job import fit
from tilemesh.align.rewards import Paid, Rewards
from tilemesh.align.tasks import TASKS, vowels
from tilemesh.data.cases import Case
from tilemesh.runs.metrics import STEP, latest
from tilemesh.serve.engine import Engine
from tilemesh.serve.request import Sampling

COMMON = (
    "evaluate.every=0", "checkpoint.every=0", "train.trace_steps=0", "align.held_out=0", "train.device=cpu",
    "align.kl_coefficient=0",
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def align(start: Path, folder: Path, *sets: str, seed: int = 0) -> list[dict[str, Any]]:
    """The steps of a run."""
    fit(load(start, sets=[*COMMON, f"train.seed={seed}", *sets]), start, run=folder)
    return [line for line in latest(folder) if line["kind"] == STEP]


def gain(lines: list[dict[str, Any]], key: str = "reward") -> tuple[float, float]:
    """At first, and at last: means over some steps, since batches differ."""
    values = [line[key] for line in lines]
    some = max(2, len(values) // 5)
    return float(np.mean(values[:some])), float(np.mean(values[-some:]))


def shuffle_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the verifier had looked at other answers; what is paid on average stays the same."""
    verify, chance = Rewards.verify, np.random.default_rng(0)

    def shuffled(self: Rewards, items: Sequence[Any]) -> Paid:
        paid = verify(self, items)
        return paid._replace(parts={name: chance.permutation(values) for name, values in paid.parts.items()})

    monkeypatch.setattr(Rewards, "verify", shuffled)


BATCH = ("align.prompts=16", "align.answers=16", "optimizer.lr=1e-3", "train.steps=60")
LEARNT = 0.1
"""Of the reward: at least so much more at last than at first; half of it, where rewards are shuffled, is chance."""
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "rloo": ("align.weighting=token",),
    "ppo": ("align.epochs=2", "align.value_coefficient=0.1"),
}


def test_sorting_is_learnt_from_its_score(tmp_path: Path) -> None:
    start = write_start(tmp_path / "start", "sort", 50)
    sets = ("align.task=sort", *BATCH, "align.prompts=8", "align.answers=8", "train.steps=16")
    before, after = gain(align(start, tmp_path / "run", *sets))
    assert after > before + 0.04


@pytest.fixture(scope="module")
def sorter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("start") / "model", "sort", 60)


@pytest.mark.slow
@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(5))
def test_every_algorithm_learns_to_sort_and_nothing_from_shuffled_rewards(
    sorter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, seed: int, is_shuffled: bool
) -> None:
    sets = ("align.task=sort", f"align.algorithm={algorithm}", *BATCH, *ALGORITHMS[algorithm])
    check_learnt(monkeypatch, sorter, tmp_path / "run", seed, is_shuffled, *sets)


def check_learnt(
    monkeypatch: pytest.MonkeyPatch,
    start: Path,
    run: Path,
    seed: int,
    is_shuffled: bool,
    *sets: str,
    least: float = LEARNT,
) -> list[dict[str, Any]]:
    """That the task's own reward rises by `least`, or with shuffled rewards by less than half; the run's steps."""
    if is_shuffled:
        shuffle_rewards(monkeypatch)
    lines = align(start, run, *sets, seed=seed)
    before, after = gain(lines, "reward/task")
    assert after < before + least / 2 if is_shuffled else after > before + least
    return lines


STARTS: dict[str, tuple[int, Callable[[random.Random, Case], str] | None]] = {
    "bandit": (20, lambda chance, case: chance.choice("abcde")),
    "add": (40, None),
    "hackable": (120, lambda chance, case: str(case["answer"]) + chance.choice(["", "", "", " ok"])),
}


@pytest.mark.slow
@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("task", ["bandit", "add"])
def test_a_bandit_and_sums_are_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, seed: int, is_shuffled: bool
) -> None:
    steps, example = STARTS[task]
    start = write_start(tmp_path / "start", task, steps, seed, example=example)
    # Five arms are soon drifted to by chance: a low rate keeps what is learnt apart from it.
    rate = ("optimizer.lr=3e-4",) if task == "bandit" else ()
    check_learnt(monkeypatch, start, tmp_path / "run", seed, is_shuffled, f"align.task={task}", *BATCH, *rate)


@pytest.mark.slow
@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_verifier_that_can_be_hacked_is_and_the_parts_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, is_shuffled: bool
) -> None:
    """It pays for the word ok: the reward goes up, and what was meant does not. Over 80 steps shuffled rewards move the
    model too, by 0.08 of reward either way (one deviation, ten seeds): so more is asked here."""
    steps, example = STARTS["hackable"]
    start = write_start(tmp_path / "start", "hackable", steps, seed, example=example)
    sets = ("align.task=hackable", *BATCH, "align.prompts=8", "optimizer.lr=5e-4", "train.steps=80")
    lines = check_learnt(monkeypatch, start, tmp_path / "run", seed, is_shuffled, *sets, least=0.4)
    if not is_shuffled:
        before, after = gain(lines)
        assert before < 0.6
        assert after > 0.9
        right_before, right_after = gain(lines, "reward/task.right")
        assert right_after < right_before + 0.05


@pytest.mark.parametrize("algorithm", ["grpo", "dr-grpo"])
def test_the_trap_shows_the_length_bias_of_grpo_and_that_dr_grpo_has_none(algorithm: str) -> None:
    """Answers are right three times in ten and stop with chance 0.2 after each token, whether right or not: length is
    neither paid nor punished. What a step does to the logit of stopping is then 0 on average; a mean over each answer's
    tokens makes it negative for wrong answers, which get longer, and positive for right ones. No run could show it as
    surely: lengths that nothing is paid for also drift by chance."""
    chance, answers, longest, stop = np.random.default_rng(0), 16, 16, 0.2
    row, group = ALIGN_ROWS[algorithm], np.repeat(np.arange(20_000), 16)
    right = chance.random(len(group)) < 0.3
    drawn = chance.geometric(stop, len(group))
    length, stops = np.minimum(drawn, longest), drawn <= longest
    advantage = BASELINES[row.baseline](right.astype(np.float64), group)
    sequence = np.repeat(np.arange(len(group)), length)
    first = np.cumsum(length) - length
    weight = WEIGHTINGS[row.weighting](sequence, len(group), longest)[first]  # the same for each token of an answer
    # The gradient of an answer's log-probability by that logit: 1 - stop where it stops, -stop where it goes on.
    score = stops * (1 - stop) - (length - stops) * stop
    for which, sign in ((right, 1), (~right, -1)):
        pull = np.add.reduceat(np.where(which, weight * advantage * score, 0), np.arange(0, len(group), answers))
        in_errors = pull.mean() / (pull.std(ddof=1) / len(pull) ** 0.5)
        assert sign * in_errors > 10 if algorithm == "grpo" else abs(in_errors) < 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_vowels_are_preferred_by_a_reward_model_and_by_dpo(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    start = write_start(
        tmp_path / "start", "vowels", 60, seed, example=lambda chance, case: "".join(chance.choices(LETTERS, k=6))
    )
    lines = []
    for number in range(600):
        words = sorted(("".join(chance.choices(LETTERS, k=6)) for _ in range(2)), key=vowels)
        if vowels(words[0]) < vowels(words[1]):
            prompt = TASKS["vowels"].case(3, number)["prompt"]
            lines.append(json.dumps({"prompt": prompt, "chosen": words[1], "rejected": words[0]}))
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(lines))
    both = (f"align.preferences={pairs}", "align.prompts=32", "optimizer.lr=1e-3", "train.steps=120")
    scored = align(start, tmp_path / "reward", "align.algorithm=reward", *both, seed=seed)
    assert gain(scored, "accuracy")[1] >= 0.95
    align(start, tmp_path / "dpo", "align.algorithm=dpo", *both, seed=seed)
    prompts = [list(TASKS["vowels"].case(9, number)["prompt"].encode()) for number in range(100)]
    shares = []
    for folder in (start, tmp_path / "dpo"):
        with Engine(folder) as engine:
            sampling = Sampling(max_tokens=6, seed=1, stop_tokens=(10,))
            shares.append([vowels(each.text) for each in engine.generate(prompts, sampling)])
    # Both are drawn with the same random numbers: many answers are the same, and decide nothing.
    decided = [ours > theirs for theirs, ours in zip(*shares, strict=True) if ours != theirs]
    assert len(decided) > 20
    assert np.mean(decided) >= 0.8
