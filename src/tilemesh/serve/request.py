"""What is asked of the engine, and what the scheduler knows of a request that is under way. No tensors.

The one idea: a request is its list of tokens (prompt, then output) and how many of them have their keys and values in
pages. The next step computes some of those that have none; when none is left, the last one's logits give a new token.
So a prompt's chunks, decoding, a prefix found in the cache and the recomputation after a preemption are one case.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from tilemesh.core.config import check_fields
from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import SEED, TEMPERATURE, TOP_P, Range, shown

MOST_LOGPROBS = 20
_Logprobs = Annotated[int, Range(0, MOST_LOGPROBS)]
_Penalty = Annotated[float, Range(-2, 2)]
_BIAS = Range(-100, 100)
_MOST_STOPS, _LONGEST_STOP = 16, 1024
_MOST_TOKENS_NAMED = 4096


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are chosen, and when it ends.

    The order: logit bias, penalties, temperature, then of the distribution's tokens those that min-p, top-k and top-p
    all keep, each looking at what the one before it left.
    """

    max_tokens: Annotated[int, Range(1, 10_000_000)] | None = None
    """None: until the context, or the pool of pages, is full."""
    temperature: Annotated[float, TEMPERATURE] = 1.0
    """0 always takes the likeliest token."""
    top_k: Annotated[int, Range(0, 1_000_000_000)] = 0
    """Only the k likeliest; 0: all."""
    top_p: Annotated[float, TOP_P] = 1.0
    """Only the likeliest that together reach this share."""
    min_p: Annotated[float, Range(0, 1)] = 0.0
    """Only tokens at least this share as likely as the likeliest."""
    repetition_penalty: Annotated[float, Range(1e-6, 1_000_000)] = 1.0
    """Tokens of prompt and output: positive logits are divided by it, negative ones multiplied."""
    presence_penalty: _Penalty = 0.0
    """Subtracted from the logits of tokens that the output has."""
    frequency_penalty: _Penalty = 0.0
    """The same for each time that the output has them."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    seed: Annotated[int, SEED] | None = None
    """Random numbers are keyed by (seed, number of the answer, position). None: the engine gives each request one."""
    n: Annotated[int, Range(1, 128)] = 1
    """Answers to the same prompt."""
    stop: tuple[str, ...] = ()
    """The output ends before the first of these."""
    stop_tokens: tuple[int, ...] = ()
    """The output ends with the first of these."""
    ignore_eos: bool = False
    regex: str | None = None
    """The output matches this regular expression as a whole, unless `max_tokens` or a stop string ends it before."""
    json_schema: Mapping[str, Any] | bool | None = None
    """The same: it is JSON that this schema allows."""
    logprobs: _Logprobs | None = None
    """Log-probabilities of each output token and of so many likeliest: the model's own, before bias, penalties and
    temperature; and as sampled, after these and the filters."""
    prompt_logprobs: _Logprobs | None = None
    """The model's own for the prompt's tokens, from the second on."""
    deadline_s: Annotated[float, Range(0, 1e9, above=True)] | None = None
    """Seconds from when it is asked: an answer that has not ended by then ends with what it has (`deadline`)."""
    adapter: str | None = None
    """Which of the engine's adapters computes it; None: the model as it is."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.adapter, str | None):
            raise UsageError(f"adapter is {shown(self.adapter)}: expected the name of one that is loaded")
        if self.regex is not None and not isinstance(self.regex, str):
            raise UsageError(f"regex is {shown(self.regex)}: expected a regular expression as text")
        if not isinstance(self.json_schema, Mapping | bool | None):
            raise UsageError(f"json_schema is {shown(self.json_schema)}: expected a schema: an object, true or false")
        if self.regex is not None and self.json_schema is not None:
            raise UsageError("regex is given beside json_schema (or response_format): leave one of them out")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise UsageError(f"stop is {shown(self.stop)}: expected texts that are not empty")
        if len(self.stop) > _MOST_STOPS:
            raise UsageError(f"stop has {len(self.stop)} texts: expected at most {_MOST_STOPS}")
        if any(len(text) > _LONGEST_STOP for text in self.stop):
            longest = max(map(len, self.stop))
            raise UsageError(f"stop has a text of {longest:,} characters: expected at most {_LONGEST_STOP:,}")
        if not isinstance(self.stop_tokens, tuple) or not isinstance(self.logit_bias, Mapping):
            raise UsageError(
                "stop_tokens and logit_bias: expected a tuple of tokens and a mapping from tokens to numbers"
            )
        for name in ("stop_tokens", "logit_bias"):
            if len(getattr(self, name)) > _MOST_TOKENS_NAMED:
                count = len(getattr(self, name))
                raise UsageError(f"{name} names {count:,} tokens: expected at most {_MOST_TOKENS_NAMED:,}")
        for token in (*self.stop_tokens, *self.logit_bias):
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise UsageError(f"stop_tokens and logit_bias name token {shown(token)}: expected whole numbers from 0")
        for token, bias in self.logit_bias.items():
            _BIAS.check(f"logit_bias of token {token}", bias)

    @cached_property
    def changes_logits(self) -> bool:
        """Whether it asks for a bias or a penalty."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias) or penalties != (1, 0, 0)

    @cached_property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from the model's own distribution."""
        filters = (self.temperature, self.top_p, self.min_p, self.top_k) != (1, 1, 0, 0)
        return not filters and not self.changes_logits


class RequestState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    """Waiting, with its keys and values in the CPU's pages."""
    DONE = "done"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """An end token, a stop token or a stop string."""
    LENGTH = "length"
    DEADLINE = "deadline"
    """Its time was over."""
    ABORT = "abort"
    ERROR = "error"
    """The engine failed to compute it."""


@dataclass(eq=False, slots=True)
class ServeRequest:
    """One answer in the making. The scheduler alone writes the fields below `max_tokens`."""

    name: str
    tokens: list[int]
    """Prompt and output."""
    max_tokens: int
    ends: frozenset[int] = frozenset()
    """Tokens after which the output ends."""
    priority: int = 0
    """Lower runs first."""
    shares: bool = True
    """Whether it may take pages that others computed; not where every prompt token's logits are wanted."""
    adapter: int = 0
    """Its adapter's number; 0: none."""

    prompt: int = 0
    """How many tokens the prompt has."""
    rank: tuple[int, int] = (0, 0)
    """Its place in line: lower runs first."""
    state: RequestState = RequestState.WAITING
    finish: FinishReason | None = None
    computed: int = 0
    """Tokens whose keys and values are in pages."""
    pages: tuple[int, ...] = ()
    """A new tuple whenever they change: whoever has seen this one knows them."""
    behind: int = 0
    """Of these, or of its local ones where it has any, the first that lie behind its window and are not its own any
    more."""
    local: tuple[int, ...] = ()
    """In a model where only some layers have a window, their pages: as many."""
    swapped: list[int] = field(default_factory=list)
    """Pages of the CPU's pool for those that are its own, while it is swapped out."""
    published: list[int] = field(default_factory=list)
    """Serial numbers of its leading pages in the prefix cache."""
    version: int = -1
    """Of the weights that its first page was computed with; -1: it never ran."""
    found: int = 0
    """Prompt tokens that it did not have to compute when it first ran."""
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens that are known and not computed: 1 while it decodes, except right after it was preempted."""
        return len(self.tokens) - self.computed

    @property
    def complete(self) -> bool:
        """Whether it has as many tokens as it may, of which the last is not known yet."""
        return len(self.tokens) - self.prompt >= self.max_tokens

    @property
    def decodes(self) -> bool:
        """Whether all its tokens but one are computed, and more may follow."""
        tokens = len(self.tokens)
        return tokens == self.computed + 1 and tokens < self.prompt + self.max_tokens

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]
