"""Runs that learn from feedback: their folders, what they are equal to, and how they go on after anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from align_start import write_start

from tilemesh.align import placement
from tilemesh.align.checks import check_position
from tilemesh.align.config import CONFLICTS, AlignConfig, load, of_run
from tilemesh.align.generate import unpacked_bytes
from tilemesh.align.job import fit
from tilemesh.align.lessons import FeedbackLessons
from tilemesh.align.rank import train_here
from tilemesh.align.source import RolloutSource
from tilemesh.comm import run_threads
from tilemesh.core.conflicts import refusals
from tilemesh.core.errors import RunError, UsageError
from tilemesh.model.huggingface import read_parameters
from tilemesh.parallel.laid import Laid
from tilemesh.report import run, run_page
from tilemesh.report.kind_page import Beside
from tilemesh.runs.files import write_text
from tilemesh.runs.folder import new_run
from tilemesh.runs.kind import ALIGN
from tilemesh.runs.metrics import STEP, latest
from tilemesh.runs.names import FEEDBACK, METRICS, ROLLOUTS, SAMPLES
from tilemesh.runs.reader import open_checkpoint
from tilemesh.serve.engine import Engine
from tilemesh.serve.request import Sampling
from tilemesh.serve.runner import Runner
from tilemesh.train.export import export

QUICK = (
    "align.task=sort", "align.prompts=4", "align.answers=4", "align.held_out=2", "align.pass_k=2", "train.steps=4",
    "evaluate.every=0", "checkpoint.every=0", "train.trace_steps=0", "optimizer.lr=1e-3", "train.device=cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_start(tmp_path_factory.mktemp("start") / "model", "sort", 50)


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


def test_a_run_is_a_training_run_that_can_be_served_exported_and_shown(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_measured(*machine: object) -> None:
        raise UsageError("this machine was not measured")

    monkeypatch.setattr(placement, "local_machine", not_measured)
    result = fit(made(start, "evaluate.every=2"), start, run=tmp_path / "run")
    folder = result.folder
    lines = steps_of(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    timed = {row.name: row for row in result.rows if row.case.get("prompts")}
    share = timed.pop("share outside of rollouts and updates").measured
    medians = [row.measured.median for row in timed.values() if row.measured is not None]
    last = np.median([line["seconds"] for line in lines[2:]])
    assert share is not None
    assert share.n == 2
    assert len(medians) == 3  # rollouts, weights to the engine, updates
    assert sum(medians) + share.median * last == pytest.approx(last, rel=0.5)
    assert {"reward", "reward/task", "kl", "entropy", "mismatch", "clipped_low", "clipped_high", "answer_tokens",
            "truncated", "groups_alike", "age"} <= lines[0].keys()  # fmt: skip
    assert all(line["age"] == 0 for line in lines)
    assert all(line["mismatch"] < 1e-4 for line in lines)
    assert {"held_out_reward", "pass_at_k"} <= lines[1].keys()
    assert lines[1]["held_out"] == pytest.approx(-lines[1]["held_out_reward"])
    samples = [json.loads(line) for line in (folder / SAMPLES).read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {2, 4}
    assert of_run(folder).align.task == "sort"
    page = run_page.render(run.read(folder), Beside())
    assert all(f'id="{name}"' in page for name in ("reward", "samples", "policy", "answers", "phases", "again"))
    assert "step 4" in page
    for line in lines:
        phases = [line[f"seconds/{phase}"] for phase in ("rollout", "reward", "passes", "weight sync")]
        assert min(phases) > 0
        assert sum(phases) < line["seconds"]
    assert "made no prediction" in page
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


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2,zero=1"])
def test_an_update_copies_nothing_to_an_engine_on_the_same_weights(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: str
) -> None:
    """Neither with whole weights nor with a rank's part of them, which stay one memory through the steps."""
    copied, real = list[int](), Runner.write_weights

    def write(self: Runner, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        given, own = dict(tensors), dict(self.model.named_parameters())
        copied.append(sum(tensor.nbytes for name, tensor in given.items() if tensor.data_ptr() != own[name].data_ptr()))
        real(self, given.items())

    monkeypatch.setattr(Runner, "write_weights", write)
    on_ranks(made(start, "train.steps=2", mesh=mesh), start, tmp_path / "run")
    assert copied == [0] * 6  # of two ranks, before both steps and a last look


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


@pytest.mark.parametrize(
    "algorithm", [pytest.param("grpo", marks=pytest.mark.slow), "ppo", pytest.param("dapo", marks=pytest.mark.slow)]
)
def test_ranks_and_microbatches_change_nothing(start: Path, tmp_path: Path, algorithm: str) -> None:
    """dp x tp, in float64: the same answers, losses and weights as one process, to 1e-10."""
    sets = (f"align.algorithm={algorithm}", "plan.precision=fp64", "train.steps=2", "optimizer.name=sgd",
            "optimizer.lr=0.05", "optimizer.momentum=0")  # fmt: skip
    alone = on_ranks(made(start, *sets, "plan.microbatch=16"), start, tmp_path / "alone")
    assert all(line["norm"] > 0 and line["reward"] > 0 for line in steps_of(alone))
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


def test_ppo_with_four_models_is_the_same_on_ranks_and_after_a_stop(start: Path, tmp_path: Path) -> None:
    """Actor, critic with weights of its own, reward model and reference. dp x tp in float64 gives the numbers of one
    process, and a run that was stopped within a batch those of one that was not, bit for bit."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(json.dumps({"prompt": "31>", "chosen": "13", "rejected": "31"}) for _ in range(8)))
    judge = made(start, "align.algorithm=reward", f"align.preferences={pairs}", "align.prompts=4", "train.steps=2")
    fit(judge, start, run=tmp_path / "judge")
    sets = ("align.algorithm=ppo", "align.critic=own", f'align.rewards=["{tmp_path / "judge"}=0.5"]', "align.epochs=2",
            "align.kl_coefficient=0.05", "plan.precision=fp64", "train.steps=4", "align.minibatches=2")  # fmt: skip
    plain = ("optimizer.name=sgd", "optimizer.lr=0.05", "optimizer.momentum=0")
    alone = on_ranks(made(start, *sets, *plain, "plan.microbatch=8"), start, tmp_path / "alone")
    ranks = on_ranks(made(start, *sets, *plain, "plan.microbatch=2", mesh="dp=2,tp=2"), start, tmp_path / "ranks")
    expected, lines = weights_of(alone), steps_of(alone)
    begun = dict(read_parameters(start))
    for name, tensor in begun.items():
        if name != "output.weight":  # which a critic has not
            assert not torch.equal(expected[f"weight:critic.{name}"], tensor.double()), name  # trained
            assert (expected[f"weight:critic.{name}"] - tensor).abs().max() < 1, name  # from the same beginning
    assert all(line["value"] > 0 and f"reward/{tmp_path / 'judge'}" in line for line in lines)
    for ours, theirs in zip(steps_of(ranks), lines, strict=True):
        for key in ("loss", "reward", "norm", "kl", "value"):
            assert ours[key] == pytest.approx(theirs[key], abs=1e-10), key
    for name, tensor in weights_of(ranks).items():
        np.testing.assert_allclose(tensor.numpy(), expected[name].numpy(), atol=1e-10, err_msg=name)
    whole = fit(made(start, *sets), start, run=tmp_path / "whole").folder
    parts = fit(made(start, *sets), start, run=tmp_path / "parts", stop_after=3).folder
    fit(None, resume=parts)
    assert_same(whole, parts)
    with Engine(parts) as engine:  # the critic is no part of what is served
        assert list(engine.generate([list(b"314159>")], Sampling(max_tokens=2)))


def test_an_engine_that_sleeps_between_batches_answers_alike(start: Path, tmp_path: Path) -> None:
    sets = ("evaluate.every=2", "align.dtype=fp32")
    folders = [
        fit(made(start, *sets, f"align.sleep={word}"), start, run=tmp_path / word).folder for word in ("true", "false")
    ]
    assert_same(*folders)


def test_adapters_are_merged_for_the_engine_and_trained_alone(start: Path, tmp_path: Path) -> None:
    """Engine and training agree on every answer, and so do the model that is served and the one that was trained."""
    folder = fit(made(start, "lora.rank=4", "optimizer.lr=1e-2"), start, run=tmp_path / "run").folder
    assert all(name.endswith(("lora_a", "lora_b")) for name in weights_of(folder))
    lines = steps_of(folder)
    assert all(line["mismatch"] < 1e-4 for line in lines)
    assert lines[-1]["kl"] > 0
    with Engine(folder) as engine:
        assert list(engine.generate([list(b"314159>")], Sampling(max_tokens=2)))


def test_adapters_share_their_base_with_the_reference(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 bytes more than the model that is trained, and the numbers of a reference with weights of its own, which is as
    large as the base."""
    more_bytes, real = [], RolloutSource.__init__

    def init(self: RolloutSource, config: AlignConfig, laid: Laid, reference: Any, *others: Any) -> None:
        models = [reference.args[0].module, laid.module]
        theirs, ours = ({each.untyped_storage().data_ptr(): each.nbytes for each in x.parameters()} for x in models)
        more_bytes.append(sum(count for place, count in theirs.items() if place not in ours))
        real(self, config, laid, reference, *others)

    monkeypatch.setattr(RolloutSource, "__init__", init)
    sets = ("lora.rank=4", "optimizer.lr=1e-2", "plan.precision=fp64", "align.algorithm=ppo", "align.epochs=2")
    shared, apart = (
        steps_of(fit(made(start, *sets, *more), start, run=tmp_path / name).folder)
        for name, more in (("shared", ()), ("apart", (f"align.reference={start}",)))
    )
    base = sum(tensor.numel() for _, tensor in read_parameters(start))
    assert more_bytes == [0, 8 * base]
    assert shared[-1]["old_kl"] != 0
    for ours, theirs in zip(shared, apart, strict=True):
        for key in ("loss", "norm", "kl", "reward"):
            assert ours[key] == pytest.approx(theirs[key], abs=1e-12), key


def test_in_exact_mode_the_first_ratio_is_1_for_every_token(start: Path, tmp_path: Path) -> None:
    """Engine and training have the same bits after updates too, whatever is computed beside a token: in microbatches of
    2 rows, beside steps of the engine of up to 7 answers. Without the mode they have not."""
    sets = ("plan.microbatch=2", "align.running=7", "train.steps=2")
    exact, engines, ordinary = (
        steps_of(fit(made(start, *sets, *more), start, run=tmp_path / name).folder)
        for name, more in (
            ("exact", ["align.invariant=true"]),
            ("engines", ["align.invariant=true", "align.old=engine"]),
            ("ordinary", []),
        )
    )
    assert [line["mismatch"] for line in exact] == [0.0] * 2  # log-probabilities of training beside the engine's
    assert [line["old_kl"] for line in engines] == [0.0] * 2  # the ratio to those of the engine
    assert any(line["mismatch"] > 0 for line in ordinary)


@pytest.mark.parametrize(
    "more",
    [
        (),
        pytest.param(("plan.sequence_parallel=true",), marks=pytest.mark.slow),
        pytest.param(("align.algorithm=ppo", "align.critic=own"), marks=pytest.mark.slow),
    ],
    ids=["", "sequence parallel", "critic"],
)
def test_exact_mode_over_two_ranks_of_tp(start: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    """Both sides cut matrices alike, and a sum of two parts is the same in either order. Answers are those of weights
    that have been updated, so the engine's parts are the ones that train."""
    sets = ("align.invariant=true", "plan.microbatch=2", "align.running=7", "train.steps=2", "evaluate.every=2", *more)
    lines = steps_of(on_ranks(made(start, *sets, mesh="tp=2"), start, tmp_path / "exact"))
    assert [line["mismatch"] for line in lines] == [0.0] * 2
    assert any(line["norm"] > 0 for line in lines)
    assert lines[1]["pass_at_1"] >= 0


def test_what_would_add_in_another_order_is_no_exact_mode(start: Path) -> None:
    with pytest.raises(UsageError, match=r"align\.invariant.*plan\.tp=2"):
        made(start, "align.invariant=true", mesh="tp=4")
    with pytest.raises(UsageError, match=r"align\.invariant.*align\.placement=colocated"):
        made(start, "align.invariant=true", "align.placement=split", mesh="tp=2")
    with pytest.raises(UsageError, match=r"align\.invariant.*lora\.rank=0"):
        made(start, "align.invariant=true", "lora.rank=4")
    with pytest.raises(UsageError, match=r"align\.invariant.*train\.compile=false"):
        made(start, "align.invariant=true", "train.compile=true")
    for precision in ("bf16", "fp16"):
        with pytest.raises(UsageError, match=r"align\.invariant.*plan\.precision=fp32 or plan\.precision=bf16-master"):
            made(start, "align.invariant=true", f"plan.precision={precision}")


def test_the_engines_own_log_probabilities_may_be_the_old_ones(start: Path, tmp_path: Path) -> None:
    """With one program for both, these are the same numbers; with two, as near as rounding is.

    A batch's later updates have weights of their own, which nothing of the engine's is to be compared with.
    """
    config = ("align.epochs=2", "align.invariant=true")
    first, second = (
        steps_of(fit(made(start, *config, f"align.old={old}"), start, run=tmp_path / old).folder)
        for old in ("trainer", "engine")
    )
    assert [line.get("mismatch") for line in second] == [0, None, 0, None]
    for ours, theirs in zip(first, second, strict=True):
        assert ours["reward"] == theirs["reward"]
        assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-3)


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_bit_for_bit(start: Path, tmp_path: Path) -> None:
    """At several moments, whatever it was doing then: rollouts, passes, updates or writing."""
    sets = ("align.algorithm=ppo", "align.minibatches=2", "align.epochs=2", "train.steps=10", "checkpoint.every=1")
    config = made(start, *sets)
    whole = fit(config, start, run=tmp_path / "whole").folder
    for number, wait_s in enumerate((0.0, 0.05, 0.13)):
        folder = tmp_path / f"killed-{number}"
        command = [sys.executable, "-m", "tilemesh", "align", str(start), "--out", str(folder)]
        command += ["--set", ",".join((*QUICK, *sets))]
        process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
        while process.poll() is None and len(steps_of(folder) if (folder / METRICS).is_file() else ()) < 2 + number:
            time.sleep(0.01)
        time.sleep(wait_s)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        fit(None, resume=folder)
        assert_same(whole, folder)


def test_what_does_not_go_together_is_refused_in_a_line(start: Path) -> None:
    for sets, words in [
        (("plan.pp=2",), "not handed from stage to stage"),
        (("plan.zero=3", "plan.dp=2"), "whole weights"),
        (("align.minibatches=3",), "expected a divisor of the 16 answers"),
        (("align.algorithm=dpo",), "no file of pairs"),
        (("align.task=check.py:score",), "names no prompts"),
        (("align.task=srot",), "did you mean 'sort'"),
        (("align.answers=1",), "an advantage of 0"),
        (("align.kl=lost",), "did you mean 'loss'"),
        (("align.algorithm=dapo", "align.kl_coefficient=0.05"), "counts nowhere"),
        (("align.critic=own",), "no critic"),
        (("align.algorithm=reward", f"align.preferences={start}", "align.critic=own"), "no critic"),
        (("align.algorithm=rloo", f"align.reference={start}"), "counts for nothing"),
        (("align.algorithm=ipo", f"align.preferences={start}", "align.beta=0"), "1 / \\(2 beta\\)"),
        (("align.dtype=fp31",), "did you mean 'fp32'"),
    ]:
        with pytest.raises(UsageError, match=words):
            made(start, *sets)
    config = made(start)
    apart = replace(config, training=replace(config.training, plan=replace(config.plan, dp=2, ep=2)))
    assert [words.instead for words in refusals(CONFLICTS, apart)] == ["plan.ep=1"]
    with pytest.raises(RunError, match="prompts would be skipped"):
        check_position(3, 40, 16)
