"""Placements that run: ranks that only draw answers change nothing; one batch ahead is what a serial replay does."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from align_start import write_start

from tilemesh.align import lessons, placement
from tilemesh.align import rows as phases_of_a_run
from tilemesh.align.config import AlignConfig, load
from tilemesh.align.formulas.rollout import Segment, pack
from tilemesh.align.generate import Generator, packed_bytes, unpacked_bytes
from tilemesh.align.job import fit
from tilemesh.align.rank import train_here
from tilemesh.align.record import BATCH, HELD_OUT, WEIGHTS, EngineEvent, note_begin, note_drawn, read_events
from tilemesh.align.source import RolloutSource, _joined
from tilemesh.align.stream import AnswerStream
from tilemesh.cli.commands.plan.grade import grade_run
from tilemesh.cli.main import main
from tilemesh.comm import run_threads
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.comm.runtime.observe import Note, Seen
from tilemesh.core.calibration import Calibration, Rates
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.placement import KINDS, reshard_bytes
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.units import format_seconds
from tilemesh.data.tokenizer import Bytes
from tilemesh.model.families.book import read_config
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.apply import lay, lay_beside
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.mesh import Mesh
from tilemesh.plan.local import local_cpu
from tilemesh.report import run, run_page
from tilemesh.report.kind_page import Beside
from tilemesh.runs.files import write_text
from tilemesh.runs.folder import new_run, read_summary, write_prediction
from tilemesh.runs.kind import ALIGN
from tilemesh.runs.metrics import STEP, latest
from tilemesh.runs.names import CHECKPOINTS, DRAWING, FEEDBACK, METRICS, ROLLOUTS, SAMPLES, SUMMARY
from tilemesh.runs.phases import predicted_phases
from tilemesh.runs.reader import open_checkpoint
from tilemesh.serve.config import EngineConfig
from tilemesh.serve.jobs import AnswerPart, PromptJob
from tilemesh.serve.load import ServedModel, load_served
from tilemesh.serve.request import FinishReason, Sampling

QUICK = (
    "align.task=sort", "align.prompts=4", "align.answers=4", "align.held_out=2", "align.pass_k=2", "train.steps=4",
    "evaluate.every=2", "checkpoint.every=0", "train.trace_steps=0", "train.device=cpu", "plan.precision=fp64",
    "optimizer.name=sgd", "optimizer.lr=0.05", "optimizer.momentum=0",
)  # fmt: skip
SPLIT = "align.placement=split"
AHEAD = "align.placement=one-step-off"
SERIAL = "align.ahead=1"
STREAM = ("align.placement=asynchronous", "align.max_tokens=24", "train.steps=6", "checkpoint.every=1",
          "checkpoint.keep=9")  # fmt: skip
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


def test_a_reference_computes_with_the_kernels_of_what_is_trained(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slower program would be a fifth of its pass."""
    seen: list[bool] = []

    def note(model: Transformer, laid: Laid) -> Laid:
        seen.append(model.kernels == laid.model.kernels)
        return lay_beside(model, laid)

    monkeypatch.setattr(lessons, "lay_beside", note)
    on_ranks(start, tmp_path / "run", "train.steps=1", "evaluate.every=0", "align.held_out=0")
    assert seen == [True]


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
    files = [folder / SAMPLES for folder in (first, second)]
    samples = [[{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in
                (file.read_text().splitlines() if file.is_file() else ())] for file in files]  # fmt: skip
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


def test_a_run_ahead_that_was_killed_goes_on_as_if_it_had_not_been(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint comes with the batch that was under way: nobody could draw it again."""
    sets = ("align.ahead=1", "align.held_out=0", "checkpoint.every=1")
    whole = on_ranks(start, tmp_path / "whole", *sets)
    paid, batches = RolloutSource._paid, list[Sequence[bytes]]()

    def die(source: RolloutSource, pieces: Sequence[bytes]) -> Any:
        batches.append(pieces)
        if len(batches) == 3:
            raise KeyError("killed")
        return paid(source, pieces)

    monkeypatch.setattr(RolloutSource, "_paid", die)
    with pytest.raises(Exception, match="killed"):
        on_ranks(start, tmp_path / "parts", *sets)
    parts = on_ranks(start, tmp_path / "parts", *sets, resume=True)
    ours, theirs = weights_of(parts), weights_of(whole)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert [line["age"] for line in steps_of(parts)] == [0, 1, 1, 1]


def test_what_was_drawn_under_other_settings_is_not_trained_on(start: Path, tmp_path: Path) -> None:
    """A resumed run with another learning rate says so, and draws anew by the weights of its checkpoint."""
    more, said = (AHEAD, "align.held_out=0", "train.steps=3"), list[Any]()
    run = on_ranks(start, tmp_path / "run", *more, stop_after=1)
    (kept,) = (run / ROLLOUTS).glob("drawn-*")
    on_ranks(start, run, *more, "optimizer.lr=0.01", resume=True, emit=said.append)
    assert not kept.is_file()
    assert [line["age"] for line in steps_of(run)] == [0, 0, 1]
    assert "batches that were drawn under other settings are deleted: 1" in [each.get("text") for each in said]


def test_an_asynchronous_run_is_what_a_serial_replay_of_it_does(start: Path, tmp_path: Path) -> None:
    """Also one that was stopped and went on; and with two engines, several steps per batch and a critic."""
    run = on_ranks(start, tmp_path / "run", *STREAM, stop_after=3)
    on_ranks(start, run, *STREAM, resume=True)
    assert [line["step"] for line in steps_of(run)] == list(range(1, 7))
    assert all(line["oldest"] <= 2 for line in steps_of(run))
    assert_alike(on_ranks(start, tmp_path / "replay", *STREAM[1:], f"align.repeats={run}"), run, exact=True)
    more = (*STREAM[1:], "align.algorithm=ppo", "align.minibatches=4", "align.epochs=1", "checkpoint.every=0",
            "train.steps=9")  # fmt: skip
    two = partial(on_ranks, start, tmp_path / "two", STREAM[0], *more, "align.rollout_ranks=2", mesh="dp=2")
    two(stop_after=5)
    run = two(resume=True)
    assert read_events(run, 2).keys() == {0, 2}  # what was evaluated within batch 1 began none of it again
    replay = on_ranks(start, tmp_path / "again", *more, f"align.repeats={run}", mesh="dp=2")
    assert_alike(replay, run, exact=True)
    with pytest.raises(UsageError, match="begin a new run"):
        on_ranks(start, replay, *more, "train.steps=8", f"align.repeats={run}", mesh="dp=2", resume=True)


def test_conversations_are_repeated(tmp_path: Path) -> None:
    """What an environment says comes before a step of the engine too, whenever it has said it."""
    start, file = write_start(tmp_path / "start", "vowels", 40), tmp_path / "talk.py"
    file.write_text("def reply(prompt, turns, case):\n    return 'ab:' if len(turns) < 3 else None\n")
    more = ("align.task=vowels", f"align.environment={file}:reply", "align.turns=3", "align.max_tokens=9",
            "align.prompts=8", "align.deadline_s=60")  # fmt: skip
    run = on_ranks(start, tmp_path / "run", STREAM[0], *more)
    with (run / DRAWING).open("a") as cut_off:
        cut_off.write('{"kind": "bat')
    events = [each for _, own in read_events(run, 1).items() for each in own[0]]
    assert {each.turn for each in events if each.kind == BATCH} >= {0, 1}
    assert_alike(on_ranks(start, tmp_path / "replay", *more, f"align.repeats={run}"), run, exact=True)


def test_weights_change_within_answers(start: Path, tmp_path: Path) -> None:
    """By a record made here. Every token is of the version that it says: its log-probability is that of a model with
    the weights of that checkpoint."""
    happened = [(0, WEIGHTS, 1), (0, BATCH, 0), (3, BATCH, 1), (7, WEIGHTS, 2), (7, BATCH, 2), (10, WEIGHTS, 3),
                (10, BATCH, 3), (14, WEIGHTS, 4)]  # fmt: skip
    events = [EngineEvent(*each) for each in happened]
    note_begin(tmp_path, 0, 1)
    note_drawn(tmp_path, BATCH, 3, [events])
    sets = (*STREAM[2:], "align.max_tokens=6", "train.steps=4", "align.held_out=0", f"align.repeats={tmp_path}")
    run = on_ranks(start, tmp_path / "run", *sets)
    assert_alike(on_ranks(start, tmp_path / "beside", STREAM[0], *sets), run, exact=True)
    models = {1: load_served(start, dtype=torch.float64).model}
    for version in range(2, 5):
        reader = open_checkpoint(run, version - 1, lambda text: None)
        models[version] = Transformer(models[1].config, device="cpu", dtype=torch.float64).requires_grad_(False)
        for name, parameter in models[version].named_parameters():
            parameter.copy_(reader.weight(name))
    both = 0
    for file in sorted((run / ROLLOUTS).glob("drawn-*")):
        rollout, _, _ = unpacked_bytes(file.read_bytes())
        both += int((rollout.first_version < np.maximum.reduceat(rollout.versions, rollout.starts[:-1])).sum())
        for places in map(rollout.row, range(len(rollout))):
            tokens, versions = torch.from_numpy(rollout.tokens[places]), rollout.versions[places]
            for version in {*versions[rollout.trainable[places]].tolist()}:
                logits_TV = models[version](tokens[None, :-1])[0]
                logprob_T = logits_TV.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()
                at = np.flatnonzero(versions == version)
                np.testing.assert_allclose(rollout.logprobs[places][at], logprob_T[at - 1], rtol=0, atol=1e-10)
    assert both > 0
    for place, (event, words) in enumerate(
        [(EngineEvent(99, WEIGHTS, 5), "nothing to do at"), (EngineEvent(2, WEIGHTS, 5), "ends")]
    ):
        note_begin(tmp_path, 0, 1)
        note_drawn(tmp_path, BATCH, 3, [[*events[:2], event]])
        with pytest.raises(RunError, match=words):
            on_ranks(start, tmp_path / f"unlike-{place}", *sets)


def test_engines_that_are_cut_otherwise_than_training(start: Path, tmp_path: Path) -> None:
    """Training on tp 2, an engine on each rank: the numbers of one process. What an update moves is HybridFlow's volume
    of the matrices, which are what tp cuts."""
    alone = on_ranks(start, tmp_path / "alone")
    assert_alike(on_ranks(start, tmp_path / "cut", "align.rollout_tp=1", mesh="dp=1,tp=2"), alone)
    config = dataclasses.replace(read_config(start), kv_heads=4)  # fewer than ranks are had by several of them

    def moved(comm: Communicator, tp: int, ranks: int) -> int:
        received = [0]

        def observer(seen: Seen) -> Note:
            others = tp // ranks - 1  # of an exchange's bytes, a rank has its own
            share = seen.nbytes * others // (others + 1)
            return lambda began, ended, calls: received.__setitem__(0, received[0] + share * calls)

        comm.observe(observer, every=1)
        laid = lay(Transformer(config, seed=3), Mesh(comm, tp=tp), ParallelPlan(tp=tp))
        served = ServedModel("", Transformer(config, device="meta"), Bytes(), frozenset())
        generator = Generator(laid, served, torch.float32, EngineConfig(running=2), ranks=ranks)
        received[0] = 0
        generator.update(1)
        update = received[0]
        whole = dict(Transformer(config, seed=3).named_parameters())
        if ranks == 1:
            assert generator.engine is not None
            for name, tensor in generator.engine.served.model.named_parameters():
                assert torch.equal(tensor, whole[name]), name
        generator.close()
        return update

    cut = sum(4 * each.numel() for each in Transformer(config, device="meta").parameters() if each.dim() > 1)
    for tp, ranks in ((2, 1), (4, 2), (4, 1)):
        assert run_threads(tp, partial(moved, tp=tp, ranks=ranks)) == [reshard_bytes(cut, tp, 1, ranks)] * tp


@pytest.mark.slow
def test_processes_draw_for_one_another(start: Path, tmp_path: Path) -> None:
    """As `tilemesh align --placement` starts them: one trains, one draws."""
    config = load(start, sets=[*QUICK, AHEAD, "train.steps=2", "evaluate.every=0"])
    folder = fit(config, start, run=tmp_path / "run").folder
    assert [line["age"] for line in steps_of(folder)] == [0, 1]


@pytest.mark.slow
def test_an_asynchronous_run_that_was_killed_is_repeated(start: Path, tmp_path: Path) -> None:
    """Batches that had been drawn are trained on again, engines begin anew, and all of it is a serial replay's."""
    sets, killed = (*STREAM[1:], "train.steps=8", "checkpoint.every=3"), tmp_path / "killed"
    command = [sys.executable, "-m", "tilemesh", "align", str(start), "--out", str(killed)]
    command += ["--placement", "asynchronous", "--set", ",".join((*QUICK, *sets))]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    while process.poll() is None and len(steps_of(killed) if (killed / METRICS).is_file() else ()) < 5:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    first = [line for line in steps_of(killed) if line["step"] <= 4]
    fit(None, resume=killed)
    again = [line for line in steps_of(killed) if line["step"] <= 4]
    assert [line["loss"] for line in again] == [line["loss"] for line in first]
    (killed / SAMPLES).unlink()  # what was evaluated twice stands there twice
    replay = on_ranks(start, tmp_path / "replay", *sets, f"align.repeats={killed}")
    (replay / SAMPLES).unlink()
    assert_alike(replay, killed, exact=True)


def test_what_does_not_fit_a_placement_is_refused(start: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    with pytest.raises(UsageError, match=r"align\.placement.*nobody draws answers"):
        load(start, sets=["align.algorithm=dpo", f"align.preferences={file}", SPLIT])
    for sets, mesh, words in [
        ((AHEAD, "align.ahead=2"), "dp=1", "older than they must be"),
        ((STREAM[0], "align.ahead=1"), "dp=1", "as it does one step off"),
        (("align.rollout_tp=2",), "dp=1", "whole parts of ranks that train"),
        ((SPLIT, "align.rollout_tp=2"), "dp=1,tp=2", "is one rank"),
        (("align.rollout_tp=1", "align.invariant=true", "plan.precision=fp32"), "dp=1,tp=2", "are other bits"),
        ((SPLIT, f"align.repeats={tmp_path}"), "dp=1", "takes its steps by itself"),
    ]:
        with pytest.raises(UsageError, match=words):
            load(start, sets=[*QUICK, *sets], mesh=mesh)


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
    assert {each.placement.kind for each in ranked} == set(KINDS)
    for each in ranked:
        chosen = load(start, sets=[*QUICK, *placement.settings_of(each.placement)], mesh="dp=2")
        assert chosen.plan.world + chosen.align.ranks_beside == 2
        assert placement.placement_words(chosen).startswith(each.placement.kind)
    words = ["align", str(start), "--placement", "auto", "--mesh", "dp=2", "--dry-run"]
    assert main([*words, "--set", ",".join(QUICK)]) == 0
    assert f"placement: {ranked[0].placement.kind}" in " ".join(capsys.readouterr().out.split())


def source_in(folder: Path, config: AlignConfig, drawing: Any = None) -> RolloutSource:
    """Without a model, prompts or ranks."""
    laid: Any = SimpleNamespace(mesh=SimpleNamespace(comm=SimpleNamespace(rank=0)), module=torch.nn.Linear(1, 1))
    nothing: Any = SimpleNamespace(fingerprint=str)
    answers = SimpleNamespace(turns=SimpleNamespace(prompts=nothing), timed=nothing)
    return RolloutSource(
        config, laid, None, drawing or SimpleNamespace(answers=answers), nothing, nothing, nothing, folder
    )


def test_batches_that_were_drawn_outlast_the_first_one_that_is_read_again(start: Path, tmp_path: Path) -> None:
    """Where each is good for several steps: nobody could draw them again."""
    source = source_in(tmp_path, load(start, sets=[*QUICK, STREAM[0], "align.minibatches=4"]))
    (tmp_path / ROLLOUTS).mkdir()
    files = [source._early_file(number) for number in range(9)]
    for file in files:
        file.touch()
    (tmp_path / CHECKPOINTS / "step-00000013").mkdir(parents=True)
    source._forget_files(4)
    assert [file.is_file() for file in files] == [False] * 3 + [True] * 6


def test_parts_of_pay_stay_beside_their_answers() -> None:
    """Where one engine's answers have a part that another's lack."""
    rollouts = [pack([[Segment([5]), Segment([row], [-1.0], [1])]] * 2, [row] * 2, ["stop"] * 2) for row in (0, 1)]
    parts: list[Any] = [{"task": np.zeros(2)}, {"task": np.ones(2), "task.format": np.array([3.0, 4.0])}]
    for order in (slice(None), slice(None, None, -1)):
        pieces = [packed_bytes(rollout, own, []) for rollout, own in zip(rollouts, parts, strict=True)][order]
        rollout, joined, _ = _joined([b"", *pieces])
        for name, expected in [("task", [0, 0, 1, 1]), ("task.format", [math.nan, math.nan, 3, 4])]:
            both = [expected[2 * row : 2 * row + 2] for row in (0, 1)][order]
            np.testing.assert_array_equal(joined[name], np.concatenate(both))
        assert [len(values) for values in joined.values()] == [len(rollout)] * 2


def test_a_distance_that_is_paid_is_estimated_as_was_set(start: Path, tmp_path: Path) -> None:
    rollout = pack([[Segment([5]), Segment([7], [-2.0], [1])]], [0], ["stop"])
    arrays = {"old": np.array([-2.0]), "reference": np.array([-3.0]), "value": np.zeros(1)}
    for name, distance in [("k1", 1.0), ("k2", 0.5), ("k3", math.exp(-1))]:
        sets = ("align.algorithm=rloo", "align.baseline=zero", "align.kl_coefficient=0.5", f"align.estimator={name}")
        source = source_in(tmp_path, load(start, sets=[*QUICK, SPLIT, *sets]))
        batch = source._advantages(rollout, {}, 0, arrays, 1)
        assert batch.advantage.tolist() == pytest.approx([-0.5 * distance]), name


# ---- a stream whose engine takes its steps when told to --------------------------------------------------------------


class SteppedEngine:
    """Answers nothing by itself: a test says when a step begins, and what ends in it."""

    version, alive = 0, True

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.tells: list[Callable[[AnswerPart], None]] = []
        self.step: Callable[[int, bool], None] = lambda taken, busy: None

    def drive(self, before: Callable[[int, bool], None]) -> None:
        self.step = before

    def together(self) -> threading.RLock:
        return self.lock

    def submit(self, tokens: list[int], sampling: Any, tell: Any, **options: Any) -> PromptJob:
        self.tells.append(tell)
        return PromptJob(tokens, sampling, 0, tell)

    def answer(self, words: str, finish: FinishReason = FinishReason.STOP) -> None:
        """To the prompt that waits longest."""
        self.tells.pop(0)(AnswerPart(0, words, (1,), (), finish, error=words))

    def idle(self, *given: Any) -> None:
        pass

    abort = wake_up = change_weights = close = idle


class SpokenPart:
    """One prompt of a batch; its conversation goes on for so many turns."""

    def __init__(self, number: int, turns: int, hold: threading.Event) -> None:
        self.number, self.turns, self.hold, self.texts = number, turns, hold, list[str]()

    def asked(self, turn: int) -> list[Any]:
        return [([1], Sampling())]

    def add(self, turn: int, completions: Any) -> None:
        self.texts += [completion.answers[0].text for completion in completions]

    def hear(self, turn: int) -> bool:
        return turn < self.turns

    def scored(self) -> bytes:
        assert self.hold.wait(10)
        return f"{self.number}: {' '.join(self.texts)}".encode()


@dataclasses.dataclass
class Spoken:
    """In place of `Answers`."""

    turns: int = 1
    hold: threading.Event = dataclasses.field(default_factory=threading.Event)

    def batch(self, number: int) -> int:
        return number

    def begin(self, batch: int, part: int, parts: int) -> SpokenPart:
        return SpokenPart(batch, self.turns, self.hold)


def stepped(turns: int = 1, is_held: bool = False) -> tuple[SteppedEngine, AnswerStream, Spoken]:
    engine, spoken = SteppedEngine(), Spoken(turns)
    if not is_held:
        spoken.hold.set()
    return engine, AnswerStream(cast(Any, engine), cast(Any, spoken), 0, 1), spoken


def test_answers_of_a_life_that_ended_are_in_no_batch_of_the_next() -> None:
    engine, stream, spoken = stepped(is_held=True)
    stream.begin(0)
    stream.give(1, {}, 2)
    engine.step(0, False)
    engine.answer("batch 0")  # whose scoring holds up what comes after it
    engine.answer("of the first life")
    stream.begin(1)
    stream.give(1, {}, 2)
    engine.step(5, False)
    spoken.hold.set()
    stream._beside.submit(int).result(10)
    engine.answer("of the second")
    assert stream.collect(BATCH, 1) == b"1: of the second"
    stream.close()


def test_what_a_repeated_run_never_drew_is_not_waited_for() -> None:
    engine, stream, _ = stepped()
    stream.begin(0, [EngineEvent(0, WEIGHTS, 1), EngineEvent(0, BATCH, 0)])
    stream.give(1, {}, 3)
    engine.step(0, False)
    engine.answer("yes")
    assert stream.collect(BATCH, 0) == b"0: yes"
    with pytest.raises(RunError, match="ended before batch 1 was drawn"):
        stream.collect(BATCH, 1)
    stream.close()


def begun_again(turns: int, *more: tuple[Any, ...]) -> tuple[SteppedEngine, AnswerStream]:
    """Two batches, and what follows."""
    engine, stream, _ = stepped(turns)
    stream.begin(0, [EngineEvent(*each) for each in ((0, WEIGHTS, 1), (0, BATCH, 0), (0, BATCH, 1), *more)])
    stream.give(1, {}, 2)
    engine.step(0, False)
    return engine, stream


def test_a_record_that_ends_between_turns_is_repeated_to_its_end() -> None:
    engine, stream = begun_again(2, (5, BATCH, 0, 1))
    engine.answer("yes")
    engine.answer("no")
    stream._beside.submit(int).result(10)
    engine.step(5, False)
    engine.answer("indeed")
    stream.wait_stalled()
    assert stream.collect(BATCH, 0) == b"0: yes indeed"
    with pytest.raises(RunError, match="ended before batch 1 was drawn"):
        stream.collect(BATCH, 1)
    stream.close()


@pytest.mark.parametrize(
    ("turns", "then", "finish", "words"),
    [
        (1, (5, BATCH, 0, 1), FinishReason.STOP, "its conversations ended"),
        (2, (5, WEIGHTS, 2), FinishReason.STOP, "weights of version 2 before batch 0 ends"),
        (1, (5, BATCH, 0, 1), FinishReason.ERROR, "could not answer: yes"),
    ],
    ids=["ends too soon", "goes on", "fails"],
)
def test_conversations_that_go_otherwise_than_recorded_are_not_waited_for(
    turns: int, then: tuple[Any, ...], finish: FinishReason, words: str
) -> None:
    engine, stream = begun_again(turns, then)

    def drawn() -> bytes:
        stream.wait_stalled()
        return stream.collect(BATCH, 0)

    engine.answer("yes", finish)
    stream._beside.submit(int).result(10)
    step = threading.Thread(target=engine.step, args=(5, False), daemon=True)
    step.start()
    with pytest.raises(RunError, match=words):
        drawn()
    stream.close()
    step.join(10)


def test_what_is_held_out_at_another_step_than_recorded_is_not_waited_for() -> None:
    """The record went from weights of version 1 to those of version 3."""
    engine, stream, _ = stepped()
    stream.begin(0, [EngineEvent(0, WEIGHTS, 1), EngineEvent(0, BATCH, 0), EngineEvent(5, WEIGHTS, 3)])
    stream.give(1, {}, 2)
    engine.step(0, False)
    stream.give(2, {}, 2)
    step = threading.Thread(target=engine.step, args=(5, False), daemon=True)
    step.start()
    stream.ask_held_out(2)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(stream.collect, HELD_OUT, 2)
        try:
            with pytest.raises(RunError, match="want weights of version 3 before held out 2 ends"):
                asked.result(5)
        finally:
            stream._problem = RunError("the test is over")
    stream.close()
    step.join(10)


def test_why_a_prompt_cannot_be_asked_is_said(start: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "{"long" * 9}"}}\n')
    (tmp_path / "pay.py").write_text("def score(prompt, answer, case):\n    return 1\n")
    sets = ("align.held_out=0", f"align.prompts_file={file}", f"align.task={tmp_path / 'pay.py'}:score")
    with pytest.raises(UsageError, match="a prompt of 36 tokens and answers of up to 24"):
        on_ranks(start, tmp_path / "run", *STREAM, *sets)


def test_a_closed_stream_asks_nothing_more() -> None:
    """Where a turn ended while it was closed."""
    engine, stream, _ = stepped(turns=2)
    stream.begin(0)
    stream.give(1, {}, 1)
    engine.step(0, False)
    engine.answer("yes")
    stream.close()
    engine.step(5, False)
    assert engine.tells == []


@pytest.mark.parametrize(("kind", "is_beside"), [("split", False), ("asynchronous", True)])
def test_waiting_for_rollouts_is_not_held_against_drawing_them(
    kind: str, is_beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: dict[str, float] = dict.fromkeys(("rollout", "weight sync", "update"), 0.5)
    expected = SimpleNamespace(seconds=phases, limits=phases)
    monkeypatch.setattr(phases_of_a_run, "predict_run_placement", lambda config, gpus: (expected, None))
    line = {"kind": "step", "seconds": 1.0, "data_s": 0.1, "seconds/rollout": 0.001}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line | {"step": step}) + "\n" for step in range(1, 5)))
    align = SimpleNamespace(
        is_of_pairs=False, steps_per_batch=1, algorithm="grpo", prompts=2, answers=2, longest=8, running=4,
        invariant=False, ranks_beside=1, placement=kind,
    )  # fmt: skip
    config: Any = SimpleNamespace(align=align, plan=SimpleNamespace(world=1, precision="fp32"))
    first, _, updates, _ = phases_of_a_run.phase_rows(config, tmp_path, [])
    assert first.name == ("waiting for rollouts of a batch" if is_beside else "rollouts of a batch")
    assert (first.predicted is None, first.limit is None) == (is_beside, is_beside)
    assert ("how long they wait" in first.missing.get("limit", "")) == is_beside
    assert updates.predicted == 0.5
