"""What an engine gives back: whole answers, put together from their parts, and how it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from tilemesh.core.errors import RunError, UsageError
from tilemesh.serve.jobs import AnswerPart, PromptJob
from tilemesh.serve.request import FinishReason
from tilemesh.serve.sampling import TokenLogprobs


@dataclass(frozen=True)
class Answer:
    """One whole answer."""

    text: str
    tokens: tuple[int, ...]
    finish: FinishReason
    stopped_by: str | int | None
    logprobs: Sequence[TokenLogprobs]
    versions: tuple[int, ...] = ()
    """Of the weights that made each token: 0 until `Engine.update_weights` gives others."""


@dataclass(frozen=True)
class Completion:
    """All answers to one prompt."""

    prompt_tokens: tuple[int, ...]
    found_tokens: int
    """Of the prompt's tokens, those that were in the prefix cache."""
    answers: tuple[Answer, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens from the second on, where they were asked for."""

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.answers[0].text


@dataclass(frozen=True)
class EngineStatus:
    """How the engine stands: taken between steps, so the numbers may be a step apart."""

    running: int
    waiting: int
    pages: int
    pages_used: int
    pages_idle: int
    steps: int
    step_tokens: int
    """Computed in all steps so far."""
    preemptions: int
    guessed: int = 0
    """Tokens that were guessed ahead."""
    guessed_right: int = 0
    version: int = 0
    """Of the weights."""
    asleep: int = 0


def collect(job: PromptJob, parts: Sequence[AnswerPart]) -> Completion:
    """A job's whole answers, from all their parts."""
    answers = []
    for number in range(job.sampling.n):
        own = [part for part in parts if part.answer == number]
        last = own[-1]
        if last.finish is FinishReason.ERROR:
            if last.refused:
                raise UsageError(str(last.error))
            raise RunError(f"the engine could not answer: {last.error}")
        assert last.finish is not None
        answers.append(
            Answer(
                "".join(part.text for part in own),
                tuple(chain.from_iterable(part.tokens for part in own)),
                last.finish,
                last.stopped_by,
                last.logprobs if len(own) == 1 else tuple(logprob for part in own for logprob in part.logprobs),
                tuple(chain.from_iterable((part.version,) * len(part.tokens) for part in own)),
            )
        )
    prompt_logprobs = tuple(job.prompt_logprobs[position] for position in sorted(job.prompt_logprobs))
    return Completion(tuple(job.prompt), job.found, tuple(answers), prompt_logprobs)
