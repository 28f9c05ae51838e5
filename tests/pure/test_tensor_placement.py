"""Placements: what each rank of a mesh has of a tensor, and what turns one into another."""

from __future__ import annotations

import itertools

import pytest

from tilemesh.core.axes import coordinates
from tilemesh.core.errors import UsageError
from tilemesh.core.tensor_placement import (
    REPLICATED,
    Crossing,
    P,
    R,
    S,
    TensorPlacement,
    V,
    can_follow,
    exchange_of,
    parse,
)

AXES = (("tp", 2), ("dp", 3))


def test_a_placement_is_its_marks_whatever_their_order_but_for_cuts_of_one_dim() -> None:
    assert TensorPlacement.of(tp=S(0), dp=P) == TensorPlacement.of(dp=P, tp=S(0)) == parse("dp:P,tp:S0")
    assert TensorPlacement.of(tp=S(0), dp=S(0)) != TensorPlacement.of(dp=S(0), tp=S(0)), (
        "who cuts first decides who has what"
    )
    assert TensorPlacement.of(tp=R, dp=R) == REPLICATED == parse("R") == parse("")
    placed = parse("dp:S(1) tp:S1 pp:V")
    assert (placed["dp"], placed["pp"], placed["cp"]) == (S(1), V, R)
    assert placed.axes_of(1) == ("dp", "tp")
    assert str(placed) == "dp:S(1) tp:S(1) pp:V"
    assert parse(str(placed)) == placed
    assert placed.put("dp", P)["dp"] == P


@pytest.mark.parametrize("words", ["tp", "tp:Q", "tp:S", "tp=S0", "tp:S-1"])
def test_what_is_no_placement_is_refused(words: str) -> None:
    with pytest.raises(UsageError, match=r"expected AXIS:R, AXIS:P, AXIS:V or AXIS:S0"):
        parse(words)


def test_an_axis_stands_once() -> None:
    with pytest.raises(UsageError, match="an axis twice"):
        parse("tp:S0,tp:S1")


@pytest.mark.parametrize("order", [("dp", "tp"), ("tp", "dp")])
@pytest.mark.parametrize("length", [2, 5, 7, 12])
def test_two_axes_cut_one_dim_unevenly_and_every_row_lies_once(order: tuple[str, str], length: int) -> None:
    placed = TensorPlacement(tuple((axis, S(0)) for axis in order))
    shards = [placed.shard((length, 4), AXES, rank) for rank in range(6)]
    rows = [range(box.begin[0], box.begin[0] + box.shape[0]) for shard in shards for _, box in shard.boxes]
    assert sorted(itertools.chain(*rows)) == [*range(length)]
    # The first of the axes makes the larger pieces: ranks that stand alike on it have rows next to one another.
    first = [min(box.begin[0] for _, box in shard.boxes) for shard in shards if shard.boxes]
    places = [coordinates(rank, AXES)[order[0]] for rank, shard in enumerate(shards) if shard.boxes]
    assert [place for _, place in sorted(zip(first, places, strict=True))] == sorted(places)


def test_the_exchange_follows_from_both_ends() -> None:
    ways = {
        (P, R): "all_reduce", (P, S(1)): "reduce_scatter", (S(0), R): "all_gather", (S(0), S(1)): "all_to_all",
        (R, S(0)): "slice", (R, P): "divide", (S(0), P): "pad", (R, R): "", (S(0), S(0)): "", (P, V): "",
    }  # fmt: skip
    assert {ends: exchange_of(*ends) for ends in ways} == ways
    for mark in (R, P, S(0)):
        assert not can_follow(V, mark)
        with pytest.raises(UsageError, match="no exchange does this"):
            exchange_of(V, mark)


def test_a_crossing_is_refused_where_no_gradient_is_such_and_says_what_it_is_taken_for() -> None:
    with pytest.raises(UsageError, match=r"a value of S\(0\) over tp with a gradient of P"):
        Crossing("tp", (S(0), P), (R, R))
    enter, leave = Crossing("tp", (R, R), (R, P)), Crossing("tp", (P, R), (R, R))
    assert (enter.value, enter.gradient, leave.value, leave.gradient) == ("", "all_reduce", "all_reduce", "")
    assert leave.why_not(leave) == ""
    deaf = Crossing("tp", (R, R), (R, R))
    assert deaf.why_not(leave) == "the value is P over tp and is taken for R over tp"
    assert deaf.why_not(enter) == "its gradient should become P over tp and is taken for R over tp"
    assert "over dp" in Crossing("dp", (P, R), (R, R)).why_not(leave)
    lost = Crossing("tp", (P, R), (R, R), has_gradient=False)
    assert lost.why_not(leave) == "its gradient does not come back over tp"
    assert leave.why_not(lost) == "", "where none is needed"
