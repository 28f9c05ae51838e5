"""Every schedule in the book is proved, every way of breaking one is caught, and the bytes are what the forms say."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.comm.schedules import draw, ring
from tilemesh.comm.schedules.book import ALGORITHMS, BOOK, algorithms, build, is_direct, is_shared
from tilemesh.comm.schedules.check import BrokenScheduleError, check
from tilemesh.comm.schedules.collectives import BLOCKED, COLLECTIVES, ROOTED, cut, layout
from tilemesh.comm.schedules.cost import Traffic, count, traffic
from tilemesh.comm.schedules.schedule import (
    DATA,
    INPUT,
    NOBODY,
    TEMP,
    Round,
    RoundStep,
    Schedule,
    Shift,
    Sparse,
    copy,
    moves,
    read,
    recv,
    same,
    send,
    sync,
    vector,
)
from tilemesh.comm.schedules.simulate import Memory, simulate
from tilemesh.comm.schedules.topology import Flat, TwoLevel, Wire
from tilemesh.core.errors import UsageError

PAIRS = [(collective, algorithm) for collective, row in BOOK.items() for algorithm in row]
BEYOND = (67, 96, 100, 128)


def roots(collective: str, ranks: int) -> list[int]:
    return sorted({0, ranks // 2, ranks - 1}) if collective in ROOTED else [0]


# Proofs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_every_schedule_is_proved_for_1_to_17_ranks_and_some_more(collective: str, algorithm: str) -> None:
    for ranks in (*range(1, 18), 24, 31, 32, 33):
        prove(collective, algorithm, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_every_schedule_is_proved_for_18_to_64_ranks(collective: str, algorithm: str) -> None:
    for ranks in range(18, 65):
        prove(collective, algorithm, ranks)


def prove(collective: str, algorithm: str, ranks: int) -> None:
    check(build(collective, algorithm, ranks, ranks * 7 // 10, segments=2, node_size=4))


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_every_schedule_is_proved_with_other_roots_nodes_and_segments(collective: str, algorithm: str) -> None:
    for ranks in (1, 2, 3, 5, 6, 7, 8, 12, 13, 16):
        for root in roots(collective, ranks):
            check(build(collective, algorithm, ranks, root, segments=3, node_size=3))
            check(build(collective, algorithm, ranks, root, segments=5, node_size=8))


@pytest.mark.parametrize(("collective", "algorithm"), [pair for pair in PAIRS if pair != ("all_to_all", "naive")][::3])
def test_some_schedules_beyond_64_ranks_are_proved(collective: str, algorithm: str) -> None:
    """A third of them; all are in the slow test below."""
    check(build(collective, algorithm, BEYOND[PAIRS.index((collective, algorithm)) % 2], segments=2))


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_every_schedule_is_proved_beyond_64_ranks(collective: str, algorithm: str) -> None:
    for ranks in BEYOND:
        for root in roots(collective, ranks):
            check(build(collective, algorithm, ranks, root, segments=3, node_size=8))


@settings(max_examples=60, deadline=None)
@given(
    pair=st.sampled_from(PAIRS),
    ranks=st.integers(1, 40),
    root=st.integers(0, 39),
    segments=st.integers(2, 6),
    node_size=st.integers(1, 11),
)
def test_any_root_segments_and_node_size(
    pair: tuple[str, str], ranks: int, root: int, segments: int, node_size: int
) -> None:
    check(build(*pair, ranks, root % ranks, segments=segments, node_size=node_size))


def test_every_collective_has_a_naive_form_and_at_least_one_other() -> None:
    assert set(BOOK) == set(COLLECTIVES)
    assert all("naive" in row and len(row) > 1 for row in BOOK.values())


# Breaking them on purpose -----------------------------------------------------------------------------------------


def changed(schedule: Schedule, rounds: list[Round]) -> Schedule:
    return replace(schedule, make=lambda: iter(rounds))


def without(steps: Round, index: int, rank: int) -> Round:
    """The same round in which one rank sits one step out."""
    step = steps[index]
    peer = vector(len(step.peer), lambda r: NOBODY if r == rank else step.peer[r])
    return (*steps[:index], replace(step, peer=peer), *steps[index + 1 :])


def with_value(steps: Round, index: int, name: str, rank: int, value: int) -> Round:
    step = steps[index]
    old = getattr(step, name)
    new: dict[str, Any] = {name: vector(len(old), lambda r: value if r == rank else old[r])}
    return (*steps[:index], replace(step, **new), *steps[index + 1 :])


def breaks(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Each single change that spoils a schedule, for every rank's every part in it."""
    rounds = list(schedule.rounds())
    ranks = schedule.ranks
    for number, steps in enumerate(rounds):

        def instead(new: Round, at: int = number) -> Schedule:
            return changed(schedule, [*rounds[:at], new, *rounds[at + 1 :]])

        for index, step in enumerate(steps):
            for rank in range(ranks):
                peer = step.peer[rank]
                if peer == NOBODY or (step.count[rank] <= 0 and step.kind != "sync"):
                    continue
                where = f"round {number} step {index} {step.kind} rank {rank}"
                yield f"{where} dropped", instead(without(steps, index, rank))
                if step.kind == "sync":
                    continue
                if step.kind in ("send", "recv"):
                    # (A copy of one slot too many can be right all the same: the next one may overwrite it.)
                    yield f"{where} other peer", instead(with_value(steps, index, "peer", rank, (peer + 1) % ranks))
                    yield f"{where} to itself", instead(with_value(steps, index, "peer", rank, rank))
                    both = drop_both(steps, rank, peer, step.kind == "send")
                    if both is not None:
                        yield f"{where} dropped with its other side", instead(both)
                    longer = with_value(steps, index, "count", rank, step.count[rank] + 1)
                    yield f"{where} one slot too many", instead(longer)
                if schedule.chunks > 1 and step.kind != "send":
                    moved = (step.at[rank] + 1) % schedule.chunks
                    yield f"{where} another slot", instead(with_value(steps, index, "at", rank, moved))
            takes_part = any(p != NOBODY and c > 0 for p, c in zip(step.peer, step.count, strict=True))
            if step.kind in ("recv", "read") and takes_part and schedule.collective != "barrier":
                yield (
                    f"round {number} step {index} reduce flipped",
                    instead((*steps[:index], replace(step, reduce=not step.reduce), *steps[index + 1 :])),
                )
            if step.kind == "sync":
                yield f"round {number} without its sync", instead((*steps[:index], *steps[index + 1 :]))


def drop_both(steps: Round, rank: int, peer: int, is_send: bool) -> Round | None:
    """Without all that goes from one rank to the other in this round."""
    source, target = (rank, peer) if is_send else (peer, rank)
    result: list[Any] = []
    for step in steps:
        mine, other = (source, target) if step.kind == "send" else (target, source)
        drops = step.kind in ("send", "recv") and step.peer[mine] == other
        new = vector(len(step.peer), lambda r, m=mine, s=step: NOBODY if r == m else s.peer[r])  # type: ignore[misc]
        result.append(replace(step, peer=new) if drops else step)
    return tuple(result)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
@pytest.mark.parametrize("ranks", [2, 5])
def test_every_break_is_caught(collective: str, algorithm: str, ranks: int) -> None:
    schedule = build(collective, algorithm, ranks, ranks // 2, segments=2, node_size=2)
    check(schedule)
    survivors, tried = [], 0
    for words, broken in breaks(schedule):
        tried += 1
        try:
            check(broken)
        except BrokenScheduleError:
            continue
        survivors.append(words)
    assert tried > 3
    assert survivors == []


def test_the_message_says_where_and_what() -> None:
    schedule = build("all_reduce", "ring", 4)
    rounds = list(schedule.rounds())
    lost = without(rounds[2], 0, 1)
    with pytest.raises(BrokenScheduleError, match=r"ring all_reduce of 4 ranks, round 2, rank 2: waits for rank 1"):
        check(changed(schedule, [*rounds[:2], lost, *rounds[3:]]))
    twice = [*rounds[:2], rounds[1], *rounds[2:]]
    with pytest.raises(BrokenScheduleError, match=r"contribution of rank \d is counted twice"):
        check(changed(schedule, twice))
    with pytest.raises(BrokenScheduleError, match=r"rank 0: ends with chunk 1 of ranks 0,2,3 in slot 1, not"):
        check(changed(schedule, rounds[:4]))


def test_adding_in_different_orders_is_caught() -> None:
    """Everybody sends all it has to everybody: complete, but each rank adds in an order of its own."""

    def rounds() -> Iterator[Round]:
        zero, one = same(4, 0), same(4, 1)
        yield ring.whole_input(4, 1)
        yield tuple(send(Shift(4, k), zero, one) for k in (1, 2, 3)) + tuple(
            recv(Shift(4, -k), zero, one, reduce=True) for k in (1, 2, 3)
        )

    with pytest.raises(BrokenScheduleError, match="rank 1: adds in another order than rank 0"):
        check(Schedule("all_reduce", "everybody", 4, 0, 1, rounds))


def test_a_receive_in_a_later_round_is_a_circle_of_waiting() -> None:
    schedule = build("all_reduce", "recursive_doubling", 2)
    first, swap = list(schedule.rounds())
    late = [first, (swap[0],), (swap[1],)]
    with pytest.raises(BrokenScheduleError, match="does not receive it in this round: it waits for ever"):
        check(changed(schedule, late))


# Sizes, bytes, time -----------------------------------------------------------------------------------------------


@given(total=st.integers(0, 10_000), parts=st.integers(1, 70))
def test_cut_is_even(total: int, parts: int) -> None:
    sizes = cut(total, parts)
    assert sum(sizes) == total
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_bytes_and_messages_equal_the_closed_forms(collective: str, algorithm: str) -> None:
    for ranks in (*range(1, 18), 24, 32, 33):
        for root in roots(collective, ranks):
            schedule = build(collective, algorithm, ranks, root, segments=3, node_size=4)
            nbytes = 12 * math.lcm(schedule.chunks, ranks) * ranks
            sizes = cut(nbytes, ranks) if collective in BLOCKED else (nbytes,)
            received = sizes if collective == "all_to_all" else ()
            places = [layout(collective, rank, root, ranks, schedule.chunks, sizes, received) for rank in range(ranks)]
            counted = count(schedule, places.__getitem__)
            for rank in range(ranks):
                options = {"rank": rank, "root": root, "segments": 3, "node_size": 4}
                assert counted[rank] == traffic(collective, algorithm, ranks, nbytes, **options), (ranks, root, rank)


def test_the_famous_figures() -> None:
    assert traffic("all_reduce", "ring", 8, 800) == Traffic(14, 1400)
    assert traffic("all_reduce", "rabenseifner", 8, 800) == Traffic(6, 1400)
    assert traffic("all_reduce", "recursive_doubling", 8, 800) == Traffic(3, 2400)
    assert traffic("all_to_all", "pairwise", 8, 800) == Traffic(7, 700)
    assert traffic("all_to_all", "bruck", 8, 800) == Traffic(3, 1200)
    assert traffic("all_to_all", "hierarchical", 64, 6400, node_size=8) == Traffic(7 + 7, 5600 + 5600)


WIRE, MEMORY = Wire(2e-6, 1e10), Memory(5e9, 1e10)


@pytest.mark.parametrize("ranks", [2, 3, 8, 13, 64])
def test_the_clock_agrees_with_the_textbook(ranks: int) -> None:
    nbytes = 1 << 24
    share = nbytes / ranks
    copying = nbytes / MEMORY.copy_bytes_per_s
    ring = simulate(build("all_reduce", "ring", ranks), nbytes, Flat(ranks, WIRE), MEMORY)
    steps = 2 * (ranks - 1)
    expected = copying + steps * WIRE.seconds(share) + (ranks - 1) * share / MEMORY.reduce_bytes_per_s
    assert ring.seconds == pytest.approx(expected, rel=1e-9)
    assert ring.rounds == steps + 1
    tree = simulate(build("broadcast", "tree", ranks), nbytes, Flat(ranks, WIRE), MEMORY)
    assert tree.seconds == pytest.approx(copying + math.ceil(math.log2(ranks)) * WIRE.seconds(nbytes), rel=1e-9)


def test_one_rank_standing_for_all_gives_the_same_time_as_all_ranks() -> None:
    inside = Wire(1e-6, 1e10)
    alike = Flat(6, inside)
    apart = Flat(6, inside, is_uniform=False)
    for collective, algorithm in PAIRS:
        schedule = build(collective, algorithm, 6)
        one, all_ = (simulate(schedule, 6000, topology, MEMORY).seconds for topology in (alike, apart))
        assert one == pytest.approx(all_, rel=1e-12), (collective, algorithm)


def test_two_levels_pay_off_where_wires_between_nodes_are_slow() -> None:
    topology = TwoLevel(32, 8, Wire(1e-6, 2e11), Wire(1e-5, 1e10))
    times = {
        name: simulate(build("all_reduce", name, 32, node_size=8), 1 << 26, topology, Memory(1e12, 1e12)).seconds
        for name in ("ring", "hierarchical", "naive")
    }
    assert times["hierarchical"] < times["ring"] < times["naive"]


def test_a_ring_of_16384_ranks_is_lazy() -> None:
    """Nothing of the schedule is ever a table of ranks: a round is a handful of numbers."""
    schedule = build("all_reduce", "ring", 16_384)
    steps = next(iter(schedule.rounds()))
    for round_ in (steps, *[next(r) for r in [schedule.rounds()]]):
        assert all(isinstance(step.peer, Shift) for step in round_)
    time = simulate(schedule, 1 << 30, Flat(16_384, WIRE), MEMORY)
    assert time.rounds == 2 * 16_383 + 1


# Vectors, drawing, wrong names ------------------------------------------------------------------------------------


@given(n=st.integers(1, 30), by=st.integers(-40, 40), scale=st.integers(0, 5), offset=st.integers(0, 9))
def test_a_shift_iterates_to_what_it_answers(n: int, by: int, scale: int, offset: int) -> None:
    shift = Shift(n, by, scale, offset)
    assert list(shift) == [shift[rank] for rank in range(n)]
    assert len(shift) == n


def test_sparse_is_nobody_elsewhere() -> None:
    assert list(Sparse(4, {2: 7})) == [NOBODY, NOBODY, 7, NOBODY]


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_every_schedule_can_be_drawn(collective: str, algorithm: str) -> None:
    schedule = build(collective, algorithm, 5, segments=2, node_size=2)
    lines = draw.text(schedule).removesuffix(f"\n\n{draw.LEGEND}").splitlines()
    rounds = list(schedule.rounds())
    assert lines[0].startswith(f"{algorithm} {collective}: 5 ranks")
    assert len(lines) == 3 + len(rounds)
    receipts = sum(move.kind == "recv" for steps in rounds for rank in range(5) for move in moves(steps, rank))
    assert sum(line.count("←") for line in lines) == receipts
    image = draw.svg(schedule)
    assert image.count("<polygon ") == receipts
    assert len(re.findall(r">rank \d<", image)) == 5


def test_the_ring_as_it_is_drawn() -> None:
    assert draw.text(build("all_reduce", "ring", 3)).splitlines()[2:5] == [
        "round  rank 0       rank 1       rank 2",
        "0      i0-2⇒0-2     i0-2⇒0-2     i0-2⇒0-2",
        "1      →1:2  ←2:1+  →2:0  ←0:2+  →0:1  ←1:0+",
    ]


def test_pictures_say_what_moves() -> None:
    assert draw.picture("all_to_all", 2).splitlines() == [
        "all_to_all",
        "  rank 0   a0 a1   →   a0 b0",
        "  rank 1   b0 b1   →   a1 b1",
    ]
    assert draw.picture("reduce_scatter", 2).splitlines()[1:] == [
        "  rank 0   a0 a1   →   Σ0 .",
        "  rank 1   b0 b1   →   . Σ1",
    ]
    assert all(name in draw.pictures(3) for name in COLLECTIVES if name != "barrier")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_redcue", "ring", 4), "unknown collective 'all_redcue': did you mean 'all_reduce'?"),
        (("all_reduce", "rnig", 4), "unknown algorithm for all_reduce 'rnig': did you mean 'ring'?"),
        (("all_to_all", "ring", 4), "algorithm 'ring' cannot serve all_to_all: those that can are pairwise, bruck"),
        (("all_reduce", "ring", 0), "0 ranks: expected at least 1"),
        (("broadcast", "tree", 4, 4), "root 4 is not a rank: expected 0 to 3"),
    ],
)
def test_wrong_names_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_a_name_says_what_a_schedule_is(collective: str, algorithm: str) -> None:
    """The runtime goes by names before it builds anything; and a segmented schedule gets the segments asked for."""
    schedule = build(collective, algorithm, 6, segments=3)
    assert (schedule.collective, schedule.algorithm) == (collective, algorithm)
    assert bool(schedule.shared) is is_shared(algorithm)
    assert (INPUT in schedule.shared) is is_direct(algorithm)
    if algorithm.endswith("_segmented"):
        assert schedule.chunks == 3 * build(collective, algorithm, 6, segments=9).chunks // 9


def test_every_algorithm_name_serves_something() -> None:
    assert set(ALGORITHMS) == {name for collective in COLLECTIVES for name in algorithms(collective)}


SAME = same(3, 0)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (sync((0, 0, NOBODY)), "only all of them together can meet"),
        (sync((0, 0, 1)), "only all of them together can meet"),
        (read((NOBODY, NOBODY, -3), INPUT, SAME, SAME, same(3, 1)), "reads from rank -3"),
        (read((1, 2, 0), TEMP, SAME, SAME, same(3, 1)), "reads temp of rank 1, which others cannot reach"),
        (RoundStep("shout", (1, 2, 0), SAME, same(3, 1)), "unknown kind, 'shout'"),  # type: ignore[arg-type]
    ],
)
def test_what_the_runtime_cannot_do_is_not_proved(step: RoundStep, words: str) -> None:
    schedule = Schedule("all_reduce", "made up", 3, 0, 1, lambda: iter([(step,)]), temp=1, shared=frozenset({0, 1}))
    with pytest.raises(BrokenScheduleError, match=words):
        check(schedule)


def test_a_rank_that_sits_a_copy_out_has_not_copied() -> None:
    """NOBODY means the same in every kind of vector."""
    for who in ((0, NOBODY), Sparse(2, {0: 0, 1: NOBODY})):
        steps = (copy(who, INPUT, same(2, 0), DATA, same(2, 0), same(2, 1)),)
        schedule = Schedule("barrier", "made up", 2, 0, 1, lambda steps=steps: iter([steps]))
        with pytest.raises(BrokenScheduleError):
            check(schedule)
