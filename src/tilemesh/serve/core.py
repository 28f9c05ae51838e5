"""The engine without threads: requests go in, steps are taken, parts of answers come out.

The one idea: a step is plan, compute, draw, commit, and each of these is someone else's; what is kept here is what
belongs to an answer beside its tokens: text, log-probabilities, and who is to be told.
"""

from __future__ import annotations

import heapq
import operator
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.serve import stretch
from tilemesh.serve.constrain.mask import Cursor
from tilemesh.serve.device_steps import DrawnTokens
from tilemesh.serve.draft import DraftModel
from tilemesh.serve.history import ServeHistory
from tilemesh.serve.jobs import AnswerPart, LiveAnswer, PromptJob
from tilemesh.serve.ranks import RankRunner, RanksLostError
from tilemesh.serve.request import FinishReason, RequestState, ServeRequest
from tilemesh.serve.runner import RequestLogits, Runner
from tilemesh.serve.sampling import (
    DrawnScores,
    TokenDraw,
    TokenLogprobs,
    draw_evenly,
    draw_tokens,
    filters,
    logprobs_of,
    unsound_rows,
)
from tilemesh.serve.scheduler import Progressed, Scheduled, Scheduler, StepPlan
from tilemesh.serve.stretch import DecodeStretch, RowEnd
from tilemesh.serve.text import Decoder, TextStream

UNSOUND = "the model's logits are NaN or infinite: are its weights sound?"


class EngineCore:
    def __init__(
        self, runner: Runner | RankRunner, scheduler: Scheduler, decoder: Decoder, ends: frozenset[int], vocabulary: int
    ) -> None:
        self.runner, self.scheduler = runner, scheduler
        self.decoder, self.ends, self.vocabulary = decoder, ends, vocabulary
        self._live: dict[str, LiveAnswer] = {}
        self._involved: set[str] = set()  # those of them that are not plain
        self._numbers = 0
        self._deadlines: list[tuple[int, str]] = []  # a heap: when answers end that have not ended before
        self._alone: dict[int, str] = {}  # texts of single tokens
        self.on_step: Callable[[int, int], None] = lambda tokens, preempted: None
        """Hears of each step how many tokens it computed and how many requests were preempted."""
        self.on_end: Callable[[str], None] = lambda name: None
        """Hears the name of each request that has ended."""
        self.draft: DraftModel | None = None
        """What makes the guesses that a plan leaves open."""
        self.history: ServeHistory | None = None
        """Where all that happens is written down, if anyone wants it."""
        self.changes: deque[tuple[bool, Callable[[], None]]] = deque()
        """What is to be done between two steps, one after the other, and whether it waits for requests that ran."""
        self.lacks = ""
        """Why there are no weights to compute with: nothing runs until they come."""
        self.asleep = 0
        """The level at which it sleeps: requests wait until it wakes."""
        self.has_stretches = True
        """Whether many answers that decode are stepped as arrays where steps are not launched ahead."""
        self.on_restart: Callable[[], None] = lambda: None
        """Called when ranks that were lost have been started again."""
        self.now_ns = 0
        """When the last orders were taken: the next step begins then."""
        self._ahead: tuple[StepPlan, DrawnTokens, int] | None = None
        """A step that was launched, and whose tokens nobody has read yet; and when it was."""
        self._stretch: DecodeStretch | None = None
        """Steps of requests that go on by themselves; its last one is launched, and `_ahead` is none."""
        self._ended_ns = 0
        self._last: tuple[StepPlan, Mapping[str, Sequence[int]], list[str], int] | None = None

    @property
    def busy(self) -> bool:
        return (self.scheduler.busy and not self.stands) or self._ahead is not None or bool(self.changes)

    @property
    def stands(self) -> bool:
        """Whether no step can be taken."""
        return bool(self.asleep or self.lacks)

    def add(
        self, job: PromptJob, max_tokens: int, priority: int = 0, drawn: int = 0, asked_ns: int | None = None
    ) -> None:
        """Begin the answers to a prompt. `drawn`: how many tokens of the same answers there were before; `asked_ns`:
        when it was asked for."""
        self._numbers += 1
        sampling = job.sampling
        for number in range(sampling.n):
            request = ServeRequest(
                f"{self._numbers}/{number}",
                list(job.prompt),
                max_tokens,
                frozenset(sampling.stop_tokens) | (frozenset() if sampling.ignore_eos else self.ends),
                priority,
                shares=number > 0 or sampling.prompt_logprobs is None,
                adapter=job.adapter,
            )
            cursor = None if job.constraint is None else Cursor(job.constraint)
            text = TextStream(self.decoder, sampling.stop, self._alone, job.prompt[-1:] if job.continues else ())
            answer = LiveAnswer(job, number, request, text, drawn, cursor)
            job.answers.append(answer)
            self._live[request.name] = answer
            if not answer.plain or (self.runner.invariant and filters(sampling, self.vocabulary)):
                self._involved.add(request.name)
            self.scheduler.add(request)
            began_ns = self.now_ns if asked_ns is None else asked_ns
            if sampling.deadline_s is not None:
                heapq.heappush(self._deadlines, (began_ns + int(sampling.deadline_s * 1e9), request.name))
            if self.history is not None:
                self.history.added(request, began_ns, self.now_ns)

    def abort(self, job: PromptJob) -> None:
        """End what is left of a job; its pages are free when this returns."""
        if any(answer.request.name in self._live for answer in job.answers):
            self._end_stretch()
        for answer in job.answers:
            self._end(answer, FinishReason.ABORT)

    def end_late(self) -> None:
        """End the answers whose time is over; their pages are free when this returns."""
        while self._deadlines and self._deadlines[0][0] <= self.now_ns:
            _, name = heapq.heappop(self._deadlines)
            self._end_stretch()
            if name in self._live:
                self._end(self._live[name], FinishReason.DEADLINE)
        if len(self._deadlines) > 2 * len(self._live) + 64:  # mostly of answers that have ended
            self._deadlines = [late for late in self._deadlines if late[1] in self._live]
            heapq.heapify(self._deadlines)

    @property
    def seconds_left(self) -> float | None:
        """Until the next answer's time is over."""
        return max(0.0, (self._deadlines[0][0] - time.monotonic_ns()) / 1e9) if self._deadlines else None

    def abort_all(self) -> None:
        self._end_stretch()
        for answer in list(self._live.values()):
            self._end(answer, FinishReason.ABORT)

    def fail_all(self, why: str) -> None:
        """Tell everyone that the engine has failed. Nothing runs afterwards, so nothing is freed."""
        for answer in list(self._live.values()):
            answer.job.tell(AnswerPart(answer.number, "", (), (), FinishReason.ERROR, None, why))

    def take_changes(self) -> None:
        """Do what is to be done between steps, as far as nobody has to be waited for."""
        while self.changes:
            waits, change = self.changes[0]
            self._drain(waits and not self.stands)
            if self.scheduler.draining and self.scheduler.begun:
                return
            self._end_ahead()
            change()
            self.changes.popleft()
        self._drain(False)

    def _drain(self, draining: bool) -> None:
        """Whether only requests that ran may run."""
        if self.history is not None and draining != self.scheduler.draining:
            self.history.changed("drain", int(draining), self.now_ns)
        self.scheduler.draining = draining

    def renew(self, version: int) -> None:
        """Other weights compute from now on."""
        self.scheduler.renew(version)
        if self.history is not None:
            self.history.changed("renew", version, self.now_ns)

    def tell_held(self) -> None:
        """Tell the tokens that were kept until now: a part's tokens are of one version."""
        for answer in self._live.values():
            if answer.held:
                text = answer.text.add(answer.held)
                tokens, logprobs = answer.release()
                answer.job.tell(AnswerPart(answer.number, text, tokens, logprobs, None, version=self.scheduler.version))

    def forget_computed(self) -> None:
        """Whatever lies in pages is computed again, and log-probabilities of prompts that are not complete."""
        self.scheduler.lose_pages()
        if self.history is not None:
            self.history.changed("lose", 0, self.now_ns)
        for answer in self._live.values():
            if len(answer.job.prompt_logprobs) < len(answer.job.prompt) - 1:
                answer.job.prompt_logprobs.clear()

    def step(self) -> None:
        """Take a step; or launch one whose tokens are read in the next, and end the one that was launched before."""
        if self._stretch is None:
            self._stretch = self._begin_stretch()
        if self._stretch is not None and self._step_stretch(self._stretch):
            return
        plan = self.scheduler.plan()
        if not self._goes_ahead(plan):
            self._end_ahead()
            # Requests that have just ended are no part of it any more.
            going = tuple(entry for entry in plan.entries if entry.request.state is RequestState.RUNNING)
            self._compute(plan if len(going) == len(plan.entries) else replace(plan, entries=going))
            return
        assert self.runner.ahead is not None
        try:
            drawings = [self._drawing(entry) for entry in plan.entries if entry.samples]
            launched = self.runner.ahead.launch(plan, drawings)
        except Exception as error:
            self._fail([entry.request for entry in plan.entries], error)
            self._end_ahead()
            return
        self._end_ahead()
        self._ahead = (plan, launched, self.now_ns)
        if self.scheduler.can_assume():
            self.scheduler.assume(plan)
        else:
            self._end_ahead()

    def _goes_ahead(self, plan: StepPlan) -> bool:
        """Whether a step can be launched whose requests' last tokens may be on the device only."""
        if self.runner.ahead is None or self.draft is not None or not plan.entries:
            return False
        if plan.swapped_in or plan.swapped_out or plan.preempted or any(entry.drafts for entry in plan.entries):
            return False
        return not self._involved or all(entry.request.name not in self._involved for entry in plan.entries)

    def _end_ahead(self) -> None:
        """Read the tokens of the step that was launched last, if there is one, and book them."""
        self._end_stretch()
        if self._ahead is None:
            return
        (plan, launched, began_ns), self._ahead = self._ahead, None
        try:
            tokens = launched.read()
        except Exception as error:
            self._fail([entry.request for entry in plan.entries], error)
            return
        for name in [name for name, token in tokens.items() if token < 0 and name in self._live]:
            self._end(self._live[name], FinishReason.ERROR, UNSOUND)
        sampled = {name: (token,) for name, token in tokens.items() if token >= 0}
        scores = launched.scores()
        for progressed in self.scheduler.commit(plan, sampled):
            answer = self._live[progressed.request.name]
            own = scores[progressed.request.name] if scores and answer.job.sampling.logprobs is not None else ()
            if progressed.finish is None and answer.holds:
                answer.held += progressed.tokens
                answer.scores += own
            else:
                self._tell(progressed, DrawnScores(progressed.tokens, own) if own else ())
        if self.history is not None:
            # It ran from when the step before it ended; the time for launching and booking passed beside it.
            began_ns, self._ended_ns = max(began_ns, self._ended_ns), time.monotonic_ns()
            failed = [name for name, token in tokens.items() if token < 0]
            self.history.stepped(self.scheduler, plan, sampled, failed, began_ns, self._ended_ns)
        self.on_step(plan.tokens, len(plan.preempted))

    def _begin_stretch(self) -> DecodeStretch | None:
        """Where all that run decode, in the launched step if there is one, and nobody wants to hear of them before they
        end."""
        if self._involved or self._deadlines or self.history is not None:
            return None
        running = len(self.scheduler.running)
        if running < stretch.LEAST_ROWS or not self.scheduler.stays:
            return None
        if self._ahead is None:
            requests = self.scheduler.running
            if not self.has_stretches or self.runner.decode_rows is None or not all(each.decodes for each in requests):
                return None
            answers = [self._live[request.name] for request in requests]
            holds = all(answer.holds for answer in answers)
            return DecodeStretch(answers, range(running), None, self.scheduler, self.vocabulary) if holds else None
        plan, launched, _ = self._ahead
        if not all(entry.samples and entry.count == 1 for entry in plan.entries):
            return None
        # Those that the step before has ended are in it in vain.
        going = [(row, entry) for row, entry in enumerate(plan.entries) if entry.request.state is RequestState.RUNNING]
        answers = [self._live[entry.request.name] for _, entry in going]
        if len(going) < running or not all(answer.holds for answer in answers):
            return None
        self._ahead = None
        return DecodeStretch(answers, [row for row, _ in going], launched, self.scheduler, self.vocabulary)

    def _step_stretch(self, going: DecodeStretch) -> bool:
        """Take a step of it; False where it is over."""
        launch = self.runner.decode_rows if self.runner.ahead is None else self.runner.ahead.launch_rows
        assert launch is not None
        try:
            ends = going.step(launch) if self.scheduler.stays else None
        except Exception as error:
            self._end_stretch()
            self._fail([answer.request for answer in going.answers], error)
            return True
        if ends is None:
            self._end_stretch()
            return False
        self._tell_ends(going, ends)
        return True

    def _end_stretch(self) -> None:
        """Requests go on one by one, and what they have drawn is known."""
        if self._stretch is None:
            return
        over, self._stretch = self._stretch, None
        try:
            ends = over.end()
        except Exception as error:
            self._fail([answer.request for answer in over.answers], error)
            return
        self._tell_ends(over, ends)

    def _tell_ends(self, of: DecodeStretch, ends: Sequence[RowEnd]) -> None:
        for answer, tokens, logprobs, reason in ends:
            if reason is FinishReason.ERROR:
                self._end(answer, reason, UNSOUND)
            else:
                self._tell(Progressed(answer.request, tokens, reason), logprobs)
        self.on_step(of.booked, 0)

    def _fail(self, requests: Sequence[ServeRequest], error: Exception) -> None:
        """Whatever it was (no memory, most likely), the requests of this step cannot go on, and the others can."""
        for request in requests:
            if request.name in self._live:
                self._end(self._live[request.name], FinishReason.ERROR, f"{type(error).__name__}: {error}")
        if isinstance(error, RanksLostError):
            self.restart_ranks()

    def restart_ranks(self) -> None:
        """After some were lost, and with them what lay in pages."""
        assert isinstance(self.runner, RankRunner)
        self.scheduler.lose_pages()
        self.runner.restart()
        self.on_restart()

    def _compute(self, plan: StepPlan) -> None:
        sampled: dict[str, list[int]] = {}
        logprobs: dict[str, list[TokenLogprobs]] = {}
        try:
            if self.draft is not None:
                plan = self.draft.fill(plan, self._next_drawing)
            begun = time.perf_counter()
            logits = self.runner.run(plan, self._wants_all)
            sampled, logprobs = self._draw(plan, logits)
            if self.draft is not None and plan.entries and all(entry.count == 1 for entry in plan.entries):
                self.draft.observe(plan, time.perf_counter() - begun)
        except Exception as error:
            self._fail([entry.request for entry in plan.entries], error)
        failed = [entry.request.name for entry in plan.entries if entry.request.state is RequestState.DONE]
        self._last = (plan, sampled, failed, self.now_ns) if self.history is not None else None
        for progressed in self.scheduler.commit(plan, sampled):
            self._tell(progressed, logprobs.get(progressed.request.name, ()))
        self.on_step(plan.tokens, len(plan.preempted))

    def take_time(self, now_ns: int) -> None:
        """Say what time it is: the last step has ended by now."""
        self.now_ns = now_ns
        if self._last is not None and self.history is not None:
            plan, sampled, failed, began_ns = self._last
            self.history.stepped(self.scheduler, plan, sampled, failed, began_ns, now_ns)
            self._last = None

    def _wants_all(self, request: ServeRequest) -> bool:
        """Whether the logits of all of a prompt's tokens are wanted, and not there yet."""
        answer = self._live[request.name]
        wanted = answer.number == 0 and answer.job.sampling.prompt_logprobs is not None
        return wanted and request.computed < request.prompt and len(answer.job.prompt_logprobs) < request.prompt - 1

    def _draw(
        self, plan: StepPlan, logits: Mapping[str, RequestLogits]
    ) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprobs]]]:
        """Tokens after each request's last token and its drafts, up to the first draft that was wrong."""
        drawn: list[DrawnRows] = []
        unsound: dict[int, set[int]] = {}
        for entry in plan.entries:
            name = entry.request.name
            computed = logits.get(name)
            if computed is None:
                continue
            answer = self._live[name]
            if answer.job.sampling.prompt_logprobs is not None:
                self._keep_prompt_logprobs(entry, computed)
            if not entry.samples:
                continue
            step_NV = computed.step_NV
            first = computed.begin + entry.start + entry.count - 1 - computed.first
            if id(step_NV) not in unsound:
                unsound[id(step_NV)] = set(unsound_rows(step_NV))
            bad = unsound[id(step_NV)]
            if bad and not bad.isdisjoint(range(first, computed.begin + computed.rows)):
                self._end(answer, FinishReason.ERROR, UNSOUND)
                continue
            try:
                allowed = self._allowed(entry)
                if allowed and allowed[0] is not None and not bool(allowed[0].any()):
                    raise UsageError("no token of this vocabulary goes on as the regex or json_schema wants it")
            except UsageError as error:
                self._end(answer, FinishReason.ERROR, str(error), refused=True)
                continue
            except Exception as error:  # whatever it was, the others of this step go on
                self._end(answer, FinishReason.ERROR, f"{type(error).__name__}: {error}")
                continue
            drawn.append(DrawnRows(first, entry, step_NV, self._drawings(entry, allowed)))
        # In the order of the rows, so that the step's logits need not be copied.
        drawn.sort(key=operator.itemgetter(0))
        sampled: dict[str, list[int]] = {}
        wanted: dict[tuple[int, int], list[DrawnRows]] = {}
        tokens, at = self._drawn_tokens(drawn), 0
        for rows in drawn:
            drafts, right = rows.entry.drafts, 0
            while right < len(drafts) and drafts[right] == tokens[at + right]:
                right += 1
            name = rows.entry.request.name
            sampled[name] = tokens[at : at + right + 1]
            at += len(drafts) + 1
            top = self._live[name].job.sampling.logprobs
            if top is not None:
                wanted.setdefault((id(rows.step_NV), top), []).append(rows)
        return sampled, _logprobs(wanted, sampled)

    def _drawn_tokens(self, drawn: Sequence[DrawnRows]) -> list[int]:
        drawings = [drawing for rows in drawn for drawing in rows.drawings]
        if not drawings:
            return []
        draw, step_NV = draw_evenly if self.runner.invariant else draw_tokens, drawn[0].step_NV
        if any(rows.step_NV is not step_NV for rows in drawn):
            return draw(torch.cat([rows.logits_NV for rows in drawn]), drawings)
        places = [rows.first + place for rows in drawn for place in range(len(rows.drawings))]
        return draw(_rows_at(step_NV, places), drawings)

    def _allowed(self, entry: Scheduled) -> list[Tensor | None]:
        """The tokens that a constraint allows after the last token and after each draft; nothing without one."""
        cursor = self._live[entry.request.name].cursor
        if cursor is None:
            return []
        ends = list(entry.request.ends)
        masks: list[Tensor | None] = []
        for after in cursor.ahead(entry.drafts):
            mask_V = None if after is None else torch.zeros(self.vocabulary, dtype=torch.bool)
            if after is not None and mask_V is not None:
                mask_V[: len(after.mask_V)] = torch.from_numpy(after.mask_V)
                mask_V[ends] = after.may_end  # a token that ends the answer is no part of it
            masks.append(mask_V)
        return masks

    def _drawing(self, entry: Scheduled, guessed: int = 0, mask_V: Tensor | None = None) -> TokenDraw:
        """Of the token after an entry's last one, or after so many of its drafts."""
        request = entry.request
        answer = self._live[request.name]
        tokens = [*request.tokens, *entry.drafts[:guessed]] if guessed else request.tokens
        job, done = answer.job, len(tokens) - request.prompt + answer.drawn
        return TokenDraw(job.sampling, job.seed, answer.number, done, tokens, request.prompt, mask_V)

    def _drawings(self, entry: Scheduled, allowed: Sequence[Tensor | None]) -> list[TokenDraw]:
        masks = allowed or [None] * (len(entry.drafts) + 1)
        return [self._drawing(entry, guessed, mask_V) for guessed, mask_V in enumerate(masks)]

    def _next_drawing(self, entry: Scheduled) -> TokenDraw | None:
        """What the token after an entry's drafts is drawn with; None where a constraint would let nothing follow."""
        try:
            allowed = self._allowed(entry)
        except Exception:  # what the step itself will say of this request
            return None
        if allowed and (allowed[-1] is None or not bool(allowed[-1].any())):
            return None
        return self._drawings(entry, allowed)[-1]

    def _keep_prompt_logprobs(self, entry: Scheduled, computed: RequestLogits) -> None:
        request = entry.request
        answer = self._live[request.name]
        top = answer.job.sampling.prompt_logprobs
        if top is None or answer.number != 0:
            return
        last = min(computed.first + len(computed.logits_NV), request.prompt - 1)
        targets = request.tokens[computed.first + 1 : last + 1]
        if targets:
            made = logprobs_of(computed.logits_NV[: len(targets)], targets, top)
            for position, logprob in enumerate(made, computed.first + 1):
                answer.job.prompt_logprobs.setdefault(position, logprob)

    def _tell(self, progressed: Progressed, logprobs: Sequence[TokenLogprobs]) -> None:
        request, reason = progressed.request, progressed.finish
        answer = self._live[request.name]
        if reason is None and answer.holds:
            answer.hold(progressed.tokens, logprobs)
            return
        if reason is None and answer.cursor is None and not answer.job.sampling.stop:  # nothing can end it
            text = answer.text.add(progressed.tokens)
            version = self.scheduler.version
            answer.job.tell(AnswerPart(answer.number, text, progressed.tokens, logprobs, None, version=version))
            return
        text, kept, complete = answer.text.add(answer.held), 0, False
        stopped_by: str | int | None = None
        for token in progressed.tokens:
            kept += 1
            if token in request.ends:
                stopped_by = token  # it is no text
                break
            text += answer.text.add([token])
            complete = answer.cursor is not None and answer.cursor.add(token)
            if complete or answer.text.stopped is not None:
                break
        if complete:
            reason = FinishReason.STOP
        if answer.text.stopped is None and reason is not None:
            text += answer.text.add([], last=True)
        if answer.text.stopped is not None:
            reason, stopped_by = FinishReason.STOP, answer.text.stopped
        if reason is not None:
            # What was drawn after a stop string in the same step would not have been drawn one by one.
            del request.tokens[len(request.tokens) - (len(progressed.tokens) - kept) :]
            self.scheduler.finish(request, reason)
            del self._live[request.name]
            self._involved.discard(request.name)
            self.on_end(request.name)
        answer.hold(progressed.tokens[:kept], logprobs[:kept])
        part = AnswerPart(answer.number, text, *answer.release(), reason, stopped_by, version=self.scheduler.version)
        answer.job.tell(part)

    def _end(self, answer: LiveAnswer, reason: FinishReason, error: str | None = None, refused: bool = False) -> None:
        if self._live.pop(answer.request.name, None) is not None:
            self._involved.discard(answer.request.name)
            self.scheduler.finish(answer.request, reason)
            if reason in (FinishReason.ABORT, FinishReason.DEADLINE) and self.history is not None:
                self.history.aborted(answer.request.name, self.now_ns)
            self.on_end(answer.request.name)
            text, version = answer.text.add(answer.held, last=True), self.scheduler.version
            tokens, logprobs = answer.release()
            answer.job.tell(AnswerPart(answer.number, text, tokens, logprobs, reason, None, error, refused, version))


class DrawnRows(NamedTuple):
    """Rows of a step's logits that tokens of a request are drawn from."""

    first: int
    entry: Scheduled
    step_NV: Tensor
    drawings: list[TokenDraw]

    @property
    def logits_NV(self) -> Tensor:
        return self.step_NV[self.first : self.first + len(self.drawings)]


def _rows_at(step_NV: Tensor, places: list[int]) -> Tensor:
    """These rows; where they are all, nothing is copied."""
    is_all = len(places) == len(step_NV) and places == list(range(len(step_NV)))
    return step_NV if is_all else step_NV[torch.tensor(places, device=step_NV.device)]


def _logprobs(
    wanted: Mapping[tuple[int, int], Sequence[DrawnRows]], sampled: Mapping[str, Sequence[int]]
) -> dict[str, list[TokenLogprobs]]:
    """Of the tokens that requests drew, all rows of a pass at once: row by row they would take longer than the pass."""
    logprobs: dict[str, list[TokenLogprobs]] = {}
    for (_, top), some in wanted.items():
        places, tokens, drawings, ends = list[int](), list[int](), list[TokenDraw](), list[tuple[str, int]]()
        for first, entry, _, own in some:
            new = sampled[entry.request.name]
            places += range(first, first + len(new))
            tokens += new
            drawings += own if len(own) == len(new) else own[: len(new)]
            ends.append((entry.request.name, len(tokens)))
        each, at = logprobs_of(_rows_at(some[0].step_NV, places), tokens, top, drawings), 0
        for name, end in ends:
            logprobs[name] = each[at:end]
            at = end
    return logprobs
