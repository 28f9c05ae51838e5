"""Schedules made for given times: within the memory, never longer than a published one that fits; and drawings."""

from __future__ import annotations

import contextlib
import dataclasses
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.core.step import draw
from tilemesh.core.step.action import Action, StepProgram
from tilemesh.core.step.book import build, synchronous
from tilemesh.core.step.check import check
from tilemesh.core.step.memory import memory_curve, memory_peaks
from tilemesh.core.step.passes import exchange, gather
from tilemesh.core.step.placement import loop
from tilemesh.core.step.search import PassTimes, search
from tilemesh.core.step.simulate import simulate

seconds = st.integers(1, 6).map(lambda units: units / 2)


def total_s(program: StepProgram, times: PassTimes) -> float:
    return simulate(program, times.times(program)).total_s


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), seconds, seconds, seconds, st.sampled_from((0.0, 0.3)), st.integers(2, 6))
def test_search_keeps_the_memory_and_is_no_longer_than_what_is_known(
    ranks: int, microbatches: int, f: float, i: float, w: float, way: float, limit: int
) -> None:
    times = PassTimes(f, i, w, way)
    found = search(ranks, microbatches, times, limit)
    check(found, times.sizes(found), limit)
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min"):
        known = build(name, ranks, microbatches)
        if max(memory_peaks(known, times.sizes(known))) <= limit:
            assert total_s(found, times) <= total_s(known, times) + 1e-9, name


def orders(counts: tuple[int, int, int], microbatches: int) -> list[str]:
    """All orders of F, I and W of one rank in which each microbatch's follow one another, from counts done on."""
    f, i, w = counts
    if w == microbatches:
        return [""]
    found = []
    for kind, may, then in (
        ("F", f < microbatches, (f + 1, i, w)), ("I", i < f, (f, i + 1, w)), ("W", w < i, (f, i, w + 1))
    ):  # fmt: skip
        found += [kind + rest for rest in orders(then, microbatches)] if may else []
    return found


def every_program(microbatches: int) -> list[StepProgram]:
    """All programs of two ranks with one chunk each and microbatches in order."""
    lists: list[list[tuple[Action, ...]]] = []
    for rank in (0, 1):
        lists.append([])
        for order in orders((0, 0, 0), microbatches):
            places = [order[:place].count(kind) for place, kind in enumerate(order)]
            actions = [Action(kind, rank, m) for kind, m in zip(order, places, strict=True)]  # type: ignore[arg-type]
            lists[rank].append(tuple(actions))
    return [StepProgram("any", loop(2), microbatches, (one, two)) for one in lists[0] for two in lists[1]]


@pytest.mark.parametrize("times", [(1, 2, 1, 0.5), (1, 1.5, 2, 0.2)])
@pytest.mark.parametrize(("microbatches", "limit"), [(2, 2), (2, 1), (3, 2)])
def test_search_finds_what_trying_every_order_finds(times: tuple[float, ...], microbatches: int, limit: int) -> None:
    """One chunk per rank: 25 and 1,764 programs. The search may use a V besides."""
    passes = PassTimes(*times)
    best = float("inf")
    for program in every_program(microbatches):
        if max(memory_peaks(program, passes.sizes(program))) <= limit:
            with contextlib.suppress(UsageError):  # ranks that wait for one another
                best = min(best, total_s(program, passes))
    assert total_s(search(2, microbatches, passes, limit), passes) <= best + 1e-9


def test_a_limit_nothing_fits_is_refused() -> None:
    for kept in (1.0, 2048.0):  # said in microbatches, whatever the unit of bytes
        with pytest.raises(
            UsageError, match=r"the activations of 0.5 microbatches on every rank; the least found is 1$"
        ):
            search(4, 8, PassTimes(kept=kept, kept_for_weights=kept), 0.5 * kept)


@pytest.mark.parametrize("name", synchronous())
def test_every_schedule_is_drawn(name: str) -> None:
    program = build(name, 4, 8, slices=2 if name == "terapipe" else 1)
    times = PassTimes(1.0, 1.2, 0.8, 0.1)
    timeline = simulate(program, times.times(program), keep_slots=True)
    curves = draw.curves(program, timeline, memory_curve(program, times.sizes(program)))
    assert max(map(len, draw.text(program, timeline, curves, 100).splitlines())) <= 100
    lines = draw.text(program, timeline, curves).splitlines()
    lanes = [line for line in lines if line.startswith("rank")]
    assert len(lanes) == 4
    assert len({len(line) for line in lanes}) == 1
    assert all("0" in line and "7" in line for line in lanes)
    # Every moment in which a rank waits is a dot, within a column per pass.
    column_s = timeline.total_s / (len(lanes[0]) - len("rank 0  ||"))
    for rank, line in enumerate(lanes):
        idle = timeline.total_s - timeline.busy_s[rank]
        assert line.count("·") * column_s == pytest.approx(idle, abs=column_s * (len(program.actions[rank]) + 1))
    root = ET.fromstring(draw.svg(program, timeline, curves, "a & b"))
    boxes = [one for one in root.iter("{http://www.w3.org/2000/svg}rect") if len(one)]  # each with its action's name
    assert len(boxes) == sum(2 if action.kind == "FB" else 1 for actions in program.actions for action in actions)


def test_a_drawing_shows_gathers_and_refuses_what_nobody_could_read() -> None:
    program = exchange(gather(build("interleaved", 2, 4)))
    times = dataclasses.replace(PassTimes().times(program), gather_s=0.5)
    timeline = simulate(program, times, keep_slots=True)
    assert "0UNSHARD" in draw.svg(program, timeline)
    many = build("1f1b", 8, 500)
    long = simulate(many, PassTimes().times(many), keep_slots=True)
    with pytest.raises(UsageError, match="nobody can read"):
        draw.text(many, long)
