"""What an engine did, step by step and request by request, as values. No torch.

The one idea: an engine that is watched and the simulator write the same `ServeHistory`, so schedules can be compared
entry by entry, and latencies of both are computed by the same code. Times are whole nanoseconds: sums are exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilemesh.model.work.decoding import SequencePart
from tilemesh.serve.request import FinishReason, RequestState, ServeRequest
from tilemesh.serve.scheduler import Scheduler, StepPlan


@dataclass(frozen=True, slots=True)
class RequestPart:
    """A request's part in a step."""

    name: str
    start: int
    count: int
    drafts: tuple[int, ...]
    samples: bool
    pages: tuple[int, ...]

    @property
    def work(self) -> SequencePart:
        queries = self.count + len(self.drafts)
        return SequencePart(queries, self.start + queries, 1 + len(self.drafts) if self.samples else 0)


@dataclass(frozen=True)
class StepRecord:
    """One step. It lasts until the next may begin: planning, computing, drawing, booking and telling."""

    number: int
    began_ns: int
    ended_ns: int
    parts: tuple[RequestPart, ...]
    sampled: Mapping[str, tuple[int, ...]]
    preempted: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    """Requests that the engine ended because they could not be computed."""
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_idle: int = 0
    held_tokens: int = 0
    """Tokens that running requests have in pages; a page that several share counts for each."""
    held_pages: int = 0
    """Pages that running requests have, counted alike."""

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.began_ns) * 1e-9

    @property
    def works(self) -> list[SequencePart]:
        return [part.work for part in self.parts]

    @property
    def decode_tokens(self) -> int:
        """Of requests that had one token left to compute; drafts included."""
        return sum(part.count + len(part.drafts) for part in self.parts if part.count == 1 and part.samples)

    @property
    def prefill_tokens(self) -> int:
        return sum(part.count for part in self.parts if not (part.count == 1 and part.samples))

    @property
    def schedule(self) -> tuple[object, ...]:
        """All that the scheduler decided: equal in two histories where the schedules are."""
        return self.number, self.parts, self.preempted


@dataclass
class RequestRecord:
    """One answer: when it was asked for and when its tokens came."""

    name: str
    asked_ns: int
    taken_ns: int
    """When the scheduler heard of it: between two steps."""
    order: int
    """Of all requests and aborts, the how manyth it was."""
    prompt: tuple[int, ...]
    max_tokens: int
    ends: frozenset[int] = frozenset()
    priority: int = 0
    shares: bool = True
    output: list[int] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    """When each token of the output was there."""
    finish: FinishReason | None = None
    aborted_ns: int | None = None
    """When the scheduler heard that nobody wants it any more."""
    abort_order: int = 0
    found: int = 0
    """Tokens of the prompt that were in the prefix cache."""
    adapter: int = 0
    """The number of its adapter; 0: none."""

    @property
    def taken_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def first_token_s(self) -> float | None:
        """From asking to the first token."""
        return (self.token_ns[0] - self.asked_ns) * 1e-9 if self.token_ns else None

    @property
    def gaps_s(self) -> list[float]:
        """Between the steps that gave it tokens."""
        steps = sorted(set(self.token_ns))
        return [(after - before) * 1e-9 for before, after in itertools.pairwise(steps)]

    @property
    def whole_s(self) -> float | None:
        return (self.token_ns[-1] - self.asked_ns) * 1e-9 if self.token_ns else None


@dataclass(frozen=True)
class WeightChange:
    """What the scheduler was told between two steps."""

    kind: str
    """renew: other weights compute, of version `value`; lose: what lay in pages is gone; drain: whether (1 or 0) only
    requests that ran may run."""
    value: int
    taken_ns: int
    order: int
    """As a request's."""

    def apply(self, scheduler: Scheduler) -> None:
        if self.kind == "renew":
            scheduler.renew(self.value)
        elif self.kind == "lose":
            scheduler.lose_pages()
        else:
            scheduler.draining = bool(self.value)


@dataclass
class ServeHistory:
    """All steps in order, all requests in the order in which they were taken."""

    steps: list[StepRecord] = field(default_factory=list)
    requests: dict[str, RequestRecord] = field(default_factory=dict)
    refused: int = 0
    orders: int = 0
    """Requests, aborts and changes of weights so far."""
    changes: list[WeightChange] = field(default_factory=list)

    # ---- an engine, or the simulator, tells --------------------------------------------------------------------

    def changed(self, kind: str, value: int, taken_ns: int) -> None:
        self.orders += 1
        self.changes.append(WeightChange(kind, value, taken_ns, self.orders))

    def added(self, request: ServeRequest, asked_ns: int, taken_ns: int) -> None:
        self.orders += 1
        self.requests[request.name] = RequestRecord(
            request.name, asked_ns, taken_ns, self.orders, tuple(request.tokens), request.max_tokens, request.ends,
            request.priority, request.shares, adapter=request.adapter,
        )  # fmt: skip

    def aborted(self, name: str, taken_ns: int) -> None:
        if name in self.requests and self.requests[name].finish is None:
            self.orders += 1
            self.requests[name].aborted_ns, self.requests[name].abort_order = taken_ns, self.orders
            self.requests[name].finish = FinishReason.ABORT

    def stepped(
        self,
        scheduler: Scheduler,
        plan: StepPlan,
        sampled: Mapping[str, Sequence[int]],
        failed: Sequence[str],
        began_ns: int,
        ended_ns: int,
    ) -> None:
        """After the step was booked, and requests that ended by their text were ended."""
        parts = tuple(RequestPart(e.request.name, e.start, e.count, e.drafts, e.samples, e.pages) for e in plan.entries)
        running = scheduler.running
        drawn = {name: tuple(new) for name, new in sampled.items()}
        computed = sum(request.computed for request in running)
        pages = sum(len(request.pages) - request.behind for request in running)
        step = StepRecord(
            plan.number, began_ns, ended_ns, parts, drawn, plan.preempted, tuple(failed), len(running),
            len(scheduler.waiting), scheduler.pool.used, len(scheduler.pool.idle), computed, pages,
        )  # fmt: skip
        self.steps.append(step)
        for entry in plan.entries:
            request = entry.request
            record = self.requests.get(request.name)
            if record is None:  # it came before anyone watched
                continue
            new = request.tokens[record.taken_tokens :]
            record.output += new
            record.token_ns += [ended_ns] * len(new)
            record.found = request.found
            if request.state is RequestState.DONE:
                record.finish = request.finish
