"""Pipeline schedules: every list is complete and free of deadlock, and simulation agrees with the closed forms."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core import pipeline
from tilemesh.core.errors import UsageError
from tilemesh.core.pipeline import Action, build, check, peak_in_flight, simulate, simulated_s


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, int, int, int]:
    name = draw(st.sampled_from(pipeline.SCHEDULES))
    stages = draw(st.integers(1, 7))
    if name == "interleaved":
        return name, stages, stages * draw(st.integers(1, 4)), draw(st.integers(2, 4))
    return name, stages, draw(st.integers(1, 20)), 1


@given(schedules())
def test_every_schedule_is_whole_and_ends(case: tuple[str, int, int, int]) -> None:
    check(build(*case))


@given(schedules(), st.floats(0.1, 3), st.floats(0.1, 3))
def test_bubble_is_the_closed_form_for_equal_stages(case: tuple[str, int, int, int], f: float, b: float) -> None:
    _, stages, microbatches, interleave = case
    schedule = build(*case)
    chunks = schedule.chunks
    timeline = simulate(schedule, [f / interleave] * chunks, [b / interleave] * chunks)
    expected = microbatches * (f + b) + (stages - 1) * (f + b) / interleave
    assert timeline.total_s == pytest.approx(expected)
    assert timeline.bubble == pytest.approx(pipeline.bubble_fraction(*case))
    assert pipeline.bubble_fraction(*case) == pytest.approx((stages - 1) / (interleave * microbatches + stages - 1))


@given(schedules())
def test_activations_in_flight_are_the_closed_form(case: tuple[str, int, int, int]) -> None:
    name, stages, microbatches, interleave = case
    expected = [pipeline.in_flight(name, stage, stages, microbatches, interleave) for stage in range(stages)]
    assert peak_in_flight(build(*case)) == expected


def test_in_flight_by_hand() -> None:
    assert peak_in_flight(build("gpipe", 4, 8)) == [8, 8, 8, 8]
    assert peak_in_flight(build("1f1b", 4, 8)) == [4, 3, 2, 1]
    # Narayanan et al. 2021: interleaving holds 1 + (p-1)/(p v) times as many as 1F1B on the first stage, the MT-NLG
    # 530B with 35 stages and 3 chunks 139 of 105.
    assert peak_in_flight(build("interleaved", 35, 70, 3))[0] / 3 == pytest.approx(35 * (1 + 34 / (35 * 3)))


@settings(max_examples=60)
@given(schedules(), st.data())
def test_the_short_way_equals_the_long_one(case: tuple[str, int, int, int], data: st.DataObject) -> None:
    name, stages, _, interleave = case
    microbatches = stages * data.draw(st.integers(1, 9)) + (data.draw(st.integers(0, 3)) if interleave == 1 else 0)
    times = st.lists(st.integers(1, 9), min_size=stages * interleave, max_size=stages * interleave)
    forward, backward = data.draw(times), data.draw(times)
    whole = simulate(build(name, stages, microbatches, interleave), forward, backward).total_s
    short = simulated_s(name, stages, microbatches, interleave, forward, backward)
    # The order of uneven stages may take longer to settle than it is watched: that costs at most a little.
    assert short == pytest.approx(whole, rel=0.02 if len({*forward, *backward}) > 1 else 1e-12)


def test_uneven_stages_are_watched_until_their_pace_is_steady() -> None:
    # After three rounds this one is not: the pace it has then would be 5.4 % off at the end.
    forward, backward = (9, 2, 1, 7, 9, 5, 9, 9), (9, 2, 9, 5, 2, 4, 3, 2)
    whole = simulate(build("interleaved", 4, 40, 2), forward, backward).total_s
    assert simulated_s("interleaved", 4, 40, 2, forward, backward) == pytest.approx(whole)


def test_one_slow_stage_sets_the_pace() -> None:
    timeline = simulate(build("1f1b", 4, 50), [1, 1, 1, 2], [2, 2, 2, 4])
    assert timeline.total_s == pytest.approx(50 * 6 + 3 * 3)


def test_a_transfer_delays_and_a_timeline_can_be_kept() -> None:
    schedule = build("gpipe", 2, 1)
    timeline = simulate(schedule, [1, 1], [2, 2], transfer_s=0.5, keep_slots=True)
    assert timeline.total_s == 1 + 0.5 + 1 + 2 + 0.5 + 2
    assert [str(slot.action) for slot in sorted(timeline.slots, key=lambda slot: slot.start_s)] == [
        "F0/0", "F0/1", "B0/1", "B0/0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "actions", "words"),
    [
        (0, [Action(False, 0, 0), Action(True, 0, 0)], "deadlock"),
        (0, [Action(True, 0, 0)], "nobody does B0/0"),
        (0, [Action(True, 0, 0), Action(True, 0, 0), Action(False, 0, 0)], "twice"),
        (0, [Action(True, 0, 1), Action(False, 0, 0)], "another stage"),
        (1, [Action(True, 5, 1), Action(False, 0, 1)], "does not have"),
    ],
)
def test_a_broken_schedule_is_named(stage: int, actions: list[Action], words: str) -> None:
    good = build("1f1b", 2, 1)
    lists = [*good.actions]
    lists[stage] = tuple(actions)
    with pytest.raises(UsageError, match=words):
        check(dataclasses.replace(good, actions=tuple(lists)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f2b", 2, 2), "did you mean '1f1b'"),
        (("1f1b", 0, 2), "0 stages"),
        (("gpipe", 2, 2, 2), "use interleaved"),
        (("interleaved", 4, 6, 2), "no multiple of 4 stages"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments: tuple[str, int, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(*arguments)
