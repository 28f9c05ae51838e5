"""Consistency of parameter servers: the rule in random schedules, the simulator against exact figures, the replay."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.methods.record import (
    ServerEvent,
    append_record,
    largest_lead,
    read_record,
    replay,
    staleness,
    standing,
)
from tilemesh.methods.rules import Push, StalenessRule, bound_of, expected_excess
from tilemesh.methods.simulate import (
    ServerTimes,
    hotspot,
    random_straggler,
    simulate_server,
    simulate_synchronous,
    slow_rank,
)


def random_schedule(draw: random.Random) -> list[ServerEvent]:
    """Any order of requests, with workers that leave and come back; what SSP promises is asserted on the way."""
    workers, bound, batch = draw.randint(1, 6), draw.choice([0, 1, 2, 3, 7, math.inf]), draw.randint(1, 4)
    rule = StalenessRule(range(workers), bound, batch)
    reading: dict[int, int] = {}
    applied: set[Push] = set()
    made: set[Push] = set()
    left: set[int] = set()
    events, version = [], 0
    for _ in range(40):
        worker = draw.randrange(workers)
        if worker in left:
            rule.join(worker)
            left.discard(worker)
        elif draw.random() < 0.02 and len(rule.clocks) > 1:
            rule.leave(worker)
            left.add(worker)
            reading.pop(worker, None)
        elif worker in reading:
            clock = reading.pop(worker)
            assert rule.push(worker, clock)
            assert not rule.push(worker, clock)  # sent twice
            made.add(Push(worker, clock))
        elif rule.may_read(worker):
            clock = reading[worker] = rule.clocks[worker]
            assert clock - rule.slowest <= bound
            # Every push that was made of a clock below c - s is in what is read.
            assert {push for push in made if push.clock < clock - bound} <= applied
            events.append(ServerEvent("pull", (Push(worker, clock),), version))
        for group in rule.due():
            assert not applied & {*group}
            applied |= {*group}
            version += 1
            events.append(ServerEvent("apply", tuple(group), version))
            if not bound:
                assert len({push.clock for push in group}) == 1
        # Somebody can always go on: whoever is slowest.
        assert any(worker in reading or rule.may_read(worker) for worker in rule.clocks)
    for worker in range(workers):
        rule.leave(worker)
    assert {push for group in rule.due() for push in group} | applied == made
    return events


@pytest.mark.parametrize("schedules", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_schedule_exceeds_its_bound_or_loses_a_push(schedules: int) -> None:
    draw = random.Random(22)
    for _ in range(schedules):
        random_schedule(draw)


def test_a_fault_in_the_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StalenessRule, "may_read", lambda self, worker: True)
    with pytest.raises((AssertionError, UsageError)):
        test_no_schedule_exceeds_its_bound_or_loses_a_push(2_000)


def test_bsp_applies_one_update_of_all_workers_in_their_order() -> None:
    rule = StalenessRule(range(3))
    for worker in (2, 0):
        assert rule.push(worker, 0)
        assert rule.due() == []
        assert not rule.may_read(worker)
    rule.push(1, 0)
    assert rule.due() == [[Push(0, 0), Push(1, 0), Push(2, 0)]]
    assert all(rule.may_read(worker) for worker in range(3))


def test_batches_are_collected_and_a_bound_does_not_wait_for_them() -> None:
    rule = StalenessRule(range(4), math.inf, batch=3)
    found = []
    for worker in (3, 1):
        rule.push(worker, 0)
        found += rule.due()
    assert found == []
    rule.push(0, 0)
    assert rule.due() == [[Push(0, 0), Push(1, 0), Push(3, 0)]]
    rule.push(2, 0)  # now all have pushed clock 0: it must be in what anybody reads next
    assert rule.due() == [[Push(2, 0)]]


def test_whoever_joins_begins_at_the_slowest_clock_and_whoever_leaves_holds_nobody_up() -> None:
    rule = StalenessRule([0, 1], clock=5)
    rule.push(0, 5)
    assert rule.join(7) == 5
    rule.leave(1)
    rule.leave(7)
    assert rule.due() == [[Push(0, 5)]]
    rule.leave(0)
    assert rule.join(0) == 6  # after its own last push


@pytest.mark.parametrize(
    "wrong", [lambda: StalenessRule([0]).push(0, 1), lambda: StalenessRule(bound=-1), lambda: bound_of("ssp", -2)]
)
def test_what_is_refused(wrong) -> None:
    with pytest.raises(UsageError):
        wrong()


def ratio(bound: float, durations, clocks: int = 4000) -> float:
    synchronous = simulate_synchronous(4, clocks, durations)
    return simulate_server(4, clocks, durations, bound).throughput / synchronous.throughput


def test_throughput_with_a_random_straggler() -> None:
    """One of four is four times slower at every clock. ASP: 4 / 1.75 = 2.29 (2.26 until the last is through)."""
    durations = random_straggler(4, 4.0)
    assert ratio(0, durations) == pytest.approx(1.0, rel=1e-3)
    assert ratio(3, durations) == pytest.approx(1.94, rel=0.03)
    assert ratio(math.inf, durations) == pytest.approx(16 / 7, rel=0.01)


def test_throughput_with_a_slow_rank() -> None:
    """ASP: three at full speed and one at a quarter, 3.25; SSP is s steps ahead once, and then waits."""
    durations = slow_rank(3, 4.0)
    assert ratio(math.inf, durations) == pytest.approx(3.25, rel=0.01)
    assert ratio(3, durations) == pytest.approx(1.0, rel=0.01)


def test_local_updates_average_a_random_straggler_out() -> None:
    durations = random_straggler(4, 4.0)
    by_period = [simulate_synchronous(4, 4000, durations, period=period).throughput for period in (1, 10, 500)]
    assert by_period == sorted(by_period)
    assert by_period[0] == pytest.approx(1.0)
    assert by_period[-1] == pytest.approx(16 / 7, rel=0.06)


def test_a_hundred_workers_of_which_one_is_slow() -> None:
    durations = slow_rank(17, 4.0)
    synchronous = simulate_synchronous(100, 60, durations).throughput
    asynchronous = simulate_server(100, 60, durations, math.inf)
    assert synchronous == pytest.approx(25)
    assert asynchronous.throughput == pytest.approx(99.25, rel=0.02)
    # What the others push while it computes once; whether the last of them count depends on who comes first at a tie.
    assert 3 * 99 <= max(asynchronous.staleness) <= 4 * 99
    assert simulate_server(100, 60, durations, 3).throughput == pytest.approx(25, rel=0.15)


def test_a_server_serves_one_message_at_a_time() -> None:
    """Pull and push of 0.05 s each: ten workers of 1 s make no more than 10 pushes a second, two servers 20."""
    times = ServerTimes(pull_s=0.05, push_s=0.05)
    alone = simulate_server(1, 20, lambda worker, clock: 1.0, math.inf, times)
    assert alone.throughput == pytest.approx(1 / 1.1)
    assert alone.queued_s == 0
    many = simulate_server(40, 20, lambda worker, clock: 1.0, math.inf, times)
    assert many.throughput == pytest.approx(10, rel=0.05)
    assert many.queued_s > 100
    two = simulate_server(40, 20, lambda worker, clock: 1.0, math.inf, ServerTimes(0.05, 0.05, servers=2))
    assert two.throughput == pytest.approx(20, rel=0.05)
    near = hotspot([2, 8, 40], 1.0, times)
    assert near[0].share > 0.9 > near[2].share
    assert near[2].busy == pytest.approx(1.0, abs=0.05)
    assert near[0].queue_s < near[1].queue_s < near[2].queue_s


@given(st.integers(1, 5), st.sampled_from([0, 1, 3, math.inf]), st.integers(0, 1000), st.integers(1, 3))
def test_simulated_runs_keep_the_bound(workers: int, bound: float, seed: int, batch: int) -> None:
    draw = random.Random(seed)
    table = [[draw.choice([0.5, 1.0, 4.0]) for _ in range(12)] for _ in range(workers)]
    run = simulate_server(workers, 10, lambda worker, clock: table[worker][clock], bound, ServerTimes(0.1, 0.1), batch)
    assert max(run.leads) <= bound
    assert all(0 <= part <= 1 + 1e-9 for part in run.utilisation)
    if not bound:
        assert set(run.staleness) == {0}


def test_the_record_tells_staleness_and_lead() -> None:
    a, b, c = Push(0, 0), Push(1, 0), Push(0, 1)
    events = [
        ServerEvent("pull", (a,), 0), ServerEvent("pull", (b,), 0), ServerEvent("push", (a,), 0),
        ServerEvent("apply", (a,), 1), ServerEvent("pull", (c,), 1), ServerEvent("apply", (b,), 2),
        ServerEvent("apply", (c,), 3),
    ]  # fmt: skip
    assert staleness(events) == Counter({0: 1, 1: 2})
    assert largest_lead(events, [0, 1]) == 1
    assert [ServerEvent.from_json(event.to_json()) for event in events] == events


def test_replay_of_several_servers_uses_what_was_read_at_each() -> None:
    """Two servers that took the pushes of two workers in different orders: x - 0.1 g, with g = x + worker."""
    weights = [1.0, 2.0]
    first, second = Push(0, 0), Push(1, 0)
    applied = [ServerEvent("apply", (first,), 1), ServerEvent("apply", (second,), 2)]
    early, late = ServerEvent("pull", (second,), 0), ServerEvent("pull", (second,), 1)
    records = [
        [ServerEvent("pull", (first,), 0), early, *applied],
        [ServerEvent("pull", (first,), 0), applied[0], late, applied[1]],
    ]

    def apply(server: int, pushes, gradients, scale: float) -> None:
        weights[server] -= 0.1 * scale * sum(gradients)

    replay(records, lambda server: weights[server], lambda push, shards: [x + push.worker for x in shards], apply)
    assert weights == pytest.approx([1.0 - 0.1 - 0.2, 1.8 - 0.1 * 2.8])
    with pytest.raises(UsageError, match="nobody read weights for"):
        replay([records[0][1:]], lambda server: 0.0, lambda push, shards: shards, lambda *rest: None)


def test_ssp_stays_within_its_expectation_bound_and_a_large_bound_does_not_converge() -> None:
    """A convex problem of one parameter per push, |x - a|: L = 1, F = sqrt(2); the mean excess against Ho et al."""
    draw = random.Random(1)
    targets = [draw.choice([-1.0, 1.0]) for _ in range(4000)]
    for bound in (0, 3, 10):
        loss = run_convex(bound, targets)
        assert 0 <= loss <= expected_excess(math.sqrt(2), 1.0, bound, 4, 4000)
    # Theorem 1 by hand, F² = 2, L = 1, P = 4, T = 4000: (4 F L)² 2 (s + 1) P / T = 32 (s + 1) / 500.
    assert [expected_excess(math.sqrt(2), 1.0, bound, 4, 4000) ** 2 for bound in (0, 3)] == pytest.approx(
        [0.064, 0.256]
    )
    assert abs(run_quadratic(0, 1.8)) < 1e-6
    assert abs(run_quadratic(20, 1.8)) > 1e3


def run_convex(bound: float, targets: list[float]) -> float:
    rule, x, total = StalenessRule(range(4), bound), 1.0, 0.0
    draw, reading, kept = random.Random(2), {}, {}
    size, left = math.sqrt(2) / math.sqrt(2 * (bound + 1) * 4), list(enumerate(targets, start=1))
    while left:
        worker = draw.choices(range(4), [1, 1, 1, 0.3])[0]
        if worker in reading:
            (t, a), at, clock = left.pop(0), reading.pop(worker), rule.clocks[worker]
            total += abs(at - a)
            kept[Push(worker, clock)] = size / math.sqrt(t) * (1.0 if at > a else -1.0 if at < a else 0.0)
            rule.push(worker, clock)
            for push in [push for group in rule.due() for push in group]:
                x = max(-1.0, min(1.0, x - kept.pop(push)))
        elif rule.may_read(worker):
            reading[worker] = x
    least = min(sum(abs(x - a) for a in targets) for x in (-1.0, 0.0, 1.0))
    return (total - least) / len(targets)


def run_quadratic(bound: float, rate: float, workers: int = 8) -> float:
    """SGD on x² / 2 with delayed gradients. x - r x(-d) is stable up to r = 2 sin(pi / (4 d + 2)): with the 7 pushes of
    the others in between up to 0.21, and 1.8 / 8 is more; BSP takes 1.8 at once, which is below its own limit of 2."""
    rule, x = StalenessRule(range(workers), bound), 1.0
    reading: dict[int, float] = {}
    kept: dict[Push, float] = {}
    for turn in range(20_000):
        worker = turn % workers
        if worker in reading:
            clock = rule.clocks[worker]
            kept[Push(worker, clock)] = reading.pop(worker)
            rule.push(worker, clock)
            for group in rule.due():
                x -= rate / workers * sum(kept.pop(push) for push in group)
        if rule.may_read(worker):
            reading[worker] = x
        if abs(x) > 1e6:
            break
    return x


def test_a_record_is_added_to_and_knows_what_a_restart_undid(tmp_path: Path) -> None:
    def event(kind: str, clock: int, version: int) -> ServerEvent:
        return ServerEvent(kind, (Push(0, clock),), version)

    file = tmp_path / "records" / "0.jsonl"
    first = [event("start", 0, 0), event("pull", 0, 0), event("apply", 0, 1), event("state", 1, 1)]
    undone = [event("pull", 1, 1), event("apply", 1, 2), event("state", 2, 2)]
    again = [event("start", 1, 1), event("pull", 1, 1), event("apply", 1, 2)]
    append_record(file, first)
    append_record(file, undone)
    with file.open("a") as torn:
        torn.write('["pull", [[0,')  # killed as it wrote
    append_record(file, again)
    assert read_record(file) == [*first, *undone, *again]
    assert standing(read_record(file)) == [*first, *again]
    assert standing([*first, *undone, event("start", 0, 0)]) == [event("start", 0, 0)]
    assert largest_lead([event("start", 5, 0), event("pull", 7, 0)], [0, 1]) == 2
    made: list[tuple[int, float]] = []
    replay(
        [standing(read_record(file))], lambda server: len(made), lambda push, read: [10.0 * push.clock + read[0]],
        lambda server, pushes, gradients, scale: made.append((pushes[0].clock, gradients[0])),
    )  # fmt: skip
    assert made == [(0, 0.0), (1, 11.0)]
    with pytest.raises(UsageError, match="no checkpoint"):
        standing([*first, event("start", 3, 3)])


def test_a_worker_that_comes_back_begins_where_another_server_has_it() -> None:
    rule = StalenessRule([0, 1], bound=1)
    rule.leave(0)
    for clock in range(4):
        rule.push(1, clock)
    assert rule.join(0) == 4
    assert rule.join(0, at_least=6) == 6
    assert rule.join(0, at_least=2) == 6
    assert not rule.may_read(0)  # it would not have seen what worker 1 pushes at 4
    rule.push(1, 4)
    assert rule.may_read(0)
