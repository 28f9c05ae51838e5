"""The mesh: places, groups along each axis, and what is refused."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import parallel_cases
import torch

from tilemesh.comm import Communicator, connect, run_threads
from tilemesh.core.axes import coordinates
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.launch.start import find_mpiexec
from tilemesh.model.transformer import Transformer
from tilemesh.parallel import Mesh, lay
from tilemesh.parallel.gate.cases import MODELS

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


@pytest.mark.parametrize(
    "sizes",
    [
        {"pp": 2, "dp": 2, "tp": 2},
        {"dp": 2, "tp": 2, "cp": 2, "pp": 2},
        {"ep": 2, "pp": 1, "dp": 3},
        {"tp": 2, "expert": 2, "node": 2},
    ],
    ids=str,
)
def test_any_number_of_axes(sizes: dict[str, int]) -> None:
    """Each group, of one axis or of several, is the ranks that differ along these axes alone."""
    ranks = math.prod(sizes.values())

    def main(comm: Communicator) -> None:
        mesh = Mesh(comm, **sizes)
        places = [coordinates(rank, mesh.shape) for rank in range(ranks)]
        mine = places[comm.rank]
        assert {name: axis.index for name, axis in mesh.axes.items()} == mine
        assert [mesh.axis(name).size for name in sizes] == list(sizes.values())
        assert (mesh.axis("nobody").size, mesh.axis("nobody").index) == (1, 0)
        for count in range(1, len(sizes) + 1):
            for names in itertools.combinations(sizes, count):
                group = mesh.group(*names)
                wanted = [
                    rank
                    for rank, place in enumerate(places)
                    if all(place[name] == mine[name] for name in place if name not in names)
                ]
                assert group.all_gather(np.array([comm.rank])).tolist() == wanted == list(mesh.members(*names))
                assert mesh.group(*names) is group
        mesh.close()

    run_threads(ranks, main)


def test_blocks_of_an_axis() -> None:
    """What holds the same kv heads: consecutive ranks of tp, within one replica or over all replicas."""

    def main(comm: Communicator) -> tuple[list[int], list[int]]:
        mesh = Mesh(comm, dp=2, tp=4)
        groups = (mesh.among((("tp", 2),)), mesh.among((("tp", 2), ("dp", 2))))
        found = [group.all_gather(np.array([comm.rank])).tolist() for group in groups]
        return found[0], found[1]

    found = run_threads(8, main)
    assert found[3] == ([2, 3], [2, 3, 6, 7])
    assert found[4] == ([4, 5], [0, 1, 4, 5])


def test_groups_of_one_name_are_as_many_as_what_they_join() -> None:
    """Experts over two ranks of dp, and then over two of tp, on a mesh that is kept: as `tilemesh verify` asks for."""

    def main(comm: Communicator) -> list[list[int]]:
        mesh = Mesh(comm, dp=2, tp=2)
        groups = [mesh.among(((axis, 2),), "ep") for axis in ("dp", "tp", "dp")]
        assert groups[0] is groups[2]
        assert [mesh.axes_of(group.label) for group in groups] == ["ep"] * 3
        return [group.all_gather(np.array([comm.rank])).tolist() for group in groups[:2]]

    assert run_threads(4, main)[1] == [[1, 3], [0, 1]]


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2}, {"dp": 2, "cp": 2, "tp": 2}])
def test_ranks_that_take_the_same_part_of_the_batch(sizes: dict[str, int]) -> None:
    """One rank of each part is its first, whatever axes there are beside those that share the batch."""

    def main(comm: Communicator) -> tuple[int, bool]:
        mesh = Mesh(comm, **sizes)
        return mesh.part_of_batch(), mesh.is_first_of_part()

    places = run_threads(math.prod(sizes.values()), main)
    parts = sizes["dp"]  # ranks of cp are given the same rows
    assert sorted(part for part, is_first in places if is_first) == list(range(parts))
    assert Counter(part for part, _ in places) == dict.fromkeys(range(parts), len(places) // parts)


def test_a_mesh_of_three_axes_is_drawn_as_grids() -> None:
    texts = run_threads(8, lambda comm: Mesh(comm, pp=2, dp=2, tp=2).describe())
    assert texts[5].splitlines() == [
        "mesh pp=2 × dp=2 × tp=2, 8 ranks over threads; this is rank 5: pp 1, dp 0, tp 1",
        "pp 0",
        "        tp 0  tp 1",
        "  dp 0     0     1",
        "  dp 1     2     3",
        "pp 1",
        "        tp 0  tp 1",
        "  dp 0     4     5",
        "  dp 1     6     7",
    ]


def test_a_group_along_an_axis_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="unknown axis 'pd'"):
        Mesh(connect("alone"), dp=1).group("pd")
    mesh = Mesh(connect("alone"), dp=1)
    assert (mesh.group("dp", "cp").size, mesh.members("cp"), mesh.axis("pp").size) == (1, (0,), 1)


def test_a_model_is_not_laid_over_an_axis_it_knows_nothing_of() -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="xp is 2: a model is laid over tp, cp, dp, pp; set xp to 1"):
            lay(Transformer(MODELS["gpt"], device="meta"), Mesh(comm, xp=2), ParallelPlan(precision="fp32"))

    run_threads(2, main)


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
        (MODELS["gpt"], {"tp": 3}, None, "tp is 3: 8 heads are not divisible by it"),
        (MODELS["gpt"].replace(heads=6, width=36, kv_heads=6, mlp_width=50), {"tp": 3}, None, "the MLP's width 50"),
        (MODELS["gpt"].replace(heads=6, width=36, kv_heads=2), {"tp": 3}, None, "tp is 3: 2 kv_heads can neither"),
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
