"""Topologies and the clock over them: shared links, alike ranks, and the closed forms at scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tilemesh.comm.schedules.book import build
from tilemesh.comm.schedules.schedule import Grid, Schedule, Shift, recv, same, send
from tilemesh.comm.schedules.simulate import Memory, simulate
from tilemesh.comm.schedules.topology import Flat, LinearArray, Ring, Sent, Topology, TwoLevel, Wire
from tilemesh.core.errors import UsageError

WIRE, FAST = Wire(2e-6, 25e9), Wire(1e-6, 400e9)
FREE = Memory(1e18, 1e18)


@dataclass(frozen=True)
class Whole:
    """The same topology, every rank counted."""

    inner: Topology

    @property
    def ranks(self) -> int:
        return self.inner.ranks

    @property
    def period(self) -> int:
        return self.inner.ranks

    def times(self, messages: Sequence[Sent], period: int) -> list[float]:
        return self.inner.times(messages, self.ranks)


@pytest.mark.parametrize("ranks", [16, 24])
@pytest.mark.parametrize(
    "make",
    [
        lambda n: Flat(n, WIRE),
        lambda n: Ring(n, WIRE, 1e-7),
        lambda n: TwoLevel(n, 8, FAST, WIRE),
        lambda n: TwoLevel(n, 8, FAST, WIRE, adapters=2),
    ],
)
def test_one_period_stands_for_all(ranks: int, make: object) -> None:
    topology = make(ranks)  # type: ignore[operator]
    memory = Memory(5e9, 1e10)
    cases = [("all_reduce", name) for name in ("ring", "ring_segmented", "tree", "hierarchical", "rabenseifner")]
    for collective, name in [*cases, ("all_to_all", "pairwise"), ("all_to_all", "bruck"), ("broadcast", "tree")]:
        schedule = build(collective, name, ranks, node_size=8)
        short, long = (simulate(schedule, 1 << 20, one, memory).seconds for one in (topology, Whole(topology)))
        assert short == pytest.approx(long, rel=1e-12), (collective, name)


def one_shift(ranks: int, by: int) -> Schedule:
    zero, one = same(ranks, 0), same(ranks, 1)
    steps = (send(Shift(ranks, by), zero, one), recv(Shift(ranks, -by), zero, one))
    return Schedule("all_reduce", "shift", ranks, 0, 1, lambda: iter([steps]))


@pytest.mark.parametrize("by", [1, 3, 8, 15])
def test_on_a_ring_who_goes_further_shares_more(by: int) -> None:
    hops = min(by, 16 - by)
    seconds = simulate(one_shift(16, by), 25_000_000, Ring(16, WIRE), FREE).seconds
    assert seconds == pytest.approx(2e-6 + hops * 1e-3)


def test_ranks_share_their_nodes_adapters() -> None:
    nbytes = 25_000_000
    for adapters, share in ((8, 1), (4, 2), (1, 8)):
        topology = TwoLevel(32, 8, FAST, WIRE, adapters)
        seconds = simulate(one_shift(32, 8), nbytes, topology, FREE).seconds
        assert seconds == pytest.approx(2e-6 + share * 1e-3), adapters
    inside = simulate(one_shift(32, 1), nbytes, TwoLevel(32, 8, FAST, WIRE), FREE).seconds
    assert inside == pytest.approx(2e-6 + 1e-3)  # the last rank of each node goes outside, alone


def test_a_last_node_that_is_not_full_has_adapters_of_its_own() -> None:
    for adapters, share in ((None, 1), (2, 4)):
        topology = TwoLevel(20, 8, FAST, WIRE, adapters)
        assert simulate(one_shift(20, 8), 25_000_000, topology, FREE).seconds == pytest.approx(2e-6 + share * 1e-3)


def test_one_sender_among_many_has_the_ring_to_itself() -> None:
    topology = Ring(64, WIRE)
    assert topology.times([(60, 4, 25e6)], 64) == [pytest.approx(2e-6 + 1e-3)]
    crowd = topology.times([(60, 4, 25e6), (62, 2, 25e6), (30, 31, 25e6)], 64)
    assert crowd == [pytest.approx(2e-6 + 2e-3), pytest.approx(2e-6 + 2e-3), pytest.approx(2e-6 + 1e-3)]


@pytest.mark.parametrize("nodes", [2, 16, 2048])
def test_two_levels_in_closed_form(nodes: int) -> None:
    """Scatter-sum inside, a ring over every rank's own adapter, gather-all inside."""
    ranks, nbytes = 8 * nodes, 1 << 26
    seconds = simulate(
        build("all_reduce", "hierarchical", ranks, node_size=8), nbytes, TwoLevel(ranks, 8, FAST, WIRE), FREE
    ).seconds
    inside = 2 * 7 * FAST.seconds(nbytes / 8)
    between = 2 * (nodes - 1) * WIRE.seconds(nbytes / ranks)
    assert seconds == pytest.approx(inside + between, rel=1e-6)  # the first copy is not quite free


@pytest.mark.parametrize(
    "make", [lambda n: Flat(n, WIRE), lambda n: Ring(n, WIRE), lambda n: TwoLevel(n, 8, FAST, WIRE)]
)
def test_a_ring_of_thousands_of_ranks(make: object) -> None:
    ranks, nbytes = 4096, 1 << 28
    seconds = simulate(build("all_reduce", "ring", ranks), nbytes, make(ranks), FREE).seconds  # type: ignore[operator]
    assert seconds == pytest.approx(2 * (ranks - 1) * WIRE.seconds(nbytes / ranks), rel=1e-3)


def test_nodes_of_nobody_are_refused() -> None:
    with pytest.raises(UsageError, match="nodes of 0 ranks"):
        TwoLevel(8, 0, FAST, WIRE)
    with pytest.raises(UsageError, match="with 0 adapters"):
        TwoLevel(8, 4, FAST, WIRE, 0)


def test_a_grid_is_its_formula() -> None:
    grid = Grid(12, 4, across=2, right=1, down=100, below=-1, offset=5)
    assert list(grid) == [grid[rank] for rank in range(12)]
    assert len(grid) == 12
    assert grid[5] == 5 + 2 * ((1 + 1) % 4) + 100 * ((1 - 1) % 3)


@pytest.mark.parametrize("ranks", [2, 4, 7, 16])
def test_a_logical_ring_on_a_linear_array_is_as_fast_as_a_ring_with_wormhole_routing(ranks: int) -> None:
    """The message from the last rank to the first goes against all others, so it shares no wire with them."""
    schedule, nbytes = build("all_reduce", "ring", ranks), 1 << 20
    ring_s = simulate(schedule, nbytes, Flat(ranks, WIRE), FREE).seconds
    assert simulate(schedule, nbytes, LinearArray(ranks, WIRE), FREE).seconds == pytest.approx(ring_s, rel=1e-12)
    one_s, rounds = WIRE.seconds(nbytes / ranks), 2 * (ranks - 1)
    hops = simulate(schedule, nbytes, LinearArray(ranks, WIRE, hop_s=1e-7), FREE).seconds
    assert hops == pytest.approx(rounds * (one_s + (ranks - 2) * 1e-7), rel=1e-6)
    stored = simulate(schedule, nbytes, LinearArray(ranks, WIRE, stores=True), FREE).seconds
    assert stored == pytest.approx(rounds * (ranks - 1) * one_s, rel=1e-6)


def test_messages_that_share_a_wire_of_a_linear_array_share_its_bandwidth() -> None:
    line = LinearArray(4, WIRE)
    alone, both = line.times([(0, 3, 1e6)], 4), line.times([(0, 3, 1e6), (1, 2, 1e6)], 4)
    assert both[0] - WIRE.latency_s == pytest.approx(2 * (alone[0] - WIRE.latency_s))
    assert line.times([(0, 3, 1e6), (3, 0, 1e6)], 4) == alone * 2  # each direction has wires of its own
