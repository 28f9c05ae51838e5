"""Which tokens may come next: the bytes of the whole vocabulary followed through a machine at once.

The one idea: tokens that begin alike share their beginnings, in a tree. Its nodes are arrays sorted by depth, so that
one lookup in the machine's table moves every node of a depth on by its byte: a mask of 128,000 tokens is a dozen array
operations. A mask is kept with its state.
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
from tilemesh.serve.constrain.machine import DEAD, MOST_STATES, ByteMachine, WorkBudget
from tilemesh.serve.constrain.pattern import Grammar
from tilemesh.serve.constrain.regex import parse_regex
from tilemesh.serve.constrain.schema import parse_schema

_LONGEST = {"regex": 16_384, "json_schema": 100_000}
"""Characters: longer ones have more nodes than a machine may, and take long to read."""
_KEPT_MACHINES = 32
_MASK_BYTES = 64 << 20
_COMPILE_WORK = (2_000_000, 10.0)
"""Places and seconds that reading a constraint and its first mask may take: about a second."""
_ANSWER_WORK, _TOKEN_WORK = 1_000_000, 20_000
"""Places that following a constraint may take per answer, and per token of it: the other answers wait meanwhile."""
_ANSWER_S = 86_400.0


class TokenTree:
    """The bytes of all tokens that have some."""

    def __init__(self, spelled: Sequence[bytes | None]) -> None:
        self.spelled = spelled
        tokens = np.array([token for token, content in enumerate(spelled) if content], np.int64)
        texts = [content for content in spelled if content]
        lengths = np.array([len(content) for content in texts], np.int64)
        begins = np.cumsum(lengths) - lengths
        content = np.frombuffer(b"".join(texts), np.uint8)
        self.ends = np.full(len(spelled), -1, np.int64)
        """The node that each token ends at."""
        self.levels: list[tuple[int, NDArray[np.int64], NDArray[np.uint8]]] = []
        """Of each depth: number of its first node, node before each, byte of each."""
        at = np.zeros(len(tokens), np.int64)  # node 0: nothing read
        self.size = 1
        for depth in range(int(lengths.max(initial=0))):
            alive = lengths > depth
            tokens, lengths, begins, at = tokens[alive], lengths[alive], begins[alive], at[alive]
            edges, at = np.unique(at * 256 + content[begins + depth], return_inverse=True)
            self.levels.append((self.size, edges // 256, (edges % 256).astype(np.uint8)))
            at = at + self.size
            self.size += len(edges)
            done = lengths == depth + 1
            self.ends[tokens[done]] = at[done]

    def allowed(self, machine: ByteMachine, state: int) -> NDArray[np.bool_]:
        reached = np.full(self.size, DEAD, np.int32)
        reached[0] = state
        for first, before, byte in self.levels:
            now = reached[before]
            alive = np.flatnonzero(now != DEAD)
            if not len(alive):
                break
            now = now[alive]
            for alive_state in np.flatnonzero(np.bincount(now, minlength=1)):
                machine.fill(int(alive_state))
            reached[first + alive] = machine.table[now, byte[alive]]
        allowed: NDArray[np.bool_] = (self.ends >= 0) & (reached[self.ends] != DEAD)
        return allowed


class Constraint:
    """A machine with the masks of its states."""

    def __init__(self, grammar: Grammar, first: TokenTree, later: TokenTree) -> None:
        self.machine = ByteMachine(grammar, WorkBudget(*_COMPILE_WORK))
        self.trees = (first, later)
        self.epoch = 0
        self._masks: OrderedDict[tuple[int, bool], NDArray[np.bool_]] = OrderedDict()
        self.mask(self.machine.start, True)  # what takes too much work is refused here, before it is an answer

    def mask(self, state: int, first: bool) -> NDArray[np.bool_]:
        mask = self._masks.pop((state, first), None)
        if mask is None:
            mask = self.trees[not first].allowed(self.machine, state)
            while len(self._masks) * len(mask) >= _MASK_BYTES:
                self._masks.popitem(last=False)
        self._masks[state, first] = mask
        return mask

    def make_room(self) -> None:
        """Forget all states when there are too many: a cursor that finds its number gone reads its text again."""
        if self.machine.size > MOST_STATES:
            self.machine.work = None
            self.machine.forget()
            self._masks.clear()
            self.epoch += 1


@dataclass(frozen=True)
class NextTokens:
    """What may come at one place of an answer."""

    mask_V: NDArray[np.bool_]
    """Tokens that go on."""
    may_end: bool


class Cursor:
    """Where one answer stands in what it must match. One thread at a time for all cursors of a constraint."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._content = bytearray()
        self._tokens = 0
        self._work = WorkBudget(_ANSWER_WORK, _ANSWER_S)
        self._refusal: UsageError | None = None
        self._state, self._epoch = constraint.machine.start, constraint.epoch

    def add(self, token: int) -> bool:
        """Go on by a token; returns whether the answer is complete: nothing may follow."""
        content = self._spelled(token, self._tokens)
        self._constraint.machine.work = self._work
        self._work.left += _TOKEN_WORK
        try:
            self._state = self._after(self._current(), content)
            ended = self._state != DEAD and self._constraint.machine.ended(self._state)
        except UsageError as error:  # the token stands: what comes after it is refused
            self._refusal = error
            return False
        self._content += content
        self._tokens += 1
        return ended

    def ahead(self, guesses: Sequence[int]) -> list[NextTokens | None]:
        """What may come next, and after each of these guesses; None behind a wrong one or a complete answer. Refuses
        where that takes too much work."""
        if self._refusal is not None:
            raise self._refusal
        self._constraint.make_room()
        self._constraint.machine.work = self._work
        state = self._current()
        masks: list[NextTokens | None] = []
        for number, guess in enumerate([*guesses, None]):
            if state == DEAD or (number and self._constraint.machine.ended(state)):
                return masks + [None] * (len(guesses) + 1 - number)
            mask = self._constraint.mask(state, self._tokens + number == 0)
            masks.append(NextTokens(mask, self._constraint.machine.accepts(state)))
            if guess is not None:
                state = self._after(state, self._spelled(guess, self._tokens + number)) if mask[guess] else DEAD
        return masks

    def _current(self) -> int:
        if self._epoch != self._constraint.epoch:
            self._state = self._after(self._constraint.machine.start, self._content)
            self._epoch = self._constraint.epoch
        return self._state

    def _after(self, state: int, content: bytes | bytearray) -> int:
        return self._constraint.machine.after(state, content)

    def _spelled(self, token: int, number: int) -> bytes:
        return self._constraint.trees[number > 0].spelled[token] or b""


class Constraints:
    """The constraints of one vocabulary, compiled when they are first asked for. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._trees: tuple[TokenTree, TokenTree] | None = None
        self._made: OrderedDict[tuple[str, str], Constraint] = OrderedDict()

    def get(self, regex: str | None, schema: Mapping[str, Any] | bool | None) -> Constraint | None:
        """Refuses what cannot be read, or not with this vocabulary."""
        if regex is None and schema is None:
            return None
        key = ("regex", regex) if regex is not None else ("json_schema", json.dumps(schema))
        if len(key[1]) > _LONGEST[key[0]]:
            raise UsageError(f"{key[0]} is {len(key[1]):,} characters long: expected at most {_LONGEST[key[0]]:,}")
        with self._lock:
            constraint = self._made.get(key)
        if constraint is None:  # made without the lock: nobody waits for what somebody else asks for
            try:
                grammar = Grammar(parse_regex(regex), {}) if regex is not None else parse_schema(schema)
                constraint = Constraint(grammar, *self._vocabulary())
            except RecursionError:
                raise UsageError(f"{key[0]} nests too deeply: expected fewer levels") from None
        with self._lock:
            constraint = self._made.setdefault(key, constraint)
            self._made.move_to_end(key)
            if len(self._made) > _KEPT_MACHINES:
                self._made.popitem(last=False)
            return constraint

    def _vocabulary(self) -> tuple[TokenTree, TokenTree]:
        with self._reading:
            if self._trees is None:
                first, later = (self._tokenizer.spell(beginning) for beginning in (True, False))
                for token in self._ends:  # what ends an answer is no part of it
                    first[token] = later[token] = None
                tree = TokenTree(later)
                self._trees = (tree if first == later else TokenTree(first), tree)
            return self._trees
