"""Sequences that ranks share, planned: time and memory of a share of the tokens, and what the exchange costs."""

from __future__ import annotations

import pytest

from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.sequence import attended, zigzag
from tilemesh.kernels.attention.cost import pairs
from tilemesh.model.config import preset
from tilemesh.model.work.operations import ring_blocks
from tilemesh.model.work.task import Task
from tilemesh.plan.choose import search
from tilemesh.plan.space import Pins
from tilemesh.plan.step import predict

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
    blocks, run = ring_blocks(4096, cp), 4096 // (2 * cp)
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
