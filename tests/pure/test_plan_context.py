"""Sequences that ranks share, planned: time and memory of a share of the tokens, and what the exchange costs."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.sequence import attended, zigzag
from tilemesh.kernels.attention.cost import pairs
from tilemesh.model.config import preset
from tilemesh.model.work.exchanges import context_exchanges
from tilemesh.model.work.operations import shared_blocks
from tilemesh.model.work.task import Task
from tilemesh.model.work.weights import cp_exchanges
from tilemesh.plan.choose import search
from tilemesh.plan.space import Pins
from tilemesh.plan.step import predict
from tilemesh.plan.why import why

LLAMA, GPUS = preset("llama-3-8b"), parse_cluster("8xh100")
LONG = 65_536


def plan(**settings: object) -> ParallelPlan:
    return ParallelPlan(**{"precision": "bf16-master", "recompute": "full", "zero": 3, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_a_rank_attends_to_as_many_pairs_as_are_predicted(cp: int) -> None:
    task = Task.of(plan(cp=cp), 4096)
    runs = [zigzag(4096, cp, rank) for rank in range(cp)]
    assert {attended(of_rank, runs) for of_rank in runs} == {pairs(task.queries, task.keys, causal=True)}


def test_shared_sequences_take_a_share_of_time_and_activations() -> None:
    """Of eight replicas two steps of one sequence each, or eight steps of all ranks on one: as many tokens."""
    apart = predict(LLAMA, GPUS, plan(dp=8), LONG)
    shared = predict(LLAMA, GPUS, plan(dp=1, cp=8, accumulation=8), LONG)
    assert shared.memory.activations_bytes == pytest.approx(apart.memory.activations_bytes / 8, rel=0.01)
    assert 1 <= shared.step_time_s / apart.step_time_s < 1.25, "the ring hides behind attention over long sequences"
    assert shared.traffic["cp"] > 0 == apart.traffic.get("cp", 0)
    short = predict(LLAMA, GPUS, plan(dp=1, cp=8, accumulation=8), 2048)
    assert short.step_time_s / predict(LLAMA, GPUS, plan(dp=8), 2048).step_time_s > 1.25, "and not over short ones"


def test_heads_send_less_than_the_ring_where_queries_are_few() -> None:
    """Multi-head attention: 4H/c² of the tokens against 2K/c each way."""
    ring, heads = (
        predict(preset("gpt2-124m"), GPUS, plan(cp=2, dp=4, cp_exchange=how), 1024) for how in ("ring", "heads")
    )
    assert heads.traffic["cp"] < ring.traffic["cp"]


@pytest.mark.parametrize("seed", range(40))
def test_what_each_exchange_sends_is_what_the_page_says(seed: int) -> None:
    """The formulas of docs/parallel/README.md, in numbers per layer, microbatch and rank, for even shares."""
    rng = random.Random(seed)
    cp, tp, kv_heads, per_kv = rng.choice((2, 4, 8)), rng.choice((1, 2)), 2 * rng.choice((1, 2, 4)), rng.choice((1, 4))
    model = preset("tiny").replace(heads=kv_heads * per_kv, kv_heads=kv_heads, width=128, head_width=8)
    tokens, rows = 16 * cp * rng.randint(1, 9), rng.randint(1, 3)
    queries, keys = model.heads * 8 // tp, kv_heads * 8 // tp
    near = math.gcd(cp, kv_heads // tp)
    around, between = 2 * rows * tokens * keys * (cp - 1) / cp, 2 * rows * tokens * (queries + keys) / cp
    forward = {
        "ring": around,
        "gather": around,
        "heads": between * (cp - 1) / cp,
        "heads-ring": between * (near - 1) / near + 2 * rows * tokens * keys / near * (1 - near / cp),
    }
    possible = cp_exchanges(model, tp, cp)
    assert ("heads" in possible, "heads-ring" in possible) == (near == cp, 1 < near < cp)
    for how in possible:
        layout = plan(cp=cp, tp=tp, cp_exchange=how, microbatch=rows, precision="fp64", recompute="none", zero=0)
        sent = {False: 0.0, True: 0.0}
        for each in context_exchanges(model, Task.of(layout, tokens)):
            ranks = each.among[0] if each.among else cp
            share = {"send": 1.0, "recv": 0.0}.get(each.collective, (ranks - 1) / ranks)
            sent[each.backward] += each.elements * share
        assert sent[False] == pytest.approx(forward[how])
        again = 0.0 if how == "heads" else forward["ring"] if near == 1 or how != "heads-ring" else (
            2 * rows * tokens * keys / near * (1 - near / cp)
        )  # fmt: skip
        assert sent[True] == pytest.approx(forward[how] + again), "keys visit again, and their gradients go home"


def test_the_search_takes_the_exchange_that_is_predicted_to_be_fastest_and_says_why() -> None:
    pins = Pins.parse(["tp=1,pp=1,dp=1,cp=16,zero=3,recompute=full"])
    found = search(LLAMA, "16xh100", batch=16, context=LONG, pins=pins, code="eager")
    times = {how: found.estimator().step_s(dataclasses.replace(found.best.plan, cp_exchange=how))
             for how in cp_exchanges(LLAMA, 1, 16)}  # fmt: skip
    assert set(times) == {"ring", "gather", "heads-ring"}, "8 KV heads are not enough for 16 ranks"
    assert found.best.plan.cp_exchange == min(times, key=times.__getitem__)
    words = next(line for line in why(found) if line.startswith("Sequences"))
    assert f"({found.best.plan.cp_exchange})" in words
    assert all(f" by {how}" in words for how in times if how != found.best.plan.cp_exchange)
    fixed = search(LLAMA, "16xh100", batch=16, context=LONG, pins=Pins.parse([f"{pins.describe()},cp_exchange=gather"]))
    assert {each.plan.cp_exchange for each in fixed.predictions} == {"gather"}
    assert any("(gather, as fixed)" in line for line in why(fixed))


def test_a_ring_wins_behind_long_attention_and_gathering_where_blocks_are_short() -> None:
    """On GPUs the ring hides; on a CPU nothing does, and gathered keys are few blocks instead of 2c + 1."""
    ring, gather = (predict(LLAMA, GPUS, plan(cp=8, cp_exchange=how), LONG) for how in ("ring", "gather"))
    assert ring.traffic["cp"] == pytest.approx(gather.traffic["cp"])
    assert ring.times.cp_s < gather.times.cp_s
    assert gather.memory.total_bytes > ring.memory.total_bytes
    common: dict[str, object] = {"zero": 0, "precision": "fp32", "recompute": "none", "cp": 4, "microbatch": 8}
    ring, gather = (
        predict(preset("tiny"), parse_cluster("4xcpu"), plan(cp_exchange=how, **common), 128)
        for how in ("ring", "gather")
    )
    assert gather.times.compute_s < ring.times.compute_s


def test_the_search_shares_sequences_that_no_rank_holds_alone() -> None:
    found = search(LLAMA, GPUS, batch=8, context=262_144, pins=Pins.parse(["tp=1,pp=1"]))
    assert found.best.plan.cp > 1
    assert search(LLAMA, GPUS, batch=8, context=8192).best.plan.cp == 1
    fixed = search(LLAMA, GPUS, batch=8, context=8192, pins=Pins.parse(["cp=2"]))
    assert {prediction.plan.cp for prediction in fixed.predictions} == {2}
    with pytest.raises(UsageError, match="cp 16 is 16 ranks, which do not divide the cluster's 8"):
        search(LLAMA, GPUS, batch=8, context=8192, pins=Pins.parse(["cp=16"]))


@pytest.mark.parametrize("cp", [2, 4])
def test_on_a_cpu_a_ring_computes_in_blocks(cp: int) -> None:
    """Of 2c runs of a sequence the rank's first has one block, its last 2c, and together every rank has as many; those
    on the diagonal are computed whole."""
    blocks, run = shared_blocks(4096, cp), 4096 // (2 * cp)
    assert sum(pair.queries.length * pair.keys.length for pair in blocks) == (2 * cp + 1) * run**2
    assert sum(pair.causal for pair in blocks) == 2
    model = preset("tiny")
    common: dict[str, object] = {"zero": 0, "precision": "fp32", "recompute": "none"}
    shared, alone = (
        predict(model, parse_cluster("4xcpu"), plan(dp=4 // ranks, cp=ranks, microbatch=4 * ranks, **common), 128)
        for ranks in (cp, 1)
    )
    heads = predict(model, parse_cluster("4xcpu"), plan(dp=2, cp=2, microbatch=8, cp_exchange="heads", **common), 128)
    assert shared.times.compute_s > alone.times.compute_s
    assert heads.times.compute_s < shared.times.compute_s
