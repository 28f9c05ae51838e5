"""Which tokens may come next: llguidance's parser over this vocabulary, behind `Constraints` and `Cursor`.

The one idea: the library's vocabulary is the set of spellings. A token has one spelling as the first of an answer and
one later (SentencePiece drops a leading blank), so a mask is the library's, looked up by either. Where only one text
can follow, the library allows the one token that this text begins with, and not each of its beginnings.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilemesh.core.errors import UsageError
from tilemesh.data.tokenizer import Tokenizer
from tilemesh.serve.constrain.schema import prepare_schema

_LONGEST = {"regex": 16_384, "json_schema": 100_000}
_KEPT = 32
_LIMITS: dict[str, Any] = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 20_000, "step_max_items": 20_000,
           "max_lexer_states": 50_000, "max_grammar_size": 200_000, "verbose_errors": False}  # fmt: skip
"""What compiling a constraint and each mask of it may cost: a few milliseconds. What needs more is refused."""
_JSON_OPTIONS: Any = {
    "lenient": False, "coerce_one_of": False, "whitespace_flexible": True, "whitespace_pattern": r" |\n {0,24}",
    "item_separator": ",", "key_separator": ":", "json_allowed_escapes": '"\\bfnrt',
}  # fmt: skip
"""White space does not go on for ever, and a name is spelled in one way: `\\u0061` would be a second `a`."""


class _Spellings:
    """The vocabulary as the library wants it: each spelling once, then an end that is never text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        spelled = [tokenizer.spell(beginning) for beginning in (True, False)]
        for token in ends:  # what ends an answer is no part of it
            spelled[0][token] = spelled[1][token] = None
        first, later = spelled
        self.vocabulary = len(later)
        self._numbers: dict[bytes, int] = {}
        self.tokens = [
            content if content and self._numbers.setdefault(content, number) == number else b""
            for number, content in enumerate([*later, *dict.fromkeys(set(first) - set(later))])
        ]
        self.eos_token_id = len(self.tokens)
        self.special_token_ids = [self.eos_token_id]
        self.tokens.append(b"<end>")
        self.by_place = [
            np.array([self._numbers[content] if content else token for token, content in enumerate(contents)])
            for contents in spelled
        ]
        """The number of each token's spelling as the first of an answer, and later; without one, of nothing."""
        self.direct = [np.array_equal(numbers, np.arange(self.vocabulary)) for numbers in self.by_place]
        self._both = {content for content in set(first) & set(later) if content}
        self._longest = min(32, max(map(len, self._both), default=1))

    def __call__(self, text: bytes) -> list[int]:
        """A text that must come, in spellings: the longest first."""
        found: list[int] = []
        while text:
            lengths = range(min(self._longest, len(text)), 0, -1)
            length = next((length for length in lengths if text[:length] in self._both), 0)
            if not length:  # no token is this byte: what cannot be spelled ends the answer
                break
            found.append(self._numbers[text[:length]])
            text = text[length:]
        return found


@dataclass(frozen=True)
class NextTokens:
    """What may come at one place of an answer."""

    mask_V: NDArray[np.bool_]
    """Tokens that go on."""
    may_end: bool


class Constraint:
    """What an answer must match, compiled: `start` is a parser at its beginning, which is only copied."""

    def __init__(self, kind: str, start: Any, spellings: _Spellings) -> None:
        self.kind, self.start, self.spellings = kind, start, spellings
        (after,) = Cursor(self).ahead([])  # what takes too much work is refused here, before it is an answer
        if after is None or not (after.may_end or after.mask_V.any()):
            raise UsageError(f"{kind} allows no text at all that this vocabulary can spell")


class Cursor:
    """Where one answer stands in what it must match."""

    def __init__(self, constraint: Constraint) -> None:
        self._kind, self._spellings = constraint.kind, constraint.spellings
        self._parser = constraint.start.deep_copy()
        self._tokens = 0

    def add(self, token: int) -> bool:
        """Go on by a token; returns whether the answer is complete: nothing may follow."""
        self._consume(token, self._tokens)
        self._tokens += 1
        return self._complete()

    def ahead(self, guesses: Sequence[int]) -> list[NextTokens | None]:
        """What may come next, and after each of these guesses; None behind a wrong one or a complete answer. Refuses
        where that takes too much work."""
        masks: list[NextTokens | None] = []
        taken = 0
        for number, guess in enumerate([*guesses, None]):
            if number and self._complete():
                break
            after = self._next(self._tokens + number == 0)
            masks.append(after)
            if guess is None or not after.mask_V[guess]:
                break
            self._consume(guess, self._tokens + number)
            taken += 1
        if taken:
            self._parser.rollback(taken)
        return masks + [None] * (len(guesses) + 1 - len(masks))

    def _next(self, first: bool) -> NextTokens:
        words = self._spellings
        bits = b"" if self._parser.is_error() else self._parser.compute_bitmask()
        if self._parser.is_error():
            if not self._parser.get_error().startswith("NoExtension"):
                raise UsageError(f"{self._kind} takes too much work to follow: give a simpler one")
            return NextTokens(np.zeros(words.vocabulary, np.bool_), False)  # no token of the vocabulary goes on
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)
        mask_V = allowed[: words.vocabulary] if words.direct[not first] else allowed.take(words.by_place[not first])
        return NextTokens(mask_V, self._parser.is_accepting())

    def _consume(self, token: int, number: int) -> None:
        self._parser.consume_token(int(self._spellings.by_place[number > 0][token]))

    def _complete(self) -> bool:
        return bool(self._parser.is_stopped()) and not self._parser.is_error()


class Constraints:
    """The constraints of one vocabulary, compiled when they are first asked for. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._spelled: tuple[_Spellings, Any] | None = None
        self._compiled: OrderedDict[tuple[str, str], Constraint] = OrderedDict()

    def get(self, regex: str | None, schema: Mapping[str, Any] | bool | None) -> Constraint | None:
        """Refuses what cannot be read, or not with this vocabulary."""
        if regex is None and schema is None:
            return None
        kind, text = ("regex", regex) if regex is not None else ("json_schema", json.dumps(schema))
        if len(text) > _LONGEST[kind]:
            raise UsageError(f"{kind} is {len(text):,} characters long: expected at most {_LONGEST[kind]:,}")
        with self._lock:
            constraint = self._compiled.get((kind, text))
        if constraint is None:  # compiled without the lock: nobody waits for what somebody else asks for
            constraint = self._compile(kind, text, schema)
        with self._lock:
            constraint = self._compiled.setdefault((kind, text), constraint)
            self._compiled.move_to_end((kind, text))
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return constraint

    def _compile(self, kind: str, text: str, schema: Mapping[str, Any] | bool | None) -> Constraint:
        try:
            import llguidance
        except ImportError:
            raise UsageError(f"{kind} needs the package `llguidance`: pip install 'tilemesh[serve]'") from None
        spellings, tokens = self._read_spellings()
        try:
            if kind == "regex":
                grammar = llguidance.LLMatcher.grammar_from_lark(f"start: /{llguidance.regex_to_lark(text, 'dws')}/")
            else:
                narrowed = json.dumps(prepare_schema(schema))
                grammar = llguidance.LLMatcher.grammar_from_json_schema(narrowed, overrides=_JSON_OPTIONS)
            limits = llguidance.LLParserLimits(**_LIMITS)
            start = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)
            error = start.get_error()
        except UsageError:
            raise
        except ValueError as refused:
            error = str(refused)
        if error:
            said = " ".join(error.split("<backtrace>")[0].split())[:300]
            raise UsageError(f"{kind} cannot be served: {said}")
        return Constraint(kind, start, spellings)

    def _read_spellings(self) -> tuple[_Spellings, Any]:
        import llguidance

        with self._reading:
            if self._spelled is None:
                words = _Spellings(self._tokenizer, self._ends)
                tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(words), eos_token=words.eos_token_id)
                self._spelled = (words, tokens)
            return self._spelled
