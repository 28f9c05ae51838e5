"""Messages to a prompt, by the chat template of a model's folder: a jinja2 program, run in a sandbox."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tilemesh.core.errors import RunError, UsageError
from tilemesh.serve.protocol import ChatMessage


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise RunError("chat templates need the package jinja2: pip install 'tilemesh[serve]'") from None
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

    def __call__(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt, special tokens included, up to where the assistant's answer begins."""
        told = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(messages=told, add_generation_prompt=True, **self._special)
        except (self._wrong, TypeError, ValueError, ArithmeticError, LookupError) as error:
            # Templates refuse, for one, a role that they do not know; some only by failing.
            raise UsageError(f"messages do not fit this model's chat template: {error}") from None

    def _refuse(self, message: str) -> None:
        raise self._wrong(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
