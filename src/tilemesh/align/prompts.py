"""Which prompt stands where, as tokens: a built-in task's, drawn by their number, or those of a file in a shuffled
order. A position is just the number of prompts taken so far, so a resumed run goes on with the next one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from tilemesh.align.config import FeedbackConfig
from tilemesh.align.tasks import TASKS
from tilemesh.core.errors import UsageError
from tilemesh.data.cases import Case, read_cases
from tilemesh.data.chat import ASSISTANT, Template
from tilemesh.data.order import Order
from tilemesh.data.tokenizer import Tokenizer, encode_prompt
from tilemesh.data.tokenizer_files import DEFAULT
from tilemesh.serve.load import ServedModel
from tilemesh.serve.request import Sampling

_HELD_OUT_SEED = 1 << 40
_ANSWER = "\ufdd2"
"""In place of an answer: no character, by Unicode's own word."""


class Prompt(NamedTuple):
    """One that is to be answered."""

    case: Case
    text: str
    tokens: list[int]
    seed: int
    """Of the random numbers that its answers are drawn with."""


class PromptSource:
    """Prompts of a run."""

    def __init__(self, align: FeedbackConfig, seed: int, served: ServedModel, context: int) -> None:
        self.align, self.seed, self.served, self.context = align, seed, served, context
        self.task = TASKS.get(align.task)
        self.cases = [] if align.prompts_file is None else read_cases(align.prompts_file)
        held_out = min(align.held_out, len(self.cases) // 2)
        self.kept = self.cases[len(self.cases) - held_out :] if self.cases else []
        self.cases = self.cases[: len(self.cases) - held_out]
        self._order = Order(len(self.cases), seed) if self.cases else None

    def at(self, position: int) -> Prompt:
        """The prompt at a position, counted over all that were taken."""
        if self._order is not None:
            return self._prompt(self.cases[self._order.at(position)], f"train {position}")
        assert self.task is not None
        return self._prompt(self.task.case(self.seed, position), f"train {position}")

    def held_out(self) -> list[Prompt]:
        """Those that are never trained on, always the same."""
        if self._order is not None:
            return [self._prompt(case, f"held out {number}") for number, case in enumerate(self.kept)]
        assert self.task is not None
        cases = [self.task.case(self.seed + _HELD_OUT_SEED, number) for number in range(self.align.held_out)]
        return [self._prompt(case, f"held out {number}") for number, case in enumerate(cases)]

    def fingerprint(self) -> str:
        parts = [self.align.task, self.seed, [str(case) for case in (*self.cases, *self.kept)]]
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


def prompt_tokens(case: Case, served: ServedModel) -> tuple[str, list[int]]:
    """A case's prompt as text and tokens: as it is, or messages by the model's chat template."""
    if "messages" in case:
        text = _template(served).render(case["messages"], answer_follows=True)
        return text, encode_prompt(served.tokenizer, text)
    text = str(case["prompt"])
    return text, encode_prompt(served.tokenizer, text, special=True)


def answer_end(case: Case, served: ServedModel) -> int:
    """The token that ends an answer: of messages, the one that the chat template writes behind it."""
    end = served.tokenizer.end
    if "messages" in case:
        answer = {"role": ASSISTANT, "content": _ANSWER}
        behind = _template(served).render([*case["messages"], answer], answer_follows=False).rpartition(_ANSWER)[2]
        written = (token for token in encode_prompt(served.tokenizer, behind) if token in served.ends)
        end = next(written, end)
    return end if end in served.ends else min(served.ends, default=end)


def _template(served: ServedModel) -> Template:
    if served.chat_template is None:
        raise UsageError("a case has messages and this model has no chat template: give prompts as text")
    return Template({DEFAULT: served.chat_template}, served.special_tokens or {})


def answer_tokens(text: str, tokenizer: Tokenizer, end: int) -> list[int]:
    """An answer that somebody else wrote, with the token that ends it."""
    return [*encode_prompt(tokenizer, text), end]
