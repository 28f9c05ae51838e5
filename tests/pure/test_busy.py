"""How busy a machine was: what is made of the kernel's counts, when it is measured again, and what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemesh.core.busy import Busyness, Counts, counts_of, judge, replaces
from tilemesh.measure.busy import OtherWork, again_while_busy, spread_of
from tilemesh.measure.sample import Sample

STAT = """cpu  600 0 200 1200 0 0 0 100 0 0
cpu0 100 10 20 800 5 1 2 40 0 0
cpu1 200 0 30 100 0 0 0 60 0 0
cpu12 300 0 150 300 0 0 0 0 0 0
intr 12345
"""
BEFORE = Counts(at_s=100.0, used_s=1000.0, idle_s=500.0, stolen_s=10.0, load=0.2)
QUIET, BUSY = Busyness(0.01, 0.0), Busyness(0.4, 0.0)


def after(*, used_s: float, idle_s: float = 0.0, stolen_s: float = 0.0, seconds: float = 10.0) -> Counts:
    return Counts(
        BEFORE.at_s + seconds, BEFORE.used_s + used_s, BEFORE.idle_s + idle_s, BEFORE.stolen_s + stolen_s, 3.0
    )


def test_counts_are_of_the_cores_that_may_be_used() -> None:
    assert counts_of(STAT, [0, 1], 100, 7.0, 0.5) == Counts(7.0, 3.63, 9.05, 1.0, 0.5)
    assert counts_of(STAT, [1], 100, 7.0, 0.5) == Counts(7.0, 2.3, 1.0, 0.6, 0.5)  # not cpu12
    assert counts_of("cpu0 5 5 5 5\n", [0], 10, 0.0, 0.0) == Counts(0.0, 1.5, 0.5, 0.0, 0.0)  # an old kernel
    assert counts_of("", [0], 100, 0.0, 0.0) is None


@pytest.mark.parametrize(
    ("now", "own_s", "others", "is_busy"),
    [
        (after(used_s=20.0), 20.0, 0.0, False),  # two cores for ten seconds, all of it one's own
        (after(used_s=19.0, idle_s=1.0), 19.5, 0.0, False),  # counted in ticks: less than one's own is none
        (after(used_s=20.0), 15.0, 0.25, True),  # a quarter was somebody else's
        (after(used_s=10.0, idle_s=10.0), 9.5, 0.025, False),
        (after(used_s=19.0, stolen_s=1.0), 19.0, 0.0, True),  # the hypervisor took a twentieth
    ],
)
def test_what_others_used_is_what_oneself_did_not(now: Counts, own_s: float, others: float, is_busy: bool) -> None:
    found = judge(BEFORE, now, own_s, cores=2, visible=2)
    assert found.others == pytest.approx(others)
    assert found.is_busy == is_busy
    assert bool(found.words) == is_busy


def test_where_a_quota_grants_fewer_cores_others_matter_only_if_none_is_idle() -> None:
    """64 cores are seen and two granted: what the neighbours do on the others is their business."""
    neighbours = after(used_s=320.0, idle_s=320.0)
    assert judge(BEFORE, neighbours, 20.0, cores=2, visible=64).others == 0.0
    busy = judge(BEFORE, after(used_s=640.0), 20.0, cores=2, visible=64)
    assert busy.is_busy
    assert busy.others == 1.0  # all of what may be used, however much they used elsewhere


def test_nothing_known_is_no_disturbance() -> None:
    assert Busyness().score == 0.0
    assert Busyness(0.0, 0.0).score == 0.0


def test_a_kernel_that_counts_nothing_leaves_the_load_to_judge_by() -> None:
    silent = judge(BEFORE, after(used_s=0.0), 20.0, cores=2, visible=2)
    assert (silent.others, silent.is_busy) == (None, False)
    loaded = judge(BEFORE._replace(load=5.0), after(used_s=0.0), 20.0, cores=2, visible=2)
    assert loaded.is_busy
    assert "load average was 2.5 per core" in loaded.words
    assert not judge(BEFORE._replace(load=5.0), after(used_s=20.0), 20.0, cores=2, visible=2).is_busy  # one's own, then
    assert judge(None, None, 1.0, 2, 2) == Busyness()


def test_readings_that_wander_say_so_too() -> None:
    calm, wild = Sample(1.0, 0.9, 1.1, 9), Sample(1.0, 0.5, 1.5, 9)
    assert spread_of([calm, calm, wild]) == pytest.approx(1.1 / 0.9)
    assert spread_of([]) == 0.0
    assert not replace(QUIET, spread=spread_of([calm, calm, wild])).is_busy
    assert "spread 3.0-fold" in replace(QUIET, spread=spread_of([wild])).words


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 50), st.floats(0, 9))
def test_what_is_stored_comes_back(others: float, stolen: float, load: float, spread: float) -> None:
    for found in (Busyness(others, stolen, load, spread), Busyness(None, None, load, spread)):
        assert Busyness.from_dict(found.to_dict()) == found
        assert bool(found.words) == found.is_busy
    for damage in (None, [], {"others": "many"}, {"load": True}):
        assert Busyness.from_dict(damage) is None


def test_a_quiet_measurement_is_never_replaced_by_a_busy_one() -> None:
    assert replaces(BUSY, None)  # nobody knows of what is stored
    assert replaces(QUIET, QUIET)
    assert replaces(QUIET, BUSY)
    assert not replaces(BUSY, QUIET)
    assert replaces(Busyness(0.2, 0.0), BUSY)  # less busy than before
    assert not replaces(BUSY, Busyness(0.2, 0.0))


@pytest.mark.parametrize(
    ("found", "kept", "warnings"),
    [
        ([QUIET], 0, 0),
        ([BUSY, QUIET], 1, 1),
        ([BUSY, Busyness(0.2, 0.0), Busyness(0.9, 0.0)], 1, 3),  # the best of three, and said to be disturbed
    ],
)
def test_it_is_measured_again_while_the_machine_is_busy(found: list[Busyness], kept: int, warnings: int) -> None:
    left, said, pauses = list(enumerate(found)), [], []
    best, busy = again_while_busy(lambda: left.pop(0), said.append, sleep=pauses.append)
    assert (best, busy) == (kept, found[kept])
    assert not left
    assert (len(said), len(pauses)) == (warnings, len(found) - 1)
    assert all("\n" not in line for line in said)


def test_this_machine_answers() -> None:
    found = OtherWork().busyness()
    assert found.others is None or 0.0 <= found.others <= 1.0
