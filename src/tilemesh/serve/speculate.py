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


_PRIOR_RIGHT, _PRIOR_TRIED = 1.4, 2.0
"""What is believed of a new request: as if two guesses had been looked at, 0.7 of them right."""


@dataclass(slots=True)
class _Record:
    """How one request's guesses did; and where each run of its tokens ended last."""

    guessed: int = 0
    guessed_at: int = 0
    paused_until: int = 0
    length: int = 2
    """How many tokens its own text is asked for next time."""
    read: int = 0
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    right: float = _PRIOR_RIGHT
    tried: float = _PRIOR_TRIED


class _Guesser:
    """What is known of guesses, all together and by request. Call `forget` when a request has ended."""

    def __init__(self, most: int = _MOST) -> None:
        self.most = most
        self.guessed = 0
        self.right = 0
        self._records: dict[str, _Record] = {}

    def forget(self, name: str) -> None:
        self._records.pop(name, None)

    def _looked_at(self, record: _Record, length: int) -> int:
        """How many of the last guesses were right: a step gives one token more than that."""
        right = max(0, min(record.guessed, length - record.guessed_at - 1))
        self.right += right
        return right

    def _note(self, record: _Record, guessed: int, length: int) -> None:
        record.guessed, record.guessed_at = guessed, length
        self.guessed += guessed


class NgramGuesser(_Guesser):
    """`guesser(request, most)` is the scheduler's `propose`."""

    def __call__(self, request: ServeRequest, most: int) -> Sequence[int]:
        record = self._records.setdefault(request.name, _Record())
        tokens = request.tokens
        self._judge(record, len(tokens))
        guess = _follow(record, tokens)
        record.guessed = 0
        if len(tokens) < record.paused_until or guess is None:
            return ()
        guesses: list[int] = []
        for place in range(guess, guess + min(most, record.length, self.most)):
            # What repeats every few tokens goes on repeating beyond the tokens that are there.
            guesses.append(tokens[place] if place < len(tokens) else guesses[place - len(tokens)])
        self._note(record, len(guesses), len(tokens))
        return guesses

    def _judge(self, record: _Record, length: int) -> None:
        """Twice as many after guesses that were all right, half after one that was not, none for a while after one."""
        if not record.guessed:
            return
        right = self._looked_at(record, length)
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
        ends = record.ends.get(tuple(tokens[-size:]))
        if ends is not None:
            return ends
    return None


# A draft model --------------------------------------------------------------------------------------------------------

_FORGETS = 0.95
_SEEN = 4
"""Steps that must have been timed before times decide."""


class DraftLengths(_Guesser):
    """How many tokens a draft model guesses for a request: as many as give the most tokens per second, or none.

    With a share `a` of guesses right, k of them give (1 - a^(k+1)) / (1 - a) tokens per step. What a step costs is
    measured: a line through the times of steps by their tokens, and the time of a draft model's pass. The answers do
    not depend on it. `lengths(request, most)` is the scheduler's `propose`: so many guesses, each UNKNOWN until the
    draft model makes it.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.pass_s = 0.0
        """Of the draft model."""
        self._sums = [0.0] * 5  # of weights, tokens, seconds, tokens², tokens x seconds of past steps
        self._timed = 0
        self.rows = 1

    def __call__(self, request: ServeRequest, most: int) -> Sequence[int]:
        record = self._records.setdefault(request.name, _Record())
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
        self._note(record, count, length)
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

    def _line(self) -> tuple[float, float]:
        """(seconds of a step without tokens, seconds per token), neither below 0."""
        weight, tokens, seconds, squares, products = self._sums
        spread = squares - tokens * tokens / weight
        slope = (products - tokens * seconds / weight) / spread if spread > 1e-6 * squares else 0.0
        slope = min(max(slope, 0.0), seconds / tokens)
        return (seconds - slope * tokens) / weight, slope

    def _judge(self, record: _Record, length: int) -> None:
        if record.guessed:
            right = self._looked_at(record, length)
            record.right = _FORGETS * record.right + right
            record.tried = _FORGETS * record.tried + min(record.guessed, right + 1)
        record.guessed = 0
