"""The slow host, rank or link of a cluster is named, and on a clean one nobody is."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemesh.bench.cluster.links import LinkReading, RankSeat, faults, kind_of, rounds


def seats_of(hosts: int, each: int) -> list[RankSeat]:
    return [RankSeat(rank, f"node{rank // each}", f"GPU {rank % each}") for rank in range(hosts * each)]


def read(seats: list[RankSeat], seed: int) -> list[LinkReading]:
    """Clean readings: 5 % of spread, links inside a host ten times as quick."""
    draw = random.Random(seed)
    links = []
    for a, b in (pair for group in rounds(seats) for pair in group):
        scale = 10.0 if kind_of(seats, a, b) == "inside a host" else 1.0
        noise = draw.uniform(0.95, 1.05)
        links.append(LinkReading(a, b, 2e-5 / scale * noise, 6e-5 / scale, 2e9 * scale * noise))
    return links


@given(st.lists(st.integers(1, 5), min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_rounds_measure_each_pair_once_and_no_host_twice_at_a_time(sizes: list[int], draw: random.Random) -> None:
    names = [f"node{host}" for host, size in enumerate(sizes) for _ in range(size)]
    draw.shuffle(names)
    seats = [RankSeat(rank, name, "cpu") for rank, name in enumerate(names)]
    pairs = [frozenset(pair) for group in rounds(seats) for pair in group]
    assert len(pairs) == len(set(pairs))
    inside = {frozenset((a.rank, b.rank)) for a, b in combinations(seats, 2) if a.host == b.host}
    rails = sum(min(names.count(one), names.count(other)) for one, other in combinations(sorted(set(names)), 2))
    assert inside <= set(pairs)
    assert len(pairs) == len(inside) + rails
    for group in rounds(seats):
        busy = [host for a, b in group for host in {names[a], names[b]}]
        assert len(busy) == len(set(busy))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("hosts", "each"), [(1, 2), (2, 1), (2, 8), (3, 2), (8, 4)])
def test_on_a_clean_cluster_nobody_is_named(hosts: int, each: int, seed: int) -> None:
    seats = seats_of(hosts, each)
    speeds = {seat.rank: random.Random(seed + seat.rank).uniform(0.95, 1.05) for seat in seats}
    assert faults(seats, read(seats, seed), speeds) == []


@pytest.mark.parametrize("hosts", [3, 4, 8])
@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_slow_host_is_named_and_not_its_neighbours(hosts: int, each: int, seed: int) -> None:
    seats = seats_of(hosts, each)
    slow = {rank.rank for rank in seats if rank.host == "node2"}
    links = [
        replace(link, bytes_per_s=link.bytes_per_s / 4)
        if slow & {link.a, link.b} and kind_of(seats, link.a, link.b) == "between hosts"
        else link
        for link in read(seats, seed)
    ]
    (fault,) = faults(seats, links, {})
    assert fault.who == "host node2"
    assert "every link between hosts" in fault.what


def test_a_slow_cable_is_named_by_both_its_ends() -> None:
    seats = seats_of(4, 2)
    links = [replace(link, bytes_per_s=1e8) if (link.a, link.b) == (1, 3) else link for link in read(seats, 0)]
    (fault,) = faults(seats, links, {})
    assert fault.who == "rank 1 (GPU 1 of node0) with rank 3 (GPU 1 of node1)"


def test_a_lossy_cable_is_named_even_where_there_is_no_other() -> None:
    seats = seats_of(2, 1)
    (fault,) = faults(seats, [replace(read(seats, 0)[0], slowest_s=0.21)], {})
    assert fault.who.startswith("rank 0")
    assert "lost and sent again" in fault.what


def test_a_gpu_whose_links_are_slow_inside_its_host() -> None:
    seats = seats_of(1, 4)
    links = [replace(link, bytes_per_s=1e9) if 2 in (link.a, link.b) else link for link in read(seats, 0)]
    (fault,) = faults(seats, links, {})
    assert fault.who == "rank 2 (GPU 2 of node0)"


def test_a_slow_gpu_and_a_broken_promise() -> None:
    seats = seats_of(1, 4)
    found = faults(seats, read(seats, 0), {0: 1.0, 1: 1.01, 2: 0.6, 3: 0.99}, {"inside a host": 1e12})
    assert [fault.who for fault in found] == ["rank 2 (GPU 2 of node0)", "links inside a host"]
    assert "0.60 of the others' speed" in found[0].what
