"""The serving policy over a fake model: pages, prefixes, preemption, order and cancellation, without a tensor.

The fake model's keys and values of a token are a hash of all tokens up to it, written into the page and the place that
the plan names. Before it reads them it compares every one: a stale page, a wrong hit, a page given twice or a missing
copy cannot go unseen. Its next token is a function of that hash, so each answer is known without any scheduler.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.errors import RunError, UsageError
from tilemesh.serve.pages import PagePool
from tilemesh.serve.prefix import PrefixCache
from tilemesh.serve.request import FinishReason, RequestState, Sampling, ServeRequest
from tilemesh.serve.scheduler import UNKNOWN, QueueFullError, Scheduler, ServeLimits, StepPlan
from tilemesh.serve.speculate import NgramGuesser

VOCABULARY = 5
END = 4


def fingerprints(tokens: Sequence[int]) -> list[int]:
    """What the fake model keeps for each token."""
    found, now = [], 17
    for token in tokens:
        now = hash((now, token))
        found.append(now)
    return found


def next_token(tokens: Sequence[int]) -> int:
    return fingerprints(tokens)[-1] % VOCABULARY


def alone(prompt: Sequence[int], max_tokens: int, ends: frozenset[int]) -> tuple[list[int], FinishReason]:
    """The answer, by no scheduler at all."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        if tokens[-1] in ends:
            return tokens[len(prompt) :], FinishReason.STOP
        if len(tokens) - len(prompt) == max_tokens:
            return tokens[len(prompt) :], FinishReason.LENGTH


class FakeRunner:
    """Does what plans say, in memory of its own."""

    def __init__(self, limits: ServeLimits) -> None:
        self.limits = limits
        self.pool: list[list[int | None]] = [[None] * limits.page_tokens for _ in range(limits.pages)]
        self.local: list[list[int | None]] = [[None] * limits.page_tokens for _ in range(limits.local_pages)]
        self.swap: list[list[int | None]] = [[None] * limits.page_tokens for _ in range(limits.swap_pages)]

    def run(self, plan: StepPlan) -> dict[str, list[int]]:
        for page, target in plan.swapped_out:
            self.swap[target] = list(self.pool[page])
        for source, page in plan.swapped_in:
            self.pool[page] = list(self.swap[source])
        sampled = {}
        for entry in plan.entries:
            tokens = [*entry.request.tokens[: entry.start + entry.count], *entry.drafts]
            assert entry.count > 0
            kept = fingerprints(tokens)
            kinds = [(self.pool, entry.pages, self.limits.window if self.limits.slides else 0)]
            if self.limits.local_pages:
                kinds.append((self.local, entry.local, self.limits.window))
                assert len(entry.local) == len(entry.pages)
            for pool, pages, window in kinds:
                for position, expected in enumerate(kept):
                    page, place = divmod(position, self.limits.page_tokens)
                    slot = pool[pages[page]]
                    if position >= entry.start:
                        slot[place] = expected
                    elif window and position <= entry.start - window:
                        continue  # behind the window of the first of its tokens
                    assert slot[place] == expected, f"{entry.request.name} reads what another wrote at {position}"
            if entry.samples:
                known = entry.start + entry.count
                new = [next_token(tokens[:known])]
                for draft in entry.drafts:
                    if new[-1] != draft:
                        break
                    known += 1
                    new.append(next_token(tokens[:known]))
                sampled[entry.request.name] = new
        return sampled


def check_accounts(scheduler: Scheduler) -> None:
    """Every page is free, idle, or used by exactly the requests that map it."""
    slides, locals_ = scheduler.limits.slides, scheduler.local
    kinds = [
        (scheduler.pool, [request.pages[request.behind if slides else 0 :] for request in scheduler.running]),
        (scheduler.swap, [request.swapped for request in scheduler.waiting]),
    ]
    if locals_ is not None:
        kinds.append((locals_.pool, [request.local[request.behind :] for request in scheduler.running]))
        assert {page: locals_._page[local] for page, local in locals_._local.items()} == {
            page: page for page in locals_._local
        }
        assert len(locals_._local) == locals_.pool.used + len(locals_.pool.idle)
        assert all(scheduler.pool.users(page) or scheduler.pool.is_idle(page) for page in locals_._local)
    for pool, maps in kinds:
        users = Counter(page for pages in maps for page in pages)
        assert all(len(set(pages)) == len(pages) for pages in maps)
        assert [pool.users(page) for page in range(pool.size)] == [users[page] for page in range(pool.size)]
        assert pool.used == len(users)
        assert pool.available == pool.size - len(users)
    assert all(not request.pages for request in scheduler.waiting)
    assert len(scheduler.running) <= scheduler.limits.running
    assert all(request.computed <= len(request.tokens) for request in scheduler.running)
    if scheduler.limits.window:  # pages behind a window are idle before those that follow them
        return
    # A page is evicted before the one that leads to it: what lies behind an evicted page could never be found.
    idle, entries = scheduler.pool.idle, scheduler.prefixes._entries
    age = {entries[page][0]: number for number, page in enumerate(idle)}
    for page in idle:
        serial, (parent, _) = entries[page]
        assert age.get(parent, len(idle)) > age[serial]


class Arrival:
    """A request as a test draws it: when it comes, and when, if ever, it is cancelled."""

    def __init__(self, draw: random.Random, number: int, limits: ServeLimits, openings: list[list[int]]) -> None:
        most = limits.sequence_tokens - 1
        tail = [draw.randrange(VOCABULARY) for _ in range(draw.choice((0, 1, 2, 5)))]
        self.prompt = [*draw.choice(openings), *tail][:most] or [1]
        self.max_tokens = min(draw.choice((1, 9, 40, 60)), limits.sequence_tokens - len(self.prompt))
        self.ends = frozenset({END}) if draw.random() < 0.25 else frozenset()
        self.step = draw.choice((0, 0, 0, 1, 2, 5, 9))
        self.abort = draw.choice((None, None, None, None, 1, 4, 9, 30))
        self.abort_inside = draw.random() < 0.5
        self.request = ServeRequest(
            f"r{number}", list(self.prompt), self.max_tokens, self.ends,
            priority=draw.choice((0, 0, 0, 1, -1)), shares=draw.random() < 0.8,
        )  # fmt: skip


def serve_randomly(seed: int) -> tuple[Scheduler, list[Arrival]]:
    """One random world from arrival to the last answer, checked after every step."""
    draw = random.Random(seed)
    page_tokens, running = draw.choice((1, 2, 4)), draw.choice((1, 3, 6))
    limits = ServeLimits(
        pages=draw.choice((3, 8, 16, 20, 60)), context=draw.choice((7, 64, 64)), page_tokens=page_tokens,
        step_tokens=running + draw.choice((0, 1, 3, 16)), chunk_tokens=draw.choice((1, 2, 3, 8, 64)), running=running,
        swap_pages=draw.choice((0, 0, 2, 8)), share_prefixes=draw.random() < 0.8, patience=draw.choice((0, 3, 100)),
        window=draw.choice((0, 0, 1, 3, 8)),
    )  # fmt: skip
    if limits.window and draw.random() < 0.5:  # and layers without one beside
        least = limits.pages_for(limits.window) + 2
        limits = dataclasses.replace(limits, swap_pages=0, local_pages=least + draw.choice((0, 1, 4, 30)))

    def propose(request: ServeRequest, most: int) -> list[int]:
        tokens, guesses = list(request.tokens), []
        for _ in range(draw.randrange(4)):
            guesses.append(next_token(tokens) if draw.random() < 0.7 else draw.randrange(VOCABULARY))
            tokens.append(guesses[-1])
        return guesses

    scheduler = Scheduler(limits, propose)
    runner = FakeRunner(limits)
    openings = [[draw.randrange(VOCABULARY) for _ in range(draw.choice((0, 3, 8, 14)))] for _ in range(2)]
    arrivals = [Arrival(draw, number, limits, openings) for number in range(draw.choice((1, 4, 8)))]
    lost = draw.choice((None, None, None, 2, 9))
    for step in range(4000):
        if step == lost:  # the ranks that computed are gone, and with them what lay in pages
            scheduler.lose_pages()
            runner = FakeRunner(limits)
            check_accounts(scheduler)
            assert not scheduler.prefixes
        for arrival in arrivals:
            if arrival.step == step:
                scheduler.add(arrival.request)
            if arrival.abort == step and arrival.step <= step and not arrival.abort_inside:
                scheduler.finish(arrival.request, FinishReason.ABORT)
        if not scheduler.busy and step > 9:
            return scheduler, arrivals
        plan = scheduler.plan()
        assert plan.entries or not scheduler.busy, "requests are there and none of them advances"
        assert plan.tokens <= limits.step_tokens
        sampled = runner.run(plan)
        for arrival in arrivals:
            if arrival.abort == step and arrival.step <= step and arrival.abort_inside:
                scheduler.finish(arrival.request, FinishReason.ABORT)
        scheduler.commit(plan, sampled)
        check_accounts(scheduler)
    raise AssertionError("some request never ended")


def check_answers(arrivals: list[Arrival]) -> None:
    for arrival in arrivals:
        request = arrival.request
        tokens, reason = alone(arrival.prompt, arrival.max_tokens, arrival.ends)
        if request.finish is FinishReason.ABORT:
            assert request.output == tokens[: len(request.output)]
        else:
            assert (request.output, request.finish) == (tokens, reason)


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 2**48))
def test_every_answer_is_the_one_it_would_have_alone_and_no_page_is_lost(seed: int) -> None:
    scheduler, arrivals = serve_randomly(seed)
    check_answers(arrivals)
    assert scheduler.pool.used == scheduler.swap.used == 0
    assert len(scheduler.prefixes) == len(scheduler.pool.idle)
    assert scheduler.local is None or scheduler.local.pool.used == 0


class AheadRunner(FakeRunner):
    """Knows the tokens that it drew last before the scheduler does."""

    def __init__(self, limits: ServeLimits) -> None:
        super().__init__(limits)
        self.last: dict[str, int] = {}

    def run(self, plan: StepPlan) -> dict[str, list[int]]:
        entries = []
        for entry in plan.entries:
            tokens = [self.last[entry.request.name] if token == UNKNOWN else token for token in entry.request.tokens]
            stand_in = ServeRequest(entry.request.name, tokens, entry.request.max_tokens)
            entries.append(dataclasses.replace(entry, request=stand_in))
        sampled = super().run(dataclasses.replace(plan, entries=tuple(entries)))
        self.last = {name: new[-1] for name, new in sampled.items()}
        return sampled


def serve_ahead(seed: int) -> tuple[Scheduler, list[Arrival], int]:
    """As `serve_randomly`, with each step begun before the last one's tokens are known, where that may be."""
    draw = random.Random(seed)
    running, page_tokens = draw.choice((1, 3, 6)), draw.choice((1, 2, 4))
    limits = ServeLimits(
        pages=draw.choice((8, 20, 60, 200)), context=64, page_tokens=page_tokens,
        step_tokens=running + draw.choice((0, 3, 16)), chunk_tokens=draw.choice((1, 3, 64)), running=running,
        swap_pages=draw.choice((0, 8)), share_prefixes=draw.random() < 0.8, window=draw.choice((0, 0, 2, 9)),
    )  # fmt: skip
    scheduler, runner = Scheduler(limits), AheadRunner(limits)
    openings = [[draw.randrange(VOCABULARY) for _ in range(draw.choice((0, 3, 8, 14)))] for _ in range(2)]
    arrivals = [Arrival(draw, number, limits, openings) for number in range(draw.choice((1, 4, 8)))]
    ahead: tuple[StepPlan, dict[str, list[int]]] | None = None
    assumed = 0
    for step in range(4000):
        for arrival in arrivals:
            if arrival.step == step:
                scheduler.add(arrival.request)
            if arrival.abort == step and arrival.step <= step:
                scheduler.finish(arrival.request, FinishReason.ABORT)
        if not scheduler.busy and ahead is None and step > 9:
            return scheduler, arrivals, assumed
        plan = scheduler.plan()
        assert ahead is None or not plan.preempted  # or it would be computed again from tokens that are not known
        sampled = runner.run(plan)
        if ahead is not None:
            scheduler.commit(*ahead)
            check_accounts(scheduler)
            ahead = None
        if plan.entries and scheduler.can_assume():
            scheduler.assume(plan)
            ahead, assumed = (plan, sampled), assumed + 1
        else:
            scheduler.commit(plan, sampled)
        check_accounts(scheduler)
    raise AssertionError("some request never ended")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**48))
def test_steps_begun_before_the_last_is_known_give_the_same_answers(seed: int) -> None:
    scheduler, arrivals, _ = serve_ahead(seed)
    check_answers(arrivals)
    assert all(UNKNOWN not in arrival.request.tokens for arrival in arrivals)
    assert scheduler.pool.used == scheduler.swap.used == 0


def test_steps_are_begun_so() -> None:
    assert sum(serve_ahead(seed)[2] for seed in range(20)) > 100


# Known traps ----------------------------------------------------------------------------------------------------------


def limits_of(pages: int = 8, **more: int | bool) -> ServeLimits:
    return ServeLimits(pages=pages, **{"context": 64, "page_tokens": 4, **more})  # type: ignore[arg-type]


def ask(name: str, prompt: Sequence[int], max_tokens: int = 3, **more: int | bool) -> ServeRequest:
    return ServeRequest(name, list(prompt), max_tokens, **more)  # type: ignore[arg-type]


def drive(scheduler: Scheduler, runner: FakeRunner, steps: int = 200) -> list[StepPlan]:
    """Until nothing is left to do, or so many steps."""
    plans = []
    while scheduler.busy and len(plans) < steps:
        plans.append(scheduler.plan())
        scheduler.commit(plans[-1], runner.run(plans[-1]))
        check_accounts(scheduler)
    return plans


def world(**more: int | bool) -> tuple[Scheduler, FakeRunner]:
    limits = limits_of(**more)  # type: ignore[arg-type]
    return Scheduler(limits), FakeRunner(limits)


def is_right(request: ServeRequest) -> bool:
    return (request.output, request.finish) == alone(request.tokens[: request.prompt], request.max_tokens, request.ends)


def test_of_a_fully_cached_prompt_the_last_page_is_computed_again() -> None:
    scheduler, runner = world()
    first, second = ask("first", range(8)), ask("second", range(8))
    for request in (first, second):
        scheduler.add(request)
        drive(scheduler, runner)
        assert is_right(request)
    assert (first.found, second.found) == (0, 4)  # page 2 of 2 gives the logits


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    # Both prompts fit, both outputs do not. The other one's pages are freed by its end, and the first pages survive.
    scheduler, runner = world(pages=6)
    first, second = ask("first", [1] * 8, 9), ask("second", [2] * 8, 9)
    scheduler.add(first)
    scheduler.add(second)
    plans = drive(scheduler, runner)
    assert [name for plan in plans for name in plan.preempted] == ["second"]
    again = [entry for plan in plans for entry in plan.entries if entry.request is second and entry.count > 1][-1]
    assert again.start > 0
    assert is_right(first)
    assert is_right(second)


def test_equal_prompts_at_once_are_computed_once() -> None:
    scheduler, runner = world()
    twins = [ask(f"twin {number}", range(10), 2) for number in range(3)]
    for twin in twins:
        scheduler.add(twin)
    plans = drive(scheduler, runner)
    assert [[(entry.start, entry.count) for entry in plan.entries] for plan in plans][:2] == [
        [(0, 10)],
        [(10, 1), (8, 2), (8, 2)],
    ]
    assert all(is_right(twin) for twin in twins)
    assert len({tuple(entry.pages[:2]) for plan in plans for entry in plan.entries}) == 1


def test_equal_prompts_that_were_computed_apart_end_up_in_the_same_pages() -> None:
    scheduler, runner = world(chunk_tokens=3)
    first, second = ask("first", range(8), 4), ask("second", range(8), 4)
    scheduler.add(first)
    drive(scheduler, runner, steps=1)
    second.shares = False  # looks for nothing, as one whose prompt's logits are wanted
    scheduler.add(second)
    drive(scheduler, runner, steps=3)
    assert first.pages[:2] == second.pages[:2]
    assert [scheduler.pool.users(page) for page in first.pages[:2]] == [2, 2]
    drive(scheduler, runner)
    assert is_right(first)
    assert is_right(second)


class Colliding(int):
    """A token whose hash is that of every other."""

    def __hash__(self) -> int:
        return 7


def test_prompts_whose_hashes_collide_are_told_apart() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool, 2)
    first, second = ([Colliding(token) for token in tokens] for tokens in ((1, 2, 3, 4), (5, 6, 3, 4)))
    assert hash(tuple(first)) == hash(tuple(second))
    for tokens in (first, second):
        serials: list[int] = []
        for page in pool.take(2):
            serials.append(cache.publish(cache.key(tokens, serials), page)[1])
    pages, _ = cache.match(first, 4)
    others, _ = cache.match(second, 4)
    assert (len(pages), len(others)) == (2, 2)
    assert not set(pages) & set(others)


def test_what_followed_an_evicted_page_is_not_found_behind_its_successor() -> None:
    pool = PagePool(3)
    cache = PrefixCache(pool, 1)
    first, behind = pool.take(2)
    _, serial = cache.publish(cache.key([1], []), first)
    cache.publish((serial, (2,)), behind)
    pool.release([first, behind])  # the wrong way round, which the scheduler never does
    pool.take(2)  # the free one, and then the first
    assert cache.match([1, 2], 2) == ([], [])
    assert len(cache) == 1


def test_a_page_that_is_freed_cannot_be_freed_shared_or_kept_again() -> None:
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.release([page])
    for misuse in (pool.release, pool.share, lambda pages: pool.keep(pages[0])):
        with pytest.raises(RunError, match="a bug in the scheduler"):
            misuse([page])
    with pytest.raises(RunError, match="3 pages were asked of a pool that has 2 left"):
        pool.take(3)


def test_what_an_aborted_request_was_computing_is_never_found() -> None:
    scheduler, runner = world(chunk_tokens=4, step_tokens=64)
    gone, later = ask("gone", range(12)), ask("later", range(12))
    scheduler.add(gone)
    drive(scheduler, runner, steps=1)
    plan = scheduler.plan()
    # The step that computes its second page never wrote it: the process that computes may have failed.
    scheduler.finish(gone, FinishReason.ABORT)
    assert scheduler.pool.used == 0
    assert scheduler.commit(plan, {}) == []
    scheduler.add(later)
    drive(scheduler, runner)
    assert later.found == 4  # the page that was complete before
    assert is_right(later)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        (0, 3, "an empty prompt"),
        (65, 1, "the prompt has 65 tokens and the context is 64 tokens: give at most 64"),
        (60, 6, "a prompt of 60 tokens and max_tokens of 6, and the context is 64 tokens: set max_tokens to at most 5"),
    ],
)  # fmt: skip
def test_what_can_never_run_is_refused(prompt: int, max_tokens: int, words: str) -> None:
    scheduler = Scheduler(limits_of(pages=100))
    with pytest.raises(UsageError, match=words):
        scheduler.add(ask("long", [1] * prompt, max_tokens))
    assert not scheduler.busy


def test_a_request_longer_than_the_pool_is_refused_and_the_longest_one_runs() -> None:
    scheduler, runner = world(pages=3)
    with pytest.raises(UsageError, match="3 pages hold 12 tokens: give at most 12"):
        scheduler.add(ask("long", [1] * 13))
    assert scheduler.check(5, None) == 8
    longest = ask("longest", [1] * 5, 8)
    scheduler.add(longest)
    drive(scheduler, runner)
    assert is_right(longest)


def test_a_prompt_of_ten_windows_runs_in_pages_for_two() -> None:
    """Pages behind the window are free again, for itself and for others."""
    limits = ServeLimits(pages=4, context=200, page_tokens=8, chunk_tokens=64, window=16)
    scheduler, runner = Scheduler(limits), FakeRunner(limits)
    request = ask("long", [number % 4 for number in range(160)], 30)
    scheduler.add(request)
    drive(scheduler, runner)
    assert is_right(request)
    assert scheduler.pool.used == 0
    with pytest.raises(UsageError, match="2 pages hold 16 tokens"):
        Scheduler(dataclasses.replace(limits, pages=2)).check(160, 30)


def test_with_the_pool_exhausted_the_last_in_line_gives_way_and_all_are_answered() -> None:
    scheduler, runner = world(pages=5)
    many = [ask(f"r{number}", [number] * 3, 12) for number in range(4)]
    for request in many:
        scheduler.add(request)
    plans = drive(scheduler, runner)
    preempted = [name for plan in plans for name in plan.preempted]
    assert preempted
    assert "r0" not in preempted
    assert all(is_right(request) for request in many)


def test_a_swapped_request_goes_on_where_it_was() -> None:
    scheduler, runner = world(pages=5, swap_pages=8, share_prefixes=False)
    many = [ask(f"r{number}", [number] * 3, 12) for number in range(4)]
    for request in many:
        scheduler.add(request)
    plans = drive(scheduler, runner)
    assert sum(len(plan.swapped_out) for plan in plans) == sum(len(plan.swapped_in) for plan in plans) > 0
    assert all(is_right(request) for request in many)
    computed = Counter((entry.request.name, entry.start) for plan in plans for entry in plan.entries)
    assert set(computed.values()) == {1}  # no token twice


def test_nobody_waits_for_a_page_of_one_that_can_publish_none() -> None:
    """It came back from the CPU's pages, and its first ones, behind the window, are not to be found any more."""
    scheduler, runner = world(pages=10, context=200, chunk_tokens=4, window=8, swap_pages=8)
    opening = [1, 2, 3, 0] * 6
    first, alike = ask("first", opening, 60, priority=2), ask("alike", opening)
    scheduler.add(first)
    drive(scheduler, runner, steps=8)
    others = [ask(f"r{number}", [number] * 3, 30) for number in range(4)]
    for request in others:
        scheduler.add(request)
    while not (first.state is RequestState.RUNNING and all(request.finish for request in others)):
        drive(scheduler, runner, steps=1)
    assert first.preemptions
    scheduler.add(alike)
    drive(scheduler, runner, steps=10)
    assert is_right(alike)
    assert not first.finish


def test_a_full_queue_refuses() -> None:
    scheduler = Scheduler(limits_of(running=1, waiting=1))
    for number in range(2):
        scheduler.add(ask(f"r{number}", [1]))
    assert not scheduler.has_room()
    with pytest.raises(QueueFullError, match="2 requests are there already"):
        scheduler.add(ask("third", [1]))


def test_decoding_goes_on_while_a_long_prompt_comes_in_chunks() -> None:
    scheduler, runner = world(pages=40, step_tokens=8, chunk_tokens=8, running=4)
    talking, long = ask("talking", [1, 2], 20), ask("long", [3] * 30, 2)
    scheduler.add(talking)
    drive(scheduler, runner, steps=1)
    scheduler.add(long)
    plans = drive(scheduler, runner, steps=5)
    assert [[(entry.request.name, entry.count) for entry in plan.entries] for plan in plans] == [
        [("talking", 1), ("long", 7)],
        [("talking", 1), ("long", 7)],
        [("talking", 1), ("long", 7)],
        [("talking", 1), ("long", 7)],
        [("talking", 1), ("long", 2)],
    ]


def test_priority_overtakes_for_as_long_as_patience_says() -> None:
    scheduler, runner = world(pages=40, running=1, patience=5)
    low = ask("low", [1], 1, priority=1)
    scheduler.add(low)
    names = []
    while not low.finish:
        scheduler.add(ask(f"high {len(names)}", [2], 1))  # one with every step: without patience low would never run
        names += [entry.request.name for plan in drive(scheduler, runner, steps=1) for entry in plan.entries]
    assert names == [f"high {number}" for number in range(5)] + ["low"]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_nobody_starves_under_requests_that_may_overtake(seed: int) -> None:
    """Under an endless flow of more urgent requests, what comes later than patience allows waits behind; so the last
    token comes within the steps that those before it take one after the other."""
    draw = random.Random(seed)
    patience, behind = draw.choice((0, 2, 7)), draw.choice((1, 3))
    limits = limits_of(pages=draw.choice((4, 9)), patience=patience, running=draw.choice((1, 3)), swap_pages=4)
    scheduler, runner = Scheduler(limits), FakeRunner(limits)
    late = ask("late", [2] * draw.choice((1, 9)), 4, priority=behind)
    scheduler.add(late)
    window, before = patience * behind, 0
    for step in range(400):
        if late.state is RequestState.DONE:
            break
        if scheduler.has_room() and len(scheduler.waiting) < 6:
            urgent = ask(f"urgent {step}", [draw.randrange(4) for _ in range(draw.choice((1, 6)))], 3)
            before += step <= window
            scheduler.add(urgent)
        drive(scheduler, runner, steps=1)
    assert is_right(late)
    # Each of those before takes at most its prompt, its answer and one start again of both, alone.
    assert step <= window + (before + 1) * 2 * (9 + 4)


def test_one_that_does_not_fit_is_not_overtaken() -> None:
    scheduler, runner = world(pages=6)
    for request in (ask("first", [1] * 9, 8), ask("large", [2] * 16, 2), ask("small", [3], 1)):
        scheduler.add(request)
    started = []
    for plan in drive(scheduler, runner):
        started += [entry.request.name for entry in plan.entries if entry.request.name not in started]
    assert started == ["first", "large", "small"]


def test_drafts_cost_no_page_and_only_accepted_ones_count() -> None:
    limits = limits_of(pages=8)
    scheduler = Scheduler(limits, lambda request, most: alone(request.tokens, most, frozenset())[0] + [9] * 5)
    runner = FakeRunner(limits)
    request = ask("guessed", [1], 11)
    scheduler.add(request)
    plans = drive(scheduler, runner)
    assert is_right(request)
    assert [len(plan.entries[0].drafts) for plan in plans] == [3, 3, 2]
    scheduler.add(ask("other", [1]))
    plan = scheduler.plan()
    with pytest.raises(RunError, match="a bug in the engine"):
        scheduler.commit(plan, {"other": [7, 7]})


def repeating(prompt: Sequence[int], steps: int, period: int) -> tuple[int, int, int]:
    """Guesses of a request whose text repeats: (steps, guessed, right)."""
    guesser, request = NgramGuesser(), ask("r", prompt, steps)
    taken = 0
    while len(request.tokens) - request.prompt < steps:
        for guess in [*guesser(request, 8), None]:
            request.tokens.append(request.tokens[-period])
            if guess != request.tokens[-1]:
                break
        taken += 1
    guesser(request, 8)
    guesser.forget("r")
    assert not guesser._records
    return taken, guesser.guessed, guesser.right


def test_text_that_repeats_is_guessed_and_other_text_hardly_costs() -> None:
    taken, guessed, right = repeating([1, 2, 3, 4, 5, 1, 2, 3], 200, 5)
    assert taken <= 200 / 8 + 5
    assert right >= guessed - 10  # the last eight were never checked
    draw, guesser = random.Random(1), NgramGuesser()
    request = ask("noise", [0, 1], 1000)
    for _ in range(1000):
        guesser(request, 8)
        request.tokens.append(draw.randrange(20))  # most pairs were there before, and say nothing
    assert 0 < guesser.guessed < 100


def test_a_guess_is_what_followed_last_time() -> None:
    guesser, request = NgramGuesser(), ask("r", [1, 2, 3, 9, 1, 2, 7, 8, 1, 2], 9)
    assert list(guesser(request, 8)) == [7, 8]
    assert list(guesser(ask("s", [1, 2, 3], 9), 8)) == []
    assert list(guesser(ask("t", [5, 5, 5, 5], 9), 1)) == [5]


# What may be asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": -1.0}, "temperature is -1.0: expected 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0: expected above 0 and at most 1"),
        ({"min_p": 1.5}, "min_p is 1.5: expected between 0 and 1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"n": 0}, "n is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": True}, "max_tokens is True: expected a whole number"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0: expected between 1e-06 and 1,000,000"),
        ({"presence_penalty": 3.0}, "presence_penalty is 3.0"),
        ({"logit_bias": {1: 101.0}}, "logit_bias of token 1 is 101.0"),
        ({"logit_bias": {-1: 1.0}}, "token -1"),
        ({"stop": ("",)}, "expected texts that are not empty"),
        ({"stop": tuple("abcdefghijklmnopq")}, "stop has 17 texts"),
        ({"stop_tokens": (1.5,)}, "token 1.5"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"seed": -1}, "seed is -1"),
        ({"ignore_eos": 1}, "ignore_eos is 1"),
    ],
)
def test_sampling_that_cannot_be_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Sampling(**given)  # type: ignore[arg-type]


def test_limits_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="pages is 0"):
        limits_of(pages=0)
    with pytest.raises(UsageError, match="running is 64 and step_tokens 32"):
        limits_of(step_tokens=32)


def test_the_state_of_a_request_is_plain() -> None:
    scheduler, runner = world()
    request = ask("one", [1, 2], 1)
    assert request.state is RequestState.WAITING
    scheduler.add(request)
    drive(scheduler, runner)
    assert request.state is RequestState.DONE
    scheduler.finish(request, FinishReason.ABORT)  # too late: it has ended already
    assert request.finish is FinishReason.LENGTH


def test_new_weights_find_no_page_of_the_old_ones_and_wait_for_none() -> None:
    scheduler = Scheduler(limits_of(pages=20, chunk_tokens=3))
    carried, same_prompt = ask("carried", range(10)), ask("same", range(10))
    scheduler.add(carried)
    scheduler.commit(scheduler.plan(), {})  # three of its tokens: no page of it is full yet
    scheduler.renew(1)
    scheduler.add(same_prompt)
    plan = scheduler.plan()
    # Pages that the carried one will fill are no other's: nobody waits for them, and nobody finds them.
    assert [(entry.request.name, entry.start) for entry in plan.entries] == [("carried", 3), ("same", 0)]
    scheduler.commit(plan, {})
    scheduler.commit(scheduler.plan(), {})
    assert (carried.version, carried.published) == (0, [])
    assert (same_prompt.version, len(same_prompt.published)) == (1, 1)


def test_new_weights_touch_only_pages_that_hold_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has pages by the million, and weights change with every step of learning from feedback."""
    scheduler, runner = world(pages=20)
    scheduler.add(ask("first", range(10)))
    drive(scheduler, runner)
    pool = scheduler.pool
    assert pool.idle
    assert len(scheduler.prefixes) == len(pool.idle)
    monkeypatch.setattr(pool, "take", None)
    monkeypatch.setattr(pool, "on_evict", None)
    scheduler.renew(1)
    assert (pool.available, pool.idle, len(scheduler.prefixes)) == (20, (), 0)


def test_while_draining_only_those_that_ran_run() -> None:
    scheduler, runner = world(pages=6, running=2)
    first, preempted, later = ask("first", [1] * 8, 8), ask("preempted", [2] * 8, 8), ask("later", [3] * 4)
    for request in (first, preempted):
        scheduler.add(request)
    for _ in range(3):
        plan = scheduler.plan()
        scheduler.commit(plan, runner.run(plan))
    scheduler.add(later)
    scheduler.draining = True
    while scheduler.begun:
        plan = scheduler.plan()
        assert plan.entries
        assert all(entry.request is not later for entry in plan.entries)
        scheduler.commit(plan, runner.run(plan))
    assert preempted.preemptions > 0
    assert is_right(first)
    assert is_right(preempted)
    scheduler.draining = False
    drive(scheduler, runner)
    assert is_right(later)
