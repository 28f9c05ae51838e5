"""Conversations as text, by a chat template, and which of that text are answers.

A chat template is a jinja2 program that comes with a tokenizer; it is run in a sandbox. What the template writes for
the messages before an answer, up to where an answer begins, must be the beginning of what it writes with the answer:
what comes after it is the answer with the token that ends it, and that is what training counts, up to that token.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.files import read_json_object
from tilemesh.core.ranges import shown

PLAIN_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""For a tokenizer that comes without one, bytes for instance."""
ASSISTANT = "assistant"
_ROLE_NAMES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT}
"""Of the older form with `from` and `value`."""


class ConversationPiece(NamedTuple):
    """A stretch of a conversation's text, and whether it is an answer."""

    text: str
    is_answer: bool
    content_end: int = 0
    """Of an answer: where in the text its own words end, and what the template writes behind them begins."""


class Template:
    """A chat template. `special_tokens`: of the tokenizer's configuration, by name (`bos_token`)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise RunError("chat templates need the package jinja2: pip install 'tilemesh[hf]'") from None
        self._wrong = TemplateError
        # What templates of Hugging Face folders expect: blocks do not leave their lines behind, loops can be left.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = self._refuse
        environment.globals["strftime_now"] = lambda shape: dt.datetime.now().strftime(shape)
        self._special = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UsageError(f"the chat template of this model cannot be read: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer_follows: bool) -> str:
        """The text of messages, special tokens included; up to where an answer begins, if one follows."""
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=answer_follows, **self._special)
        except (self._wrong, TypeError, ValueError, ArithmeticError, LookupError) as error:
            # Templates refuse, for one, a role that they do not know; some only by failing.
            raise UsageError(f"messages do not fit this model's chat template: {error}") from None

    def pieces(self, messages: Sequence[Mapping[str, Any]]) -> list[ConversationPiece]:
        """A whole conversation, cut where answers begin and end."""
        made: list[ConversationPiece] = []
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self.render(messages[:number], answer_follows=True)
            after = self.render(messages[: number + 1], answer_follows=False)
            if not before.startswith(done) or not after.startswith(before):
                raise UsageError(
                    f"this chat template writes the messages before answer {number} differently once the answer is "
                    "there, so that the answer cannot be told from them: use another template, or data.chat=false"
                )
            answer = after[len(before) :]
            made.append(ConversationPiece(before[len(done) :], False))
            made.append(ConversationPiece(answer, True, _content_end(answer, message["content"])))
            done = after
        rest = self.render(messages, answer_follows=False)
        if rest.startswith(done) and len(rest) > len(done):
            made.append(ConversationPiece(rest[len(done) :], False))
        return [piece for piece in made if piece.text]

    def _refuse(self, message: str) -> None:
        raise self._wrong(message)


def read_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """The messages of a record, or one line that says what is wrong with them."""
    if not isinstance(value, list) or not value:
        raise UsageError(
            "data.field", f": {where} is {shown(value)}: expected a list of messages with role and content"
        )
    messages = []
    for message in value:
        told = message if isinstance(message, dict) else {}
        role, content = told.get("role", told.get("from")), told.get("content", told.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise UsageError(
                "data.field", f": {where}: a message is {shown(message)}: expected role and content, texts"
            )
        messages.append({"role": _ROLE_NAMES.get(role, role), "content": content})
    if not any(message["role"] == ASSISTANT for message in messages):
        raise UsageError("data.field", f": {where} has no message of role {ASSISTANT}: nothing in it would be learnt")
    return messages


def template_of(tokenizer: Path | None) -> Template:
    """The chat template beside a tokenizer.json; a plain one where there is none."""
    source: object = None
    special: dict[str, str] = {}
    if tokenizer is not None:
        beside = tokenizer.parent / "tokenizer_config.json"
        told = read_json_object(beside) if beside.is_file() else {}
        source = told.get("chat_template")
        file = tokenizer.parent / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else source
        for name, value in told.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                special[name] = text
    return Template(source if isinstance(source, str) else PLAIN_TEMPLATE, special)


def _content_end(answer: str, content: str) -> int:
    """Where an answer's own words end; many templates strip them. Where they were rewritten: nowhere before the end."""
    for words in (content, content.strip()):
        # From the right: the template may write the same words before the answer, "assistant" for instance.
        place = answer.rfind(words) if words else 0
        if place >= 0:
            return place + len(words)
    return len(answer)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
