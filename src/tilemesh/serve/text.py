"""Tokens to text as they come: characters that are complete, and stop strings wherever tokens are cut.

The one idea: what was given out is never taken back. Text is held as long as later tokens could change it (a character
of several bytes that has not ended) or as it could be the beginning of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tilemesh.core.errors import UsageError
from tilemesh.data.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # what a tokenizer decodes an incomplete character to


class Decoder(Protocol):
    """A tokenizer, as far as it is needed here."""

    def decode(self, tokens: Sequence[int]) -> str: ...


class Spelling:
    """What each token adds to a text, in bytes: as its first token, and later."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        try:
            self._tables = [tokenizer.spell(beginning) for beginning in (False, True)]
        except UsageError:  # of this vocabulary it is not known
            self._tables = [[], []]

    def __call__(self, token: int, is_first: bool) -> bytes:
        table = self._tables[is_first]
        spelt = table[token] if token < len(table) else None
        return self._tokenizer.decode([token]).encode() if spelt is None else spelt


class TokenTexts:
    """The tokens of one text one by one, and where in it each begins."""

    def __init__(self, spelling: Spelling, offset: int = 0, is_first: bool = True) -> None:
        self._spelling, self._is_first, self._offset = spelling, is_first, offset
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def spell(self, token: int) -> bytes:
        """A token that may be the next one."""
        return self._spelling(token, self._is_first)

    def text(self, token: int) -> str:
        return self.spell(token).decode(errors="replace")

    def add(self, token: int) -> int:
        """The next token; returns where the character stands that it begins with, or goes on with."""
        spelt, unended = self.spell(token), self._characters.getstate()[0]
        # What did not end, and does not go on, is a character of its own.
        begin = self._offset + (len((unended + spelt[:1]).decode(errors="replace")) - 1 if unended else 0)
        self._offset += len(self._characters.decode(spelt))
        self._is_first = False
        return max(0, begin)


class TextStream:
    """The text of one answer, token by token: `add` returns what is certain so far."""

    def __init__(
        self, decoder: Decoder, stop: Sequence[str] = (), alone: dict[int, str] | None = None,
        before: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`alone`: the texts of single tokens, which streams of one tokenizer may share: each is decoded once;
        `before`: tokens that this text follows, unless they end within a character."""
        self._decoder = decoder
        self._alone = {} if alone is None else alone
        self._stop = tuple(stop)
        # A token may read differently at the beginning of a text (a leading space is dropped, for one): so the tokens
        # before the new ones are decoded along, from the last place where a character began.
        self._tokens = list(before) if before and not decoder.decode(before).endswith(_REPLACEMENT) else []
        self._known = len(self._tokens)  # how many of these have been given out
        self._before: str | None = None  # the text of those, once it was needed
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the text; it is no part of it."""

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that these tokens make certain; with `last` all there is. After a stop string comes nothing."""
        given = ""
        if tokens and not self._stop:
            self._tokens += tokens
            given = self._decoded(False)
        elif self._stop:
            for token in tokens:  # one by one: nothing after the token that completes a stop string counts
                if self.stopped is None:
                    self._tokens.append(token)
                    given += self._pass_on(self._decoded(False))
        if last and self.stopped is None:
            given += self._pass_on(self._decoded(True))
            given, self._held = given + self._held, ""
        return given

    def _decoded(self, last: bool) -> str:
        """New text, if it ends with a whole character."""
        before = self._before
        if before is None:
            before = self._before = self._first_text()
        whole = self._decoder.decode(self._tokens)
        if not last and (whole.endswith(_REPLACEMENT) or len(whole) <= len(before)):
            return ""
        self._tokens = self._tokens[self._known :]
        self._known, self._before = len(self._tokens), None
        return whole[len(before) :]

    def _first_text(self) -> str:
        """Of the tokens whose text was given out."""
        if self._known != 1:
            return self._decoder.decode(self._tokens[: self._known])
        token = self._tokens[0]
        text = self._alone.get(token)
        if text is None:
            text = self._alone[token] = self._decoder.decode([token])
        return text

    def _pass_on(self, text: str) -> str:
        """Text without what might be the beginning of a stop string; up to a whole one where there is one."""
        if not self._stop:
            return text
        self._held += text
        # The one that is complete first wins, and of those the one that began first: as if characters came one by one.
        stops = [(at + len(stop), at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if stops:
            _, at, self.stopped = min(stops)
            given, self._held = self._held[:at], ""
            return given
        kept = max(_overlap(self._held, stop) for stop in self._stop)
        given, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return given


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters could be the beginning of the stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
