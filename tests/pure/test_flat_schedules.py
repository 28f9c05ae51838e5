"""Schedules through shared memory: proved in any number of segments, and every break of them caught."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_schedules import breaks

from tilemesh.comm.schedules.book import BOOK, build, is_shared
from tilemesh.comm.schedules.check import BrokenScheduleError, check
from tilemesh.comm.schedules.schedule import INPUT, TEMP, Round, Schedule, copy, read, same, sync

SHARED = [(collective, name) for collective, row in BOOK.items() for name in row if is_shared(name)]


@pytest.mark.parametrize(("collective", "algorithm"), SHARED)
def test_in_any_number_of_segments(collective: str, algorithm: str) -> None:
    for ranks in (1, 2, 3, 7, 16):
        for segments in (1, 2, 3, 6):
            for root in {0, ranks - 1}:
                check(build(collective, algorithm, ranks, root, stage_segments=segments))


@pytest.mark.parametrize(("collective", "algorithm"), SHARED)
def test_every_break_is_caught_in_segments(collective: str, algorithm: str) -> None:
    for segments in (2, 3):
        schedule = build(collective, algorithm, 3, 1, stage_segments=segments)
        survivors = []
        for words, broken in breaks(schedule):
            try:
                check(broken)
            except BrokenScheduleError:
                continue
            survivors.append(words)
        assert survivors == []


def test_a_call_without_a_meeting_may_not_leave_readers_behind() -> None:
    """Without a sync of its own in between, the half that comes round again may still be read."""
    two, zero, one = 2, same(2, 0), same(2, 1)

    def rounds(meets: int) -> list[Round]:
        put = (copy(zero, INPUT, zero, TEMP, zero, one),)
        get = tuple(read(same(two, p), TEMP, zero, zero, one, reduce=p > 0) for p in range(two))
        return [put, *([(sync(zero), *get)] if meets else [get])]

    good = Schedule("all_reduce", "made up", two, 0, 1, lambda: iter(rounds(1)), temp=1, shared=frozenset({TEMP}))
    check(good)
    with pytest.raises(BrokenScheduleError, match="in the epoch in which it is written"):
        check(replace(good, make=lambda: iter(rounds(0))))


def test_input_may_not_be_read_where_only_the_stage_is_shared() -> None:
    zero, one = same(2, 0), same(2, 1)
    steps = (sync(zero), *(read(same(2, p), INPUT, zero, zero, one, reduce=p > 0) for p in range(2)))
    schedule = Schedule("all_reduce", "made up", 2, 0, 1, lambda: iter([steps]), shared=frozenset({TEMP}))
    with pytest.raises(BrokenScheduleError, match="reads input of rank 0, which others cannot reach"):
        check(schedule)
