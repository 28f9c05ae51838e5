"""The engine without a model: the real scheduler, driven by step times that are predicted or were recorded.

The one idea: an engine's loop is to take what was asked, plan, compute, book; only computing needs a model, and of that
only how long it takes and which tokens come out matter to the schedule. So what is simulated here is a clock and the
tokens, and nothing of the policy. Given the recorded arrivals, outputs and durations of an engine that waits for its
steps, the schedule is the engine's, step for step (a test compares them).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tilemesh.core.errors import RunError
from tilemesh.model.work.decoding import SequencePart
from tilemesh.plan.serving_clock import StepClock
from tilemesh.serve.history import ServeHistory, WeightChange
from tilemesh.serve.request import FinishReason, RequestState, ServeRequest
from tilemesh.serve.scheduler import QueueFullError, Scheduled, Scheduler, ServeLimits, StepPlan, no_drafts
from tilemesh.serve.speculate import NgramGuesser

NS = 1_000_000_000
Duration = Callable[[StepPlan], int]
"""Nanoseconds of a step."""


@dataclass(frozen=True)
class SimRequest:
    """A request whose answer is known beforehand."""

    name: str
    at_ns: int
    prompt: Sequence[int]
    output: Sequence[int]
    max_tokens: int
    """As it was asked for; the output may be shorter."""
    ends: frozenset[int] = frozenset()
    priority: int = 0
    shares: bool = True
    aborted_ns: int | None = None
    stops: bool = False
    """Whether it ends after its output by a stop string, which the scheduler does not see."""
    fails: bool = False
    """Whether it ends because its last step could not be computed."""
    asked_ns: int | None = None
    """When the client asked, where the scheduler heard of it later."""
    order: int | None = None
    """Of orders at one moment, lower is taken first; None: as they are listed."""
    abort_order: int = 0
    adapter: int = 0


def simulate(
    limits: ServeLimits,
    requests: Iterable[SimRequest],
    duration: Duration,
    guesser: NgramGuesser | None = None,
    until_ns: int | None = None,
    launching: Duration | None = None,
    changes: Iterable[WeightChange] = (),
) -> ServeHistory:
    """Run all requests; a step takes what `duration` says. With `until_ns` no step begins after it.

    `launching`: as an engine on a GPU (`EngineCore.step`). The host plans a step and takes so long to launch it while
    the one before it runs, and only then reads that one's tokens: who comes in the meantime waits for the next step.
    """
    scheduler = Scheduler(limits, guesser or no_drafts)
    history = ServeHistory()
    asked: dict[str, SimRequest] = {}
    live: dict[str, ServeRequest] = {}
    inbox: list[tuple[int, int, str, SimRequest | WeightChange]] = []
    inbox += [(change.taken_ns, change.order, "change", change) for change in changes]
    for number, request in enumerate(requests):
        order = number if request.order is None else request.order
        inbox.append((request.at_ns, order, "ask", request))
        if request.aborted_ns is not None:
            inbox.append((request.aborted_ns, request.abort_order or order, "abort", request))
    heapq.heapify(inbox)
    now = 0
    launched: tuple[StepPlan, int, int] | None = None  # with its beginning and its end; nobody has read its tokens yet

    def end_launched() -> None:
        nonlocal launched, now
        if launched is not None:
            plan, began, ended = launched
            launched, now = None, max(now, ended)
            _book(scheduler, plan, asked, live, history, began, now, guesser)

    while inbox or scheduler.busy or launched is not None:
        if not scheduler.busy and launched is None:
            now = max(now, inbox[0][0])
        if until_ns is not None and now > until_ns:
            break
        while inbox and inbox[0][0] <= now:
            _, _, what, taken = heapq.heappop(inbox)
            if isinstance(taken, WeightChange):
                taken.apply(scheduler)
                history.changed(taken.kind, taken.value, now)
                continue
            request = taken
            if what == "abort":
                if request.name in live:
                    scheduler.finish(live.pop(request.name), FinishReason.ABORT)
                    history.aborted(request.name, now)
                continue
            made = ServeRequest(
                request.name, list(request.prompt), request.max_tokens, request.ends, request.priority, request.shares,
                request.adapter,
            )  # fmt: skip
            try:
                scheduler.add(made)
            except QueueFullError:
                history.refused += 1
                continue
            asked[request.name], live[request.name] = request, made
            history.added(made, request.at_ns if request.asked_ns is None else request.asked_ns, now)
        if not scheduler.busy:
            end_launched()
            continue
        plan = scheduler.plan()
        if launching is not None and plan.entries and not (plan.preempted or plan.swapped_in or plan.swapped_out):
            now, began = now + launching(plan), now if launched is None else max(now, launched[2])
            following = plan, began, max(began + duration(plan), now)
            end_launched()
            launched = following
            if scheduler.can_assume():
                scheduler.assume(plan)
            else:
                end_launched()
            continue
        if launched is not None:
            end_launched()
            going = tuple(entry for entry in plan.entries if entry.request.state is RequestState.RUNNING)
            plan = replace(plan, entries=going)
        if plan.entries or launching is None:
            began, now = now, now + duration(plan)
            _book(scheduler, plan, asked, live, history, began, now, guesser)
    return history


def _book(
    scheduler: Scheduler,
    plan: StepPlan,
    asked: Mapping[str, SimRequest],
    live: dict[str, ServeRequest],
    history: ServeHistory,
    began_ns: int,
    ended_ns: int,
    guesser: NgramGuesser | None,
) -> None:
    """What the engine does after a step was computed, in its order."""
    sampled: dict[str, list[int]] = {}
    failed: list[str] = []
    for entry in plan.entries:
        if entry.request.state is not RequestState.RUNNING:
            continue  # it has ended since the step was launched
        known = asked[entry.request.name]
        new = _drawn(entry, known)
        if new:
            sampled[entry.request.name] = new
        elif entry.samples and known.fails:
            failed.append(entry.request.name)
            scheduler.finish(entry.request, FinishReason.ERROR)
        elif entry.samples:
            raise RunError(f"{known.name} goes on after the last of its {len(known.output)} tokens")
    for progressed in scheduler.commit(plan, sampled):
        request = progressed.request
        known = asked[request.name]
        exhausted = len(request.tokens) - request.prompt >= len(known.output)
        if known.stops and exhausted and request.state is not RequestState.DONE:
            scheduler.finish(request, FinishReason.STOP)
    history.stepped(scheduler, plan, sampled, failed, began_ns, ended_ns)
    for entry in plan.entries:
        if entry.request.state is RequestState.DONE:
            live.pop(entry.request.name, None)
            if guesser is not None:
                guesser.forget(entry.request.name)


def _drawn(entry: Scheduled, known: SimRequest) -> list[int]:
    """The tokens after this entry: right drafts, and one more."""
    if not entry.samples:
        return []
    done = entry.start + entry.count - entry.request.prompt
    left = list(known.output[done : done + len(entry.drafts) + 1])
    right = 0
    while right < min(len(entry.drafts), len(left)) and entry.drafts[right] == left[right]:
        right += 1
    return left[: right + 1]


# ---- where durations come from -------------------------------------------------------------------------------


def plan_parts(plan: StepPlan) -> list[SequencePart]:
    """What a step does, as the planner describes it."""
    parts = []
    for entry in plan.entries:
        queries = entry.count + len(entry.drafts)
        parts.append(SequencePart(queries, entry.start + queries, 1 + len(entry.drafts) if entry.samples else 0))
    return parts


def predicted(clock: Callable[[Sequence[SequencePart]], float]) -> Duration:
    """By a model of step times (`plan.serving_clock`), or of the times that launching takes."""
    return lambda plan: max(1, round(clock(plan_parts(plan)) * NS))


def simulate_with(clock: StepClock, limits: ServeLimits, requests: Iterable[SimRequest]) -> ServeHistory:
    """With the step times of a device; on a GPU its host launches steps ahead."""
    if not clock.gpu:
        return simulate(limits, requests, predicted(clock))
    on_device = predicted(lambda parts: clock.seconds(parts).total)
    return simulate(limits, requests, on_device, launching=predicted(clock.launching))


def replay(history: ServeHistory, limits: ServeLimits, guesser: NgramGuesser | None = None) -> ServeHistory:
    """A watched engine's requests again, with the durations of its steps."""
    durations = iter([step.ended_ns - step.began_ns for step in history.steps])
    requests = [
        SimRequest(
            record.name,
            record.taken_ns,
            record.prompt,
            record.output,
            record.max_tokens,
            record.ends,
            record.priority,
            record.shares,
            record.aborted_ns,
            record.finish is FinishReason.STOP,
            record.finish is FinishReason.ERROR,
            record.asked_ns,
            record.order,
            record.abort_order,
            record.adapter,
        )
        for record in history.requests.values()
    ]
    return simulate(limits, requests, lambda plan: next(durations, 1), guesser, changes=history.changes)


# ---- loads ---------------------------------------------------------------------------------------------------


def poisson_arrivals(rate_per_s: float, count: int, seed: int = 0) -> list[int]:
    """Nanoseconds at which so many requests come, independent of each other."""
    draw = random.Random(seed)
    now, arrivals = 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate_per_s)
        arrivals.append(round(now * NS))
    return arrivals


def fresh_requests(arrivals: Sequence[int], prompts: Sequence[int], outputs: Sequence[int]) -> list[SimRequest]:
    """Requests of these lengths of which no two share a token."""
    made, next_token = [], 0
    for number, (at_ns, prompt, output) in enumerate(zip(arrivals, prompts, outputs, strict=True)):
        first, last = next_token, next_token + prompt
        next_token = last + output
        made.append(SimRequest(f"{number + 1}/0", at_ns, range(first, last), range(last, next_token), output))
    return made
