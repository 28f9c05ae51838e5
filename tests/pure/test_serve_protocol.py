"""Bodies of OpenAI's interface: read strictly, and whatever is not served is refused by name."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from tilemesh.serve.protocol import (
    AskedCompletion,
    ChatMessage,
    RefusedError,
    known_fields,
    read_chat,
    read_completion,
)
from tilemesh.serve.request import Sampling


def test_defaults_are_those_that_are_documented() -> None:
    assert read_completion({"prompt": "a"}) == AskedCompletion(Sampling(max_tokens=16), prompts=("a",))
    given = {"max_tokens": 5, "temperature": 0.6}  # of a folder, where that was asked for; a body says more
    assert read_completion({"prompt": "a"}, given) == AskedCompletion(Sampling(**given), prompts=("a",), shortens=True)
    assert read_completion({"prompt": "a", "temperature": 1}, given).sampling == Sampling(max_tokens=5, temperature=1)
    asked = read_chat({"messages": [{"role": "user", "content": "a"}]})
    assert asked == AskedCompletion(Sampling(), messages=(ChatMessage("user", "a"),))


def test_every_field_arrives() -> None:
    body = {
        "model": "m", "prompt": [[1, 2], [3]], "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3,
        "min_p": 0.1, "n": 2, "seed": 7, "stop": ["a", "b"], "stream": True, "stream_options": {"include_usage": True},
        "logprobs": 2, "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1,
        "logit_bias": {"5": -1}, "echo": True, "stop_token_ids": [9], "ignore_eos": True, "priority": 3,
        "deadline_s": 2.5,
        "best_of": 1, "suffix": "", "response_format": {"type": "text"}, "regex": "a+", "service_tier": "default",
    }  # fmt: skip
    assert set(body) == set(known_fields(chat=False))
    sampling = Sampling(
        5,
        0.5,
        3,
        0.9,
        0.1,
        1.1,
        0.1,
        0.2,
        {5: -1},
        7,
        2,
        ("a", "b"),
        (9,),
        True,
        "a+",
        logprobs=2,
        prompt_logprobs=2,
        deadline_s=2.5,
    )
    expected = AskedCompletion(sampling, ((1, 2), (3,)), (), "m", stream=True, stream_usage=True, echo=True, priority=3)
    assert read_completion(body) == expected
    assert read_completion(dict.fromkeys(body) | {"prompt": "x"}) == read_completion({"prompt": "x"})


def test_a_chats_own_fields_arrive() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None}
    ]
    asked = read_chat(
        {"messages": messages, "max_completion_tokens": 4, "logprobs": True, "top_logprobs": 3, "stop": "x"}
    )
    assert asked == AskedCompletion(Sampling(4, stop=("x",), logprobs=3), messages=(ChatMessage("user", "ab"),))
    assert read_chat({"messages": messages, "logprobs": True}).sampling.logprobs == 0
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    assert read_chat({"messages": messages, **neutral}) == read_chat({"messages": messages})


def test_json_is_asked_for_as_openai_has_it() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    told = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "description": "y", "schema": schema}}
    for read, body in ((read_chat, CHAT), (read_completion, {"prompt": "a"})):
        assert read({**body, "response_format": told}).sampling.json_schema == schema
        assert read({**body, "response_format": {"type": "json_object"}}).sampling.json_schema == {"type": "object"}
        assert read({**body, "response_format": {"type": "text"}}) == read(body)


CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("chat", "body", "field", "words"),
    [
        (False, [], None, "expected a JSON object"),
        (False, {}, "prompt", "prompt is missing"),
        (True, {}, "messages", "messages is missing"),
        (False, {"prompt": []}, "prompt", "expected a text or a list of tokens"),
        (False, {"prompt": [1, "a"]}, "prompt", "expected a text or a list of tokens"),
        (False, {"prompt": ["a"] * 129}, "prompt", "at most 128"),
        (False, {"prompt": "a", "verbosity": "low"}, "verbosity", "'verbosity' is not served here: leave it out"),
        (False, {"prompt": "a", "top_pp": 1}, "top_pp", "'top_pp' is not served here: did you mean 'top_p'?"),
        (False, {"prompt": "a", "n": 1.5}, "n", "n is 1.5: expected a whole number"),
        (False, {"prompt": "a", "stop": 3}, "stop", "expected a text or a list of texts"),
        (False, {"prompt": "a", "stop": [""]}, "stop", "not empty"),
        (False, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "from tokens to numbers"),
        (False, {"prompt": "a", "logit_bias": {"1": True}}, "logit_bias", "from tokens to numbers"),
        (False, {"prompt": "a", "stream": 1}, "stream", "expected true or false"),
        (False, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
        (False, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options", "include_usage"),
        (False, {"prompt": "a", "priority": 1000}, "priority", "between -100 and 100"),
        (False, {"prompt": "a", "suffix": "b"}, "suffix", "only '' is served here"),
        (True, {**CHAT, "best_of": 2}, "best_of", "'best_of' is not served here: leave it out"),
        (True, {**CHAT, "service_tier": "flex"}, "service_tier", "only 'auto' or 'default' is served"),
        (False, {"prompt": "a", "best_of": True}, "best_of", "only 1 is served here"),
        (False, {"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        (True, {**CHAT, "tools": [{"type": "function"}]}, "tools", "tools[0] is"),
        (True, {**CHAT, "max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens", "the same meaning"),
        (True, {**CHAT, "top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
        (True, {**CHAT, "response_format": {"type": "json_object", "x": 1}}, "response_format", "expected {"),
        (True, {**CHAT, "response_format": {"type": "json_schema"}}, "response_format", "expected {"),
        (True, {**CHAT, "response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "schema"),
        (True, {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"x": 1}}}, "response_format", "'x'"),
        (True, {**CHAT, "response_format": {"type": "json_object"}, "regex": "a"}, "regex", "leave one"),
        (False, {"prompt": "a", "regex": 3}, "regex", "expected a regular expression"),
        (True, {"messages": [{"role": "user"}]}, "messages", "expected a role and a content"),
        (True, {"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "messages", "'tool_calls'"),
        (True, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "of text"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(chat: bool, body: Any, field: str | None, words: str) -> None:
    with pytest.raises(RefusedError) as refusal:
        (read_chat if chat else read_completion)(body)
    assert words in str(refusal.value)
    assert refusal.value.parameter == field
    assert len(str(refusal.value)) < 500


def anything(draw: random.Random, depth: int = 0) -> Any:
    """Any JSON."""
    kind = draw.randrange(8 if depth < 2 else 6)
    if kind == 6:
        return [anything(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 7:
        keys = ("type", "text", "include_usage", "role", "content", "1", "é")
        return {draw.choice(keys): anything(draw, depth + 1) for _ in range(draw.randrange(4))}
    numbers = (draw.randrange(-2, 30), draw.uniform(-2, 3), 2**70, 1e308)
    return (None, draw.random() < 0.5, draw.choice(numbers), draw.choice(("", "a", "none")), 1, 0.5)[kind]


def test_any_body_is_read_or_refused() -> None:
    draw, read, refused = random.Random(5), 0, 0
    for _ in range(5000):
        chat = draw.random() < 0.5
        body = {**(CHAT if chat else {"prompt": "a"})}
        for _ in range(draw.randrange(4)):
            body[draw.choice(known_fields(chat))] = anything(draw)
        try:
            asked = (read_chat if chat else read_completion)(json.loads(json.dumps(body)))
        except RefusedError:
            refused += 1
        else:
            read += 1
            assert asked.prompts or asked.messages
            assert math.isfinite(asked.sampling.temperature)
    assert min(read, refused) > 500


def test_harmless_fields_are_accepted_and_named() -> None:
    body = {"messages": [{"role": "user", "content": "a", "name": "anna"}], "user": "me", "store": True, "stream": True}
    asked = read_chat(body | {"metadata": {"a": "b"}, "stream_options": {"include_obfuscation": False}})
    expected = ("messages.name", "user", "store", "metadata", "stream_options.include_obfuscation")
    assert sorted(asked.ignored) == sorted(expected)
    assert asked == read_chat({"messages": [{"role": "user", "content": "a"}], "stream": True})
    said = {"role": "assistant", "content": "a", "annotations": [{"type": "url_citation"}]}
    asked = read_chat({"messages": [said], "service_tier": "auto", "prompt_cache_retention": "24h"})
    assert sorted(asked.ignored) == ["messages.annotations", "prompt_cache_retention", "service_tier"]
    schema = {"properties": {"a": {"format": "password"}, "format": {"format": "date"}, "c": {"format": "password"}}}
    told = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert read_chat({"messages": [said | {"annotations": []}], "response_format": told}).ignored == (
        "format: password",
    )


def test_a_prompt_is_scored_without_an_answer() -> None:
    asked = read_completion({"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0})
    assert (asked.scores, asked.sampling.max_tokens, asked.sampling.prompt_logprobs) == (True, 1, 1)
