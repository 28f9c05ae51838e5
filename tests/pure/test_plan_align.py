"""Placements of the models of a run that learns from feedback: proved, timed, composed, ranked, and the command."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tilemesh.align.formulas.algorithms import ALGORITHMS
from tilemesh.align.placement import why_not_run, work_of
from tilemesh.cli.commands.plan.align import _work
from tilemesh.cli.main import main
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.placement import (
    ACTOR,
    ENGINE,
    KINDS,
    PASSES,
    REFERENCE,
    STEP_TOKENS,
    UPDATES,
    AlignWork,
    Placement,
    Pool,
    check,
    idle_share,
    reshard_bytes,
    simulate,
)
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import preset
from tilemesh.model.work.decoding import SequencePart
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.align import AlignEstimator
from tilemesh.plan.placements import search_placements
from tilemesh.plan.rollouts import most_step_tokens, page_tokens, rollout_s
from tilemesh.plan.serving_clock import StepClock
from tilemesh.plan.step import Estimator
from tilemesh.serve.history import ServeHistory
from tilemesh.serve.scheduler import ServeLimits, StepPlan
from tilemesh.serve.simulate import NS, SimRequest
from tilemesh.serve.simulate import simulate as simulate_scheduler

FOUR = ParallelPlan(dp=4, microbatch=4, accumulation=16, precision="bf16-master", zero=1)
EIGHT = replace(FOUR, dp=8, accumulation=8)
ALL = ("actor", "engine", "critic", "reference", "reward")
COLOCATED = Placement((Pool(8, ALL, EIGHT),))
SPLIT = Placement((Pool(4, ("actor", "critic", "reference", "reward"), FOUR), Pool(4, ("engine",))))
BESIDE = Placement((Pool(4, ("actor", "critic"), FOUR), Pool(4, ("engine", "reference", "reward"), FOUR)))
SECONDS = {"rollout": 40.0, "reward": 3.0, "reference": 5.0, "values": 4.0, "old": 2.0, "update": 17.0,
           "critic update": 6.0, "weight sync": 1.0}  # fmt: skip
WORK = work_of(AlignWork(prompts=16, answers=16, prompt=256, tokens=512))


def test_steps_of_placements_take_what_their_phases_say() -> None:
    scores, updates = 14.0, 23.0
    assert simulate(COLOCATED, SECONDS).seconds == pytest.approx(40 + scores + updates + 1)
    assert simulate(SPLIT, SECONDS).seconds == pytest.approx(40 + scores + updates + 1)
    # One step off: both pools at once, and the weights go when both have ended.
    assert simulate(replace(SPLIT, ahead=1), SECONDS).seconds == pytest.approx(max(40, scores + updates) + 1)
    # Reference and reward beside the engine take its time, not that of the ranks that train.
    assert simulate(replace(BESIDE, ahead=1), SECONDS).seconds == pytest.approx(max(40 + 8, 6 + updates) + 1)
    step = simulate(replace(SPLIT, ahead=1), SECONDS)
    assert step.idle == pytest.approx((1 - 38 / 41, 0.0))
    assert idle_share(SPLIT, step) == pytest.approx((1 - 38 / 41) / 2)
    assert simulate(SPLIT, {"rollout": 2.0, "update": 2.0}).idle == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize("seed", range(20))
def test_no_pool_does_two_things_at_once_and_nothing_begins_too_early(seed: int) -> None:
    chance = random.Random(seed)
    pools = [chance.choice((0, 1)) for _ in range(3)]
    models = [("actor", *(name for name, pool in zip(ALL[2:], pools, strict=True) if pool == 0)),
              ("engine", *(name for name, pool in zip(ALL[2:], pools, strict=True) if pool == 1))]  # fmt: skip
    placement = Placement((Pool(4, models[0], FOUR), Pool(4, models[1], FOUR)), chance.choice((0, 1, 3)))
    check(placement, 8)
    seconds = {name: chance.choice((0.0, chance.random())) for name in SECONDS} | {"rollout": 1.0, "update": 1.0}
    step = simulate(placement, seconds)
    for pool in (0, 1):
        spans = sorted((span.begin_s, span.end_s) for span in step.spans if span.pool == pool)
        assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(spans))
    ends = {(span.name, span.step): span.end_s for span in step.spans}
    begins = {(span.name, span.step): span.begin_s for span in step.spans}
    for name, number in begins:
        before = [("rollout", number)] if name in PASSES else []
        before += [(each, number) for each in ("rollout", *PASSES)] if name in UPDATES else []
        before += [("update", number)] if name == "weight sync" else []
        before += [("weight sync", number - 1 - placement.ahead)] if name == "rollout" else []
        assert all(ends.get(each, 0.0) <= begins[name, number] + 1e-9 for each in before), name
    assert step.seconds >= max(sum(seconds[name] for name in ("rollout",)), seconds["update"]) - 1e-9


@pytest.mark.parametrize(
    ("placement", "why"),
    [
        (Placement((Pool(8, ("actor",), EIGHT),)), "an engine that draws"),
        (Placement((Pool(8, ("actor", "engine", "engine"), EIGHT),)), "engine 2 times"),
        (Placement((Pool(4, ("actor", "engine"), FOUR),)), "4 ranks on a cluster of 8"),
        (Placement((Pool(8, ("actor", "engine"), FOUR),)), "8 ranks with a layout of 4"),
        (Placement((Pool(4, ("actor",), FOUR), Pool(4, ("engine", "reward")))), "reward on 4 ranks with no layout"),
        (Placement((Pool(4, ("actor",), FOUR), Pool(4, ("engine",), rollout_tp=3))), "engines of 3 ranks on 4"),
        (replace(SPLIT, ahead=-1), "-1 batches ahead"),
    ],
)
def test_what_is_no_placement_is_refused(placement: Placement, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check(placement, 8)


def held(rank: int, tp: int, pp: int, size: int) -> set[tuple[int, int]]:
    """(layer, row) that a rank of a training replica holds of `size` layers with as many rows; tp varies fastest."""
    stage, part = divmod(rank, tp)
    return set(itertools.product(range(stage * size // pp, (stage + 1) * size // pp),
                                 range(part * size // tp, (part + 1) * size // tp)))  # fmt: skip


@pytest.mark.parametrize(("tp", "pp", "engine_tp"), [(8, 1, 2), (4, 2, 2), (2, 4, 1), (1, 2, 2), (2, 2, 4), (4, 1, 4)])
def test_what_a_rank_receives_is_what_it_lacks(tp: int, pp: int, engine_tp: int) -> None:
    """Element by element, where engines are made of ranks whose rows are among those needed (HybridFlow's grouping);
    where the engine is cut no finer than training, that is HybridFlow's formula."""
    size = 8
    shares = []
    for rank in range(tp * pp):
        part = (rank % tp) * engine_tp // tp if engine_tp <= tp else None
        own = held(rank, tp, pp, size)
        parts = [part] if part is not None else range(engine_tp)
        needs = [set(itertools.product(range(size), range(each * size // engine_tp, (each + 1) * size // engine_tp)))
                 for each in parts]  # fmt: skip
        shares.append(min(len(need - own) for need in needs) / size**2)
    assert max(shares) == pytest.approx(reshard_bytes(1.0, tp, pp, engine_tp))
    if engine_tp <= tp:
        assert max(shares) == pytest.approx((tp * pp - engine_tp) / (engine_tp * tp * pp))


def test_lengths_of_answers_have_the_mean_and_the_longest() -> None:
    assert set(AlignWork(tokens=64).lengths()) == {64.0}
    for mean in (10, 100, 500, 900):
        each = AlignWork(tokens=1000, mean=mean).lengths()
        assert sum(each) / len(each) == pytest.approx(mean, rel=0.02)
        assert each == sorted(each)
        assert each[-1] <= 1000
    assert sum(length > 999 for length in AlignWork(tokens=1000, mean=950).lengths()) > 16  # most are cut there


def clock(parts: Sequence[SequencePart]) -> float:
    """1 for a step, and a thousandth for each of its tokens, a millionth for each key."""
    return 1 + sum(1e-3 * part.queries + 1e-6 * part.keys for part in parts)


def scheduled_rollout(work: AlignWork, sequences: int, running: int) -> ServeHistory:
    """By the scheduler that engines have."""
    lengths = [round(length) for length in work.lengths() for _ in range(sequences // len(work.lengths()))]
    random.Random(0).shuffle(lengths)
    lengths[0 if running < sequences else -1] = work.tokens  # the last that runs is as long as is allowed
    limits = ServeLimits(
        pages=4096, context=512, step_tokens=STEP_TOKENS, chunk_tokens=STEP_TOKENS, running=running, waiting=sequences,
        share_answers=False,
    )  # fmt: skip
    asked = [
        SimRequest(f"{number}", 0, [number // work.answers] * work.prompt, [9] * length, length)
        for number, length in enumerate(lengths[::-1])
    ]

    def duration(plan: StepPlan) -> int:
        parts = [SequencePart(entry.count, entry.start + entry.count, entry.samples) for entry in plan.entries]
        return round(NS * clock(parts))

    return simulate_scheduler(limits, asked, duration)


@pytest.mark.parametrize("prompt", [7, 16, 17, 80])
@pytest.mark.parametrize(("mean", "running"), [(0, 64), (40, 64), (40, 16), (0, 16)])
def test_a_batch_of_answers_takes_what_the_scheduler_says(mean: int, running: int, prompt: int) -> None:
    """Seconds, and pages: of prompts that share a page, and of those that are too short to."""
    work = AlignWork(prompts=8, answers=8, prompt=prompt, tokens=200, mean=mean)
    steps = scheduled_rollout(work, 64, running).steps
    seconds = rollout_s(clock, work, 64, running, False, STEP_TOKENS)
    assert seconds == pytest.approx(sum(step.seconds for step in steps), rel=0.12 if mean else 0.04)
    if mean:  # nobody waits for the longest
        assert rollout_s(clock, work, 64, running, True, STEP_TOKENS) < seconds
    pages = page_tokens(work, running, running < 64) / 16
    most = max(step.pages_used for step in steps)
    assert pages == pytest.approx(most, rel=0.02 if (mean, running) == (0, 64) else 0.3)
    if running == 64:
        tokens = max(sum(part.queries for part in step.works) for step in steps)
        assert most_step_tokens(work, 64, 64, STEP_TOKENS) == tokens


def test_on_a_cpu_pages_stay_and_ranks_beside_others_hold_more() -> None:
    """An engine there does not sleep; a rank that trains alone has others beside it that draw."""
    cluster, plan = parse_cluster("2xcpu"), ParallelPlan(microbatch=256, precision="fp32")
    models = (ACTOR, REFERENCE)
    work = replace(WORK, prompt=16, tokens=64, repacks=True)
    split = Placement((Pool(1, models, plan), Pool(1, (ENGINE,))), 0)
    training, drawing = AlignEstimator(preset("tiny"), cluster, work).predict(split).memory
    together = Placement((Pool(1, (*models, ENGINE), plan),), 0)
    alone = AlignEstimator(preset("tiny"), parse_cluster("1xcpu"), work).predict(together)
    (parts,) = alone.memory
    assert alone.total_bytes == (sum(parts.values()),)
    slack = 9 * 2**20 + 0.17 * parts["activations"]
    assert training["reserved"] - parts["reserved"] == pytest.approx(slack, rel=1e-6)
    assert drawing["engine weights"] == 2 * parts["engine weights"]  # of its own, and once more as its products want


def test_a_prediction_is_put_together_of_those_that_the_planner_makes() -> None:
    model, cluster = preset("tinyllama-1.1b"), parse_cluster("8xh100")
    work = replace(WORK, epochs=2, critic="own", reward="model", old=True)
    estimator = AlignEstimator(model, cluster, work)
    colocated, split = (estimator.predict(placement) for placement in (COLOCATED, SPLIT))
    training = Estimator(model, cluster, 256 + 512)
    plan = replace(EIGHT, accumulation=8)
    assert colocated.seconds["update"] == pytest.approx(2 * training.predict(plan).step_time_s)
    assert colocated.seconds["critic update"] == colocated.seconds["update"]
    assert colocated.seconds["reference"] == pytest.approx(8 * sum(training.chunk_times(plan).forward_s))
    step_clock = StepClock(model, cluster)
    assert colocated.seconds["rollout"] == pytest.approx(rollout_s(step_clock, work, 32, 32, False, STEP_TOKENS))
    assert colocated.step.seconds == pytest.approx(sum(colocated.seconds.values()))
    assert colocated.seconds["weight sync"] == colocated.sync_bytes == 0  # the engine's weights are the trained ones
    assert split.sync_bytes == 2 * count_parameters(model).total
    assert split.idle > 0.3
    assert all(each.limit_s < each.step.seconds for each in (colocated, split))


def test_memory_by_hand() -> None:
    model, parameters = preset("tinyllama-1.1b"), count_parameters(preset("tinyllama-1.1b")).total
    estimator = AlignEstimator(model, parse_cluster("8xh100"), WORK)
    (parts,) = estimator.predict(COLOCATED).memory
    assert parts["weights"] == parts["gradients"] == parts["reference"] == parts["reward"] == 2 * parameters
    assert parts["optimizer"] == pytest.approx(12 * parameters / 8, rel=1e-3)
    assert parts["critic"] == pytest.approx((2 + 2 + 12 / 8) * parameters, rel=1e-3)
    assert parts["engine weights"] == 0
    # 32 answers with 32 pages of 16 for 511 tokens behind 16 pages of each of 2 prompts; 22 layers x 4 heads x 64 x 2
    # x 2 bytes.
    assert parts["pages"] == 22528 * (32 * 512 + 2 * 256)
    prediction = estimator.predict(COLOCATED)
    both = parts["pages"] + parts["answers"], parts["activations"]
    assert prediction.total_bytes == (sum(parts.values()) - min(both),)
    rollouts = estimator.predict(SPLIT).memory[1]
    assert rollouts["engine weights"] == 2 * parameters
    assert not rollouts.keys() & {"weights", "gradients", "optimizer"}


def test_a_reference_lies_in_the_base_of_adapters() -> None:
    model = preset("tinyllama-1.1b")
    full, adapted = (AlignEstimator(model, parse_cluster("8xh100"), replace(WORK, lora=rank)) for rank in (0, 16))
    whole, small = full.predict(COLOCATED), adapted.predict(COLOCATED)
    assert small.memory[0]["reference"] == 0 < whole.memory[0]["reference"]
    # Rank 16 beside four matrices of 22 layers: 16 x (inputs + outputs), two of them narrow.
    adapters = 22 * 16 * (2 * (2048 + 2048) + 2 * (2048 + 256))
    assert small.memory[0]["gradients"] == pytest.approx(2 * adapters, rel=1e-3)
    assert small.seconds["update"] < whole.seconds["update"]
    apart = adapted.predict(BESIDE)
    assert apart.memory[1]["reference"] > 0  # no base of the actor's lies there


def test_the_best_placement_is_no_slower_than_any_that_was_tried() -> None:
    estimator = AlignEstimator(preset("llama-3-8b"), parse_cluster("8xh100"), work_of(replace(WORK, algorithm="ppo")))
    ranked = search_placements(estimator)
    seconds = [each.step.seconds for each in ranked]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-5)  # of equals the youngest answers are first
    assert {each.placement.kind for each in ranked} == {*KINDS}
    assert all(each.fits for each in ranked)
    run = search_placements(estimator, runs=lambda placement: not why_not_run(placement))
    assert all(why_not_run(each.placement) == "" for each in run)
    assert run[0].step.seconds >= ranked[0].step.seconds
    with pytest.raises(RunError, match="no placement fits on 1x1xh100"):
        search_placements(AlignEstimator(preset("llama-3-70b"), parse_cluster("1xh100"), WORK))
    # With adapters there are neither gradients nor states of the base: what does not fit then fits.
    with pytest.raises(RunError, match="no placement fits"):
        search_placements(AlignEstimator(preset("llama-3-8b"), parse_cluster("1xh100"), WORK))
    assert search_placements(AlignEstimator(preset("llama-3-8b"), parse_cluster("1xh100"), replace(WORK, lora=16)))


def test_an_algorithm_says_what_a_step_has() -> None:
    ppo = work_of(AlignWork(algorithm="ppo"))
    assert (ppo.critic, ppo.reference, ppo.old, ppo.updates) == ("head", True, True, ALGORITHMS["ppo"].epochs)
    assert work_of(AlignWork(algorithm="dapo", reference=True)).reference
    assert work_of(AlignWork(algorithm="dapo")).reference is False
    with pytest.raises(UsageError, match="unknown algorithm 'gpro': did you mean 'grpo'"):
        work_of(AlignWork(algorithm="gpro"))
    with pytest.raises(UsageError, match="critic=own and algorithm=grpo"):
        work_of(AlignWork(critic="own"))


COMMAND = ["plan", "tinyllama-1.1b", "--align", "prompts=16,tokens=256,algorithm=ppo", "--cluster", "4xh100"]


def test_the_command_ranks_placements(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*COMMAND, "--json", str(tmp_path / "rows"), "--svg", str(tmp_path / "step.svg")]) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 80
    assert re.search(r"placement +ranks +step +draw +score +update +sync +idle +limit", text)
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert {row["placement"] for row in rows} == {*KINDS}
    best = rows[0]
    assert best["step_time_s"] == min(row["step_time_s"] for row in rows)
    assert {"rollout_s", "reference_s", "old_s", "update_s", "weight_sync_s"} <= best["times"].keys()
    assert all(0 <= row["idle"] < 1 and row["limit_s"] < row["step_time_s"] for row in rows)
    assert all(pool["total_bytes"] <= row["usable_bytes"] for row in rows for pool in row["pools"])
    drawing = (tmp_path / "step.svg").read_text()
    assert drawing.startswith("<svg")
    assert "rollout" in drawing


@pytest.mark.parametrize(
    ("typed", "sizes"),
    [(["answers=16"], (8, 24)), (["tokens=10"], (22, 10)), (["prompt=20"], (20, 12)), (["prompt=3,tokens=4"], (3, 4))],
)
def test_lengths_that_nobody_says_fit_the_context(typed: list[str], sizes: tuple[int, int]) -> None:
    work = _work(typed, 32)
    assert (work.prompt, work.tokens) == sizes
    work.check(32)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["plan", "tiny", "--align", "answers=16"], "placements need a model and a cluster"),
        (["plan", "tiny", "--align", "anwsers=16", "--cluster", "2xh100"], "did you mean 'answers'"),
        (["plan", "tiny", "--align", "answers=0", "--cluster", "2xh100"], "answers is 0"),
        (["plan", "tiny", "--align", "tokens=100000", "--cluster", "2xh100"], "prompt=1 and tokens=100000: the"),
        (["plan", "tiny", "--align", "prompt=8,tokens=8,prompts=1,answers=3,minibatches=2", "--cluster", "1xh100"],
         "2 minibatches of 3 answers"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_one_line(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1
