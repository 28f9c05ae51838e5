"""The mesh: places, groups along each axis, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import parallel_cases
import torch

from tilemesh.comm import Communicator, connect, run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.launch.start import find_mpiexec
from tilemesh.model.transformer import Transformer
from tilemesh.parallel import Mesh, lay
from tilemesh.parallel.gate.cases import MODELS
from tilemesh.parallel.mesh import coordinates, members, rank_at

PROCESSES = [pytest.param("mpi", marks=pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")), "torch"]


@pytest.mark.parametrize("ranks", [1, 3, 6])
def test_axes_and_their_groups(ranks: int) -> None:
    run_threads(ranks, parallel_cases.groups)


@pytest.mark.parametrize("transport", PROCESSES)
@pytest.mark.parametrize("part", ["groups", "configurations_differ"])
def test_of_processes(transport: str, part: str) -> None:
    parallel_cases.require_part(transport, part)


def test_configurations_that_differ_are_named_on_every_rank() -> None:
    run_threads(3, parallel_cases.configurations_differ)


def test_places_follow_from_rank_and_shape_alone() -> None:
    shape = {"tp": 4, "dp": 3}
    for rank in range(12):
        assert rank_at(coordinates(rank, shape), shape) == rank
    assert coordinates(6, shape) == {"tp": 2, "dp": 1}
    assert members(6, "tp", shape) == (4, 5, 6, 7)
    assert members(6, "dp", shape) == (2, 6, 10)


def test_the_grid_is_drawn() -> None:
    texts = run_threads(6, lambda comm: Mesh(comm, dp=2, tp=3).describe())
    assert texts[4].splitlines() == [
        "mesh dp=2 × tp=3, 6 ranks over threads; this is rank 4: dp 1, tp 1",
        "        tp 0  tp 1  tp 2",
        "  dp 0     0     1     2",
        "  dp 1     3     4     5",
    ]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 2}, "a mesh of dp=2 × tp=1 needs 2 ranks and there are 1: start as many, or change the sizes"),
        ({"tp": 0}, "tp is 0: expected a whole number of at least 1"),
        ({"dp": True}, "dp is True"),
    ],
)
def test_a_mesh_that_does_not_match_the_world(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Mesh(connect("alone"), **sizes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("model", "plan", "splits", "message"),
    [
        (MODELS["gpt"], {"tp": 1}, None, "the plan is dp=1 × tp=1 and the mesh dp=1 × tp=3"),
        (MODELS["gpt"], {"tp": 3}, None, "tp is 3 and heads 8: not divisible; set tp to a divisor of it"),
        (MODELS["gpt"].replace(heads=6, width=36, kv_heads=6, mlp_width=50), {"tp": 3}, None, "the MLP's width 50"),
        (MODELS["gpt"].replace(heads=6, width=36, kv_heads=2), {"tp": 3}, None, "tp is 3 and kv_heads 2: one must be"),
        (None, {"tp": 3}, None, "a Linear and no splits: give a map from name patterns to kinds of split"),
        (None, {"tp": 3}, {"weigth": "column"}, "unknown module 'weigth'"),
        (None, {"tp": 3, "sequence_parallel": True}, {}, "sequence_parallel of a Linear"),
        (MODELS["gpt"].replace(heads=6, width=36, kv_heads=6), {"tp": 3, "zero": 3}, None, "zero is 3"),
    ],
)
def test_what_cannot_be_laid(model: object, plan: dict[str, object], splits: object, message: str) -> None:
    def main(comm: Communicator) -> None:
        whole = torch.nn.Linear(3, 3) if model is None else Transformer(model, device="meta")  # type: ignore[arg-type]
        with pytest.raises(UsageError) as caught:
            lay(whole, Mesh(comm, tp=3), ParallelPlan(**plan, precision="fp32"), splits)  # type: ignore[arg-type]
        assert message in str(caught.value)

    run_threads(3, main)
