"""Faults that others have shipped, planted one at a time: each is found and named before the second step, and the same
run without it stays silent."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from align_start import write_start

from tilemesh.align import answers, rewards, turns, verifier
from tilemesh.align.config import load
from tilemesh.align.formulas import advantages
from tilemesh.align.formulas.rollout import Rollout
from tilemesh.align.generate import Generator
from tilemesh.align.job import fit
from tilemesh.align.lessons import FeedbackLessons
from tilemesh.align.objective import WEIGHT, FeedbackObjective
from tilemesh.align.prompts import PromptSource
from tilemesh.align.rank import train_here
from tilemesh.align.rewards import Rewards
from tilemesh.align.source import RolloutBatch, RolloutSource
from tilemesh.align.verifier import Scored
from tilemesh.comm import run_threads
from tilemesh.core.errors import RunError
from tilemesh.launch.function import FunctionProcess
from tilemesh.runs.files import write_text
from tilemesh.runs.folder import new_run
from tilemesh.runs.kind import ALIGN
from tilemesh.runs.metrics import STEP, latest
from tilemesh.runs.names import FEEDBACK
from tilemesh.serve.core import EngineCore
from tilemesh.serve.engine import Engine
from tilemesh.serve.scheduler import Scheduler
from tilemesh.train.loop import Progress

QUICK = (
    "align.task=sort", "align.prompts=4", "align.answers=4", "align.held_out=0", "train.steps=3", "evaluate.every=0",
    "checkpoint.every=0", "train.trace_steps=0", "optimizer.lr=1e-2", "train.device=cpu", "align.temperature=0.7",
    "plan.microbatch=4",
)  # fmt: skip
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("start") / "model", "sort", 30)


def changed_rollout(change: Callable[[Rollout], Rollout]) -> Plant:
    """Something done to answers between the engine and training."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = turns.rollout_of
        patch.setattr(answers, "rollout_of", lambda *given: change(real(*given)))

    return plant


def raw_logprobs(patch: pytest.MonkeyPatch) -> None:
    """The model's own log-probabilities instead of those at the temperature that answers were drawn at."""
    real = Generator.answer

    def answer(self: Generator, *given: Any) -> Any:
        completions = real(self, *given)
        raw = []
        for each in completions:
            own = [
                dataclasses.replace(
                    one, logprobs=tuple(token._replace(sampled=token.logprob) for token in one.logprobs)
                )
                for one in each.answers
            ]
            raw.append(dataclasses.replace(each, answers=tuple(own)))
        return raw

    patch.setattr(Generator, "answer", answer)


def stale_pages(patch: pytest.MonkeyPatch) -> None:
    """Prompts that come again find pages that older weights computed."""
    patch.setattr(Scheduler, "renew", lambda self, version: setattr(self, "version", version))
    patch.setattr(EngineCore, "forget_computed", lambda self: None)
    prompts_again(patch)


def prompts_again(patch: pytest.MonkeyPatch) -> None:
    """The same in every batch, and of several pages."""
    engine, case = FeedbackLessons._engine, PromptSource.at
    patch.setattr(FeedbackLessons, "_engine", lambda self: dataclasses.replace(engine(self), page_tokens=2))
    patch.setattr(PromptSource, "at", lambda self, position: case(self, position % 4))


def wake_without_weights(patch: pytest.MonkeyPatch) -> None:
    """The engine goes on with the weights that it began with, under the new number."""
    real = Generator.__init__

    def init(self: Generator, *given: Any) -> None:
        real(self, *given)
        assert self.engine is not None
        for parameter in self.engine.served.model.parameters():
            parameter.data = parameter.data.clone()

    local = Generator.engine_weights

    def weights(self: Generator) -> Any:
        return local(self) if self.engine is None else self.engine.served.model.named_parameters()

    patch.setattr(Generator, "__init__", init)
    patch.setattr(Generator, "engine_weights", weights)


def ends_masked(rollout: Rollout) -> Rollout:
    trainable, versions, logprobs = rollout.trainable.copy(), rollout.versions.copy(), rollout.logprobs.copy()
    ends = rollout.starts[1:] - 1
    trainable[ends], versions[ends], logprobs[ends] = False, -1, 0.0
    return dataclasses.replace(rollout, trainable=trainable, versions=versions, logprobs=logprobs)


def encoded_again(rollout: Rollout) -> Rollout:
    """Decoded and encoded again, some tokens come out as others."""
    tokens = np.where(rollout.trainable & (rollout.tokens == ord("3")), ord("8"), rollout.tokens)
    return dataclasses.replace(rollout, tokens=tokens)


def history_trained(rollout: Rollout) -> Rollout:
    trainable = rollout.trainable.copy()
    trainable[rollout.starts[:-1] + 1] = True
    return dataclasses.replace(rollout, trainable=trainable)


def groups_split(patch: pytest.MonkeyPatch) -> None:
    """A filter drops answers by themselves, and other prompts' fill the batch up."""
    real = RolloutSource._paid

    def answers(self: RolloutSource, *given: Any) -> Any:
        rollout, parts, failures = real(self, *given)
        group = rollout.group.copy()
        group[2] = 1
        return dataclasses.replace(rollout, group=group), parts, failures

    patch.setattr(RolloutSource, "_paid", answers)


def mean_per_microbatch(patch: pytest.MonkeyPatch) -> None:
    """Weights that each microbatch makes for itself."""
    real = RolloutSource._microbatches

    def microbatches(self: RolloutSource, *given: Any) -> Any:
        made = real(self, *given)
        for batch in made:
            batch.tensors[2][WEIGHT] = 1.0 / batch.tensors[2].shape[1]
        return made

    patch.setattr(RolloutSource, "_microbatches", microbatches)


def mean_of_the_right_total(patch: pytest.MonkeyPatch) -> None:
    """The same, so scaled that they add up to what they should."""
    real = RolloutSource._microbatches

    def microbatches(self: RolloutSource, *given: Any) -> Any:
        made = real(self, *given)
        total = sum(float(batch.tensors[2][WEIGHT].sum()) for batch in made)
        for batch in made:
            batch.tensors[2][WEIGHT] = total / len(made) / batch.tensors[2].shape[1]
        return made

    patch.setattr(RolloutSource, "_microbatches", microbatches)


def answers_left_out(patch: pytest.MonkeyPatch) -> None:
    """A filter drops answers by themselves: their tokens count for nothing."""
    real = RolloutSource._weights

    def weights(self: RolloutSource, batch: RolloutBatch, *given: Any) -> Any:
        sequence = batch.rollout.sequence[batch.rollout.trainable]
        return np.where(sequence % 4 == 1, 0.0, real(self, batch, *given))

    patch.setattr(RolloutSource, "_weights", weights)


def answers_exchanged(patch: pytest.MonkeyPatch) -> None:
    """Two answers to different prompts change places between their groups."""
    real = RolloutSource._paid

    def paid(self: RolloutSource, *given: Any) -> Any:
        rollout, *more = real(self, *given)
        group = rollout.group.copy()
        group[[1, 5]] = group[[5, 1]]
        return dataclasses.replace(rollout, group=group), *more

    patch.setattr(RolloutSource, "_paid", paid)


def divided_twice(patch: pytest.MonkeyPatch) -> None:
    """By the number of microbatches, beside the weights."""
    real = FeedbackObjective.policy_loss

    def loss(self: FeedbackObjective, *given: Any, **options: Any) -> Any:
        total, count = real(self, *given, **options)
        return total / self.config.plan.accumulation, count

    patch.setattr(FeedbackObjective, "policy_loss", loss)


def rewards_shifted(patch: pytest.MonkeyPatch) -> None:
    real = Rewards.total
    patch.setattr(Rewards, "total", lambda self, parts: np.roll(real(self, parts), 1))


def rewards_shifted_by_a_token(patch: pytest.MonkeyPatch) -> None:
    real = advantages.token_rewards
    patch.setattr(advantages, "token_rewards", lambda *given: np.roll(real(*given), -1))


def scores_reversed(patch: pytest.MonkeyPatch) -> None:
    """As if in the order in which a pool of workers completed them."""
    real = rewards.score_builtin
    patch.setattr(rewards, "score_builtin", lambda *given: real(*given)[::-1])


def calls_reversed(patch: pytest.MonkeyPatch) -> None:
    real = FunctionProcess.__call__
    patch.setattr(FunctionProcess, "__call__", lambda self, calls: real(self, calls)[::-1])


def failures_paid(patch: pytest.MonkeyPatch) -> None:
    """A parser says that it could not read a score, and gives one."""
    real = verifier.read_parts

    def read_parts(value: Any) -> Scored:
        scored = real(value)
        return Scored({"score": 1.0}, scored.failure) if scored.failure else scored

    patch.setattr(verifier, "read_parts", read_parts)


def nonsense_paid(patch: pytest.MonkeyPatch) -> None:
    """What cannot be parsed counts as right."""
    real = Rewards.total

    def total(self: Rewards, parts: Any) -> Any:
        return np.where(np.isfinite(parts["task"]), real(self, parts), 1.0)

    patch.setattr(Rewards, "total", total)
    one_unparsed(patch)


def one_unparsed(patch: pytest.MonkeyPatch) -> None:
    real = Rewards.verify

    def verify(self: Rewards, items: Any) -> Any:
        paid = real(self, items)
        paid.parts["task"][0] = np.nan
        return paid

    patch.setattr(Rewards, "verify", verify)


def old_version(patch: pytest.MonkeyPatch) -> None:
    """An engine that a resumed run finds at an earlier version."""
    real = Generator.update
    patch.setattr(Generator, "update", lambda self, version: real(self, min(version, 1)))


def completion_order(patch: pytest.MonkeyPatch) -> None:
    real = Engine.generate
    patch.setattr(Engine, "generate", lambda self, *given: reversed(list(real(self, *given))))


FAULTS: dict[str, tuple[Plant, str]] = {
    "raw instead of tempered log-probabilities": (raw_logprobs, "temperature"),
    "stale prefix pages": (stale_pages, "stale pages"),
    "wake without weights": (wake_without_weights, "other weights"),
    "EOS masked with padding": (changed_rollout(ends_masked), "end was masked with padding"),
    "decode and encode again": (changed_rollout(encoded_again), "other tokens"),
    "history trained": (changed_rollout(history_trained), "did not draw"),
    "mean per microbatch": (mean_per_microbatch, "not over the global batch"),
    "division by accumulation twice": (divided_twice, "divided"),
    "reward shifted by one": (rewards_shifted, "shifted by one"),
    "verifier pays for what it cannot parse": (nonsense_paid, "could not be scored"),
    "filter that splits groups": (groups_split, "groups were split"),
    "resumed engine at an old version": (old_version, "engine is behind"),
    "completion order changes the batch": (completion_order, "another prompt"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named_before_the_second_step(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    plant, words = FAULTS[fault]
    plant(monkeypatch)
    # A batch's clipped loss is 0 whatever it is divided by, where ratios are 1 and groups have mean 0.
    more = ["align.algorithm=reinforce"] if fault == "division by accumulation twice" else []
    config = load(start, sets=[*QUICK, *more])
    with pytest.raises(RunError, match=words):
        fit(config, start, run=tmp_path / "run")
    assert len([line for line in latest(tmp_path / "run") if line["kind"] == STEP]) <= 1


def some_encoded_again(rollout: Rollout) -> Rollout:
    """One in 40."""
    tokens, some = rollout.tokens.copy(), np.flatnonzero(rollout.trainable)[3::40]
    tokens[some] ^= 1
    return dataclasses.replace(rollout, tokens=tokens)


def history_as_drawn(rollout: Rollout) -> Rollout:
    """With a log-probability of 0 and the weights' version."""
    versions, first = rollout.versions.copy(), rollout.starts[:-1] + 1
    versions[first] = versions.max()
    return history_trained(dataclasses.replace(rollout, versions=versions))


def function(folder: Path) -> list[str]:
    """Settings of a run whose answers a user's function scores: those of an even length it cannot."""
    file, prompts = folder / "check.py", folder / "prompts.jsonl"
    file.write_text("def score(prompt, answer, case):\n    return 0.5 if len(answer) % 2 else 'no number'\n")
    prompts.write_text("".join(f'{{"prompt": "{number}:"}}\n' for number in range(1000, 1016)))
    return [f"align.task={file}:score", f"align.prompts_file={prompts}", "align.max_tokens=6"]


FURTHER: dict[str, tuple[Plant, str, Sequence[str]]] = {
    "mean per microbatch of the right total": (mean_of_the_right_total, "not over the global batch", ()),
    "filter that leaves answers out": (answers_left_out, "leaves whole groups out", ()),
    "answers exchanged between groups": (answers_exchanged, "exchanged between groups", ()),
    "division by accumulation twice of a loss of 0": (divided_twice, "counts 0.25 times", ("align.kl=off",)),
    "reward a token early": (rewards_shifted_by_a_token, "shifted by one token", ("align.algorithm=ppo",)),
    "scores in another order": (scores_reversed, "order of completion", ()),
    "calls in another order": (calls_reversed, "order of completion", ("function",)),
    "a parser that pays and says that it failed": (failures_paid, "have no score", ("function",)),
    "nothing": (lambda patch: None, "", ("align.kl=off",)),
    "nothing, with a critic": (lambda patch: None, "", ("align.algorithm=ppo",)),
    "nothing, with a filter of groups": (lambda patch: None, "", ("align.algorithm=dapo",)),
    "nothing, with a function": (lambda patch: None, "", ("function",)),
}


@pytest.mark.parametrize("fault", FURTHER)
def test_a_fault_that_leaves_sums_as_they_are_is_found_before_the_first_step(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    plant, words, sets = FURTHER[fault]
    plant(monkeypatch)
    more = function(tmp_path) if "function" in sets else sets
    config = load(start, sets=[*QUICK, "train.steps=2", *more])
    with pytest.raises(RunError, match=words) if words else contextlib.nullcontext():
        fit(config, start, run=tmp_path / "run")
    steps = len([line for line in latest(tmp_path / "run") if line["kind"] == STEP])
    assert steps == (0 if words else 2)


NARROW: dict[str, tuple[Plant, str]] = {
    "raw instead of tempered log-probabilities": (raw_logprobs, "temperature"),
    "stale prefix pages": (stale_pages, "stale pages"),
    "wake without weights": (wake_without_weights, "other weights"),
    "one token in 40 encoded again": (changed_rollout(some_encoded_again), "other tokens"),
    "history trained": (changed_rollout(history_as_drawn), "other tokens"),
    "nothing": (prompts_again, ""),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16-master"])
@pytest.mark.parametrize("fault", NARROW)
def test_a_planted_fault_is_found_where_rounding_and_updates_say_little(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, precision: str
) -> None:
    """In bf16 weights of a few low updates before differ by less than rounding does."""
    plant, words = NARROW[fault]
    plant(monkeypatch)
    config = load(start, sets=[*QUICK, f"plan.precision={precision}", "optimizer.lr=1e-5", "train.steps=2"])
    with pytest.raises(RunError, match=words) if words else contextlib.nullcontext():
        fit(config, start, run=tmp_path / "run")
    steps = len([line for line in latest(tmp_path / "run") if line["kind"] == STEP])
    assert steps <= 1 if words else steps == 2


@pytest.mark.parametrize("is_planted", [True, False])
def test_log_probabilities_are_compared_where_updates_take_those_of_the_engine(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_planted: bool
) -> None:
    """These were compared with themselves. Of two updates of a batch the first is by the weights that drew it."""
    if is_planted:
        raw_logprobs(monkeypatch)
    config = load(start, sets=[*QUICK, "align.old=engine", "align.minibatches=2", "train.steps=4"])
    with pytest.raises(RunError, match="log-probabilities of the engine") if is_planted else contextlib.nullcontext():
        fit(config, start, run=tmp_path / "run")
    lines = [line for line in latest(tmp_path / "run") if line["kind"] == STEP]
    assert len(lines) == (0 if is_planted else 4)
    assert all(line["mismatch"] < 1e-4 for line in lines[::2])


def unequal_batches(patch: pytest.MonkeyPatch) -> None:
    """A replica leaves rows out by itself, and has a microbatch less than the other."""
    real = RolloutSource._microbatches

    def microbatches(self: RolloutSource, *given: Any) -> Any:
        return real(self, *given)[self.mesh.dp.index :]

    patch.setattr(RolloutSource, "_microbatches", microbatches)


@pytest.mark.parametrize("is_planted", [True, False])
def test_unequal_batches_are_found_before_a_replica_waits_for_another(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_planted: bool
) -> None:
    config, folder = load(start, sets=[*QUICK, "train.steps=2"], mesh="dp=2"), tmp_path / "run"
    new_run(ALIGN, config.training.to_toml(), folder, init=start)
    write_text(folder / FEEDBACK, config.file)
    if is_planted:
        unequal_batches(monkeypatch)
    with pytest.raises(RunError, match="would wait for another") if is_planted else contextlib.nullcontext():
        run_threads(2, lambda comm: train_here(config.training, folder, comm, init=start))
    assert len([line for line in latest(folder) if line["kind"] == STEP]) == (0 if is_planted else 2)


@pytest.mark.parametrize("is_planted", [True, False])
def test_a_resumed_run_that_would_skip_prompts_is_found(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_planted: bool
) -> None:
    """A checkpoint that counts a batch which was fetched ahead, and never trained on."""
    config, real = load(start, sets=QUICK), Progress.values
    if is_planted:
        ahead = config.align.rows
        monkeypatch.setattr(
            Progress, "values", lambda self, *given: {**real(self, *given), "position": self.position + ahead}
        )
    folder = fit(config, start, run=tmp_path / "run", stop_after=2).folder
    with pytest.raises(RunError, match="prompts would be skipped") if is_planted else contextlib.nullcontext():
        fit(None, resume=folder)
    assert len([line for line in latest(folder) if line["kind"] == STEP]) == (2 if is_planted else 3)


@pytest.mark.parametrize(
    ("around", "sets"),
    [(None, ""), (None, "align.algorithm=reinforce"), (prompts_again, ""), (one_unparsed, "")],
    ids=["as it is", "without a clip", "prompts again", "one that cannot be parsed"],
)
def test_a_clean_twin_stays_silent(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, around: Plant | None, sets: str
) -> None:
    """What is around each of these faults, without it."""
    if around is not None:
        around(monkeypatch)
    fit(load(start, sets=[*QUICK, sets] if sets else QUICK), start, run=tmp_path / "run")
    assert len([line for line in latest(tmp_path / "run") if line["kind"] == STEP]) == 3
