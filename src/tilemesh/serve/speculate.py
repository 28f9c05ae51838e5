"""Guesses of a request's next tokens from its own text: what followed the last time these tokens were there. No torch.

The one idea: a guess is checked by drawing the token anyway, with the token's own random number, and comparing. So a
guess, right or wrong, never changes an answer, sampled ones included; it only saves steps. What it costs is the tokens
that a step computes in vain, so each request's own record of right guesses decides how many it makes next, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilemesh.serve.request import ServeRequest

LONGEST, SHORTEST = 4, 2
"""How many of the last tokens are looked for: the longer the likelier right, the shorter the oftener found."""
_MOST = 8
_PAUSE = 32
"""Tokens without a guess after guesses stopped being right; then it is tried again with one."""


@dataclass(slots=True)
class _Record:
    """Where each run of tokens of one request ended last, and how its guesses did."""

    read: int = 0
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    length: int = 2
    """How many tokens it guesses next time."""
    guessed: int = 0
    guessed_at: int = 0
    paused_until: int = 0


class NgramGuesser:
    """`guesser(request, most)` is the scheduler's `propose`. Call `forget` when a request has ended."""

    def __init__(self, most: int = _MOST) -> None:
        self.most = most
        self.guessed = 0
        self.right = 0
        self._records: dict[str, _Record] = {}

    def __call__(self, request: ServeRequest, most: int) -> Sequence[int]:
        record = self._records.setdefault(request.name, _Record())
        tokens = request.tokens
        self._judge(record, len(tokens))
        found = _follow(record, tokens)
        record.guessed = 0
        if len(tokens) < record.paused_until or found is None:
            return ()
        guesses: list[int] = []
        for place in range(found, found + min(most, record.length, self.most)):
            # What repeats every few tokens goes on repeating beyond the tokens that are there.
            guesses.append(tokens[place] if place < len(tokens) else guesses[place - len(tokens)])
        record.guessed, record.guessed_at = len(guesses), len(tokens)
        self.guessed += len(guesses)
        return guesses

    def forget(self, name: str) -> None:
        self._records.pop(name, None)

    def _judge(self, record: _Record, length: int) -> None:
        """Twice as many after guesses that were all right, half after one that was not, none for a while after one."""
        if not record.guessed:
            return
        # A step gives one token more than it had right guesses.
        right = max(0, min(record.guessed, length - record.guessed_at - 1))
        self.right += right
        if right == record.guessed:
            record.length = min(self.most, 2 * record.length)
        elif right == 0 and record.length == 1:
            record.paused_until = length + _PAUSE
        else:
            record.length = max(1, record.length // 2, right)


def _follow(record: _Record, tokens: Sequence[int]) -> int | None:
    """Where the tokens begin that followed the last ones when these were last there."""
    # The run at the very end is not read yet: nothing follows it.
    for end in range(max(record.read, SHORTEST), len(tokens)):
        for size in range(SHORTEST, min(LONGEST, end) + 1):
            record.ends[tuple(tokens[end - size : end])] = end
    record.read = len(tokens)
    for size in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
        found = record.ends.get(tuple(tokens[-size:]))
        if found is not None:
            return found
    return None
