"""`Engine`: a model that answers prompts, many at a time, from any thread or from asyncio.

The one idea: one thread takes all steps and owns everything that steps change. Others hand it jobs and aborts through
an inbox, and hear of their answers' parts as they come; between them there is nothing shared but that inbox.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack

from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.ranges import LARGEST_WHOLE, Range
from tilemesh.data.tokenizer import encode_prompt
from tilemesh.kernels.launch.tensors import read_device
from tilemesh.measure.gpu import CudaGraphs
from tilemesh.model.config import ModelConfig
from tilemesh.model.kinds import group_sizes, kinds_of
from tilemesh.model.lora import PeftAdapter, give_slots, read_adapter
from tilemesh.model.work.weights import why_not, why_not_groups
from tilemesh.serve.adapters import AdapterSlots, LoadedAdapter
from tilemesh.serve.ahead import kernels_ahead
from tilemesh.serve.answers import EngineStatus
from tilemesh.serve.config import EngineConfig
from tilemesh.serve.constrain.mask import Constraints
from tilemesh.serve.core import EngineCore
from tilemesh.serve.device_steps import PlainCalls, ServeGraphs
from tilemesh.serve.draft import DraftModel, check_draft
from tilemesh.serve.history import ServeHistory
from tilemesh.serve.jobs import AnswerPart, PromptJob
from tilemesh.serve.joint import JointRanks
from tilemesh.serve.live import LiveWeights, WhileRunning, check_running
from tilemesh.serve.load import (
    NewWeights,
    ServedModel,
    WeightSource,
    check_weights,
    load_served,
    open_weights,
    read_dtype,
)
from tilemesh.serve.memory import choose_limits
from tilemesh.serve.offline import Prompt, PromptTaker, SubmitOptions
from tilemesh.serve.ranks import RankRunner, RanksLostError
from tilemesh.serve.request import FinishReason, Sampling
from tilemesh.serve.runner import POOLINGS, Runner
from tilemesh.serve.scheduler import QueueFullError, Scheduler, no_drafts
from tilemesh.serve.speculate import DraftLengths, NgramGuesser

T = TypeVar("T")
_DRAFTS = 4
"""Guesses of a draft model per step at most, unless told otherwise."""


class Engine(PromptTaker):
    """`Engine("runs/…")` or a Hugging Face folder."""

    def __init__(
        self,
        source: str | Path | ServedModel,
        config: EngineConfig | None = None,
        *,
        draft: str | Path | ServedModel | None = None,
        history: ServeHistory | None = None,
        say: Callable[[str], None] = lambda text: None,
        make_runner: Callable[..., Runner] = Runner,
        joint: JointRanks | None = None,
        replica: int = 0,
        **settings: Any,
    ) -> None:
        """`settings` are fields of `EngineConfig`, over those of `config`: `Engine("runs/…", running=8)`.

        `draft`: a smaller model that guesses up to `speculate` tokens per step. `history`: where every step and request
        is written down, which takes memory for as long as it goes on. `make_runner`: what computes a model that is
        given, with a `Runner`'s arguments. `joint`: ranks that hold experts together, of which this engine uses those
        of replica number `replica`; see `Replicas`.
        """
        config = replace(config or EngineConfig(), **settings)
        wanted, place, ranks = read_dtype(config.dtype), read_device(config.device), config.ranks
        if isinstance(source, ServedModel):
            if ranks:
                raise UsageError("ranks read weights themselves: give the folder of a run or of Hugging Face")
            self.served = source
        else:
            with kernels_ahead(config, place) as foresee:
                self.served = load_served(
                    source, dtype=wanted, device=place, step=config.step, say=say, with_weights=not ranks,
                    foresee=foresee,
                )  # fmt: skip
        if ranks and place.type == "cuda" and config.pages is None:
            raise UsageError("ranks on GPUs and no pages: say how many with pages (--pages)")
        model = self.served.model
        self.config: ModelConfig = model.config
        layout = ParallelPlan(tp=max(1, ranks)) if joint is None else joint.plan
        groups = group_sizes(kinds_of(model))
        if ranks and (reason := why_not(self.config, layout) or why_not_groups(self.config, layout, groups)):
            raise UsageError(reason)  # before any of them is started
        longest = min(config.context or self.config.context, self.config.context)
        if config.context is not None and config.context > longest:
            say(f"context {config.context:,} is more than the model's {longest:,}: served with {longest:,}")
        weight_dtype = next(model.parameters()).dtype
        if draft is not None and not isinstance(draft, ServedModel):
            draft = load_served(draft, dtype=weight_dtype, device=place, say=say)
        if draft is not None:
            check_draft(draft.model.config, self.config, longest)
        drafts = None if draft is None else draft.model.config
        self.limits = choose_limits(config, self.config, weight_dtype, longest, place, drafts)
        self._guesser: NgramGuesser | DraftLengths | None = None
        if draft is not None:
            self._guesser = DraftLengths(config.speculate or _DRAFTS)
        elif config.speculate:
            self._guesser = NgramGuesser(config.speculate)
        self._scheduler = Scheduler(self.limits, self._guesser or no_drafts)
        self._adapters: AdapterSlots | None = None
        if config.adapters:
            self._adapters = AdapterSlots(give_slots(model, config.adapters, config.adapter_rank), model)
        on_gpu = place.type == "cuda"
        graphs: ServeGraphs | None = None
        ahead = on_gpu if config.launch_ahead is None else config.launch_ahead
        if ahead and (on_gpu or not config.invariant):  # a CPU's blocks are not kernels over pages
            graphs = CudaGraphs(place, one_pool=True) if on_gpu else PlainCalls()
        implementation = "auto" if on_gpu or graphs is None else "torch"
        runner: Runner | RankRunner
        if ranks:
            names = ("dtype", "device", "step", "invariant", "adapters", "adapter_rank", "shared_by")
            passed_on = {name: getattr(config, name) for name in names}
            if joint is not None:
                passed_on |= {"ep": layout.ep, "begin": partial(joint.join, replica)}
            runner = RankRunner(str(source), self.limits, ranks, say=say, **passed_on)
        else:
            options = (config.invariant, implementation, graphs, say, config.packed)
            runner = make_runner(model, self.limits, place, *options)
        self._core = EngineCore(
            runner, self._scheduler, self.served.tokenizer, self.served.ends, self.config.vocabulary
        )
        owns = not isinstance(source, ServedModel)
        self._weights = LiveWeights(self._core, self.served, owns, on_gpu, self._adapters)
        self._constraints = Constraints(self.served.tokenizer, self.served.ends)
        self._seed, self._prepares = config.seed, config.prepare
        self._shared_by, self._replica = config.shared_by, replica
        self._meeting = None if joint is None else joint.meeting
        self._lock = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._submitted: set[PromptJob] = set()  # those that have not begun
        self._unfinished = 0  # answers that were asked for and have not ended
        self._asked = 0
        self._closing = False
        self._ended: deque[float] = deque(maxlen=64)  # when the last answers did
        self._steps = self._step_tokens = self._preemptions = 0
        self._core.on_step = self._count
        self._core.has_stretches = config.launch_ahead is None
        self._core.history = history
        if isinstance(self._guesser, DraftLengths):
            assert draft is not None
            self._core.draft = DraftModel(Runner(draft.model, self.limits, place), self._guesser)
            self._core.on_end = self._core.draft.forget
        elif self._guesser is not None:
            self._core.on_end = self._guesser.forget
        self._taken = 0
        self._before_step: Callable[[int, bool], None] = lambda taken, busy: None
        self._thread = threading.Thread(target=self._work, name="tilemesh-engine", daemon=True)
        self._thread.start()
        if config.shared_by == 1:
            self.wait_ready()

    # ---- asking ------------------------------------------------------------------------------------------------

    async def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, priority: int = 0
    ) -> AsyncIterator[AnswerPart]:
        """The parts of a prompt's answers as they come; leaving the loop aborts what is left."""
        job, parts = self.submit_async(self.encode(prompt), sampling or Sampling(), priority)
        try:
            left = job.sampling.n
            while left:
                part = await parts.get()
                left -= part.finish is not None
                yield part
        finally:
            self.abort(job)

    def submit_async(
        self, prompt: Sequence[int], sampling: Sampling, priority: int = 0
    ) -> tuple[PromptJob, asyncio.Queue[AnswerPart]]:
        """Begin a job whose parts come into a queue of the running event loop."""
        loop, parts = asyncio.get_running_loop(), asyncio.Queue[AnswerPart]()

        def tell(part: AnswerPart) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(parts.put_nowait, part)

        return self.submit(prompt, sampling, tell, priority=priority), parts

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        tell: Callable[[AnswerPart], None],
        **options: Unpack[SubmitOptions],
    ) -> PromptJob:
        priority, drawn = options.get("priority", 0), options.get("drawn", 0)
        max_tokens = self.check(prompt, sampling)
        constraint = self._constraints.get(sampling.regex, sampling.json_schema)
        with self._lock:
            if self._closing:
                raise RunError(
                    "the engine is closed, or closing: ask it, and read all that `generate` gives, inside of its `with`"
                )
            if self._core.lacks:
                raise RunError(f"{self._core.lacks}: no requests are taken until update_weights gives others")
            if self._unfinished + sampling.n > self.limits.requests:
                raise QueueFullError(
                    f"{self._unfinished} requests are under way, of {self.limits.requests} at most: ask again later"
                )
            number = 0 if self._adapters is None else self._adapters.number(sampling.adapter)
            self._unfinished += sampling.n
            self._asked += 1
            seed = sampling.seed
            if seed is None:  # another one in each replica
                seed = (self._seed + self._asked * self._shared_by + self._replica) & LARGEST_WHOLE
            continues = options.get("continues", False) and constraint is None
            whole = options.get("whole", False)
            job = PromptJob(list(prompt), sampling, seed, tell, constraint, number, whole, continues)
            job.tell = self._counting(job)
            asked_ns = time.monotonic_ns()

            def begin() -> None:
                self._core.add(job, max_tokens, priority, drawn, asked_ns)
                self._submitted.discard(job)

            self._submitted.add(job)
            self._inbox.append(begin)
            self._lock.notify()
        return job

    def together(self) -> AbstractContextManager[object]:
        return self._lock

    def abort(self, job: PromptJob) -> None:
        """End a job's answers that have not ended; their pages are free before the next step."""
        with self._lock:
            self._inbox.append(lambda: self._core.abort(job))
            self._lock.notify()

    def encode(self, prompt: Prompt, special: bool = True) -> list[int]:
        """A prompt's tokens; text gets the special tokens (such as a beginning) that its tokenizer adds, if wanted."""
        if isinstance(prompt, str):
            return encode_prompt(self.served.tokenizer, prompt, special, self.limits.sequence_tokens - 1)
        if len(prompt) >= self.limits.sequence_tokens:
            self._scheduler.check(len(prompt), None)
        tokens, most = list(prompt), self.config.vocabulary
        # Long prompts are looked at without a loop of Python's: token by token, 8,192 take as long as a decode step.
        if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < most:
            return tokens
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < most:
                raise UsageError(f"the prompt has token {token!r}: expected whole numbers from 0 to {most - 1}")
        return tokens

    def check(self, prompt: Sequence[int], sampling: Sampling) -> int:
        outside = [token for token in (*sampling.stop_tokens, *sampling.logit_bias) if token >= self.config.vocabulary]
        if outside:
            raise UsageError(
                f"stop_tokens and logit_bias name token {outside[0]}: the vocabulary has {self.config.vocabulary}"
            )
        if sampling.adapter not in (None, *self.adapters):
            raise unknown("adapter", str(sampling.adapter), sorted(self.adapters))
        if sampling.n > self.limits.requests:
            raise UsageError(f"n is {sampling.n}: expected at most {self.limits.requests}")
        self._constraints.get(sampling.regex, sampling.json_schema)
        return self._scheduler.check(len(prompt), sampling.max_tokens)

    def most_prompts(self, n: int) -> int:
        """Of n answers each, that can be under way at a time."""
        return self.limits.requests // n

    def wait_ready(self) -> None:
        """Until the ranks that compute have read their weights; without ranks at once."""
        if isinstance(self._core.runner, RankRunner):
            try:
                self._core.runner.ready()
            except BaseException:
                self.close()
                raise

    def explain(self) -> list[str]:
        """Which programs compute the model and why not others, in lines."""
        return self._core.runner.explain()

    # ---- weights that live -------------------------------------------------------------------------------------

    def update_weights(
        self,
        source: NewWeights,
        version: int | None = None,
        *,
        running: WhileRunning = "finish",
        step: int | None = None,
    ) -> int:
        """Compute with other weights from the next step on; returns their version when they are there.

        `source`: a run's or a Hugging Face folder (`step`: of a run's), a model, or all its tensors by name. They are
        written into the engine's memory; of tensors that are that memory nothing is copied. Weights that do not fit are
        refused, and nothing is changed. `version`: above that of now; None: one more. `running`: see `WhileRunning`.
        """
        check_running(running)
        return self.write_weights(self.open_weights(source, step), version, running)

    def open_weights(self, source: NewWeights, step: int | None = None) -> WeightSource:
        """Weights that were found to fit this engine's model."""
        opened = open_weights(source, step)
        check_weights(opened, self.served.model)
        return opened

    def drive(self, before: Callable[[int, bool], None]) -> None:
        """From now on call this before every step, and when woken, in the thread that takes steps: with how many it has
        taken, and whether there is something to do. What is submitted there, and weights of `change_weights`, belong to
        the step that follows: what is computed is then a function of what came before which step."""
        self._before_step = before

    def wake_up(self) -> None:
        """Let an engine that has nothing to do look whether it has."""
        with self._lock:
            self._inbox.append(lambda: None)
            self._lock.notify()

    def change_weights(self, source: WeightSource, version: int) -> None:
        """Of the step that follows, where `drive` calls: what was computed with others is computed again. Weights that
        it has are not written, and what was computed with them before is not found."""

        def change() -> None:
            if version == self.version:
                self._core.renew(version)
            else:
                self._weights.update(source, version, "recompute")

        self._core.changes.append((False, change))

    def write_weights(self, source: WeightSource, version: int | None, running: WhileRunning) -> int:
        self._weights.next_version(version)  # refused before anybody is waited for
        return self._when_all_stand(lambda: self._weights.update(source, version, running), running == "finish")

    def sleep(self, level: int = 1) -> None:
        """Give the memory of pages back (level 1), or of pages and weights (2), until `wake`.

        Requests under way, and those that come meanwhile, wait; what they had computed is computed again. Weights move
        to the host from a GPU. On a CPU they are dropped: `wake` reads them again from the folder that they came from;
        where they came from memory, `update_weights` must come before it. It may in any case: the engine sleeps on.
        """
        Range(1, 2).check("level", level, whole=True)
        self._when_all_stand(lambda: self._weights.sleep(level))

    def wake(self) -> None:
        """Take the memory again and go on; an engine that does not sleep stays awake."""
        self._when_all_stand(self._wake)

    # ---- adapters ----------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        """Those that a request may name (`Sampling.adapter`)."""
        return {} if self._adapters is None else self._adapters.names

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Hold what PEFT wrote into a folder under a name; it takes the place of one of this name, whose requests go on
        with what it was. `Engine(adapters=8)` says how many there may be."""
        self.put_adapter(name, str(folder), self.open_adapter(name, folder))

    def open_adapter(self, name: str, folder: str | Path) -> PeftAdapter:
        """Weights that were found to fit this engine's model and the room that it has."""
        if self._adapters is None:
            raise UsageError("this engine has no room for adapters: start it with adapters (--adapters)")
        if not name or name == self.served.name:
            raise UsageError(f"an adapter called '{name}': expected a name of its own, which the model has not")
        weights = read_adapter(folder, self.config)
        self._adapters.check(weights, str(folder))
        return weights

    def put_adapter(self, name: str, folder: str, weights: PeftAdapter) -> None:
        slots = self._adapters
        assert slots is not None

        def put() -> None:
            if self.asleep:
                raise UsageError("the engine sleeps: wake it before it loads an adapter")
            in_use = {request.adapter for request in (*self._scheduler.running, *self._scheduler.waiting)}
            with self._lock:  # nobody is given a number meanwhile, and those who were may not have begun
                slots.put(name, folder, weights, in_use | {job.adapter for job in self._submitted})
            self._weights.write_adapters()

        self._between_steps(put)

    def drop_adapter(self, name: str) -> None:
        """Let no request name it any more; those under way go on."""
        if self._adapters is None or name not in self._adapters.names:
            raise unknown("adapter", name, sorted(self.adapters))
        slots = self._adapters
        self._between_steps(lambda: slots.drop(name))

    def embed(self, prompt: Prompt, pooling: str = "mean", adapter: str | None = None) -> list[float]:
        """A vector of length 1 for a prompt: of what the last norm gives, the mean over its tokens, or the last one's.

        It is computed between two steps."""
        tokens = self.encode(prompt)
        self._scheduler.check(len(tokens), 1)
        if pooling not in POOLINGS:
            raise unknown("pooling", pooling, POOLINGS)
        if adapter not in (None, *self.adapters):
            raise unknown("adapter", str(adapter), sorted(self.adapters))

        def compute() -> list[float]:
            runner = self._core.runner
            if self._core.stands:
                raise RunError("the engine sleeps, or has no weights: wake it, or give it some")
            number = 0 if self._adapters is None else self._adapters.number(adapter)
            try:
                return runner.embed(tokens, pooling, number)
            except RanksLostError:
                self._core.restart_ranks()
                raise

        return self._between_steps(compute)

    def _wake(self) -> None:
        self._weights.wake()
        if self._prepares and self._core.runner.ahead is not None:
            self._core.runner.ahead.prepare_all()

    @property
    def asleep(self) -> int:
        """The level at which it sleeps; 0: it is awake."""
        return self._core.asleep

    @property
    def version(self) -> int:
        """Of the weights that compute now."""
        return self._scheduler.version

    def _when_all_stand(self, change: Callable[[], T], waits: bool = False) -> T:
        """As `_between_steps`, and where replicas compute with one another's experts, of all of them."""

        def meet() -> T:
            if self._meeting is None:
                return change()
            try:
                self._meeting.wait()
                try:
                    return change()
                finally:
                    self._meeting.wait()
            except threading.BrokenBarrierError:
                raise RunError("another replica, which holds some of the experts, could not do the same") from None

        return self._between_steps(meet, waits)

    def _between_steps(self, change: Callable[[], T], waits: bool = False) -> T:
        """Have the thread that takes steps do something, after requests that ran have ended if it `waits` for them."""
        done: Future[T] = Future()

        def order() -> None:
            try:
                done.set_result(change())
            except BaseException as error:
                done.set_exception(error)

        with self._lock:
            if self._closing:
                raise RunError("the engine is closed, or closing: it can do nothing more")
            self._inbox.append(lambda: self._core.changes.append((waits, order)))
            self._lock.notify()
        while not wait([done], 1.0).done:
            if not self._thread.is_alive() and not done.done():
                raise RunError("the engine has ended before it came to this")
        return done.result()

    # ---- how it stands -----------------------------------------------------------------------------------------

    @property
    def status(self) -> EngineStatus:
        scheduler = self._scheduler
        return EngineStatus(
            len(scheduler.running),
            len(scheduler.waiting) + len(self._inbox),
            self.limits.pages,
            scheduler.pool.used,
            len(scheduler.pool.idle),
            self._steps,
            self._step_tokens,
            self._preemptions,
            self._guesser.guessed if self._guesser else 0,
            self._guesser.right if self._guesser else 0,
            self.version,
            self.asleep,
        )

    @property
    def launches_ahead(self) -> bool:
        """Whether it launches steps before it has read the tokens of the last."""
        return self._core.runner.ahead is not None

    @property
    def alive(self) -> bool:
        """Whether it answers requests."""
        return self._thread.is_alive() and not self._closing

    @property
    def retry_after_s(self) -> int:
        """When a refused request had best be sent again: when as many answers will have ended as now wait."""
        ended = list(self._ended)
        if len(ended) < 2:
            return 1
        per_s = (len(ended) - 1) / max(1e-3, time.monotonic() - ended[0])
        return max(1, min(600, math.ceil((self._unfinished - self.limits.running) / per_s)))

    def watch(self, history: ServeHistory | None) -> None:
        """From the next step on write everything down there, or nowhere; what came before it stays where it is."""
        self._between_steps(lambda: setattr(self._core, "history", history))

    def close(self, drain: bool = False) -> None:
        with self._lock:
            self._closing = True
            if not drain:
                self._inbox.append(self._core.abort_all)
            self._lock.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if isinstance(self._core.runner, RankRunner):
            self._core.runner.close()

    # ---- inside ------------------------------------------------------------------------------------------------

    def _counting(self, job: PromptJob) -> Callable[[AnswerPart], None]:
        tell = job.tell

        def heard(part: AnswerPart) -> None:
            if part.finish is not None:
                with self._lock:
                    self._unfinished -= 1
                self._ended.append(time.monotonic())
            try:
                tell(part)
            except Exception as error:  # whoever listens has failed, and others go on
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, self._thread)))
                if part.finish is None:
                    self.abort(job)

        return heard

    def _count(self, tokens: int, preempted: int) -> None:
        self._steps += 1
        self._step_tokens += tokens
        self._preemptions += preempted

    def _work(self) -> None:
        try:
            if self._prepares and self._core.runner.ahead is not None:
                self._core.runner.ahead.prepare_all()
            self._take_steps()
        except BaseException as error:  # a bug: nobody may wait for answers that will never come
            with self._lock:
                self._closing = True
                self._inbox.clear()
            why = f"{type(error).__name__}: {error}"
            self._core.fail_all(why)
            for job in self._submitted:
                for number in range(len(job.answers), job.sampling.n):
                    job.tell(AnswerPart(number, "", (), (), FinishReason.ERROR, None, why))
            raise

    def _take_steps(self) -> None:
        while True:
            self._before_step(self._taken, self._core.busy)
            with self._lock:
                self._core.take_time(time.monotonic_ns())
                while not self._inbox and not self._core.busy and not self._closing:
                    late = not self._lock.wait(self._core.seconds_left)  # an engine that sleeps has answers that wait
                    self._core.take_time(time.monotonic_ns())
                    if late:
                        break
                if self._closing and not self._inbox and not self._core.busy:
                    break
                orders = list(self._inbox)
                self._inbox.clear()
            for order in orders:
                order()
            self._core.end_late()
            self._core.take_changes()
            if self._core.busy:
                self._core.step()
                self._taken += 1
        self._core.abort_all()  # of an engine that sleeps
