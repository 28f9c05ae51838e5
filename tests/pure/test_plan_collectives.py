"""Collectives' seconds: the closed forms of comm/schedules, what it counts and simulates, and groups on nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemesh.comm.schedules.book import build
from tilemesh.comm.schedules.cost import seconds, traffic
from tilemesh.comm.schedules.simulate import Memory, simulate
from tilemesh.comm.schedules.topology import Flat, Wire
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.plan.constants import LINK_FRACTION
from tilemesh.plan.speed import group, neighbour_s

WIRE = Wire(3e-6, 200e9)
NO_WORK = Memory(float("inf"), float("inf"))


@given(st.integers(2, 64), st.integers(1, 10**6), st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]))
def test_a_ring_is_what_the_schedule_sends(ranks: int, block: int, collective: str) -> None:
    sent = traffic(collective, "ring", ranks, ranks * block)
    wanted = sent.messages * WIRE.latency_s + sent.nbytes / WIRE.bytes_per_s
    assert seconds(collective, "ring", ranks, ranks * block, WIRE) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [("all_reduce", "ring"), ("all_gather", "ring"), ("reduce_scatter", "ring"), ("all_reduce", "tree")],
)
@pytest.mark.parametrize("ranks", [2, 4, 8, 32])
def test_a_closed_form_is_the_simulated_time(collective: str, algorithm: str, ranks: int) -> None:
    nbytes = ranks << 16
    found = simulate(build(collective, algorithm, ranks), nbytes, Flat(ranks, WIRE), NO_WORK)
    assert seconds(collective, algorithm, ranks, nbytes, WIRE) == pytest.approx(found.seconds)


def test_ring_and_tree_by_hand() -> None:
    fast = Wire(0, 100e9)
    assert seconds("all_reduce", "ring", 8, 1e9, fast) == pytest.approx(2 * 7 / 8 * 1e9 / 100e9)
    assert seconds("all_reduce", "tree", 8, 1e9, fast) == pytest.approx(2 * 3 * 1e9 / 100e9)
    assert seconds("all_reduce", "tree", 1000, 0, Wire(1e-6, 1)) == pytest.approx(2 * 10 * 1e-6)
    assert seconds("all_reduce", "tree", 1, 1e9, fast) == 0
    with pytest.raises(UsageError, match="simulate its schedule"):
        seconds("all_gather", "bruck", 8, 1e9, fast)


@given(st.sampled_from([2, 4, 8]), st.integers(2, 8), st.integers(1, 10**6))
def test_two_levels_send_what_the_hierarchical_schedule_sends(inside: int, nodes: int, block: int) -> None:
    ranks, nbytes = inside * nodes, inside * nodes * block
    axis = group(parse_cluster(f"{nodes}x8xh100"), ranks, 8 // inside)
    assert (axis.inside, axis.nodes) == (inside, nodes)
    assert axis.sent_bytes(nbytes, "all_reduce") == pytest.approx(
        traffic("all_reduce", "hierarchical", ranks, nbytes, node_size=inside).nbytes
    )


def test_groups_lie_on_nodes_by_stride() -> None:
    cluster = parse_cluster("64xh100")
    assert (group(cluster, 8, 1).inside, group(cluster, 8, 1).nodes) == (8, 1)
    assert (group(cluster, 8, 8).inside, group(cluster, 8, 8).nodes) == (1, 8)
    assert (group(cluster, 16, 4).inside, group(cluster, 16, 4).nodes) == (2, 8)
    assert (group(cluster, 16, 1).inside, group(cluster, 16, 1).nodes) == (8, 2)
    assert group(cluster, 1, 8).all_reduce_s(1e9) == 0


@pytest.mark.parametrize(
    ("nodes", "size", "stride", "expected"),
    [
        ("2x6", 4, 1, (2, 2)),  # ranks 4 to 7: two on either node
        ("3x5", 3, 1, (1, 3)),  # ranks 3 to 5: two and one
        ("2x6", 3, 1, (3, 1)),
        ("2x6", 2, 3, (2, 1)),
        ("2x6", 6, 2, (3, 2)),
        ("3x4", 3, 2, (1, 3)),  # ranks 0, 2 and 4
    ],
)
def test_the_group_that_ends_of_nodes_cut_sets_the_pace(
    nodes: str, size: int, stride: int, expected: tuple[int, int]
) -> None:
    axis = group(parse_cluster(f"{nodes}xh100"), size, stride)
    assert (axis.inside, axis.nodes) == expected


def test_small_messages_go_by_tree_and_large_ones_by_ring() -> None:
    axis = group(parse_cluster("512xh100"), 512, 1)
    ring = 2 * axis.all_gather_s(8)
    assert axis.all_reduce_s(8) < ring
    assert axis.all_reduce_s(1e9) == pytest.approx(2 * axis.all_gather_s(1e9))


def test_a_neighbour_in_the_node_is_nearer() -> None:
    cluster = parse_cluster("16xh100")
    near, far = neighbour_s(cluster, 4, 2, 1e8), neighbour_s(cluster, 8, 2, 1e8)
    assert near == pytest.approx(cluster.node.intra.latency_s + 1e8 / (450e9 * LINK_FRACTION))
    assert far == pytest.approx(cluster.node.inter.latency_s + 1e8 / (50e9 * LINK_FRACTION))
