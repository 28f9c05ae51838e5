"""From schedule to program: what is posted when, where reductions land, and that programs are kept."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tilemesh.comm import Communicator, run_threads
from tilemesh.comm.runtime.lower import LANDING, Local, Post, Program, Wait, lower
from tilemesh.comm.schedules.book import BOOK, build
from tilemesh.comm.schedules.collectives import BLOCKED, cut, layout
from tilemesh.comm.schedules.cost import count


def program(collective: str, algorithm: str, ranks: int, rank: int, length: int) -> Program:
    schedule = build(collective, algorithm, ranks, segments=3)
    sizes = cut(length, ranks) if collective in BLOCKED else (length,)
    received = (sizes[rank],) * ranks if collective == "all_to_all" else ()
    return lower(
        schedule, rank, lambda who: layout(collective, who, schedule.root, ranks, schedule.chunks, sizes, received)
    )


def test_the_next_receive_is_posted_before_this_one_is_reduced() -> None:
    instructions = program("all_reduce", "ring", 4, 0, 400).instructions
    reduces = [i for i, step in enumerate(instructions) if isinstance(step, Local) and step.reduce]
    assert len(reduces) == 3
    for at in reduces:
        waits = [step.number for step in instructions[:at] if isinstance(step, Wait)]
        early = [
            step
            for step in instructions[:at]
            if isinstance(step, Post) and step.number not in waits and not step.messages[0][0]
        ]
        assert len(early) == 1, "one receive is under way while we add"


def test_a_segmented_ring_also_sends_while_it_adds() -> None:
    instructions = program("all_reduce", "ring_segmented", 4, 0, 480).instructions
    at = next(i for i, step in enumerate(instructions) if isinstance(step, Local) and step.reduce)
    waited = {step.number for step in instructions[:at] if isinstance(step, Wait)}
    under_way = [
        message
        for step in instructions[:at]
        if isinstance(step, Post) and step.number not in waited
        for message in step.messages
    ]
    assert [is_send for is_send, _, _ in under_way] == [False, True]


def test_what_is_reduced_lands_in_two_places_in_turn() -> None:
    steps = [step for step in program("all_reduce", "ring", 5, 2, 500).instructions if isinstance(step, Local)]
    landings = [step.source.lo for step in steps if step.reduce]
    assert all(step.source.space == LANDING for step in steps if step.reduce)
    assert all(one != other for one, other in pairwise(landings))


@pytest.mark.parametrize("collective", [name for name in BOOK if name != "barrier"])
def test_a_program_sends_what_the_schedule_counts(collective: str) -> None:
    for algorithm in BOOK[collective]:
        for ranks, length in ((1, 7), (3, 2), (5, 33), (6, 0)):
            schedule = build(collective, algorithm, ranks, segments=3)
            for rank in range(ranks):
                made = program(collective, algorithm, ranks, rank, length)
                sizes = cut(length, ranks) if collective in BLOCKED else (length,)
                received = (sizes[rank],) * ranks if collective == "all_to_all" else ()
                place = layout(collective, rank, 0, ranks, schedule.chunks, sizes, received)
                if ranks > 1:
                    counted = count(schedule, lambda _, p=place: p)[rank]
                    posts = [step for step in made.instructions if isinstance(step, Post)]
                    sent = [span.hi - span.lo for step in posts for is_send, _, span in step.messages if is_send]
                    assert (len(sent), sum(sent)) == (counted.messages, counted.nbytes)
                posted = [step.number for step in made.instructions if isinstance(step, Post)]
                waited = [step.number for step in made.instructions if isinstance(step, Wait)]
                assert sorted(posted) == sorted(waited), "everything that is begun is waited for"


def test_programs_and_small_memory_are_kept_between_calls() -> None:
    def main(comm: Communicator) -> None:
        planner = comm.planner
        for _ in range(5):
            comm.all_reduce(np.ones(10), algorithm="ring")
        assert planner.program.cache_info().misses == 1  # type: ignore[attr-defined]
        assert [len(pool) for pool in planner.free.values()] == [1]
        # Two at once need memory of their own; both are kept afterwards.
        handles = [comm.all_reduce(np.full(10, float(i)), algorithm="ring", wait=False) for i in range(2)]
        assert [handle.wait()[0] for handle in handles] == [0.0, comm.size]
        assert [len(pool) for pool in planner.free.values()] == [2]
        assert planner.program.cache_info().misses == 1  # type: ignore[attr-defined]

    run_threads(3, main)
