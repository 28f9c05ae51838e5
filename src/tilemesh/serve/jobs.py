"""Prompts and their answers under way: what belongs to an answer beside its tokens, and who is told of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tilemesh.serve.constrain.mask import Constraint, Cursor
from tilemesh.serve.request import FinishReason, Sampling, ServeRequest
from tilemesh.serve.sampling import DrawnScores, TokenLogprobs
from tilemesh.serve.text import TextStream


class AnswerPart(NamedTuple):
    """What a step added to one answer."""

    answer: int
    """Which of the answers to its prompt, from 0."""
    text: str
    tokens: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs]
    """Of these tokens, where they were asked for."""
    finish: FinishReason | None
    stopped_by: str | int | None = None
    """The stop string or stop token that ended it."""
    error: str | None = None
    refused: bool = False
    """Whether it failed for what the request asked for, not for the engine's state."""
    version: int = 0
    """Of the weights that made its tokens."""


@dataclass(eq=False)
class PromptJob:
    """A prompt and its answers under way. `tell` hears each part, in the thread that takes the steps."""

    prompt: list[int]
    sampling: Sampling
    seed: int
    tell: Callable[[AnswerPart], None]
    constraint: Constraint | None = None
    """What the answers must match."""
    adapter: int = 0
    """The number of what computes it beside the model."""
    whole: bool = False
    """Whether `tell` need not hear of an answer before it ends: its text is then decoded at once."""
    continues: bool = False
    """Whether an answer's text goes on with the prompt's: its first word keeps the blank that a text's may lose."""
    answers: list[LiveAnswer] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By position, from 1: complete when the first part of answer 0 comes."""

    @property
    def found(self) -> int:
        """Tokens of the prompt that were in the prefix cache."""
        return self.answers[0].request.found if self.answers else 0


@dataclass(eq=False)
class LiveAnswer:
    job: PromptJob
    number: int
    request: ServeRequest
    text: TextStream
    drawn: int = 0
    """Tokens that were drawn for the same answer before this request."""
    cursor: Cursor | None = None
    """Where it stands in what it must match."""
    held: list[int] = field(default_factory=list)
    """Tokens that were not told yet."""
    scores: list[float] = field(default_factory=list)
    """Of each of these its log-probabilities, its own and as sampled, where it is plain and they are wanted."""
    held_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """The same where it is not plain."""
    holds: bool = False
    """Whether tokens may wait there until it ends: nobody wants to hear of them before, and no text can end it."""
    plain: bool = False
    """Whether nothing is wanted but tokens, drawn from the model's logits as they are, and their log-probabilities."""

    def __post_init__(self) -> None:
        sampling = self.job.sampling
        self.holds = self.job.whole and self.cursor is None and not sampling.stop
        known = not sampling.logprobs and sampling.prompt_logprobs is None  # 0: of the drawn token alone
        self.plain = known and self.cursor is None and not sampling.changes_logits and not self.job.adapter

    def hold(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Keep tokens that are told later."""
        self.held += tokens
        if not self.plain:
            self.held_logprobs += logprobs
            return
        for each in logprobs:
            self.scores += (each.logprob, 0.0 if each.sampled is None else each.sampled)

    def release(self) -> tuple[tuple[int, ...], Sequence[TokenLogprobs]]:
        """What was held, which is told now."""
        tokens, scores, logprobs = tuple(self.held), self.scores, tuple(self.held_logprobs)
        self.held, self.scores, self.held_logprobs = [], [], []
        return tokens, DrawnScores(tokens, scores) if scores else logprobs
