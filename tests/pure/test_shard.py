"""Places on a mesh and parts of a tensor, as values: any mesh, any cuts, and every number is somewhere exactly once."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from tilemesh.comm.schedules.collectives import cut
from tilemesh.core.axes import Axes, coordinates, members, ordered, place_among, rank_at, ranks_of
from tilemesh.core.errors import UsageError
from tilemesh.core.shard import Box, Cut, Shard, share
from tilemesh.parallel.shard import join, take

NAMES = ("tp", "cp", "dp", "pp", "expert")


@some.composite
def meshes(draw: some.DrawFn) -> Axes:
    names = draw(some.lists(some.sampled_from(NAMES), unique=True, max_size=4))
    return ordered({name: draw(some.integers(1, 4)) for name in names})


@some.composite
def shards(draw: some.DrawFn, whole: tuple[int, ...] | None = None) -> Shard:
    """Any tensor on any mesh: up to three cuts, along the same dim or others, even and not, with units and copies."""
    axes = draw(meshes())
    if whole is None:
        whole = tuple(draw(some.lists(some.sampled_from([0, 1, 2, 5, 6, 12]), min_size=1, max_size=3)))
    apart_along = {name: draw(some.sampled_from(_divisors(n))) for name, n in axes if name in ("cp", "dp")}
    spread = tuple((name, every) for name, every in apart_along.items() if every > 1)
    at = draw(some.integers(0, math.prod(every for _, every in spread) - 1))
    partial = tuple(draw(some.sets(some.sampled_from(NAMES))))
    first = next(rank for rank in range(ranks_of(axes)) if place_among(rank, spread, axes) == at)
    shard = Shard("a", whole, axes, first, partial=partial, spread=spread, at=at)
    for name, size in draw(some.permutations(axes))[:3]:
        dim = draw(some.integers(0, len(whole) - 1))
        apart = apart_along.get(name, 1)
        pieces = draw(some.sampled_from([*([None] if apart == 1 else []), *_divisors(size // apart)]))
        stride = apart if apart > 1 or draw(some.booleans()) else None
        parts, units = draw(some.sampled_from([(1, None), (1, None), (1, 2), (2, None), (3, None), (2, 3)]))
        try:
            made = shard.cut_over(Cut(name, dim, parts, units, pieces, stride))
            for rank in range(ranks_of(axes)):
                made.on(rank)  # a later cut sees different lengths on different ranks
            shard = made
        except UsageError:
            continue  # what does not divide into parts or units is refused
    return shard


def _divisors(size: int) -> list[int]:
    return [n for n in range(1, size + 1) if size % n == 0]


def places(box: Box) -> list[tuple[int, ...]]:
    ranges = (range(begin, begin + length) for begin, length in zip(box.begin, box.shape, strict=True))
    return list(itertools.product(*ranges))


boxes = some.lists(some.tuples(some.integers(0, 6), some.integers(1, 5)), min_size=2, max_size=2).map(
    lambda pairs: Box(tuple(begin for begin, _ in pairs), tuple(length for _, length in pairs))
)


@given(a=boxes, b=boxes)
def test_the_overlap_of_boxes_is_that_of_their_places(a: Box, b: Box) -> None:
    shared = a.overlap(b)
    assert (set(places(shared)) if shared else set()) == set(places(a)) & set(places(b))
    if shared:
        for here, length in zip(shared.within(a), a.shape, strict=True):
            assert 0 <= here.start < here.stop <= length


@given(axes=meshes())
def test_a_rank_is_its_place(axes: Axes) -> None:
    ranks = range(ranks_of(axes))
    found = [coordinates(rank, axes) for rank in ranks]
    assert [rank_at(place, axes) for place in found] == list(ranks)
    assert len({tuple(place.values()) for place in found}) == len(ranks)
    if axes and axes[0][1] > 1:  # the first axis varies fastest
        assert coordinates(1, axes)[axes[0][0]] == 1


@given(axes=meshes(), data=some.data())
def test_blocks_divide_the_ranks(axes: Axes, data: some.DataObject) -> None:
    """Every rank is in one block, with those that differ along the block's axes alone."""
    chosen = [(name, data.draw(some.sampled_from([n for n in range(1, size + 1) if size % n == 0])))
              for name, size in axes if data.draw(some.booleans())]  # fmt: skip
    blocks = tuple(chosen)
    groups = {members(rank, blocks, axes) for rank in range(ranks_of(axes))}
    assert sorted(rank for group in groups for rank in group) == list(range(ranks_of(axes)))
    for group in groups:
        assert len(group) == math.prod(count for _, count in blocks)
        first = coordinates(group[0], axes)
        for rank in group:
            place = coordinates(rank, axes)
            assert all(place[name] == first[name] for name in place if name not in dict(blocks))
            assert all(place[name] // count == first[name] // count for name, count in blocks)


def test_model_major() -> None:
    assert ordered({"pp": 2, "z": 3, "dp": 4, "a": 1, "cp": 5, "tp": 6}) == (
        ("tp", 6), ("cp", 5), ("dp", 4), ("pp", 2), ("z", 3), ("a", 1),
    )  # fmt: skip
    axes = ordered({"dp": 3, "tp": 4})
    assert coordinates(6, axes) == {"tp": 2, "dp": 1}
    assert members(6, (("tp", 4),), axes) == (4, 5, 6, 7)
    assert members(6, (("dp", 3),), axes) == (2, 6, 10)


@given(total=some.integers(0, 50), parts=some.integers(1, 9))
def test_shares_are_what_collectives_cut(total: int, parts: int) -> None:
    lengths = cut(total, parts)
    assert [share(total, parts, index) for index in range(parts)] == [
        (sum(lengths[:index]), lengths[index]) for index in range(parts)
    ]


@given(shard=shards())
def test_the_boxes_of_all_ranks_are_the_whole_once_for_each_copy(shard: Shard) -> None:
    everyone = [shard.on(rank) for rank in range(ranks_of(shard.axes))]
    held: Counter[tuple[int, ...]] = Counter()
    written: Counter[tuple[int, ...]] = Counter()
    for mine in everyone:
        assert all(span.length > 0 for spans in mine.spans for span in spans)
        local = [place for here, _ in mine.boxes for place in places(here)]
        assert sorted(local) == places(Box((0,) * len(mine.shape), mine.shape)), "the local tensor, once"
        there = [place for _, box in mine.boxes for place in places(box)]
        assert len(there) == math.prod(mine.shape)
        held.update(there)
        written.update(there if mine.writes else [])
    everything = places(Box((0,) * len(shard.whole), shard.whole))
    assert set(held) == set(everything)
    assert all(held[place] == shard.copies for place in everything)
    assert written == Counter(everything)


@given(shard=shards())
def test_arrays_are_cut_and_joined_by_any_shard(shard: Shard) -> None:
    whole = np.arange(math.prod(shard.whole), dtype=np.int32).reshape(shard.whole)
    everyone = [shard.on(rank) for rank in range(ranks_of(shard.axes))]
    locals_ = [take(mine, whole) for mine in everyone]
    assert [local.shape for local in locals_] == [mine.shape for mine in everyone]
    assert np.array_equal(join(everyone, locals_), whole)


@given(shard=shards())
def test_who_holds_the_same_is_known(shard: Shard) -> None:
    everyone = [shard.on(rank) for rank in range(ranks_of(shard.axes))]
    for mine in everyone:
        alike = members(mine.rank, mine.replicas, mine.axes)
        assert all(everyone[rank].boxes == mine.boxes for rank in alike)
        if any(cut.stride for cut in mine.cuts):  # those that hold the same are not neighbours: no block of them
            assert mine.copies % len(alike) == 0
            continue
        assert len(alike) == mine.copies
        assert sum(everyone[rank].writes for rank in alike) == 1
        summed = members(mine.rank, mine.summed, mine.axes)
        assert len(summed) * mine.alike == mine.copies
        assert set(summed) <= set(alike)


@given(data=some.data())
def test_what_one_layout_wrote_any_other_can_read(data: some.DataObject) -> None:
    """Box by box, as a checkpoint is read: every number that is asked for is found once."""
    written = data.draw(shards())
    read = data.draw(shards(whole=written.whole))
    stored = [
        box for rank in range(ranks_of(written.axes)) if written.on(rank).writes for _, box in written.on(rank).boxes
    ]
    for rank in range(ranks_of(read.axes)):
        for _, box in read.on(rank).boxes:
            shared = [common for one in stored if (common := box.overlap(one)) is not None]
            assert sorted(place for common in shared for place in places(common)) == sorted(places(box))
            for common in shared:
                assert [one.start + first for one, first in zip(common.within(box), box.begin, strict=True)] == list(
                    common.begin
                )


def test_experts_shared_out_among_replicas() -> None:
    """Of 4 replicas every second holds it: the first and the third, or with ZeRO a half of it each."""
    shard = Shard("expert", (6, 2), ordered({"dp": 4, "tp": 2}), 2, partial=("dp",), spread=(("dp", 2),), at=1)
    assert [shard.on(rank).shape[0] for rank in range(8)] == [0, 0, 6, 6, 0, 0, 6, 6]
    assert (shard.replicas, shard.summed, shard.copies) == ((("tp", 2), ("dp/2", 2)), (("dp/2", 2),), 4)
    assert members(2, shard.summed, shard.axes) == (2, 6)
    cut = shard.cut_over(Cut("dp", 0, pieces=2, stride=2))
    assert [cut.on(rank).boxes[0][1].begin[0] for rank in (2, 3, 6, 7)] == [0, 0, 3, 3]
    assert [(cut.on(rank).writes, cut.on(rank).copies) for rank in (2, 3, 6, 7)] == [(True, 2), (False, 2)] * 2


def test_experts_shared_out_among_ranks_of_cp_and_dp() -> None:
    """Of 2 x 2 replicas, twice: each holds another; ZeRO cuts it over the two that hold the same."""
    axes, spread = ordered({"dp": 4, "cp": 2}), (("cp", 2), ("dp", 2))
    assert [place_among(rank, spread, axes) for rank in range(8)] == [0, 1, 2, 3] * 2
    shard = Shard("expert", (6, 2), axes, 2, partial=("dp", "cp"), spread=spread, at=2)
    assert [shard.on(rank).shape[0] for rank in range(8)] == [0, 0, 6, 0, 0, 0, 6, 0]
    assert (shard.replicas, shard.copies) == ((("dp/2", 2),), 2)
    cut = shard.cut_over(Cut("dp", 0, pieces=2, stride=2)).cut_over(Cut("cp", 0, pieces=1, stride=2))
    assert [cut.on(rank).shape[0] for rank in (2, 6)] == [3, 3]
    assert (cut.on(6).copies, cut.on(6).writes) == (1, True)


def test_zero_inside_a_node_is_replicated_across_nodes() -> None:
    shard = Shard("table", (6, 2), ordered({"dp": 4}), 0, (Cut("dp", 0, pieces=2, stride=1),))
    assert [shard.on(rank).boxes[0][1].begin[0] for rank in range(4)] == [0, 3, 0, 3]
    assert [shard.on(rank).writes for rank in range(4)] == [True, True, False, False]
    assert (shard.copies, shard.replicas) == (2, ())


def test_tensor_parallelism_then_zero() -> None:
    """q, k and v stacked in one matrix, cut by heads over tp, then by rows of what is left over dp."""
    axes = ordered({"dp": 2, "tp": 2})
    shard = Shard("qkv", (12, 4), axes, 3, (Cut("tp", 0, parts=3), Cut("dp", 0)))
    assert shard.shape == (3, 4)
    assert [box.begin for _, box in shard.boxes] == [(7, 0), (10, 0)]
    assert (shard.copies, shard.writes, shard.replicas) == (1, True, ())
    along_columns = Shard("qkv", (12, 4), axes, 3, (Cut("tp", 0, parts=3), Cut("dp", 1)))
    assert along_columns.shape == (6, 2)
    assert [box.begin for _, box in along_columns.boxes] == [(2, 2), (6, 2), (10, 2)]


def test_a_norm_under_sequence_parallelism() -> None:
    """Held by all, its gradient a part along both axes: all are summed, one rank writes."""
    norm = Shard("norm", (8,), ordered({"dp": 2, "tp": 4, "pp": 3}), partial=("dp", "tp"))
    assert (norm.copies, norm.alike, norm.summed) == (24, 3, (("tp", 4), ("dp", 2)))
    assert sum(norm.on(rank).writes for rank in range(24)) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shard("a", (4,), (("tp", 2),), 2), "a: rank 2 of a mesh of 2"),
        (lambda: Shard("a", (4,), (("tp", 2),), 0, (Cut("tp", 1),)), "a of shape (4,) has no dim 1 to cut over tp"),
        (lambda: Shard("a", (4, 4), (("tp", 2),), 0, (Cut("tp", 0), Cut("tp", 1))), "a is cut twice over one axis"),
        (lambda: Shard("a", (4,), (("tp", 2),), 0, (Cut("tp", 0, parts=3),)), "a: 4 along dim 0 cannot be cut by"),
        (lambda: Shard("a", (4,), (("tp", 2),), 0, (Cut("tp", 0, units=3),)), "a: 4 along dim 0 cannot be cut by"),
        (lambda: Shard("a", (4,), (("tp", 3),), 0, (Cut("tp", 0, pieces=2),)), "3 ranks of tp cannot hold 2 pieces"),
        (lambda: ordered({"tp": 0}), "tp is 0: expected a whole number of at least 1"),
        (lambda: ordered({"tp": True}), "tp is True"),
    ],
)
def test_what_cannot_be_is_refused(make: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()  # type: ignore[operator]
    assert message in str(caught.value)
