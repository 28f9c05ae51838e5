"""What OpenAI's completions and chat completions ask for, read strictly: a body becomes an `Asked` or one refusal.

The one idea: every field that a body may have stands in one table with the function that reads it. A field that is not
there, or one whose value asks for something that is not served, is refused by name; nothing is ignored. null counts as
not given, as in OpenAI's own clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tilemesh.core.errors import UsageError, nearest
from tilemesh.core.ranges import Range, shown
from tilemesh.serve.constrain.schema import CALLS, unchecked_formats
from tilemesh.serve.request import Sampling
from tilemesh.serve.tools import MOST_TOOLS, ToolUse, read_calls, read_tool

COMPLETION_TOKENS = 16
"""max_tokens of a completion that does not say, as OpenAI has it; a chat completion then ends with the context."""
_MOST_PROMPTS, _MOST_MESSAGES = 128, 8192
_PRIORITY = Range(-100, 100)


class RefusedError(UsageError):
    """A body that is not served; `parameter` is the field at fault, `code` OpenAI's word for it."""

    def __init__(self, parameter: str | None, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter, self.status, self.code = parameter, status, code


@dataclass(frozen=True)
class ChatMessage:
    role: str
    content: str | None
    more: Mapping[str, Any] = field(default_factory=dict)
    """Calls of tools, or which of them a message answers, as chat templates read them."""


@dataclass(frozen=True)
class AskedCompletion:
    """A body, read. Either `prompts` or `messages` is there."""

    sampling: Sampling
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    model: str | None = None
    stream: bool = False
    stream_usage: bool = False
    echo: bool = False
    priority: int = 0
    tools: ToolUse = field(default_factory=ToolUse)
    scores: bool = False
    """Whether nothing is to be written: a prompt's own log-probabilities are asked for."""
    shortens: bool = False
    """Whether max_tokens is a default of the server's, for which there need not be room."""
    ignored: tuple[str, ...] = field(default=(), compare=False)
    """Fields that are accepted and change no answer."""


@dataclass
class _BodyRead:
    """What the fields of a body said so far."""

    sampling: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)

    def ignore(self, name: str) -> None:
        self.asked["ignored"] = (*self.asked.get("ignored", ()), name)


def read_completion(body: object, defaults: Mapping[str, Any] = MappingProxyType({})) -> AskedCompletion:
    """A body of /v1/completions. `defaults`: fields of `Sampling` for bodies that do not say."""
    body_read = _read(body, _COMPLETION, defaults)
    if "prompts" not in body_read.asked:
        raise RefusedError("prompt", "prompt is missing: expected a text or a list of tokens, or a list of either")
    body_read.sampling.setdefault("max_tokens", COMPLETION_TOKENS)
    if body_read.sampling["max_tokens"] == 0 and type(body_read.sampling["max_tokens"]) is int:
        if not body_read.asked.get("echo") or body_read.asked.get("stream"):
            raise RefusedError("max_tokens", "max_tokens is 0: expected 1 or more, or echo without stream beside it")
        body_read.sampling["max_tokens"], body_read.asked["scores"] = 1, True  # the one is thrown away
    if body_read.asked.get("echo") and body_read.sampling.get("logprobs") is not None:
        body_read.sampling["prompt_logprobs"] = body_read.sampling["logprobs"]
    return _made(body_read)


def read_chat(
    body: object, defaults: Mapping[str, Any] = MappingProxyType({}), marks: tuple[str, ...] = ()
) -> AskedCompletion:
    """A body of /v1/chat/completions. `marks`: as in `ToolUse`."""
    body_read = _read(body, _CHAT, defaults)
    if "messages" not in body_read.asked:
        raise RefusedError("messages", "messages is missing: expected a list of messages with role and content")
    wanted, top = body_read.asked.pop("logprobs", False), body_read.sampling.pop("logprobs", None)
    if top is not None and not wanted:
        raise RefusedError("top_logprobs", "top_logprobs is given and logprobs is not true: set logprobs to true")
    body_read.sampling["logprobs"] = (top or 0) if wanted else None
    fields = {key: body_read.asked.pop(key) for key in _TOOL_FIELDS if key in body_read.asked}
    use = ToolUse(**fields, marks=marks)
    try:
        use.check()
    except UsageError as error:
        raise RefusedError("tools" if "strict" in str(error) else "tool_choice", str(error)) from None
    if use.must_call:
        if {"json_schema", "regex"} & body_read.sampling.keys():
            raise RefusedError("tool_choice", "tool_choice asks for a call beside response_format: leave one out")
        body_read.sampling["json_schema"] = use.schema()
    body_read.asked["tools"] = use if use.tools else ToolUse()
    return _made(body_read)


_TOOL_FIELDS = ("tools", "choice", "name", "parallel")


_HARMLESS = frozenset(["metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "store", "user"])
"""Fields of OpenAI's that name or file a request and change no answer."""
_NOT_SERVED = frozenset(
    ["audio", "best_of", "function_call", "functions", "modalities", "prediction", "reasoning_effort", "suffix",
     "verbosity", "web_search_options"]
)  # fmt: skip
"""Fields of OpenAI's that are no slip of the pen for one that is served."""


# ---- reading values --------------------------------------------------------------------------------------------


def _read(
    body: object, fields: Mapping[str, Callable[[str, Any, _BodyRead], None]], defaults: Mapping[str, Any]
) -> _BodyRead:
    if not isinstance(body, dict):
        raise RefusedError(None, f"the body is {shown(body)}: expected a JSON object")
    reading = _BodyRead()
    for name, value in body.items():
        if value is None:
            continue
        if name in _HARMLESS:
            reading.ignore(name)
            continue
        if name not in fields:
            close = None if name in _NOT_SERVED else nearest(name, fields)
            hint = f"did you mean '{close}'?" if close else "leave it out"
            raise RefusedError(name[:200], f"{shown(name)} is not served here: {hint}")
        fields[name](name, value, reading)
    reading.asked["shortens"] = "max_tokens" in defaults and "max_tokens" not in reading.sampling
    reading.sampling = {**defaults, **reading.sampling}
    return reading


def _made(reading: _BodyRead) -> AskedCompletion:
    if reading.asked.get("stream_usage") and not reading.asked.get("stream"):
        raise RefusedError("stream_options", "stream_options is given and stream is not true: set stream to true")
    for form in unchecked_formats(reading.sampling.get("json_schema")):
        reading.ignore(f"format: {form}")
    try:
        sampling = Sampling(**reading.sampling)
    except RefusedError:
        raise
    except UsageError as error:
        raise RefusedError(str(error).split(" ", 1)[0], str(error)) from None
    return AskedCompletion(sampling, **reading.asked)


def _sampled(key: str) -> Callable[[str, Any, _BodyRead], None]:
    """A field whose value goes to `Sampling` as it is, and is checked there."""

    def read(name: str, value: Any, reading: _BodyRead) -> None:
        if key in reading.sampling:
            raise RefusedError(name, f"{name} is given beside another field of the same meaning: leave one out")
        reading.sampling[key] = value

    return read


def _flag(key: str, into: str = "asked") -> Callable[[str, Any, _BodyRead], None]:
    def read(name: str, value: Any, reading: _BodyRead) -> None:
        if not isinstance(value, bool):
            raise RefusedError(name, f"{name} is {shown(value)}: expected true or false")
        getattr(reading, into)[key] = value

    return read


def _text(name: str, value: Any, reading: _BodyRead) -> None:
    if not isinstance(value, str):
        raise RefusedError(name, f"{name} is {shown(value)}: expected text")
    reading.asked[name] = value


def _prompt(name: str, value: Any, reading: _BodyRead) -> None:
    expected = "expected a text or a list of tokens, or a list of either"
    if _is_prompt(value):
        prompts = [value]
    elif isinstance(value, list) and len(value) > _MOST_PROMPTS:  # before each of them is looked at
        raise RefusedError(name, f"{name} has {len(value)} prompts: expected at most {_MOST_PROMPTS}, or one of tokens")
    elif isinstance(value, list) and value and all(_is_prompt(prompt) for prompt in value):
        prompts = value
    else:
        raise RefusedError(name, f"{name} is {shown(value)}: {expected}")
    reading.asked["prompts"] = tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts)


def read_prompts(value: Any) -> Sequence[str | tuple[int, ...]]:
    """What is to be embedded: a prompt as a completion's, or a list of them."""
    reading = _BodyRead()
    _prompt("input", value, reading)
    prompts: Sequence[str | tuple[int, ...]] = reading.asked["prompts"]
    return prompts


def _is_prompt(value: object) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, list) and set(map(type, value)) == {int}


def _messages(name: str, value: Any, reading: _BodyRead) -> None:
    if not isinstance(value, list) or not value:
        raise RefusedError(name, f"messages is {shown(value)}: expected a list of messages with role and content")
    if len(value) > _MOST_MESSAGES:
        raise RefusedError(name, f"messages has {len(value):,} messages: expected at most {_MOST_MESSAGES:,}")
    reading.asked["messages"] = tuple(_message(index, message) for index, message in enumerate(value))
    if any(message.get("name") is not None and message.get("role") != "tool" for message in value):
        reading.ignore("messages.name")
    if any(message.get("annotations") for message in value):
        reading.ignore("messages.annotations")


def _message(index: int, value: Any) -> ChatMessage:
    where = f"messages[{index}]"
    if not isinstance(value, dict):
        raise RefusedError("messages", f"{where} is {shown(value)}: expected an object with role and content")
    role, content = value.get("role"), value.get("content")
    served = ("role", "content", "name", *_ROLE_FIELDS.get(role if isinstance(role, str) else "", ()))
    others = [key for key, given in value.items() if key not in served and given is not None]
    if others:
        raise RefusedError("messages", f"{where} has {shown(others[0])}, which is not served here: leave it out")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]
    more: dict[str, Any] = {}
    if value.get("tool_calls"):
        try:
            more["tool_calls"] = read_calls(value["tool_calls"], f"{where}.tool_calls")
        except UsageError as error:
            raise RefusedError("messages", str(error)) from None
    if isinstance(value.get("tool_call_id"), str):
        more["tool_call_id"] = value["tool_call_id"]
    if isinstance(value.get("name"), str) and role == "tool":
        more["name"] = value["name"]
    if not isinstance(role, str) or not (isinstance(content, str) or (value.get("content") is None and more)):
        raise RefusedError("messages", f"{where} is {shown(value)}: expected a role and a content of text")
    return ChatMessage(role, content, more)


_ROLE_FIELDS = {"assistant": ("tool_calls", "refusal", "reasoning_content", "annotations"), "tool": ("tool_call_id",)}


def _tools(name: str, value: Any, reading: _BodyRead) -> None:
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise RefusedError(name, f"tools is {shown(value)}: expected a list of at most {MOST_TOOLS} tools")
    try:
        tools = tuple(read_tool(tool, f"tools[{index}]") for index, tool in enumerate(value))
    except UsageError as error:
        raise RefusedError(name, str(error)) from None
    if len({tool["function"]["name"] for tool in tools}) < len(tools):
        raise RefusedError(name, "tools has a name twice: give each a name of its own")
    reading.asked["tools"] = tools


def _tool_choice(name: str, value: Any, reading: _BodyRead) -> None:
    if value in ("auto", "none", "required"):
        reading.asked["choice"] = value
        return
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedError(
            name, f"tool_choice is {shown(value)}: expected auto, none, required or one function by name"
        )
    reading.asked.update(choice="named", name=function["name"])


def _stop(name: str, value: Any, reading: _BodyRead) -> None:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RefusedError(name, f"stop is {shown(value)}: expected a text or a list of texts")
    reading.sampling["stop"] = tuple(texts)


def _token_list(name: str, value: Any, reading: _BodyRead) -> None:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise RefusedError(name, f"{name} is {shown(value)}: expected a list of tokens")
    reading.sampling["stop_tokens"] = tuple(value)


def _bias(name: str, value: Any, reading: _BodyRead) -> None:
    expected = "expected an object from tokens to numbers"
    if not isinstance(value, dict):
        raise RefusedError(name, f"logit_bias is {shown(value)}: {expected}")
    made = {}
    for token, bias in value.items():
        if not token.isdecimal() or len(token) > 12 or type(bias) not in (int, float):
            raise RefusedError(name, f"logit_bias has {shown(token)}: {shown(bias)}: {expected}")
        made[int(token)] = bias
    reading.sampling["logit_bias"] = made


def _stream_options(name: str, value: Any, reading: _BodyRead) -> None:
    known = isinstance(value, dict) and set(value) <= {"include_usage", "include_obfuscation"}
    if not known or not all(isinstance(given, bool) for given in value.values()):
        raise RefusedError(name, f'stream_options is {shown(value)}: expected {{"include_usage": true}}')
    if "include_obfuscation" in value:
        reading.ignore("stream_options.include_obfuscation")
    reading.asked["stream_usage"] = value.get("include_usage", False)


def _response_format(name: str, value: Any, reading: _BodyRead) -> None:
    """OpenAI's way to ask for JSON; of text nothing is asked."""
    kind = value.get("type") if isinstance(value, dict) else None
    told = (
        {key: given for key, given in value.items() if key != "type" and given is not None} if kind is not None else {}
    )
    if kind == "json_schema" and set(told) == {"json_schema"} and isinstance(told["json_schema"], dict):
        described = told["json_schema"]
        others = set(described) - {"name", "description", "schema", "strict"}
        if others:
            raise RefusedError(name, f"response_format has {shown(min(others))}, which is not served: leave it out")
        if described.get("schema") is None:
            raise RefusedError(name, "response_format has no json_schema.schema: expected a JSON schema")
        if isinstance(described["schema"], dict) and CALLS in described["schema"]:
            raise RefusedError(name, f"response_format has '{CALLS}', which is not served: leave it out")
        reading.sampling["json_schema"] = described["schema"]
    elif kind == "json_object" and not told:
        reading.sampling["json_schema"] = {"type": "object"}
    elif kind != "text" or told:
        expected = '{"type": "json_schema", "json_schema": {"schema": ...}}, json_object or text'
        raise RefusedError(name, f"response_format is {shown(value)}: expected {expected}")


def _priority(name: str, value: Any, reading: _BodyRead) -> None:
    try:
        _PRIORITY.check(name, value, whole=True)
    except UsageError as error:
        raise RefusedError(name, str(error)) from None
    reading.asked["priority"] = value


def _only(*accepted: object) -> Callable[[str, Any, _BodyRead], None]:
    """A field of which only the values that change nothing are served."""

    def read(name: str, value: Any, reading: _BodyRead) -> None:
        if not any(value == known and type(value) is type(known) for known in accepted):
            served = " or ".join(shown(known) for known in accepted) or "nothing"
            raise RefusedError(name, f"{name} is {shown(value)}: only {served} is served here; leave it out")

    return read


def _service_tier(name: str, value: Any, reading: _BodyRead) -> None:
    _only("auto", "default")(name, value, reading)
    reading.ignore(name)


_COMMON: dict[str, Callable[[str, Any, _BodyRead], None]] = {
    "model": _text, "stream": _flag("stream"), "stream_options": _stream_options, "stop": _stop,
    "temperature": _sampled("temperature"), "top_p": _sampled("top_p"), "top_k": _sampled("top_k"),
    "min_p": _sampled("min_p"), "n": _sampled("n"), "seed": _sampled("seed"), "max_tokens": _sampled("max_tokens"),
    "presence_penalty": _sampled("presence_penalty"), "frequency_penalty": _sampled("frequency_penalty"),
    "repetition_penalty": _sampled("repetition_penalty"), "logit_bias": _bias, "stop_token_ids": _token_list,
    "ignore_eos": _flag("ignore_eos", "sampling"), "priority": _priority,
    "deadline_s": _sampled("deadline_s"),
    "response_format": _response_format, "regex": _sampled("regex"), "service_tier": _service_tier,
}  # fmt: skip
_COMPLETION = {
    **_COMMON, "prompt": _prompt, "echo": _flag("echo"), "logprobs": _sampled("logprobs"), "best_of": _only(1),
    "suffix": _only(""),
}  # fmt: skip
_CHAT = {
    **_COMMON, "messages": _messages, "max_completion_tokens": _sampled("max_tokens"), "logprobs": _flag("logprobs"),
    "top_logprobs": _sampled("logprobs"), "tools": _tools, "tool_choice": _tool_choice,
    "parallel_tool_calls": _flag("parallel"), "modalities": _only(["text"]),
}  # fmt: skip


def known_fields(chat: bool) -> Sequence[str]:
    """Every field that a body may have."""
    return tuple(_CHAT if chat else _COMPLETION)
