"""Functions of whole matrices over ranks that hold parts of them: against numpy slices of the whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tilemesh.comm import run_threads
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.shard import Cut, Shard
from tilemesh.parallel.matrices import MatrixGroup
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.shard import take
from tilemesh.parallel.zero import cut_over_replicas

COLUMN, ROW = Cut("tp", 0), Cut("tp", 1)
SHAPES = {"tall": (9, 4), "wide": (4, 6), "flat": (1, 4), "heads": (8, 3), "again": (9, 4)}
CUTS: dict[str, tuple[Cut, ...]] = {
    "tall": (COLUMN,), "wide": (ROW,), "flat": (ROW,), "heads": (Cut("tp", 0, units=2, pieces=2),), "again": (),
}  # fmt: skip


def matrix(name: str) -> Tensor:
    shape = SHAPES[name]
    return torch.arange(math.prod(shape), dtype=torch.float64).view(shape) + 100 * list(SHAPES).index(name)


def ranked(whole: Tensor) -> Tensor:
    """Depends on all numbers of the matrix, so that a part alone gives another result."""
    return whole / whole.sum() + whole.mT.reshape(whole.shape)


@pytest.mark.parametrize(
    ("sizes", "plan"),
    [
        ({"tp": 2}, {}),
        ({"tp": 4}, {}),  # two ranks hold the same heads
        ({"dp": 2}, {"zero": 1}),
        ({"dp": 4}, {"zero": 2, "zero_group": 2}),  # two groups, each with all of the matrices
        ({"dp": 3, "tp": 2}, {"zero": 3}),  # fewer rows than replicas
    ],
)
@pytest.mark.parametrize("least", [1, 1 << 20])
def test_every_rank_gets_its_part_of_the_function_of_the_whole(
    sizes: dict[str, int], plan: dict[str, Any], least: int
) -> None:
    laid = ParallelPlan(**(sizes | plan))

    def body(comm: Any) -> list[tuple[str, Tensor, Tensor]]:
        mesh = Mesh(comm, **sizes)
        shards = []
        for name, shape in SHAPES.items():
            uncut = Shard(name, shape, mesh.shape, comm.rank, CUTS[name] if laid.tp > 1 else ())
            shards.append(cut_over_replicas(uncut, laid.zero_ranks) if laid.zero else uncut)
        rounds = list(MatrixGroup(mesh, laid).rounds(shards, least))
        assert [shard for part in rounds for shard in part.shards] == shards
        results = []
        for part in rounds:
            parts = [take(shard, matrix(shard.name)).contiguous() for shard in part.shards]
            wanted = [take(shard, ranked(matrix(shard.name))) for shard in part.shards]
            results += list(zip((s.name for s in part.shards), part(ranked, parts), wanted, strict=True))
        return results

    for results in run_threads(laid.world, body):
        for name, result, wanted in results:
            assert torch.equal(result, wanted), name


def test_work_is_shared_out_and_exchanges_are_few() -> None:
    """24 equal matrices over 4 ranks: each computes 6, in one round or, with few numbers in a round, in rounds of 4."""

    def body(comm: Any) -> tuple[list[int], list[int]]:
        mesh, plan = Mesh(comm, tp=4), ParallelPlan(tp=4)
        shards = [Shard(f"{n}", (8, 8), mesh.shape, comm.rank, (COLUMN,)) for n in range(24)]
        group, computed = MatrixGroup(mesh, plan), []

        def count(whole: Tensor) -> Tensor:
            computed.append(whole.shape)
            return whole

        rounds = {least: list(group.rounds(shards, least)) for least in (1, 1 << 20)}
        for part in rounds[1 << 20]:
            part(count, [torch.zeros(2, 8) for _ in part.shards])
        return [len(part.shards) for part in rounds[1]], [len(rounds[1 << 20]), len(computed)]

    assert run_threads(4, body) == [([4] * 6, [1, 6])] * 4
