"""Guesses of a request's next tokens: from its own text, or how many to ask of a draft model. No torch.

The one idea: a guess is checked by drawing the token anyway, with the token's own random number, and comparing. So a
guess, right or wrong, never changes an answer, sampled ones included; it only saves steps. What it costs is the tokens
that a step computes in vain, so each request's own record of right guesses decides how many it makes next, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilemesh.serve.request import ServeRequest
from tilemesh.serve.scheduler import UNKNOWN

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


# A draft model --------------------------------------------------------------------------------------------------------

_PRIOR_RIGHT, _PRIOR_TRIED = 1.4, 2.0
"""What is believed of a new request: as if two guesses had been looked at, 0.7 of them right."""
_FORGETS = 0.95
_SEEN = 4
"""Steps that must have been timed before times decide."""


@dataclass(slots=True)
class _DraftRecord:
    right: float = _PRIOR_RIGHT
    tried: float = _PRIOR_TRIED
    guessed: int = 0
    guessed_at: int = 0
    paused_until: int = 0


class DraftLengths:
    """How many tokens a draft model guesses for a request: as many as give the most tokens per second, or none.

    With a share `a` of guesses right, k of them give (1 - a^(k+1)) / (1 - a) tokens per step. What a step costs is
    measured: a line through the times of steps by their tokens, and the time of a draft model's pass. The answers do
    not depend on it. `lengths(request, most)` is the scheduler's `propose`: so many guesses, each UNKNOWN until the
    draft model makes it.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.guessed = 0
        self.right = 0
        self.pass_s = 0.0
        """Of the draft model."""
        self._requests: dict[str, _DraftRecord] = {}
        self._sums = [0.0] * 5  # of weights, tokens, seconds, tokens², tokens x seconds of past steps
        self._timed = 0
        self.rows = 1

    def __call__(self, request: ServeRequest, most: int) -> Sequence[int]:
        record = self._requests.setdefault(request.name, _DraftRecord())
        length = len(request.tokens)
        self._judge(record, length)
        if length < record.paused_until:
            return ()
        if record.paused_until:  # the pause is over: one guess says whether it pays now
            record.paused_until, record.right, record.tried = 0, _PRIOR_RIGHT, _PRIOR_TRIED
            count = min(1, most)
        else:
            count = self.best(record.right / record.tried, min(most, self.most))
            if count == 0 and most > 0:
                record.paused_until = length + _PAUSE
        record.guessed, record.guessed_at = count, length
        self.guessed += count
        return (UNKNOWN,) * count

    def best(self, right: float, most: int) -> int:
        """The number of guesses with the most tokens per second."""
        if self._timed < _SEEN:
            return min(2, most)
        fixed_s, token_s = self._line()
        paid = []
        for count in range(most + 1):
            tokens = sum(right**place for place in range(count + 1))
            seconds = fixed_s + token_s * self.rows * (1 + count) + count * self.pass_s
            paid.append(tokens / max(seconds, 1e-9))
        return max(range(most + 1), key=lambda count: paid[count])

    def observe(self, rows: int, tokens: int, step_s: float, passes: int, draft_s: float) -> None:
        """How long a step of decoding took, beside the passes of the draft model before it."""
        self.rows = rows
        self._timed += 1
        for index, value in enumerate((1, tokens, step_s, tokens * tokens, tokens * step_s)):
            self._sums[index] = _FORGETS * self._sums[index] + value
        if passes:
            each = draft_s / passes
            self.pass_s = each if not self.pass_s else _FORGETS * self.pass_s + (1 - _FORGETS) * each

    def forget(self, name: str) -> None:
        self._requests.pop(name, None)

    def _line(self) -> tuple[float, float]:
        """(seconds of a step without tokens, seconds per token), neither below 0."""
        weight, tokens, seconds, squares, products = self._sums
        spread = squares - tokens * tokens / weight
        slope = (products - tokens * seconds / weight) / spread if spread > 1e-6 * squares else 0.0
        slope = min(max(slope, 0.0), seconds / tokens)
        return (seconds - slope * tokens) / weight, slope

    def _judge(self, record: _DraftRecord, length: int) -> None:
        if record.guessed:
            right = max(0, min(record.guessed, length - record.guessed_at - 1))
            self.right += right
            record.right = _FORGETS * record.right + right
            record.tried = _FORGETS * record.tried + min(record.guessed, right + 1)
        record.guessed = 0
