"""Whole answers to many prompts: as many are asked at a time as the engine takes, and answers come in order."""

from __future__ import annotations

import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self, TypedDict, Unpack

from tilemesh.core.errors import UsageError
from tilemesh.serve.answers import Completion, collect
from tilemesh.serve.jobs import AnswerPart, PromptJob
from tilemesh.serve.request import Sampling
from tilemesh.serve.scheduler import QueueFullError

Prompt = str | Sequence[int]
"""Text, or tokens."""
_RETRY_S = 0.02


class SubmitOptions(TypedDict, total=False):
    """Beside a prompt, its sampling and who hears of its answers."""

    priority: int
    """Lower first; 0 if not given."""
    drawn: int
    """How many tokens of this answer others have drawn."""
    whole: bool
    """An answer may be told in one part when it has ended, which takes less of the host's time."""
    continues: bool
    """As in `PromptJob`; what a constraint is on is a text by itself."""


class PromptTaker(ABC):
    """An engine, or several used as one. Use it with `with`, or call `close`."""

    @abstractmethod
    def encode(self, prompt: Prompt, special: bool = True) -> list[int]: ...

    @abstractmethod
    def check(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Refuse what can never be answered; returns the most tokens that each answer may have."""

    @abstractmethod
    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        tell: Callable[[AnswerPart], None],
        **options: Unpack[SubmitOptions],
    ) -> PromptJob:
        """Begin the answers to a prompt; `tell` is called in the engine's thread and must return soon.

        Raises QueueFullError where too many are under way."""

    @abstractmethod
    def abort(self, job: PromptJob) -> None: ...

    @abstractmethod
    def together(self) -> AbstractContextManager[object]:
        """What is submitted inside begins in one step: which batches form does not depend on threads."""

    @abstractmethod
    def close(self, drain: bool = False) -> None:
        """Abort what is under way, or with `drain` finish it first. Afterwards no requests are taken."""

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> Iterator[Completion]:
        """The completions of these prompts, in their order. One prompt is one text, or one list of tokens; `sampling`
        is that of all prompts, or one for each."""
        return completions(self, prompts, sampling)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def completions(
    engine: PromptTaker, prompts: Prompt | Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None
) -> Iterator[Completion]:
    """As `PromptTaker.generate`."""
    some: list[Prompt] = [prompts] if _is_prompt(prompts) else list(prompts)  # type: ignore[arg-type, list-item]
    each: list[Sampling] = (
        [sampling or Sampling()] * len(some) if sampling is None or isinstance(sampling, Sampling) else list(sampling)
    )
    if len(each) != len(some):
        raise UsageError(f"{len(some)} prompts and {len(each)} samplings: give one for all, or one for each")
    encoded = [engine.encode(prompt) for prompt in some]
    for prompt, asked in zip(encoded, each, strict=True):
        engine.check(prompt, asked)
    return whole_answers(engine, encoded, each)


def whole_answers(
    engine: PromptTaker, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
) -> Iterator[Completion]:
    """The completions of these prompts, in their order; leaving early aborts the rest."""
    # Prompts whose answers have ended. On Ctrl-C in `get` a queue.Queue may release a lock that it does not hold.
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    left: dict[int, int] = {}
    jobs: list[PromptJob] = []
    heard: dict[int, list[AnswerPart]] = {}

    def ask_next() -> bool:
        number, own = len(jobs), list[AnswerPart]()

        def tell(part: AnswerPart) -> None:
            own.append(part)
            left[number] -= part.finish is not None
            if not left[number]:  # nobody is woken before
                ended.put(number)

        heard[number], left[number] = own, samplings[number].n
        try:
            jobs.append(engine.submit(prompts[number], samplings[number], tell, whole=True, continues=True))
        except QueueFullError:
            del left[number]
            return False
        return True

    try:
        for number in range(len(prompts)):
            while left.get(number) != 0:
                with engine.together():
                    while len(jobs) < len(prompts) and ask_next():
                        pass
                if number not in left:  # others fill the engine, and nothing of ours is under way
                    time.sleep(_RETRY_S)
                else:
                    ended.get()
            yield collect(jobs[number], heard.pop(number))
    finally:
        for job in (job for number, job in enumerate(jobs) if left[number]):
            engine.abort(job)


def _is_prompt(prompts: object) -> bool:
    if isinstance(prompts, str):
        return True
    return isinstance(prompts, Sequence) and bool(prompts) and all(isinstance(token, int) for token in prompts)
