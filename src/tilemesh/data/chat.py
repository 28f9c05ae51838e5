"""Conversations as text, by a chat template, and which of that text are answers.

A chat template is a jinja2 program that comes with a tokenizer; it is run in a sandbox. A conversation is written out
once, as transformers does it. Where a template marks its answers (`{% generation %}`) these count; else what it writes
for the messages before an answer, up to where an answer begins, must be the beginning of the whole text, and the answer
is what follows, up to the token that ends it.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.ranges import shown
from tilemesh.data.tokenizer_files import DEFAULT, TOOL_USE, read_beside

PLAIN_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""For a tokenizer that comes without one, bytes for instance."""
ASSISTANT = "assistant"
_ROLE_NAMES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT}
"""Of the older form with `from` and `value`."""


_OPENS, _CLOSES = "\ufdd0", "\ufdd1"
"""Around an answer that a template marks, until the text is cut there: no characters, by Unicode's own word."""


class Conversation(NamedTuple):
    """Messages, and the tools that the assistant may call."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


class AnswerPlace(NamedTuple):
    """Where in a conversation's text an answer stands."""

    begin: int
    end: int
    content_end: int | None
    """From where on the first special token ends it; None: its words were rewritten, and the last one does."""
    is_marked: bool = False
    """By the template, which knows where it ends."""
    needs_end: bool = False
    """Whether only a token that ends it tells it from what follows."""


class Template:
    """A chat template, or several by name. `special_tokens`: of the tokenizer's configuration (`bos_token`)."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        try:
            from jinja2 import TemplateError
        except ImportError:
            raise RunError("chat templates need the package jinja2: pip install 'tilemesh[hf]'") from None
        if DEFAULT not in sources:
            names = ", ".join(sources)
            raise UsageError(f"this model has chat templates for {names} and none called {DEFAULT}: add that one")
        self._wrong = TemplateError
        self._special, self._sources = dict(special_tokens), dict(sources)
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except TemplateError as error:
            raise UsageError(f"the chat template of this model cannot be read: {error}") from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None = None, *, answer_follows: bool
    ) -> str:
        """The text of messages, special tokens included; up to where an answer begins, if one follows."""
        return self._marked(messages, tools, answer_follows).replace(_OPENS, "").replace(_CLOSES, "")

    def write(self, conversation: Conversation) -> tuple[str, list[AnswerPlace]]:
        """A conversation's text, and where its answers are."""
        messages, tools = conversation
        self._check_tools(conversation)
        marked = self._marked(messages, tools, False)
        text = marked.replace(_OPENS, "").replace(_CLOSES, "")
        if marked != text:
            return text, _marked_answers(marked)
        numbers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        begins = []
        for number in numbers:
            before = self.render(messages[:number], tools, answer_follows=True)
            if not text.startswith(before):
                raise UsageError(
                    f"this chat template writes the messages before answer {number} differently once the answer is "
                    "there, so that the answer cannot be told from them: use another template, or data.chat=false"
                )
            begins.append(len(before))
        limits = [*begins[1:], len(text)]
        return text, [
            self._answer(text, conversation, number, begin, limit)
            for number, begin, limit in zip(numbers, begins, limits, strict=True)
        ]

    def _answer(self, text: str, conversation: Conversation, number: int, begin: int, limit: int) -> AnswerPlace:
        messages, tools = conversation
        after = self.render(messages[: number + 1], tools, answer_follows=False)
        if begin <= len(after) and text.startswith(after):
            return AnswerPlace(begin, len(after), self._content_end(after, begin, messages[: number + 1], tools))
        # A template may write an answer otherwise as the last message, with a token behind it for instance.
        content = messages[number]["content"] or ""
        for words in (content, content.strip()):
            if words and text.startswith(words, begin) and not messages[number].get("tool_calls"):
                return AnswerPlace(begin, limit, begin + len(words), needs_end=True)
        raise UsageError(
            f"this chat template writes answer {number} differently once more messages follow, so that it cannot be "
            "told where it ends: use another template, or data.chat=false"
        )

    def _content_end(
        self, text: str, begin: int, messages: Sequence[dict[str, Any]], tools: list[Any] | None
    ) -> int | None:
        """Where the words of the answer that ends this text end; many templates strip them. None: they were rewritten.

        Told by a mark behind them: the same words may stand before the answer, or in the token that ends it.
        """
        *before, answer = messages
        if answer.get("tool_calls"):
            return None
        for words in (answer["content"], answer["content"].strip()):
            marked = self._marked([*before, {**answer, "content": words + _CLOSES}], tools, False)
            up_to_end, _, _ = marked.rpartition(_CLOSES)
            if marked.replace(_CLOSES, "") == text:
                return len(up_to_end.replace(_CLOSES, ""))
        return None if answer["content"] else begin

    def _check_tools(self, conversation: Conversation) -> None:
        """Refuse what a template would drop without a word."""
        name = self._name(conversation.tools)
        calls = [message for message in conversation.messages if message.get("tool_calls")]
        for key, values in (("tools", conversation.tools), ("tool_calls", calls)):
            if values and key not in self._sources[name]:
                raise UsageError(f"this chat template does not write {key}, which are there: use another template")

    def _name(self, tools: list[Any] | None) -> str:
        return TOOL_USE if tools is not None and TOOL_USE in self._sources else DEFAULT

    def _marked(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, answer_follows: bool) -> str:
        try:
            text: str = self._templates[self._name(tools)].render(
                messages=list(messages), tools=tools, documents=None, add_generation_prompt=answer_follows,
                **self._special,
            )  # fmt: skip
        except (self._wrong, TypeError, ValueError, ArithmeticError, LookupError) as error:
            # Templates refuse, for one, a role that they do not know; some only by failing.
            raise UsageError(f"messages do not fit this model's chat template: {error}") from None
        return text


def _environment() -> Any:
    """What templates of Hugging Face folders expect: blocks do not leave their lines behind, loops can be left."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`: what stands in it is an answer."""

        tags = {"generation"}  # noqa: RUF012  (theirs is one)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_OPENS}{caller()}{_CLOSES}"

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda shape: dt.datetime.now().strftime(shape)
    return environment


def _marked_answers(marked: str) -> list[AnswerPlace]:
    before, *pieces = marked.split(_OPENS)
    answers, length = [], len(before)
    for piece in pieces:
        inside, closes, behind = piece.partition(_CLOSES)
        if not closes or _CLOSES in behind:
            raise UsageError("this chat template has one generation block in another: use another template")
        answers.append(AnswerPlace(length, length + len(inside), None, is_marked=True))
        length += len(inside) + len(behind)
    return answers


def read_conversation(value: Any, tools: Any, where: str) -> Conversation:
    """The messages of a record, and its tools, or one line that says what is wrong with them."""
    if not isinstance(value, list) or not value:
        raise UsageError(
            "data.field", f": {where} is {shown(value)}: expected a list of messages with role and content"
        )
    messages = [_read_message(message, where) for message in value]
    if not any(message["role"] == ASSISTANT for message in messages):
        raise UsageError("data.field", f": {where} has no message of role {ASSISTANT}: nothing in it would be learnt")
    if tools is not None and not isinstance(tools, list):
        raise UsageError(f"{where}: tools is {shown(tools)}: expected a list of JSON schemas")
    text = json.dumps([messages, tools], ensure_ascii=False)
    if _OPENS in text or _CLOSES in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(f"{where} has U+FDD0, U+FDD1 or half a surrogate pair in it, which are no text: take them out")
    return Conversation(messages, tools)


def _read_message(message: Any, where: str) -> dict[str, Any]:
    """As it is, since templates read more than role and content; but what is null is left out, as Parquet has it."""
    known = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
    role, content = known.pop("from", None), known.pop("value", None)
    role, content = known.get("role", role), known.get("content", content)
    is_call = role == ASSISTANT and bool(known.get("tool_calls"))
    if not isinstance(role, str) or not (isinstance(content, str) or (content is None and is_call)):
        raise UsageError("data.field", f": {where}: a message is {shown(message)}: expected role and content, texts")
    return {**known, "role": _ROLE_NAMES.get(role, role), "content": content}


def template_of(tokenizer: Path | None) -> Template:
    """The chat template beside a tokenizer.json; a plain one where there is none."""
    if tokenizer is None:
        return Template({DEFAULT: PLAIN_TEMPLATE}, {})
    files = read_beside(tokenizer)
    return Template(files.templates or {DEFAULT: PLAIN_TEMPLATE}, files.special_tokens)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
