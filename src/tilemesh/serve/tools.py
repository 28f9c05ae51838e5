"""Calls of tools: what a body offers, and what an answer says, in the forms that served families write. Plain values.

The one idea: an answer is text, read as it comes. What stands between a family's marks is a call, what stands between
<think> marks is reasoning, the rest is content; whatever does not prove to be a call of a tool that was offered is
content too, so nothing that the model said is lost. A call that must come (`required`, or one by name) has no marks:
the whole answer is its JSON, which a schema constrains. Where a template writes a name before each call's JSON, the
prompt has the first mark, and of one by name all that stands before its arguments.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import shown
from tilemesh.serve.constrain.schema import CALLS

MOST_TOOLS = 128
_MOST_CALLS = 8
"""In one answer that must call."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Marks around reasoning; the second are Mistral's."""
_CONSTANTS = ("const", "default", "enum", "examples")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


class ToolForm(NamedTuple):
    """How a family writes calls: between marks, each an object or all in a list. Empty marks: all of an answer."""

    name: str
    opens: str
    closes: str
    seen: str
    """What a chat template has that writes them so."""


OPENS_CALL, OPENS_ID, OPENS_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID = "call00000"  # of a call whose name is given: the prompt has it too
FORMS = (
    ToolForm("hermes", "<tool_call>", "</tool_call>", "<tool_call>"),
    ToolForm("mistral", OPENS_CALL, "", OPENS_CALL),
    ToolForm("llama", "", "", '"parameters"'),
)
"""Hermes and Qwen; Mistral; Llama 3, whose answer begins with { or <|python_tag|>."""
_PYTHON_TAG = "<|python_tag|>"
_NAME_BEFORE = re.compile(r"(?:\[TOOL_CALLS\]\s*)?([A-Za-z0-9_-]{1,64})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
"""Of a call whose arguments alone are JSON: Mistral's since its tokenizers of version 11."""
_ESCAPED = re.compile(r"\\.", re.DOTALL)


def form_of(template: str) -> ToolForm | None:
    """What this chat template's model writes; None: its template shows no tools."""
    if "tools" not in template:
        return None
    return next((form for form in FORMS if form.seen in template), None)


def marks_of_calls(template: str) -> tuple[str, ...]:
    """The marks behind a call's name where this chat template writes it before arguments, perhaps with an id between;
    none: calls are JSON."""
    seen = tuple(mark for mark in (OPENS_CALL, OPENS_ID, OPENS_ARGUMENTS) if mark in template)
    return seen[1:] if {OPENS_CALL, OPENS_ARGUMENTS} <= set(seen) else ()


@dataclass(frozen=True)
class ToolUse:
    """What a body says of tools."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """As they came, for the chat template."""
    choice: str = "auto"
    """auto, none, required, or named."""
    name: str = ""
    """Of the one that must be called."""
    parallel: bool = True
    marks: tuple[str, ...] = ()
    """As `marks_of_calls`."""

    @property
    def offered(self) -> list[Mapping[str, Any]]:
        """What the model is shown."""
        return [] if self.choice == "none" else list(self.tools)

    @property
    def must_call(self) -> bool:
        return self.choice in ("required", "named")

    @property
    def names(self) -> set[str]:
        return {tool["function"]["name"] for tool in self.offered}

    def check(self) -> None:
        if self.must_call and not self.tools:
            raise UsageError("tool_choice asks for a call and there are no tools: give some")
        if self.choice == "named" and self.name not in self.names:
            raise UsageError(f"tool_choice names {shown(self.name)}: expected one of {', '.join(sorted(self.names))}")
        if not self.must_call and any(tool["function"].get("strict") for tool in self.offered):
            raise UsageError(
                "tools has strict: true and tool_choice lets the model write freely: leave strict out, or set "
                "tool_choice to required or to a tool"
            )

    def schema(self) -> Mapping[str, Any]:
        """What the answer must be: the arguments of the named tool, or a list of calls. Where names come first that is
        no JSON as a whole, so `constrain.mask` writes its grammar."""
        own = {tool["function"]["name"]: tool["function"].get("parameters") or _NO_PARAMETERS for tool in self.tools}
        most = _MOST_CALLS if self.parallel else 1
        if self.choice == "named":
            named: Mapping[str, Any] = own[self.name]
            return named
        if self.marks:
            return {CALLS: {"tools": own, "most": most, "marks": [OPENS_CALL, *self.marks]}}
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{number}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for number, name in enumerate(own)
        ]
        kept = {str(number): _moved(schema, f"#/$defs/{number}") for number, schema in enumerate(own.values())}
        return {"$defs": kept, "type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": most}

    @property
    def begun(self) -> str:
        """What the prompt ends with: where names come first, of a call that must come."""
        if not (self.marks and self.must_call):
            return ""
        return OPENS_CALL + (self.name + _ID.join(self.marks)) * (self.choice == "named")


_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def _moved(schema: Any, to: str, named: bool = False) -> Any:
    """A schema whose references hold where it lies inside of another. `named`: schemas by name, not one."""
    if isinstance(schema, list):
        return [_moved(value, to) for value in schema]
    if not isinstance(schema, Mapping):
        return schema
    if isinstance(reference := schema.get("$ref"), str) and reference[:1] == "#":
        schema = {**schema, "$ref": to + reference[1:]}
    return {
        key: value if key in _CONSTANTS and not named else _moved(value, to, key in _NAMED and not named)
        for key, value in schema.items()
    }


def read_tool(value: Any, where: str) -> Mapping[str, Any]:
    """One entry of `tools`, or a refusal."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type") != "function" or set(value) > {"type", "function"}:
        raise UsageError(f'{where} is {shown(value)}: expected {{"type": "function", "function": {{"name": ...}}}}')
    if others := set(function) - {"name", "description", "parameters", "strict"}:
        raise UsageError(f"{where} has {shown(min(others))}, which is not served here: leave it out")
    if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
        raise UsageError(f"{where} is called {shown(function.get('name'))}: expected letters, digits, _ and -")
    if not isinstance(function.get("parameters"), dict | None):
        raise UsageError(f"{where}: parameters is {shown(function['parameters'])}: expected a JSON schema")
    if CALLS in (function.get("parameters") or {}):
        raise UsageError(f"{where}: parameters has '{CALLS}', which is not served here: leave it out")
    tool: Mapping[str, Any] = value
    return tool


def read_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """The calls of an assistant's message, their arguments as objects: what chat templates write."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        try:
            function, name = call["function"], call["function"]["name"]
            arguments = json.loads(function["arguments"] or "{}")
        except (KeyError, TypeError, ValueError, RecursionError):
            name, arguments = None, None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise UsageError(f"{where} is {shown(call)}: expected an id and a function with name and arguments as JSON")
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call.get("id", ""), "type": "function", "function": function})
    return calls


# ---- what an answer says ---------------------------------------------------------------------------------------


class AnswerDelta(NamedTuple):
    """What more of an answer is known: text of one kind, or a call that begins."""

    kind: str
    """content, reasoning, call (`text` is the tool's name) or arguments."""
    text: str
    call: int = 0
    """Which one, from 0."""


def delta_fields(delta: AnswerDelta) -> dict[str, Any]:
    """As OpenAI's chunks have it."""
    if delta.kind == "call":
        function = {"name": delta.text, "arguments": ""}
        call = {"index": delta.call, "id": uuid.uuid4().hex[:9], "type": "function", "function": function}
        return {"tool_calls": [call]}
    if delta.kind == "arguments":
        return {"tool_calls": [{"index": delta.call, "function": {"arguments": delta.text}}]}
    return {"content" if delta.kind == "content" else "reasoning_content": delta.text}


class AnswerReader:
    """Text in, deltas out. `thinks`: the marks around reasoning, if answers may have some; `thinking`: whether this one
    begins in it."""

    def __init__(
        self, use: ToolUse, form: ToolForm | None, thinks: tuple[str, str] | None = None, thinking: bool = False
    ) -> None:
        self._use, self._form = use, form if use.offered else None
        self.is_named = use.choice == "named"
        self._thinks, self._thought = thinks if thinks and not use.must_call else ("", "")
        self._state = "reasoning" if thinking and self._thinks else "content"
        self._text = ""
        self._begun = False  # whether there was content
        self._skips = False  # blanks that come next: behind reasoning and calls they are no content
        self._searched = self._quotes = 0  # of a call: where to look for its end, and the quotes before
        self.calls = 0

    def add(self, text: str, last: bool = False) -> Iterator[AnswerDelta]:
        self._text += text
        if self.is_named:
            yield from self._named()
        elif self._use.must_call:
            if last:
                yield from self._parsed(self._text, self._text)
        else:
            while (read := self._step(last)) is not None:
                yield from read
            if last and (self._text or self._state == "call"):
                text, self._text = self._text, ""
                opens = self._form.opens if self._form is not None else ""
                yield from self._parsed(text, opens + text) if self._state == "call" else self._flush(text)

    def _named(self) -> Iterator[AnswerDelta]:
        if not self.calls:
            yield from self._call(self._use.name, "")
        if self._text:
            yield AnswerDelta("arguments", self._text, self.calls - 1)
            self._text = ""

    def _step(self, last: bool) -> list[AnswerDelta] | None:
        """What is sure of the text so far; None: nothing more before more comes."""
        if self._state == "call":
            assert self._form is not None
            if (end := self._call_end(last)) < 0:
                return None
            self._searched = self._quotes = 0
            inside, after = self._text[:end], self._text[end + len(self._form.closes) :]
            whole = self._form.opens + inside + self._form.closes
            self._text, self._state = after, "content"
            known = self.calls
            made = list(self._parsed(inside, whole))
            self._skips = self.calls > known
            return made
        if self._skips:
            self._text = self._text.lstrip()
            self._skips = not self._text
        marks = self._marks()
        if self._state == "content" and not self._begun and self._form is not None and not self._form.opens:
            head = self._text.lstrip()
            if head.startswith(("{", _PYTHON_TAG)):
                self._state = "call"
                return []
            if not head or _PYTHON_TAG.startswith(head):
                return None
        places = [(at, mark) for mark in marks if (at := self._text.find(mark)) >= 0]
        if not self._begun:  # reasoning comes first: behind content its mark is content, however the text was cut
            places = [(at, mark) for at, mark in places if mark != self._thinks or not self._text[:at].strip()]
        if places:
            at, mark = min(places)
            before, self._text = self._text[:at], self._text[at + len(mark) :]
            made = list(self._flush(before.rstrip()))
            self._state = {self._thinks: "reasoning", self._thought: "content"}.get(mark, "call")
            self._skips = mark in (self._thinks, self._thought)
            return made
        sure = len(self._text) - max((_overlap(self._text, mark) for mark in marks), default=0)
        if marks:
            sure = len(self._text[:sure].rstrip())  # blanks before a mark are no content
        if last or sure <= 0:
            return None
        before, self._text = self._text[:sure], self._text[sure:]
        return list(self._flush(before))

    def _call_end(self, last: bool) -> int:
        """Where a call's closing mark stands: in a string of its JSON it is none, if that is JSON. -1: later."""
        closes = self._form.closes if self._form is not None else ""
        while closes and (end := self._text.find(closes, self._searched)) >= 0:
            self._quotes += _ESCAPED.sub("", self._text[self._searched : end]).count('"')
            self._searched = end + len(closes)
            if self._quotes % 2 == 0:
                return end if any(_json_values(self._text[:end].strip())) else self._text.find(closes)
        return self._text.find(closes) if closes and last else -1

    def _marks(self) -> list[str]:
        if self._state == "reasoning":
            return [self._thought]
        opens = "" if self._form is None else self._form.opens
        return [mark for mark in ("" if self._begun else self._thinks, opens) if mark]

    def _flush(self, text: str) -> Iterator[AnswerDelta]:
        if text:
            self._begun |= self._state != "reasoning" and bool(text.strip())
            yield AnswerDelta("reasoning" if self._state == "reasoning" else "content", text)

    def _parsed(self, inside: str, whole: str) -> Iterator[AnswerDelta]:
        """The calls of what stands between marks, or all of it as content."""
        self._text = "" if self._state == "call" and not (self._form and self._form.closes) else self._text
        calls = list(_json_values(inside.strip().removeprefix(_PYTHON_TAG)))
        calls = [call for value in calls for call in (value if isinstance(value, list) else [value])]
        read = [
            (call.get("name"), call.get("arguments", call.get("parameters")))
            for call in calls
            if isinstance(call, dict) and isinstance(call.get("name"), str)
        ]
        known = [
            (name, arguments) for name, arguments in read if name in self._use.names and isinstance(arguments, dict)
        ]
        if not known or len(known) < len(calls):
            yield AnswerDelta("content", whole)
            return
        for name, arguments in known if self._use.parallel else known[:1]:
            if self._use.parallel or not self.calls:
                yield from self._call(name, _written(arguments))

    def _call(self, name: str, arguments: str) -> Iterator[AnswerDelta]:
        self.calls += 1
        yield AnswerDelta("call", name, self.calls - 1)
        if arguments:
            yield AnswerDelta("arguments", arguments, self.calls - 1)


def _json_values(text: str) -> Iterator[Any]:
    """JSON values one after the other, with ; or blanks between them; nothing where one is not complete. One behind a
    tool's name is the arguments of its call."""
    decoder, at, values = json.JSONDecoder(parse_float=_finite, parse_constant=_refused), 0, []
    while at < len(text):
        if text[at] in "; \n\t\r":
            at += 1
            continue
        name = _NAME_BEFORE.match(text, at)
        try:
            value, at = decoder.raw_decode(text, name.end() if name else at)
        except (ValueError, RecursionError):
            return
        values.append({"name": name[1], "arguments": value} if name else value)
    yield from values


def _finite(text: str) -> float:
    """A number that is too large for a float, as the largest: Infinity is no JSON."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def _refused(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _written(arguments: Mapping[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    has_surrogates = any("\ud800" <= letter <= "\udfff" for letter in text)
    return json.dumps(arguments) if has_surrogates else text  # half of a pair is JSON as an escape alone


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of a text that may begin a mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def whole_message(reader: AnswerReader, text: str) -> dict[str, Any]:
    """A complete answer as an assistant's message."""
    kinds: dict[str, str] = {}
    calls: list[dict[str, Any]] = []
    for delta in reader.add(text, last=True):
        if delta.kind == "call":
            (call,) = delta_fields(delta)["tool_calls"]
            del call["index"]
            calls.append(call)
        elif delta.kind == "arguments":
            calls[delta.call]["function"]["arguments"] += delta.text
        else:
            kinds[delta.kind] = kinds.get(delta.kind, "") + delta.text
    content = kinds.get("content", None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if "reasoning" in kinds:
        message["reasoning_content"] = kinds["reasoning"]
    return {**message, "tool_calls": calls} if calls else message
