"""Which tokens may come next: llguidance's parser over this vocabulary, behind `Constraints` and `Cursor`.

The one idea: the library's vocabulary is the set of spellings. A token has one spelling as the first of an answer and
one later (SentencePiece drops a leading blank), so a mask is the library's, looked up by either. Where only one text
can follow, the library allows the one token that this text begins with, and not each of its beginnings.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilemesh.core.errors import UsageError
from tilemesh.data.tokenizer import Tokenizer
from tilemesh.serve.constrain.schema import CALLS, prepare_schema

_LONGEST = {"regex": 16_384, "json_schema": 100_000}
_KEPT = 32
_AROUND = re.compile(r"\A(at \d+\(\d+\): )?failed to compile JSON schema: |\n *[0-9]+ \| .*", re.DOTALL)
"""Of an error within a grammar of calls: where in it, and all of the grammar."""
_LIMITS: dict[str, Any] = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 20_000, "step_max_items": 20_000,
           "max_lexer_states": 50_000, "max_grammar_size": 200_000, "verbose_errors": False}  # fmt: skip
"""What compiling a constraint and each mask of it may cost: a few milliseconds. What needs more is refused."""
_JSON_OPTIONS: Any = {"lenient": False, "coerce_one_of": False, "whitespace_flexible": True, "item_separator": ",",
           "key_separator": ":", "whitespace_pattern": r" |\n {0,24}", "json_allowed_escapes": '"\\bfnrt'}  # fmt: skip
"""White space does not go on for ever, and a name is spelled in one way: `\\u0061` would be a second `a`."""


class _Spellings:
    """The vocabulary as the library wants it: each spelling once, then an end that is never text."""

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        first, later = (  # what ends an answer is no part of it
            [b"" if token in ends else text or b"" for token, text in enumerate(tokenizer.spell(beginning))]
            for beginning in (True, False)
        )
        every, known = [*later, *(set(first) - set(later))], dict[bytes, int]()
        self.tokens = [text * (known.setdefault(text, number) == number) for number, text in enumerate(every)]
        self.bos_token_id, self.eos_token_id, self.special_token_ids = None, len(every), [len(every)]
        self.tokens.append(b"<end>")
        self.by_place = [
            np.array([known[text] if text else at for at, text in enumerate(own)]) for own in (first, later)
        ]
        """The number of each token's spelling as the first of an answer, and later; without one, of nothing."""
        every_token = np.arange(len(later))
        self.masked = [slice(len(later)) if np.array_equal(own, every_token) else own for own in self.by_place]
        self._numbers, self._both = known, set(first) & set(later) - {b""}

    def __call__(self, text: bytes) -> list[int]:
        """A text that must come, in spellings, the longest first; a byte that no token spells ends it."""
        numbers: list[int] = []
        while length := next((count for count in range(min(32, len(text)), 0, -1) if text[:count] in self._both), 0):
            numbers.append(self._numbers[text[:length]])
            text = text[length:]
        return numbers


class NextTokens(NamedTuple):
    """What may come at one place of an answer: tokens that go on, or its end."""

    mask_V: NDArray[np.bool_]
    may_end: bool


class Constraint(NamedTuple):
    """What an answer must match, compiled: `start` is a parser at its beginning, which is only copied."""

    start: Any
    spellings: _Spellings


class Cursor:
    """Where one answer stands in what it must match."""

    def __init__(self, constraint: Constraint) -> None:
        self._parser, self._spellings, self._tokens = constraint.start.deep_copy(), constraint.spellings, 0

    def add(self, token: int) -> bool:
        """Go on by a token; returns whether the answer is complete: nothing may follow."""
        self._parser.consume_token(int(self._spellings.by_place[self._tokens > 0][token]))
        self._tokens += 1
        return bool(self._parser.is_stopped()) and not self._parser.is_error()

    def ahead(self, guesses: Sequence[int]) -> list[NextTokens | None]:
        """What may come next, and after each of these guesses; None behind a wrong one or a complete answer. Refuses
        where that takes too much work."""
        masks, stands = list[NextTokens | None](), self._tokens
        for guess in [*guesses, None]:
            masks.append(after := self.next())
            # Of a vocabulary that is larger than the tokenizer's, a guess may be a token without a text.
            if guess is None or guess >= len(after.mask_V) or not after.mask_V[guess] or self.add(guess):
                break
        self._parser.rollback(self._tokens - stands)
        self._tokens = stands
        return masks + [None] * (len(guesses) + 1 - len(masks))

    def next(self) -> NextTokens:
        bits = b"" if self._parser.is_error() else self._parser.compute_bitmask()
        if self._parser.is_error():
            if not self._parser.get_error().startswith("NoExtension"):
                raise UsageError("regex or json_schema takes too much work to follow: give a simpler one")
            return NextTokens(
                np.zeros(len(self._spellings.by_place[0]), np.bool_), False
            )  # no token of the vocabulary goes on
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)
        return NextTokens(allowed[self._spellings.masked[self._tokens > 0]], self._parser.is_accepting())


class Constraints:
    """The constraints of one vocabulary, compiled when they are first asked for. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._reading = threading.Lock()
        self._spelled: tuple[_Spellings, Any] | None = None
        self._compiled = functools.lru_cache(_KEPT)(self._compile)

    def get(self, regex: str | None, schema: Mapping[str, Any] | bool | None) -> Constraint | None:
        """Refuses what cannot be read, or not with this vocabulary."""
        if regex is None and schema is None:
            return None
        kind, text = ("regex", regex) if regex is not None else ("json_schema", json.dumps(schema))
        if len(text) > _LONGEST[kind]:
            raise UsageError(f"{kind} is {len(text):,} characters long: expected at most {_LONGEST[kind]:,}")
        return self._compiled(kind, text)

    def _compile(self, kind: str, text: str) -> Constraint:
        try:
            from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
        except ImportError:
            raise UsageError(f"{kind} needs the package `llguidance`: pip install 'tilemesh[serve]'") from None
        with self._reading:
            if self._spelled is None:
                words = _Spellings(self._tokenizer, self._ends)
                self._spelled = words, LLTokenizer(TokenizerWrapper(words), eos_token=words.eos_token_id)
        spellings, tokens = self._spelled
        try:
            if kind == "regex":
                grammar = LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, 'dws')}/")
            else:
                schema = json.loads(text)
                if isinstance(schema, dict) and set(schema) == {CALLS}:
                    grammar = LLMatcher.grammar_from_lark(self._calls(**schema[CALLS]))
                else:
                    narrowed = json.dumps(prepare_schema(schema))
                    grammar = LLMatcher.grammar_from_json_schema(narrowed, overrides=_JSON_OPTIONS)
            start = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
            error = start.get_error()
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as refused:
            error = str(refused)
        if error:
            why = _AROUND.sub("", error.split("<backtrace>")[0])
            raise UsageError(f"{kind} cannot be served: " + " ".join(why.split())[:300])
        constraint = Constraint(start, spellings)
        after = Cursor(constraint).next()  # what takes too much work is refused here, before it is an answer
        if not (after.may_end or after.mask_V.any()):
            raise UsageError(f"{kind} allows no text at all that this vocabulary can spell")
        return constraint

    def _calls(self, tools: Mapping[str, Any], most: int, marks: Sequence[str]) -> str:
        """A grammar of calls: a tool's name, the other marks, an id between two, and arguments; the first mark before
        the next call."""
        opens, *others = map(self._mark, marks)
        between = " /[A-Za-z0-9]{9}/ ".join(others)
        rules = [f"start: call ({opens} call){{0,{most - 1}}}" if most > 1 else "start: call"]
        rules.append("call: " + " | ".join(f"{json.dumps(name)} {between} a{at}" for at, name in enumerate(tools)))
        for at, schema in enumerate(tools.values()):
            rules.append(f"a{at}: %json {json.dumps({**prepare_schema(schema), 'x-guidance': _JSON_OPTIONS})}")
        return "\n".join(rules)

    def _mark(self, mark: str) -> str:
        """A mark in a grammar: the special token that it is, or its text."""
        tokens = [int(token) for token in self._tokenizer.encode(mark.encode())]
        is_special = len(tokens) == 1 and not self._tokenizer.spell(False)[tokens[0]]
        return f"<[{tokens[0]}]>" if is_special else json.dumps(mark)
