"""Which prompt stands where, as tokens: a built-in task's, drawn by their number, or those of a file in a shuffled
order. A position is just the number of prompts taken so far, so a resumed run goes on with the next one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from tilemesh.align.config import FeedbackConfig
from tilemesh.align.tasks import TASKS
from tilemesh.core.errors import UsageError
from tilemesh.data.cases import Case, read_cases
from tilemesh.data.chat import ASSISTANT, Template
from tilemesh.data.order import Order
from tilemesh.data.tokenizer import Tokenizer, encode_prompt
from tilemesh.data.tokenizer_files import DEFAULT
from tilemesh.serve.request import Sampling

Item = TypeVar("Item")
_HELD_OUT_SEED = 1 << 40
_ANSWER = "\ufdd2"
"""In place of an answer: no character, by Unicode's own word."""


class ServedText(NamedTuple):
    """Of a served model, what turns text into tokens and back: fields as `ServedModel` has them."""

    tokenizer: Tokenizer
    ends: frozenset[int]
    chat_template: str | None = None
    special_tokens: Mapping[str, str] | None = None


class Prompt(NamedTuple):
    """One that is to be answered."""

    case: Case
    text: str
    tokens: list[int]
    seed: int
    """Of the random numbers that its answers are drawn with."""


class PromptSource:
    """Prompts of a run."""

    def __init__(self, align: FeedbackConfig, seed: int, served: ServedText, context: int) -> None:
        self.align, self.seed, self.served, self.context = align, seed, served, context
        self.task = TASKS.get(align.task)
        cases = [] if align.prompts_file is None else read_cases(align.prompts_file)
        self.cases, self.kept = without_last(cases, min(align.held_out, len(cases) // 2), _asked)
        self._order = Order(len(self.cases), seed) if self.cases else None
        if self.task is not None and self._order is None:
            self.kept = [self.task.case(seed + _HELD_OUT_SEED, number) for number in range(align.held_out)]

    def at(self, position: int) -> Prompt:
        """The prompt at a position, counted over all that were taken."""
        if self._order is not None:
            return self._prompt(self.cases[self._order.at(position)], f"train {position}")
        assert self.task is not None
        return self._prompt(self.task.case(self.seed, position), f"train {position}")

    def held_out(self) -> list[Prompt]:
        """Those that are never trained on, always the same."""
        return [self._prompt(case, f"held out {number}") for number, case in enumerate(self.kept)]

    def check(self) -> None:
        """Refuse what some position would: any of a file's, the first ones of a built-in task."""
        for position in range(len(self.cases) or self.align.prompts):
            self.at(position)
        self.held_out()

    def fingerprint(self) -> str:
        read = (*self.cases, *self.kept) if self._order is not None else ()  # a task's own follow from the seed
        parts = [self.align.task, self.seed, [str(case) for case in read]]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def sampling(self, prompt: Prompt, answers: int) -> Sampling:
        """How a prompt is answered: log-probabilities are wanted as sampled, of the drawn token alone."""
        return Sampling(
            max_tokens=self.align.longest,
            temperature=self.align.temperature,
            seed=prompt.seed,
            n=answers,
            stop_tokens=self.stop_tokens,
            logprobs=0,
        )

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The token that ends an answer to a built-in task, where it is one: an answer then ends with it."""
        if self.task is None:
            return ()
        tokens = [int(token) for token in self.served.tokenizer.encode(self.task.stop.encode())]
        return tuple(tokens) if len(tokens) == 1 else ()

    def text_of(self, tokens: Sequence[int]) -> str:
        """An answer as a person reads it, without what ended it."""
        ends = {*self.stop_tokens, *self.served.ends}
        return self.served.tokenizer.decode(tokens[:-1] if tokens and tokens[-1] in ends else tokens)

    def _prompt(self, case: Case, place: str) -> Prompt:
        text, tokens = prompt_tokens(case, self.served)
        if len(tokens) + self.align.longest > self.context or not tokens:
            raise UsageError(
                f"a prompt of {len(tokens)} tokens and answers of up to {self.align.longest}: the model's context is "
                f"{self.context}, and a prompt has at least one token; set align.max_tokens lower or shorten prompts"
            )
        digest = hashlib.sha256(f"{self.seed} {place}".encode()).digest()
        return Prompt(case, text, tokens, int.from_bytes(digest[:6], "little"))


def _asked(case: Case) -> str:
    return str(case["messages"] if "messages" in case else case["prompt"])


def without_last(items: list[Item], count: int, key: Callable[[Item], Hashable]) -> tuple[list[Item], list[Item]]:
    """What is trained on, and the last ones, which are held out: with all of their key, where others are left."""
    rest, kept = items[: len(items) - count], items[len(items) - count :]
    keys = {key(item) for item in kept}
    return [item for item in rest if key(item) not in keys] or rest, kept


def prompt_tokens(case: Case, served: ServedText) -> tuple[str, list[int]]:
    """A case's prompt as text and tokens: as it is, or messages by the model's chat template."""
    if "messages" in case:
        text = _template(served).render(case["messages"], answer_follows=True)
        return text, encode_prompt(served.tokenizer, text)
    text = case["prompt"]
    if not isinstance(text, str):
        raise UsageError(f"a case's prompt is {text!r:.60}: expected text")
    return text, encode_prompt(served.tokenizer, text, special=True)


def answer_end(case: Case, served: ServedText) -> int:
    """The token that ends an answer: of messages, the one that the chat template writes behind it."""
    end = served.tokenizer.end
    if "messages" in case:
        answer = {"role": ASSISTANT, "content": _ANSWER}
        behind = _template(served).render([*case["messages"], answer], answer_follows=False).rpartition(_ANSWER)[2]
        written = (token for token in encode_prompt(served.tokenizer, behind) if token in served.ends)
        end = next(written, end)
    return end if end in served.ends else min(served.ends, default=end)


def _template(served: ServedText) -> Template:
    if served.chat_template is None:
        raise UsageError("a case has messages and this model has no chat template: give prompts as text")
    return Template({DEFAULT: served.chat_template}, served.special_tokens or {})


# Pairs ----------------------------------------------------------------------------------------------------------------

_SIDES = ("chosen", "rejected")


class Pair(NamedTuple):
    """Two sequences, and how long the prompt is that both begin with."""

    chosen: list[int]
    rejected: list[int]
    prompt: int


def read_pairs(path: Path | None, served: ServedText, context: int) -> list[Pair]:
    """Of a JSONL file with `prompt` (or `messages`), `chosen` and `rejected` in each line."""
    assert path is not None
    pairs = []
    for number, case in enumerate(read_cases(path), 1):
        if not all(isinstance(case.get(side), str) and case[side] for side in _SIDES):
            raise UsageError(f"{path}, pair {number}: expected texts `chosen` and `rejected` beside the prompt")
        pairs.append(pair := pair_of(case, served))
        if not pair.prompt:
            raise UsageError(f"{path}, pair {number} has an empty prompt: expected one of at least one token")
        longest = max(len(pair.chosen), len(pair.rejected))
        if longest > context:
            raise UsageError(f"{path}, pair {number} has {longest} tokens: the context is {context}; shorten it")
    return pairs


def pair_of(case: Case, served: ServedText) -> Pair:
    """Answers end with the token that ends one of the model."""
    _, prompt = prompt_tokens(case, served)
    end = answer_end(case, served)
    chosen, rejected = ([*prompt, *encode_prompt(served.tokenizer, case[side]), end] for side in _SIDES)
    return Pair(chosen, rejected, len(prompt))
