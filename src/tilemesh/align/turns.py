"""Answers to prompts, and conversations: after an answer a user's function, the environment, says what follows.

The one idea: a conversation is segments of tokens, drawn and given in turn. The engine goes on from all tokens so far,
whose pages it still has; only what it drew is trained. `FILE.py:FUNCTION(prompt, turns, case)` gets all texts after the
prompt and returns the next one, or none to end; where it fails, the conversation ends too, which is told.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from tilemesh.align.formulas.rollout import LENGTH, Rollout, Segment, pack
from tilemesh.align.prompts import Prompt, PromptSource
from tilemesh.core.errors import RunError, UsageError
from tilemesh.data.cases import Case
from tilemesh.data.tokenizer import encode_prompt
from tilemesh.launch.function import FunctionProcess
from tilemesh.serve.answers import Answer, Completion
from tilemesh.serve.request import Sampling
from tilemesh.serve.sampling import sampled_logprobs

ENVIRONMENT = "environment: "
"""What failures of that function begin with, among those of a batch."""


@dataclasses.dataclass
class DrawnTalk:
    """A prompt, and in turn what was drawn and what the environment said."""

    prompt: Prompt
    number: int
    """Among those that begin with this prompt."""
    segments: list[Segment]
    texts: list[str] = dataclasses.field(default_factory=list)
    finish: str = ""
    failure: str = ""
    """Why the environment could not say what follows."""

    @property
    def tokens(self) -> list[int]:
        return [token for segment in self.segments for token in segment.tokens]

    @property
    def item(self) -> tuple[str, str, Case]:
        """What is scored: the last answer; of several, the case has all texts as `turns`."""
        case = self.prompt.case if len(self.texts) == 1 else {**self.prompt.case, "turns": self.texts}
        return self.prompt.text, self.texts[-1], case

    def add(self, answer: Answer, text: str) -> None:
        self.segments.append(Segment(answer.tokens, np.minimum(sampled_logprobs(answer.logprobs), 0), answer.versions))
        self.texts.append(text)
        self.finish = str(answer.finish)


class AnswerTurns:
    """What is asked of an engine, turn by turn, in conversations of up to `align.turns` answers."""

    def __init__(self, prompts: PromptSource) -> None:
        self.prompts, self.align = prompts, prompts.align
        spec = self.align.environment
        self._environment = FunctionProcess(spec, self.align.deadline_s) if spec else None

    def begun(self, prompts: Sequence[Prompt], answers: int) -> list[DrawnTalk]:
        """So many for each prompt, in their order."""
        return [DrawnTalk(each, place, [Segment(each.tokens)]) for each in prompts for place in range(answers)]

    def asked(self, going: Sequence[DrawnTalk], answers: int, turn: int) -> list[tuple[list[int], Sampling]]:
        """Tokens and how they are answered; in the first turn so many have a prompt in common."""
        if turn == 0:
            return [(each.tokens, self.prompts.sampling(each.prompt, answers)) for each in going[::answers]]
        keyed = [each.prompt._replace(seed=_seed(each, turn)) for each in going]
        return [(each.tokens, self.prompts.sampling(key, 1)) for each, key in zip(going, keyed, strict=True)]

    def add(self, going: Sequence[DrawnTalk], answers: int, completions: Sequence[Completion]) -> None:
        """An answer to each. Refuses those to other prompts than were asked."""
        for place, completion in enumerate(completions):
            if list(completion.prompt_tokens) != going[place * answers].tokens:
                raise RunError(f"answer {place} is to another prompt than was asked: the order of completion counts")
            for each, answer in zip(going[place * answers :], completion.answers, strict=False):
                each.add(answer, self.prompts.text_of(answer.tokens))

    def heard(self, going: Sequence[DrawnTalk], turn: int) -> list[DrawnTalk]:
        """Those that the environment goes on with, and that have room for another answer."""
        if self._environment is None or turn >= self.align.turns:
            return []
        heard, going = [], [each for each in going if each.finish != LENGTH]
        calls = [(each.prompt.text, each.texts, each.prompt.case) for each in going]
        for each, called in zip(going, self._environment(calls), strict=True):
            each.failure = called.failure
            if called.value and not isinstance(called.value, str):
                each.failure = f"{called.value!r:.60}: expected text, or nothing to end"
            elif called.value:
                try:
                    given = encode_prompt(self.prompts.served.tokenizer, called.value)
                except UsageError:
                    each.failure = "what it said is not UTF-8 text"
                    continue
                if len(each.tokens) + len(given) + self.align.longest <= self.prompts.context:
                    each.segments.append(Segment(given))
                    each.texts.append(called.value)
                    heard.append(each)
        return heard

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()


def _seed(conversation: DrawnTalk, turn: int) -> int:
    words = f"{conversation.prompt.seed} {conversation.number} {turn}"
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:6], "little")


def rollout_of(conversations: Sequence[DrawnTalk], group: Sequence[int], temperature: float) -> Rollout:
    """As packed arrays, made of the engine's tokens."""
    return pack([each.segments for each in conversations], group, [each.finish for each in conversations], temperature)
