"""Pace of the planner's schedules: simulation agrees with the closed forms, and the short way with the long one."""

from __future__ import annotations

import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.step import pace
from tilemesh.core.step.action import StepProgram
from tilemesh.core.step.book import asynchronous, build, find, synchronous
from tilemesh.core.step.memory import StepBytes, fullest_moments, largest_moments, memory_peaks
from tilemesh.core.step.pace import simulated_s
from tilemesh.core.step.schedule import PipeShape, RankLoad
from tilemesh.core.step.simulate import StepTimes, number, number_anything, simulate

Case = tuple[str, int, int, int]


ALL = tuple(name for name in synchronous() if name != "terapipe")


@st.composite
def any_cases(draw: st.DrawFn) -> Case:
    """Every schedule, over stages and microbatches that it takes."""
    name = draw(st.sampled_from(ALL))
    stages = draw(st.integers(1, 3)) * 2
    microbatches = find(name).microbatches_from(stages, draw(st.integers(1, 20)))
    return name, stages, microbatches, draw(st.integers(2, 3)) if find(name).interleaves else 1


@st.composite
def cases(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(("gpipe", "1f1b", "interleaved")))
    stages = draw(st.integers(1, 7))
    if name == "interleaved":
        return name, stages, stages * draw(st.integers(1, 4)), draw(st.integers(2, 4))
    return name, stages, draw(st.integers(1, 20)), 1


def made(case: Case) -> StepProgram:
    name, stages, microbatches, interleave = case
    return build(name, stages, microbatches, interleave if interleave > 1 else None)


def timed(forward: list[float], backward: list[float], transfer_s: float = 0.0) -> StepTimes:
    return StepTimes(forward, backward, [0.0] * len(backward), transfer_s)


def passes_held(program: StepProgram) -> list[float]:
    return memory_peaks(program, StepBytes.activations(program.chunks))


@given(cases(), st.floats(0.1, 3), st.floats(0.1, 3))
def test_bubble_is_the_closed_form_for_equal_stages(case: Case, f: float, b: float) -> None:
    _, stages, microbatches, interleave = case
    schedule = build(*case)
    chunks = schedule.chunks
    timeline = simulate(schedule, timed([f / interleave] * chunks, [b / interleave] * chunks))
    expected = microbatches * (f + b) + (stages - 1) * (f + b) / interleave
    assert timeline.total_s == pytest.approx(expected)
    assert timeline.bubble == pytest.approx(pace.bubble_fraction(*case))
    assert pace.bubble_fraction(*case) == pytest.approx((stages - 1) / (interleave * microbatches + stages - 1))


def most_held(case: Case, r: int) -> tuple[tuple[int, int], ...]:
    """Passes whose activations rank r holds at its fullest moments as published: from F to B or I, and from I to W."""
    name, p, m, v = case
    match name:
        case "gpipe" | "breadth-first":
            return ((m * v, 0),)
        case "1f1b":
            return ((min(m, p - r), 0),)
        case "interleaved":
            return ((1 + min(m * v - 1, (v - 1) * p + 2 * (p - 1 - r)), 0),)
        case "zb-h1" | "zb-h2":
            ahead = min(p - r if name == "zb-h1" else 2 * (p - r) - 1, m)
            late = min(r if name == "zb-h1" else 2 * r, m - ahead)
            return (ahead, late), (ahead - 1, late + 1)
        case "zb-v":
            most = min(2 * p, 2 * m)
            return (most, 0), (most - 1, 1), (min(p - 1 - r, 2 * m), min(2 * r + 1, 2 * m))
        case "v-half" | "v-min":  # a half and a third of 1F1B's 2 p, but for a constant
            most = min(2 * m, p + 3 if name == "v-half" else -(-2 * p // 3) + 2)
            return (most, 0), (max(0, most - 4), min(4, most))
        case "dualpipe" | "dualpipe-v":
            whole, place = (p, min(r, p - 1 - r)) if name == "dualpipe" else (2 * p, r)
            return (whole + 1, 0), (whole // 2 - 1 - place, place + 2)
    assert name == "chimera"
    return ((min(m, p // 2 + 1 + min(r, p - 1 - r)), 0),)


EXACT = ("gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2")


@given(any_cases(), st.sampled_from([(1.0, 0.0), (1.0, 0.4), (1.0, 1.0), (0.2, 1.7)]))
def test_no_rank_holds_more_than_the_closed_form(case: Case, sizes: tuple[float, float]) -> None:
    """And of these schedules just as much, of ZB-V and Chimera where there are microbatches enough to fill them."""
    name, stages, microbatches, _ = case
    kept, late = sizes
    program = made(case)
    held = memory_peaks(program, StepBytes.activations(program.chunks, kept, late))
    most = [max(a * kept + b * late for a, b in most_held(case, rank)) for rank in range(stages)]
    assert all(one <= bound + 1e-9 for one, bound in zip(held, most, strict=True))
    if name in EXACT or (name in ("zb-v", "chimera") and microbatches >= 2 * stages):
        assert held == pytest.approx(most)


def test_both_ends_of_dualpipe_hold_as_much() -> None:
    """Its two directions are each other's image."""
    held = memory_peaks(build("dualpipe", 8, 20), StepBytes.activations(8, 1.0, 0.4))
    assert held == held[::-1]
    assert max(held) == 9


@settings(max_examples=60)
@given(any_cases(), st.integers(2, 5))
def test_a_shorter_step_holds_as_much(case: Case, rounds: int) -> None:
    name, stages, microbatches, interleave = case
    microbatches += rounds * stages
    sizes = StepBytes.activations(find(name).placement(stages, interleave).chunks, 1.0, 0.6)
    whole = memory_peaks(made((name, stages, microbatches, interleave)), sizes)
    short = memory_peaks(pace.program_for_memory(name, stages, microbatches, interleave), sizes)
    assert max(short) == pytest.approx(max(whole))


@pytest.mark.parametrize("name", [name for name in (*synchronous(), *asynchronous()) if find(name).is_settling])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_after_two_rounds_no_rank_holds_more_of_anything(name: str, stages: int) -> None:
    """Of no chunk, whatever its passes keep; and ranks looked at together are looked at one by one."""
    schedule, ranks = find(name), tuple(range(stages))
    interleave = schedule.interleaves[0] if schedule.interleaves else 1
    counts = [count for count in range(2 * stages + 1, 5 * stages) if schedule.why_not(stages, count) is None]
    for microbatches in counts:
        program = schedule.build(PipeShape(stages, microbatches, interleave))
        short = [pace.moments_for_memory(name, (rank,), stages, microbatches, interleave) for rank in ranks]
        for rank, actions in enumerate(program.actions):
            chunks = program.placement.held[rank]
            assert {*fullest_moments(actions, chunks)} == {*short[rank]}
            sizes = StepBytes(*([float(7 * chunk % 5 + 1) for chunk in range(program.chunks)] for _ in range(2)))
            each = [size for chunk in chunks for size in (sizes.kept[chunk], sizes.kept_for_weights[chunk])]
            most = max(sum(map(operator.mul, moment, each)) for moment in short[rank])
            assert most == memory_peaks(program, sizes)[rank]
        if len({len(held) for held in program.placement.held}) == 1:
            together = pace.moments_for_memory(name, ranks, stages, microbatches, interleave)
            assert {*together} == {*largest_moments({moment for each in short for moment in each})}
    assert counts or schedule.refuses(stages, 5 * stages) is not None


CLOSED = ("gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v")


@settings(max_examples=60)
@given(any_cases(), st.floats(1.0, 1.6), st.floats(0.5, 1.0), st.sampled_from([0.0, 0.02]))
def test_lengths_in_closed_form(case: Case, i: float, w: float, transfer_s: float) -> None:
    """Equal to simulation where I is no shorter than F and W no longer; messages may hide a little more or less."""
    name, stages, microbatches, interleave = case
    program = made((name, stages, max(microbatches, 2 * stages), interleave))
    times = StepTimes.even(program.chunks, 1.0, i, w, transfer_s)
    load = RankLoad.of(program.placement.held, times, len(program.placement.directions))
    quick = pace.closed_form_s(name, stages, program.microbatches, interleave, load)
    whole = simulate(program, times).total_s
    if name in CLOSED:
        assert quick == pytest.approx(whole, rel=0.02 if transfer_s else 5e-3)
    else:
        assert quick == pytest.approx(whole, rel=0.25)


@given(any_cases())
def test_a_placement_is_known_without_the_lists(case: Case) -> None:
    program = made(case)
    schedule = find(case[0])
    assert schedule.placement(case[1], case[3]) == program.placement
    assert schedule.is_split == ("I" in program.kinds)


@given(any_cases())
def test_passes_are_numbered_by_arithmetic_as_by_names(case: Case) -> None:
    assert number(made(case)) == number_anything(made(case))


def test_in_flight_by_hand() -> None:
    assert passes_held(build("gpipe", 4, 8)) == [8, 8, 8, 8]
    assert passes_held(build("1f1b", 4, 8)) == [4, 3, 2, 1]
    # Narayanan et al. 2021: interleaving holds 1 + (p-1)/(p v) times as many as 1F1B on the first stage, the MT-NLG
    # 530B with 35 stages and 3 chunks 139 of 105.
    assert passes_held(build("interleaved", 35, 70, 3))[0] / 3 == pytest.approx(35 * (1 + 34 / (35 * 3)))


@settings(max_examples=60)
@given(cases(), st.data())
def test_the_short_way_equals_the_long_one(case: Case, data: st.DataObject) -> None:
    name, stages, _, interleave = case
    microbatches = stages * data.draw(st.integers(1, 9)) + (data.draw(st.integers(0, 3)) if interleave == 1 else 0)
    times = st.lists(st.integers(1, 9), min_size=stages * interleave, max_size=stages * interleave)
    forward, backward = data.draw(times), data.draw(times)
    whole = simulate(build(name, stages, microbatches, interleave), timed(forward, backward)).total_s
    short = simulated_s(name, stages, microbatches, interleave, timed(forward, backward))
    # The order of uneven stages may take longer to settle than it is watched: that costs at most a little.
    assert short == pytest.approx(whole, rel=0.02 if len({*forward, *backward}) > 1 else 1e-12)


@settings(max_examples=40)
@given(any_cases(), st.integers(0, 5), st.data())
def test_the_short_way_of_every_schedule(case: Case, rounds: int, data: st.DataObject) -> None:
    name, stages, microbatches, interleave = case
    program = made((name, stages, microbatches + rounds * stages, interleave))
    each = st.lists(st.integers(4, 6), min_size=program.chunks, max_size=program.chunks)
    times = StepTimes(data.draw(each), data.draw(each), data.draw(each), data.draw(st.sampled_from([0.0, 0.5])))
    short = simulated_s(name, stages, program.microbatches, interleave, times)
    assert short == pytest.approx(simulate(program, times).total_s, rel=0.03)


def test_uneven_stages_are_watched_until_their_pace_is_steady() -> None:
    # After three rounds this one is not: the pace it has then would be 5.4 % off at the end.
    forward, backward = [9, 2, 1, 7, 9, 5, 9, 9], [9, 2, 9, 5, 2, 4, 3, 2]
    whole = simulate(build("interleaved", 4, 40, 2), timed([*forward], [*backward])).total_s
    assert simulated_s("interleaved", 4, 40, 2, timed(forward, backward)) == pytest.approx(whole)


def test_a_stage_that_is_busiest_by_little_sets_the_pace_late() -> None:
    # The last stage is ahead of the first for more rounds than are walked; then the first, 14 against 13, takes over.
    assert simulated_s("1f1b", 5, 35, 1, timed([6, 1, 1, 1, 8], [8, 1, 1, 6, 5])) == 35 * 14


def test_one_slow_stage_sets_the_pace() -> None:
    timeline = simulate(build("1f1b", 4, 50), timed([1, 1, 1, 2], [2, 2, 2, 4]))
    assert timeline.total_s == pytest.approx(50 * 6 + 3 * 3)


def test_a_transfer_delays_and_a_timeline_can_be_kept() -> None:
    timeline = simulate(build("gpipe", 2, 1), timed([1, 1], [2, 2], transfer_s=0.5), keep_slots=True)
    assert timeline.total_s == 1 + 0.5 + 1 + 2 + 0.5 + 2
    ordered = sorted(timeline.slots, key=lambda slot: slot.start_s)
    assert [str(slot.action) for slot in ordered] == ["0F0", "1F0", "1B0", "0B0"]
