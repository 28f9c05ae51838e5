"""Messages to a prompt, by the chat template of a model's folder (`data/chat.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilemesh.core.errors import UsageError
from tilemesh.data.chat import Template
from tilemesh.data.tokenizer_files import DEFAULT
from tilemesh.serve.protocol import ChatMessage
from tilemesh.serve.tools import THINKING, AnswerReader, ToolUse, form_of, marks_of_calls


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = Template({DEFAULT: source}, special_tokens)
        self._form, self.marks = form_of(source), marks_of_calls(source)
        self._thinks = next((marks for marks in THINKING if marks[1] in source), None)

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
        begins = self._thinks is not None and prompt.rstrip().endswith(self._thinks[0])
        return AnswerReader(use, self._form, self._thinks, begins)
