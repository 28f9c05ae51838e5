"""What runs in the next step: prompts in chunks beside decoding, under a budget of tokens and a pool of pages.

The one idea: every decision follows from the requests, the pools and the step's number alone. No clock, no tensors, no
threads; so the engine and the simulator share this file, and a fake model proves it.

A step is `plan()`, then whoever computes does what the plan says, then `commit(plan, sampled)`. Requests may be added
or aborted at any time between; an abort during a step frees pages at once, and the step's results are dropped.
Whoever computes may also begin a step before the tokens of the one before are known: `assume(plan)` between the two.

Who runs: requests in line by rank. A rank is the step of arrival plus `patience` steps for each unit of priority, so
only those that come within so many steps can overtake a request: nobody starves. A request that needs a page takes it
from the pool, else from the running request of the last rank. The first in line thus always advances.

Where every layer has a window, pages behind it are free again: a request holds pages for a window and a chunk. Where
only some have one, these have pages of their own, which are (`local_pages.py`).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from tilemesh.core.config import check_fields
from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.core.ranges import Range
from tilemesh.serve.local_pages import LocalPages
from tilemesh.serve.pages import PagePool
from tilemesh.serve.prefix import Key, PrefixCache
from tilemesh.serve.request import FinishReason, RequestState, ServeRequest

UNKNOWN = -1
"""A token that was drawn and not read yet: see `Scheduler.assume`."""


class QueueFullError(RunError):
    """No room for another waiting request: ask again later."""


KV_CACHES = ("", "int8", "fp8")
"""How keys and values may be kept: as they are computed, or in 8 bits."""
Count = Annotated[int, Range(1, 2**40)]
CountOrNone = Annotated[int, Range(0, 2**40)]


@dataclass(frozen=True)
class ServeLimits:
    """What a scheduler may use."""

    pages: Count
    context: Count
    """The most tokens that a sequence may have."""
    page_tokens: Count = 16
    step_tokens: Count = 512
    """The budget of one step."""
    chunk_tokens: Count = 512
    """The most tokens of one prompt in one step."""
    running: Count = 64
    """The most requests that have pages."""
    waiting: Count = 1024
    """The most requests beside those; more are refused."""
    swap_pages: CountOrNone = 0
    """Pages in the CPU's memory for preempted requests; where they are used up, a request is computed again."""
    share_prefixes: bool = True
    share_answers: bool = True
    """Whether pages with tokens of answers are among those that are found."""
    patience: CountOrNone = 256
    """Steps that one unit of priority is worth."""
    kv_cache: str = ""
    """int8 or fp8: keys and values are kept in 8 bits, with a scale for each token and head; empty: as computed."""
    window: CountOrNone = 0
    """Tokens that any layer attends to, the newest included: pages behind them are free again; 0: all."""
    local_pages: CountOrNone = 0
    """Where not every layer has that window: pages of those that do, which alone are free again; 0: all layers do."""

    def __post_init__(self) -> None:
        if self.kv_cache not in KV_CACHES:
            raise unknown("kv_cache", self.kv_cache, KV_CACHES[1:])
        check_fields(self)
        if self.local_pages and (self.swap_pages or self.local_pages < self.pages_for(self.window) + 2):
            raise UsageError(
                f"local_pages is {self.local_pages}, window {self.window}, swap_pages {self.swap_pages}: expected two "
                "pages more than a window's, and no pages in CPU memory"
            )
        if self.running > self.step_tokens:
            raise UsageError(
                f"running is {self.running} and step_tokens {self.step_tokens}: expected room for a token of each "
                "running request in a step"
            )

    @property
    def requests(self) -> int:
        """The most that are there at a time."""
        return self.waiting + self.running

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def pages_behind(self, tokens: int) -> int:
        """Of a sequence's first pages, those that no layer with a window attends to after so many tokens."""
        return max(0, tokens + 1 - self.window) // self.page_tokens if self.window else 0

    @property
    def slides(self) -> bool:
        """Whether every layer has a window."""
        return self.window > 0 and not self.local_pages

    def live_pages(self, tokens: int, most: int) -> int:
        """The most pages of a window that a sequence of so many tokens uses at a time, where it may use `most`."""
        chunk = min(self.chunk_tokens, self.step_tokens)
        return min(self.pages_for(tokens), self.pages_for(self.window + chunk) + 1, most)

    @property
    def sequence_tokens(self) -> int:
        """The most tokens that one request may have in all: the last one of an output needs neither place nor page."""
        # One page more than a window's: it may begin within a page, and the next token needs a place.
        slides = self.slides and self.pages > self.pages_for(self.window)
        return (self.context if slides else min(self.context, self.pages * self.page_tokens)) + 1


@dataclass(slots=True)
class Scheduled:
    """A request's part in a step: compute tokens `start` to `start + count`, then the drafts, in these pages.

    Nobody changes it; it is not frozen because one is made for every sequence and step, and that would take longer.
    """

    request: ServeRequest
    start: int
    count: int
    drafts: tuple[int, ...]
    """Guesses of the tokens after; only where it samples."""
    samples: bool
    """Whether the last of its tokens is the last that is known: its logits give the next."""
    pages: tuple[int, ...]
    local: tuple[int, ...] = ()
    """As the request's."""


@dataclass(frozen=True)
class StepPlan:
    """One step. Copies out of the pool come first, then those into it, then the computation."""

    number: int
    entries: tuple[Scheduled, ...]
    swapped_out: tuple[tuple[int, int], ...] = ()
    """(page of the pool, page of the CPU's pool)"""
    swapped_in: tuple[tuple[int, int], ...] = ()
    """(page of the CPU's pool, page of the pool)"""
    preempted: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(entry.count + len(entry.drafts) for entry in self.entries)


@dataclass
class _Draft:
    """A plan while it is made."""

    left: int
    """Tokens of the budget, beside one for each request that decodes."""
    entries: list[Scheduled] = field(default_factory=list)
    out: list[tuple[int, int]] = field(default_factory=list)
    into: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    stalled: bool = False
    """Whether a running request found no page."""
    promised: int = 0
    """Pages that the tokens of those that run still lack: counted once, not for each that is admitted."""
    promised_local: int = 0


class Progressed(NamedTuple):
    """What a step meant for one request: the new tokens, and whether it has ended."""

    request: ServeRequest
    tokens: tuple[int, ...]
    finish: FinishReason | None


def no_drafts(request: ServeRequest, most: int) -> Sequence[int]:
    return ()


class Scheduler:
    def __init__(self, limits: ServeLimits, propose: Callable[[ServeRequest, int], Sequence[int]] = no_drafts) -> None:
        """`propose(request, most)` guesses at most so many of a decoding request's next tokens."""
        self.limits = limits
        self.pool = PagePool(limits.pages)
        self.swap = PagePool(limits.swap_pages)
        self.prefixes = PrefixCache(self.pool, limits.page_tokens)
        self.local = LocalPages(limits.local_pages) if limits.local_pages else None
        if self.local is not None:
            self.pool.on_evict = self._evict
        self.running: list[ServeRequest] = []
        self.waiting: list[ServeRequest] = []
        self.step = 0
        self.version = 0
        """Of the weights that steps compute with."""
        self.draining = False
        """Whether only requests that ran before may run."""
        self._arrivals = 0
        self._propose = propose

    # ---- requests come and go ----------------------------------------------------------------------------------

    def check(self, prompt: int, max_tokens: int | None) -> int:
        """Refuse a request that can never run; returns the most tokens that its output may have."""
        most = self.limits.sequence_tokens
        held = f"the context is {self.limits.context} tokens"
        if most <= self.limits.context:
            held = f"{self.limits.pages} pages hold {self.limits.pages * self.limits.page_tokens} tokens"
        if prompt == 0:
            raise UsageError("an empty prompt: give at least one character or token")
        if prompt >= most:
            raise UsageError(f"the prompt has {prompt} tokens and {held}: give at most {most - 1}")
        if max_tokens is not None and prompt + max_tokens > most:
            raise UsageError(
                f"a prompt of {prompt} tokens and max_tokens of {max_tokens}, and {held}: set max_tokens to at most "
                f"{most - prompt}"
            )
        return most - prompt if max_tokens is None else max_tokens

    def has_room(self) -> bool:
        """Whether another request may come. Those that will run at once count like those that wait."""
        return len(self.waiting) + len(self.running) < self.limits.requests

    def add(self, request: ServeRequest) -> None:
        self.check(request.prompt, request.max_tokens)
        if not self.has_room():
            raise QueueFullError(f"{len(self.waiting) + len(self.running)} requests are there already: ask again later")
        self._arrivals += 1
        request.rank = (self.step + request.priority * self.limits.patience, self._arrivals)
        bisect.insort(self.waiting, request, key=_rank)

    def finish(self, request: ServeRequest, reason: FinishReason) -> None:
        """End a request, whatever it is doing, and free what it holds."""
        if request.state is RequestState.DONE:
            return
        (self.running if request.state is RequestState.RUNNING else self.waiting).remove(request)
        while request.tokens[-1] == UNKNOWN:
            del request.tokens[-1]
        self._free(request)
        request.state, request.finish = RequestState.DONE, reason

    def lose_pages(self) -> None:
        """What lay in pages is gone, the CPU's too: whoever has not ended is computed again, and nothing is found."""
        self.waiting = sorted([*self.running, *self.waiting], key=_rank)
        self.running = []
        for request in self.waiting:
            self._free(request)
            request.state = RequestState.WAITING
        self._forget_idle()

    def renew(self, version: int) -> None:
        """From now on other weights compute: nothing of the older ones is found. Requests that have pages keep them."""
        self.version = version
        self.prefixes.begin_again()
        self._forget_idle()

    def _forget_idle(self) -> None:
        for page in self.prefixes.forget_idle():
            if self.local is not None:
                self.local.forget(page)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def begun(self) -> int:
        """Requests that ran and have not ended."""
        return len(self.running) + sum(request.version >= 0 for request in self.waiting)

    # ---- a step ------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        self.step += 1
        decoding = sum(request.decodes for request in self.running)
        draft = _Draft(left=self.limits.step_tokens - decoding)
        for request in list(self.running):
            if request.state is RequestState.RUNNING:  # an earlier one may just have preempted it
                self._continue(request, draft)
        if not draft.stalled:
            self._admit_waiting(draft)
        return StepPlan(self.step, tuple(draft.entries), tuple(draft.out), tuple(draft.into), tuple(draft.preempted))

    def can_assume(self) -> bool:
        """Whether the next step may be planned before this one's tokens are known: nobody can be preempted in it, who
        would have to be computed again from tokens that are not known."""
        if self._propose is not no_drafts or self.local is not None:
            return False
        wanted = self.limits.step_tokens + len(self.running) * self.limits.page_tokens
        if self.pool.available * self.limits.page_tokens >= wanted:
            return True
        # In fact each takes what the tokens that it has still lack, the one that this step draws, and the one after it.
        missing = (self.limits.pages_for(len(request.tokens) + 2) - len(request.pages) for request in self.running)
        return self.pool.available >= sum(pages for pages in missing if pages > 0)

    def assume(self, plan: StepPlan) -> None:
        """Go on as if the step were done: a request that samples has one token more, which is UNKNOWN until `commit`.

        At most one step may be assumed at a time, and none with drafts.
        """
        for entry in plan.entries:
            request = entry.request
            if request.state is RequestState.RUNNING:
                request.computed = entry.start + entry.count
                if entry.samples:
                    request.tokens.append(UNKNOWN)

    def commit(self, plan: StepPlan, sampled: Mapping[str, Sequence[int]]) -> list[Progressed]:
        """What the step gave, by the requests' names: after its last token one, and one more per accepted draft."""
        done = []
        for entry in plan.entries:
            request = entry.request
            if request.state is not RequestState.RUNNING:
                continue  # aborted while the step ran: nobody wants its tokens, and its pages were never published
            new = sampled[request.name] if entry.samples else ()
            place, right = entry.start + entry.count, len(new) - 1 if new else 0
            if entry.samples and (not new or (right and tuple(new[:right]) != entry.drafts[:right])):
                raise RunError(f"{request.name}: tokens {new} after drafts {entry.drafts}: a bug in the engine")
            taken, reason = self._extend(request, place, new)
            # The step computed the drafts too; of those, the right ones are tokens of the request now. Where the
            # step was assumed, the next one may have been as well.
            self.settle(request, min(place + right, len(request.tokens)) if right else place, reason)
            if taken or reason is not None:
                done.append(Progressed(request, taken, reason))
        return done

    def settle(self, request: ServeRequest, known: int, reason: FinishReason | None) -> None:
        """So many of its tokens are computed now, and perhaps it has ended."""
        if known > request.computed:
            request.computed = known
        if self.limits.share_prefixes and request.version == self.version:
            self._publish(request, known if self.limits.share_answers else min(known, request.prompt))
        if self.limits.window:
            self._leave_behind(request, known)
        if reason is not None:
            self.finish(request, reason)

    @property
    def stays(self) -> bool:
        """Whether those that run go on by themselves: nobody can join them, or leave pages behind."""
        if self._propose is not no_drafts or self.local is not None or self.limits.window:
            return False
        return not self.waiting or len(self.running) >= self.limits.running

    # ---- inside a step -----------------------------------------------------------------------------------------

    def _continue(self, request: ServeRequest, draft: _Draft) -> None:
        """Give a running request its part of the step."""
        decodes = request.decodes
        place = request.computed
        if decodes and place < len(request.pages) * self.limits.page_tokens and self._propose is no_drafts:
            # What follows comes to the same where a request decodes into a page that it has: most of the time.
            draft.entries.append(Scheduled(request, place, 1, (), True, request.pages, request.local))
            return
        if request.complete:  # its last token is not known yet, and none follows
            return
        count = 1 if decodes else min(request.pending, self.limits.chunk_tokens, draft.left)
        if count == 0:
            return
        while (room := self._room(request)) < count:
            victim = self.running[-1]
            if victim is request:
                break
            self._preempt(victim, draft)
        if room == 0:
            # Waiting loses less than starting again, and those in front of it do advance.
            draft.stalled = True
            return
        count = min(count, room)
        if not decodes:
            draft.left -= count
        self._schedule(request, count, draft)

    def _room(self, request: ServeRequest) -> int:
        """How many more tokens its own pages and those that nobody uses could hold."""
        pages = len(request.pages) + self.pool.available
        if self.local is not None:
            pages = min(pages, len(request.pages) + self.local.pool.available)
        return pages * self.limits.page_tokens - request.computed

    def _schedule(self, request: ServeRequest, count: int, draft: _Draft) -> None:
        missing = self.limits.pages_for(request.computed + count) - len(request.pages)
        if missing > 0:
            taken = tuple(self.pool.take(missing))
            request.pages += taken
            if self.local is not None:
                self.local.take(taken)
                request.local = self.local.table(request.pages, request.behind)
        samples = count == request.pending
        drafts: tuple[int, ...] = ()
        if samples and request.pending == 1:
            most = min(draft.left, request.max_tokens - (len(request.tokens) - request.prompt) - 1)
            most = min(most, len(request.pages) * self.limits.page_tokens - request.computed - 1)  # takes no page
            if most > 0:
                drafts = tuple(self._propose(request, most))[:most]
                draft.left -= len(drafts)
        draft.entries.append(Scheduled(request, request.computed, count, drafts, samples, request.pages, request.local))

    def _preempt(self, victim: ServeRequest, draft: _Draft) -> None:
        """Take a running request's pages; what they hold goes to the CPU's pool if it has room, else it is lost."""
        computed, behind = victim.computed, victim.behind
        held = victim.pages[behind : self.limits.pages_for(computed)]
        self.running.remove(victim)
        self._free(victim)
        victim.state = RequestState.WAITING
        if 0 < len(held) <= self.swap.available:
            victim.state, victim.computed, victim.behind = RequestState.SWAPPED, computed, behind
            victim.swapped = self.swap.take(len(held))
            draft.out += zip(held, victim.swapped, strict=True)
        victim.preemptions += 1
        draft.preempted.append(victim.name)
        bisect.insort(self.waiting, victim, key=_rank)

    def _admit_waiting(self, draft: _Draft) -> None:
        """Start requests in line, until one does not fit: none behind it may overtake it and take its pages."""
        if not self.waiting:
            return
        under_way = {key for request in self.running if (key := self._next_page(request)) is not None}
        missing = (self._lacking(request) for request in self.running)
        index, draft.promised = 0, sum(pages for pages in missing if pages > 0)
        draft.promised_local = sum(self._lacking_local(request) for request in self.running)
        while index < len(self.waiting) and len(self.running) < self.limits.running and draft.left > 0:
            request = self.waiting[index]
            if self.draining and request.version < 0:
                index += 1
                continue
            pages, serials = self._match(request)
            key = self._next_page(request, serials)
            if key in under_way:
                index += 1  # another one computes this very page: a step later it is found
                continue
            if not self._start(request, pages, serials, draft):
                return
            if key is not None:
                under_way.add(key)

    def _match(self, request: ServeRequest) -> tuple[list[int], list[int]]:
        """Cached pages with its first tokens. At least one token stays to be computed, whose logits are needed."""
        if not self._may_share(request):
            return [], []
        pages, serials = self.prefixes.match(request.tokens, len(request.tokens) - 1, request.adapter)
        if self.local is not None:
            most = self.local.found(pages, lambda count: self.limits.pages_behind(count * self.limits.page_tokens))
            pages, serials = pages[:most], serials[:most]
        return pages, serials

    def _next_page(self, request: ServeRequest, serials: Sequence[int] | None = None) -> Key | None:
        """The page that this request would publish next, if it has all the page's tokens already."""
        known = request.published if serials is None else serials
        if serials is None and len(known) < request.behind:
            return None  # see `_publish`
        end = (len(known) + 1) * self.limits.page_tokens
        is_given = self.limits.share_answers or end <= request.prompt  # else it is never published
        if not is_given or not self._may_share(request) or end >= len(request.tokens):
            return None
        return self.prefixes.key(request.tokens, known, request.adapter)

    def _may_share(self, request: ServeRequest) -> bool:
        """Not where it has pages that older weights computed."""
        is_current = request.version == self.version or not (request.pages or request.swapped)
        return self.limits.share_prefixes and request.shares and is_current

    def _start(self, request: ServeRequest, pages: list[int], serials: list[int], draft: _Draft) -> bool:
        """Move a waiting request among the running, if pages for all its tokens can be had; pages found count less."""
        swapped = request.state is RequestState.SWAPPED
        # Of what was swapped out, pages that are still cached need no copy; the cache may even have more.
        computed = max(len(pages) * self.limits.page_tokens, request.computed)
        behind = self.limits.pages_behind(computed)
        # Of those that were found nothing looks at the others any more, where every layer has a window.
        used = pages[behind:] if self.local is None else pages
        whole = self._whole(request)
        idle = sum(self.pool.users(page) == 0 for page in used)
        spare = max(1, self.limits.pages // 100) if self.running else 0  # or the next tokens would preempt at once
        if self.pool.available - idle < whole - len(used) + draft.promised + spare:
            return False
        if self.local is not None:
            mine = pages[behind:]
            lacking = self.limits.live_pages(len(request.tokens), self.limits.local_pages) - len(mine)
            if self.local.pool.available - self.local.idle(mine) < lacking + draft.promised_local + bool(self.running):
                return False
            self.local.share(mine)
            request.local = self.local.table(pages, behind)
        self.pool.share(used)
        request.pages, request.published = tuple(pages), serials
        if swapped:
            first = max(len(pages), request.behind)
            request.pages += (0,) * (first - len(pages))
            copied = request.swapped[first - request.behind :]
            fresh = self.pool.take(len(copied))
            draft.into += zip(copied, fresh, strict=True)
            request.pages += tuple(fresh)
            self.swap.release(request.swapped)
            request.swapped = []
        else:
            if request.preemptions == 0:
                request.found = min(computed, request.prompt)
            request.version = self.version
        request.computed, request.behind = computed, behind
        self._cover(request)
        self.waiting.remove(request)
        request.state = RequestState.RUNNING
        bisect.insort(self.running, request, key=_rank)
        count = min(request.pending, self.limits.chunk_tokens, draft.left, self._room(request))
        draft.left -= count
        self._schedule(request, count, draft)
        draft.promised += max(0, self._lacking(request))
        draft.promised_local += self._lacking_local(request)
        return True

    def _whole(self, request: ServeRequest) -> int:
        """The most pages that its tokens use at a time."""
        count = len(request.tokens)
        slides = self.limits.slides
        return self.limits.live_pages(count, self.limits.pages) if slides else self.limits.pages_for(count)

    def _lacking(self, request: ServeRequest) -> int:
        """Pages that the tokens of a running request still need."""
        return self._whole(request) - len(request.pages) + (request.behind if self.local is None else 0)

    def _lacking_local(self, request: ServeRequest) -> int:
        if self.local is None:
            return 0
        live = self.limits.live_pages(len(request.tokens), self.limits.local_pages)
        return max(0, live - len(request.pages) + request.behind)

    def _extend(
        self, request: ServeRequest, place: int, new: Sequence[int]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Put sampled tokens in their places, from `place` on, up to the one that ends the request."""
        tokens, last = request.tokens, request.prompt + request.max_tokens - 1
        for at, token in enumerate(new, place):
            if at < len(tokens):
                tokens[at] = token  # it was not known yet
            else:
                tokens.append(token)
            if token in request.ends:
                return tuple(new[: at - place + 1]), FinishReason.STOP
            if at == last:
                return tuple(new[: at - place + 1]), FinishReason.LENGTH
        return tuple(new), None

    def _publish(self, request: ServeRequest, known: int) -> None:
        """Let others find the pages that are full now, of the first `known` tokens."""
        while (len(request.published) + 1) * self.limits.page_tokens <= known:
            number = len(request.published)
            if number < request.behind:
                return  # it came back from the CPU's pool, and what lies before is gone
            key = self.prefixes.key(request.tokens, request.published, request.adapter)
            own = request.pages[number]
            page, serial = self.prefixes.publish(key, own)
            if self.local is not None:
                self.local.publish(own, page)
            if page != own:  # another one has computed the same tokens
                request.pages = (*request.pages[:number], page, *request.pages[number + 1 :])
                if self.local is not None:
                    request.local = self.local.table(request.pages, request.behind)
            request.published.append(serial)

    def _leave_behind(self, request: ServeRequest, known: int) -> None:
        """Free the pages that nothing after the first `known` tokens attends to."""
        behind = self.limits.pages_behind(known)
        if behind > request.behind:
            left = request.pages[request.behind : behind]
            request.behind = behind
            if self.local is not None:
                self.local.release(left)
                request.local = self.local.table(request.pages, behind)
            else:
                self.pool.release(left)
                self._cover(request)

    def _cover(self, request: ServeRequest) -> None:
        """In place of pages that were left behind stands one of its own: what is masked is read all the same, and must
        be nobody else's."""
        behind = request.behind
        if behind and behind < len(request.pages) and self.local is None:
            request.pages = (request.pages[behind],) * behind + request.pages[behind:]

    def _evict(self, page: int) -> None:
        self.prefixes.forget(page)
        assert self.local is not None
        self.local.forget(page)

    def _free(self, request: ServeRequest) -> None:
        own = request.pages[request.behind :]
        if self.local is not None:
            self.local.release(reversed(own))
            own, request.local = request.pages, ()
        self.pool.release(reversed(own))
        self.swap.release(request.swapped)
        request.pages, request.swapped, request.published = (), [], []
        request.computed = request.behind = 0


def _rank(request: ServeRequest) -> tuple[int, int]:
    return request.rank
