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
from tilemesh.serve.text import Decoder
from tilemesh.serve.tools import AnswerReader


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
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": found_tokens},
    }


def whole_choices(
    completions: Sequence[Completion], head: ReplyHead, decoder: Decoder, logprobs: bool, echo: bool
) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = []
    for completion in completions:
        before = decoder.decode(completion.prompt_tokens) if echo else ""
        for answer in completion.answers:
            tokens = answer.logprobs
            choice: dict[str, Any] = {"index": len(choices), "finish_reason": answer.finish.value, "logprobs": None}
            choice["weight_versions"] = _version_runs(answer.versions)
            if head.chat:
                choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
                choice["logprobs"] = chat_logprobs(tokens, decoder) if logprobs else None
            else:
                choice["text"] = before + answer.text
                if logprobs:
                    prompt = completion.prompt_tokens[:1] if echo else ()
                    shown = (*completion.prompt_logprobs, *tokens) if echo else tokens
                    choice["logprobs"] = text_logprobs(shown, decoder, prompt)
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
    """Why an answer ended, as OpenAI's clients hear it."""
    return "tool_calls" if finish == FinishReason.STOP.value and reader.calls else finish


def _version_runs(versions: Sequence[int]) -> list[list[int]]:
    """Of tokens one after the other: [the weights' version, how many tokens they made]."""
    return [[version, len(list(run))] for version, run in itertools.groupby(versions)]


def text_logprobs(
    tokens: Sequence[TokenLogprobs], decoder: Decoder, before: Sequence[int] = (), offset: int = 0
) -> dict[str, Any]:
    """As completions have them, and as sampled. `before`: tokens of which nothing is known, the first of a prompt that
    is echoed."""
    texts = [decoder.decode([token]) for token in (*before, *(entry.token for entry in tokens))]
    unknown = [None] * len(before)
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [*unknown, *(entry.logprob for entry in tokens)],
        "top_logprobs": [
            *unknown,
            *({decoder.decode([token]): value for token, value in entry.top} for entry in tokens),
        ],
        "text_offset": offsets,
        "sampled_logprobs": [*unknown, *(entry.sampled for entry in tokens)],
        "sampled_top_logprobs": [
            *unknown,
            *({decoder.decode([token]): value for token, value in entry.sampled_top} for entry in tokens),
        ],
    }


def chat_logprobs(tokens: Sequence[TokenLogprobs], decoder: Decoder) -> dict[str, Any]:
    """As chat completions have them, and as sampled."""
    return {
        "content": [
            {
                **_shown(entry.token, entry.logprob, decoder),
                "top_logprobs": [_shown(token, logprob, decoder) for token, logprob in entry.top],
                "sampled_logprob": entry.sampled,
                "sampled_top_logprobs": [_shown(token, logprob, decoder) for token, logprob in entry.sampled_top],
            }
            for entry in tokens
        ],
        "refusal": None,
    }


def _shown(token: int, logprob: float, decoder: Decoder) -> dict[str, Any]:
    text = decoder.decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def failure(message: str, kind: str, parameter: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    readable = message.encode("utf-8", "replace").decode()  # half a surrogate pair, as JSON may spell it, is no text
    return {"error": {"message": readable, "type": kind, "param": parameter, "code": code}}
