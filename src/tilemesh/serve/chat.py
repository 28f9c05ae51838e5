"""Messages to a prompt, by the chat template of a model's folder (`data/chat.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilemesh.core.errors import UsageError
from tilemesh.data.chat import Template
from tilemesh.data.tokenizer_files import DEFAULT
from tilemesh.serve.protocol import ChatMessage
from tilemesh.serve.tools import AnswerReader, ToolUse, form_of, names_come_first


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = Template({DEFAULT: source}, special_tokens)
        self._form, self._thinks = form_of(source), "</think>" in source
        self.names_first = names_come_first(source)

    def __call__(self, messages: Sequence[ChatMessage], use: ToolUse) -> str:
        """The prompt, special tokens included, up to where the assistant's answer begins, or a call."""
        tools = use.offered
        if tools and self._form is None:
            raise UsageError("tools are given and this model's chat template shows none to it: leave them out")
        told = [{"role": message.role, "content": message.content, **message.more} for message in messages]
        return self._template.render(told, tools or None, answer_follows=True) + use.begun

    def reader(self, use: ToolUse, prompt: str) -> AnswerReader | None:
        """What reads an answer to this prompt; None: all of it is content."""
        if not self._thinks and not use.offered:
            return None
        return AnswerReader(use, self._form, self._thinks, prompt.rstrip().endswith("<think>"))
