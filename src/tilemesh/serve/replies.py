"""Answers in the shapes that OpenAI's clients read: whole, or as chunks of a stream. Plain values, no server.

R: replies to one body have one id; each answer to each of its prompts is a choice, numbered through.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilemesh.serve.answers import Completion
from tilemesh.serve.request import FinishReason
from tilemesh.serve.sampling import TokenLogprobs
from tilemesh.serve.text import Spelling, TokenTexts
from tilemesh.serve.tools import AnswerReader

_TEXT_COLUMNS = (
    "tokens", "text_offset", "token_logprobs", "top_logprobs", "sampled_logprobs", "sampled_top_logprobs",
)  # fmt: skip


@dataclass(frozen=True)
class ReplyHead:
    """What all replies to one body have in common."""

    name: str
    created: int
    model: str
    chat: bool

    def __call__(self, choices: Sequence[Mapping[str, Any]], chunk: bool = False) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        fields = {"id": self.name, "object": kind, "created": self.created, "model": self.model}
        return {**fields, "choices": list(choices)}


def usage(prompt_tokens: int, found_tokens: int, completion_tokens: int) -> dict[str, Any]:
    total, details = prompt_tokens + completion_tokens, {"cached_tokens": found_tokens}
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
    return {**counts, "prompt_tokens_details": details}


def whole_choices(
    completions: Sequence[Completion], head: ReplyHead, spelling: Spelling | None, echoed: Sequence[str],
    continues: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """`spelling`: of tokens whose log-probabilities are wanted. `echoed`: of each prompt what comes before answers."""
    choices: list[dict[str, Any]] = []
    for completion, before in zip(completions, echoed, strict=True):
        for answer in completion.answers:
            choice: dict[str, Any] = {"index": len(choices), "finish_reason": answer.finish.value, "logprobs": None}
            choice["weight_versions"] = _version_runs(answer.versions)
            if head.chat:
                choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
            else:
                choice["text"] = before + answer.text
            if spelling is not None:
                texts = TokenTexts(spelling, len(before), not continues)
                choice["logprobs"] = (chat_logprobs if head.chat else text_logprobs)(answer.logprobs, texts)
                if completion.prompt_logprobs or before:
                    parts = echoed_logprobs(completion.prompt_tokens, completion.prompt_logprobs, before, spelling)
                    choice["logprobs"] = {name: parts[name] + values for name, values in choice["logprobs"].items()}
            choices.append(choice)
    return choices


def without_answers(completion: Completion) -> Completion:
    """What was asked for a prompt's log-probabilities alone (`max_tokens` of 0)."""
    none = [
        replace(answer, text="", tokens=(), logprobs=(), versions=(), finish=FinishReason.LENGTH)
        for answer in completion.answers
    ]
    return replace(completion, answers=tuple(none))


def chunk_choice(
    head: ReplyHead,
    index: int,
    text: str,
    finish: str | None,
    logprobs: dict[str, Any] | None,
    versions: Sequence[int] = (),
    first: bool = False,
) -> dict[str, Any]:
    """A piece of one choice of a stream."""
    if head.chat:
        delta = {**({"role": "assistant"} if first else {}), **({"content": text} if text or first else {})}
        return delta_choice(index, delta, finish, logprobs, versions)
    return {**_chunk_fields(index, finish, logprobs, versions), "text": text}


def delta_choice(
    index: int, delta: Mapping[str, Any], finish: str | None, logprobs: dict[str, Any] | None, versions: Sequence[int]
) -> dict[str, Any]:
    """A piece of one choice of a chat's stream."""
    return {**_chunk_fields(index, finish, logprobs, versions), "delta": delta}


def _chunk_fields(
    index: int, finish: str | None, logprobs: dict[str, Any] | None, versions: Sequence[int]
) -> dict[str, Any]:
    fields = {"index": index, "finish_reason": finish, "logprobs": logprobs}
    return {**fields, "weight_versions": _version_runs(versions)}


def finish_word(finish: str | None, reader: AnswerReader) -> str | None:
    """Why an answer ended, as OpenAI's clients hear it: of a call that was named, `stop`."""
    return "tool_calls" if finish == FinishReason.STOP.value and reader.calls and not reader.is_named else finish


def _version_runs(versions: Sequence[int]) -> list[list[int]]:
    """Of tokens one after the other: [the weights' version, how many tokens they made]."""
    return [[version, len(list(run))] for version, run in itertools.groupby(versions)]


def text_logprobs(
    tokens: Sequence[TokenLogprobs], texts: TokenTexts, before: Sequence[int] = ()
) -> dict[str, list[Any]]:
    """As completions have them, and as sampled. `before`: tokens of which nothing is known, the first of a prompt that
    is echoed."""
    columns: dict[str, list[Any]] = {name: [] for name in _TEXT_COLUMNS}
    for token, entry in (*((token, None) for token in before), *((entry.token, entry) for entry in tokens)):
        values: tuple[Any, ...] = (None,) * 4
        if entry is not None:
            values = (entry.logprob, _by_text(entry.top, texts), entry.sampled, _by_text(entry.sampled_top, texts))
        for name, value in zip(_TEXT_COLUMNS, (texts.text(token), texts.add(token), *values), strict=True):
            columns[name].append(value)
    return columns


def echoed_logprobs(
    prompt: Sequence[int], known: Sequence[TokenLogprobs], text: str, spelling: Spelling
) -> dict[str, list[Any]]:
    """Of a prompt's tokens. Those that its text has not, such as a beginning, take no room in it."""
    spelt = b"".join(spelling(token, place == 0) for place, token in enumerate(prompt)).decode(errors="replace")
    return text_logprobs(known, TokenTexts(spelling, len(text) - len(spelt)), prompt[:1])


def _by_text(top: Sequence[tuple[int, float]], texts: TokenTexts) -> dict[str, float]:
    """Of tokens with one text, such as parts of a character, the likeliest: it comes first."""
    found: dict[str, float] = {}
    for token, value in top:
        found.setdefault(texts.text(token), value)
    return found


def chat_logprobs(tokens: Sequence[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """As chat completions have them, and as sampled."""
    content = []
    for entry in tokens:
        content.append(
            {
                **_shown(entry.token, entry.logprob, texts),
                "top_logprobs": [_shown(token, logprob, texts) for token, logprob in entry.top],
                "sampled_logprob": entry.sampled,
                "sampled_top_logprobs": [_shown(token, logprob, texts) for token, logprob in entry.sampled_top],
            }
        )
        texts.add(entry.token)
    return {"content": content, "refusal": None}


def _shown(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": logprob, "bytes": list(texts.spell(token))}


def failure(message: str, kind: str, parameter: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    readable = message.encode("utf-8", "replace").decode()  # half a surrogate pair, as JSON may spell it, is no text
    return {"error": {"message": readable, "type": kind, "param": parameter, "code": code}}
