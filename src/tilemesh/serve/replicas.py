"""Several engines used as one, each with a model of its own in other processes.

What the HTTP application asks of an engine, it asks of this: a prompt goes to the replica that `route.py` names, and an
abort to where its job is. A replica whose ranks were lost starts again by itself; meanwhile the others are asked.
Replicas that share the experts of a model go in step (`joint.py`), and change and sleep together.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, TypeVar, Unpack

from tilemesh.core.errors import UsageError
from tilemesh.serve.adapters import LoadedAdapter
from tilemesh.serve.answers import EngineStatus
from tilemesh.serve.config import EngineConfig
from tilemesh.serve.engine import Engine
from tilemesh.serve.jobs import AnswerPart, PromptJob
from tilemesh.serve.joint import JointRanks
from tilemesh.serve.live import WhileRunning, check_running
from tilemesh.serve.load import NewWeights
from tilemesh.serve.offline import Prompt, PromptTaker, SubmitOptions
from tilemesh.serve.request import FinishReason, Sampling
from tilemesh.serve.route import PrefixRouter
from tilemesh.serve.scheduler import QueueFullError

T = TypeVar("T")


class Replicas(PromptTaker):
    """`Replicas("runs/…", 2)`: engines that share the requests; with `ep=2` and experts, the experts too."""

    def __init__(
        self,
        source: str | Path,
        replicas: int,
        config: EngineConfig | None = None,
        *,
        ranks: int = 1,
        ep: int = 1,
        **options: Any,
    ) -> None:
        """`ranks`: processes of each replica. `ep`: so many neighbours hold the experts together, a share each, and all
        else each for itself. The configuration and the options are those of `Engine`."""
        if options.get("history") is not None:
            raise UsageError("history is kept of one engine: leave it out with several replicas")
        self.engines: list[Engine] = []
        self._joint = JointRanks(replicas, ranks, ep) if ep > 1 else None
        try:
            self._start(source, replicas, config, options | {"ranks": ranks, "joint": self._joint})
        except BaseException:
            self.close()
            raise
        first = self.engines[0]
        self.served, self.config, self.limits = first.served, first.config, first.limits
        self._router = PrefixRouter(replicas, self.limits.page_tokens, self.limits.pages)
        self._lock = threading.Lock()
        self._homes: dict[int, int] = {}  # a job's id: its replica

    def _start(self, source: str | Path, replicas: int, config: EngineConfig | None, options: dict[str, Any]) -> None:
        """All read their weights at the same time. Ranks die with the thread that started them, so it is this one."""
        for replica in range(replicas):
            self.engines.append(Engine(source, config, shared_by=replicas, replica=replica, **options))
            if self._joint is not None:  # its ranks were started with as many pages as the first engine has
                options |= {"pages": self.engines[0].limits.pages, "memory": None}
        for engine in self.engines:
            engine.wait_ready()

    def together(self) -> AbstractContextManager[object]:
        """What is submitted inside goes to several engines, each of which begins when it can."""
        return nullcontext()

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        tell: Callable[[AnswerPart], None],
        **options: Unpack[SubmitOptions],
    ) -> PromptJob:
        self.check(prompt, sampling)
        alive = [engine.alive for engine in self.engines]
        with self._lock:
            replica, missing = self._router.choose(prompt, alive)
            order = [replica, *(other for other in range(len(self.engines)) if other != replica and alive[other])]
        for number, place in enumerate(order):
            hear = _Counted(self, place, missing, sampling.n, tell)
            try:
                job = self.engines[place].submit(prompt, sampling, hear, **options)
            except QueueFullError:
                hear.undo()
                if number == len(order) - 1:
                    raise
                continue
            except BaseException:
                hear.undo()
                raise
            with self._lock:
                self._homes[id(job)] = place
                hear.job = id(job)
                if hear.left == 0:
                    self._homes.pop(hear.job, None)
            return job
        raise AssertionError("a loop over at least one replica")

    def explain(self) -> list[str]:
        """As every replica would say."""
        return self.engines[0].explain()

    def abort(self, job: PromptJob) -> None:
        with self._lock:
            place = self._homes.get(id(job))
        if place is not None:  # else all its answers have ended
            self.engines[place].abort(job)

    def encode(self, prompt: Prompt, special: bool = True) -> list[int]:
        return self.engines[0].encode(prompt, special)

    def check(self, prompt: Sequence[int], sampling: Sampling) -> int:
        return self.engines[0].check(prompt, sampling)

    def most_prompts(self, n: int) -> int:
        return sum(engine.most_prompts(n) for engine in self.engines)

    def update_weights(
        self,
        source: NewWeights,
        version: int | None = None,
        *,
        running: WhileRunning = "finish",
        step: int | None = None,
    ) -> int:
        """Of all replicas, each between two steps of its own. As `Engine.update_weights`."""
        check_running(running)
        sources = [engine.open_weights(source, step) for engine in self.engines]  # before one of them is changed
        wanted = max(engine.version for engine in self.engines) + 1 if version is None else version
        opened = dict(zip(self.engines, sources, strict=True))
        written = self._each(lambda engine: engine.write_weights(opened[engine], wanted, running))
        with self._lock:
            for replica in range(len(self.engines)):
                self._router.forget(replica)
        return max(written)

    def _each(self, change: Callable[[Engine], T]) -> list[T]:
        """Of all replicas at the same time: those that share experts wait for one another."""
        with ThreadPoolExecutor(len(self.engines)) as pool:
            changes = [pool.submit(change, engine) for engine in self.engines]
            try:
                for ended in as_completed(changes):
                    ended.result()
            except BaseException:
                if self._joint is not None:
                    self._joint.meeting.abort()
                raise
            finally:
                pool.shutdown()
                if self._joint is not None:
                    self._joint.meeting.reset()
        return [ended.result() for ended in changes]

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        """Those that all replicas have."""
        first, *others = (engine.adapters for engine in self.engines)
        return {name: adapter for name, adapter in first.items() if all(name in each for each in others)}

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Into all replicas; where one of them cannot take it, the others have what they had."""
        weights = self.engines[0].open_adapter(name, folder)
        with ExitStack() as undo:
            for engine in self.engines:
                before = engine.adapters.get(name)
                engine.put_adapter(name, str(folder), weights)
                if before is None:
                    undo.callback(engine.drop_adapter, name)
                else:
                    undo.callback(engine.put_adapter, name, before.folder, before.weights)
            undo.pop_all()

    def drop_adapter(self, name: str) -> None:
        """From all replicas that have it, also where one of them can do nothing more."""
        having = [engine for engine in self.engines if name in engine.adapters] or self.engines
        self._each(lambda engine: engine.drop_adapter(name) if engine in having else None)

    def embed(self, prompt: Prompt, pooling: str = "mean", adapter: str | None = None) -> list[float]:
        return self.engines[0].embed(prompt, pooling, adapter)

    def sleep(self, level: int = 1) -> None:
        self._each(lambda engine: engine.sleep(level))

    def wake(self) -> None:
        self._each(Engine.wake)

    @property
    def asleep(self) -> int:
        """The deepest level at which a replica sleeps."""
        return max(engine.asleep for engine in self.engines)

    @property
    def version(self) -> int:
        """The oldest that a replica computes with."""
        return min(engine.version for engine in self.engines)

    @property
    def status(self) -> EngineStatus:
        each = [dataclasses.astuple(engine.status) for engine in self.engines]
        summed = EngineStatus(*(sum(numbers) for numbers in zip(*each, strict=True)))
        return dataclasses.replace(summed, version=self.version, asleep=self.asleep)

    @property
    def alive(self) -> bool:
        return any(engine.alive for engine in self.engines)

    @property
    def retry_after_s(self) -> int:
        return min(engine.retry_after_s for engine in self.engines)

    def close(self, drain: bool = False) -> None:
        if self._joint is not None:
            self._joint.meeting.abort()  # nobody waits for a replica that takes no more changes
        for engine in self.engines:
            engine.close(drain)


class _Counted:
    """Passes a job's parts on, and tells the router what is left of it."""

    def __init__(
        self, replicas: Replicas, place: int, missing: int, answers: int, tell: Callable[[AnswerPart], None]
    ) -> None:
        self._replicas, self._place, self._missing, self.left, self._tell = replicas, place, missing, answers, tell
        self.job: int | None = None
        with replicas._lock:
            replicas._router.waiting[place] += missing
            replicas._router.running[place] += answers

    def __call__(self, part: AnswerPart) -> None:
        router = self._replicas._router
        with self._replicas._lock:
            router.waiting[self._place] -= self._missing
            self._missing = 0
            if part.finish is FinishReason.ERROR:
                router.forget(self._place)  # its ranks may be gone, and their pages with them
            if part.finish is not None:
                self.left -= 1
                router.running[self._place] -= 1
                if self.left == 0 and self.job is not None:
                    self._replicas._homes.pop(self.job, None)
        self._tell(part)

    def undo(self) -> None:
        """The job was not taken."""
        with self._replicas._lock:
            self._replicas._router.waiting[self._place] -= self._missing
            self._replicas._router.running[self._place] -= self.left
