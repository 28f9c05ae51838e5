"""Steps in which the same requests decode, one after the other, as arrays over these requests.

The one idea: between two pages nothing is decided about a request that decodes; it gets one token more. So while nobody
can join, a step is a few operations on arrays, and a request itself is looked at only where it has filled a page or
ended: what it has drawn is written into it then, or when the stretch is over.

On a GPU, as in `EngineCore.step`, a step is launched before the tokens of the one before are read: where they are, the
device knows. On a CPU they are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilemesh.model.sampling import keyed_uniforms, stream_key
from tilemesh.serve.device_steps import DrawnTokens
from tilemesh.serve.jobs import LiveAnswer
from tilemesh.serve.request import FinishReason
from tilemesh.serve.sampling import DrawKind, DrawnScores, TokenLogprobs, kind_of
from tilemesh.serve.scheduler import Scheduler
from tilemesh.serve.staging import RowColumns

Rows = NDArray[np.int64]
LEAST_ROWS = 16
"""Fewer are quicker one by one."""
_COLUMNS = 64
"""Steps whose tokens are kept here at most."""


class LaunchedRows(NamedTuple):
    """A step whose tokens nobody has read."""

    rows: Rows
    """Numbers of answers, ascending."""
    at: Rows
    """Where in the step each of them stands."""
    computed: Rows
    """How many tokens of each it leaves computed."""
    drawn: DrawnTokens | None
    """None: a step that was booked before the stretch began."""


class RowEnd(NamedTuple):
    """An answer that has ended, and its last token: none where its logits were NaN or infinite."""

    answer: LiveAnswer
    tokens: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs]
    reason: FinishReason


class DecodeStretch:
    """Answers that decode, from a step on that was launched for all of them."""

    def __init__(
        self,
        answers: Sequence[LiveAnswer],
        at: Sequence[int],
        drawn: DrawnTokens | None,
        scheduler: Scheduler,
        vocabulary: int,
    ) -> None:
        """`at`: where in the launched step, `drawn`, each of them stands; None: all tokens are known, of each step when
        it has been launched. All are plain and hold their tokens."""
        self.answers, self._scheduler, self._is_ahead = list(answers), scheduler, drawn is not None
        requests = [answer.request for answer in self.answers]
        samplings = [answer.job.sampling for answer in self.answers]
        self._page = page = scheduler.limits.page_tokens
        self._known: Rows = np.array([request.tokens[-1] for request in requests])
        for request in requests if self._is_ahead else ():
            del request.tokens[-1]  # the one that is on the device
        self._place: Rows = np.array([request.computed for request in requests])
        """Of the token that the next step computes."""
        self._last: Rows = np.array([request.prompt + request.max_tokens - 1 for request in requests])
        self._room: Rows = np.array([len(request.pages) * page for request in requests])
        self._tables = np.zeros((len(requests), scheduler.limits.pages_for(scheduler.limits.context)), np.int32)
        for row, request in enumerate(requests):
            self._tables[row, : len(request.pages)] = request.pages
        self._keys = np.array([stream_key(answer.job.seed, answer.number) for answer in self.answers], np.uint64)
        self._before: Rows = np.array([answer.drawn - answer.request.prompt + 1 for answer in self.answers])
        self._floats = np.array([(each.temperature, each.top_k, each.top_p, each.min_p, 0.0) for each in samplings]).T
        self._kind = max(kind_of(each, vocabulary) for each in samplings)
        self._wants = [each.logprobs is not None for each in samplings]
        self._ends: Rows = np.array(sorted(frozenset[int]().union(*{each.ends for each in requests})), np.int64)
        self._publishes = scheduler.limits.share_prefixes and scheduler.limits.share_answers
        self._alive = np.ones(len(requests), np.bool_)
        self._tokens = np.zeros((_COLUMNS, len(requests)), np.int64)
        self._scores = np.zeros((_COLUMNS, len(requests), 2))
        self._column = 0
        self._settled = [0] * len(requests)
        self.booked = 0
        """Rows of the step that was read last."""
        self._launched = LaunchedRows(np.arange(len(requests)), np.array(at), self._place.copy(), drawn)

    def step(self, launch: Callable[[RowColumns], DrawnTokens]) -> list[RowEnd] | None:
        """Launch a step and read the one before, or this one where tokens are known; the answers that it has ended,
        whose pages are free again. None, and nothing was done, where nobody has another token or pages are short."""
        rows, at, _, _ = before = self._launched
        going = self._alive[rows] & (self._place[rows] < self._last[rows])
        rows, at = rows[going], at[going]
        if not len(rows) or not self._take_pages(rows):
            return None
        drawn = launch(self._columns(rows, at))
        self._place[rows] += 1
        self._launched = LaunchedRows(rows, np.arange(len(rows)), self._place[rows], drawn)
        return self._book(before if self._is_ahead else self._launched)

    def end(self) -> list[RowEnd]:
        """Read the launched step and write into requests what they have drawn: they go on one by one."""
        ends = self._book(self._launched) if self._is_ahead else []
        self._settle_all()
        for row in np.flatnonzero(self._alive).tolist():
            self.answers[row].request.computed = int(self._place[row])
        return ends

    def _take_pages(self, rows: Rows) -> bool:
        """For those whose next token needs one; False, and none is taken, where there are too few."""
        short, pool = rows[self._place[rows] >= self._room[rows]], self._scheduler.pool
        if len(short) > pool.available:
            return False
        taken = pool.take(len(short))
        for row, page in zip(short.tolist(), taken, strict=True):
            self.answers[row].request.pages += (page,)
        self._tables[short, self._room[short] // self._page] = taken
        self._room[short] += self._page
        return True

    def _columns(self, rows: Rows, at: Rows) -> RowColumns:
        position, page = self._place[rows], self._page
        tables, floats = self._tables[rows, : int(position.max()) // page + 1], self._floats[:, rows]
        if self._kind is not DrawKind.GREEDY:
            floats[-1] = keyed_uniforms(self._keys[rows], position + self._before[rows])
        place = tables[np.arange(len(rows)), position // page] * np.int64(page) + position % page
        known = None if self._is_ahead else self._known[rows]
        return RowColumns(at, position, place, tables, floats, self._kind, any(self._wants), known)

    def _book(self, launched: LaunchedRows) -> list[RowEnd]:
        live = self._alive[launched.rows]
        self.booked = len(launched.rows)
        rows, at, computed = (each[live] for each in launched[:3])
        assert launched.drawn is not None
        tokens, *scores = launched.drawn.rows()
        tokens = tokens[at]
        self._tokens[self._column, rows] = self._known[rows] = tokens
        if scores:
            self._scores[self._column, rows] = scores[0][:, at].T
        self._column += 1
        ends = np.isin(tokens, self._ends) | (tokens < 0) | (computed == self._last[rows])
        seen = np.flatnonzero(ends | (computed % self._page == 0) if self._publishes else ends)
        each = zip(rows[seen].tolist(), tokens[seen].tolist(), computed[seen].tolist(), strict=True)
        ended = [end for row, token, known in each if (end := self._look_at(row, token, known)) is not None]
        if self._column == _COLUMNS:
            self._settle_all()
        return ended

    def _look_at(self, row: int, token: int, known: int) -> RowEnd | None:
        """An answer that filled a page or has perhaps ended, with its last token and how many are computed."""
        answer, request = self.answers[row], self.answers[row].request
        reason = FinishReason.STOP if token in request.ends else None
        if reason is None and known == self._last[row]:
            reason = FinishReason.LENGTH
        self._settle(row)
        before = request.pages
        if token >= 0:
            self._scheduler.settle(request, known, reason)
        if reason is None and token >= 0:
            if request.pages is not before:  # another one has computed the same tokens
                self._tables[row, : len(request.pages)] = request.pages
            return None
        self._alive[row] = False
        del answer.held[-1]
        own = [answer.scores.pop(), answer.scores.pop()][::-1] if self._wants[row] else []
        if reason is None or token < 0:
            del request.tokens[-1]
            return RowEnd(answer, (), (), FinishReason.ERROR)
        return RowEnd(answer, (token,), DrawnScores((token,), own) if own else (), reason)

    def _settle(self, row: int) -> None:
        """Write what an answer has drawn into it and its request."""
        answer, new = self.answers[row], slice(self._settled[row], self._column)
        tokens = self._tokens[new, row].tolist()
        answer.request.tokens += tokens
        answer.held += tokens
        if self._wants[row]:
            answer.scores += self._scores[new, row].ravel().tolist()
        self._settled[row] = self._column

    def _settle_all(self) -> None:
        for row in np.flatnonzero(self._alive).tolist():
            self._settle(row)
        self._column, self._settled = 0, [0] * len(self.answers)
