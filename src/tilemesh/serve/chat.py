"""Messages to a prompt, by the chat template of a model's folder (`data/chat.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilemesh.data.chat import Template
from tilemesh.data.tokenizer_files import DEFAULT
from tilemesh.serve.protocol import ChatMessage


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = Template({DEFAULT: source}, special_tokens)

    def __call__(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt, special tokens included, up to where the assistant's answer begins."""
        told = [{"role": message.role, "content": message.content} for message in messages]
        return self._template.render(told, answer_follows=True)
