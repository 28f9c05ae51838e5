"""The numbers of a step on their way to the device: written by the host, copied, then read by captured kernels.

The one idea: what a captured step reads lies in memory that stays, so a step's numbers are written into host memory
that stays as well and copied there as a whole. A row mostly has the pages and the sampling that it had when it was last
written: they are written only if they differ.

A step in which every request decodes has a token per row. A step with prompts has its tokens one after the other, those
that decode first, rounded up to one of a few numbers; attention is given tiles, a few tokens of one sequence each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilemesh.model.sampling import keyed_uniform
from tilemesh.serve.request import Sampling
from tilemesh.serve.sampling import DrawKind, TokenDraw, kind_of
from tilemesh.serve.scheduler import UNKNOWN, Scheduled, ServeLimits

TOKEN_NUMBERS = ("known", "source", "position", "place")
"""Of each token: itself; which of the numbers on the device it is, one that the last step drew or the one just named;
where it stands; where it goes."""
ROW_FLOATS = ("temperature", "top_k", "top_p", "min_p", "uniform")
"""Of each row that is drawn; the last one is a random number."""
_TILE_NUMBERS = 4
_ROUND = 16


def rounded_tokens(tokens: int) -> int:
    """Of a pass with prompts: to 64 more at most up to 1,024, to an eighth of a power of two beyond."""
    step = max(64, 1 << max(0, (tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step


@dataclass(frozen=True)
class StepSizes:
    """What a step's numbers have room for, and how they are rounded up."""

    limits: ServeLimits
    tile: int
    """Tokens of a tile of a prompt."""

    @property
    def most_tokens(self) -> int:
        return rounded_tokens(self.limits.step_tokens)

    def all_tokens(self) -> list[int]:
        """The numbers of tokens that steps with prompts are rounded up to."""
        sizes = {rounded_tokens(tokens) for tokens in range(1, self.limits.step_tokens + 1, 64)}
        return sorted(sizes | {self.most_tokens})

    def rows(self, rows: int) -> int:
        """The number of rows that a step is captured for: powers of two, and from 16 on multiples of 16."""
        wanted = 1 << (rows - 1).bit_length() if rows <= _ROUND else -(-rows // _ROUND) * _ROUND
        return min(wanted, self.limits.running)

    def drawn(self, tokens: int) -> int:
        """Rows that a step of so many tokens with prompts may draw for."""
        return min(tokens, self.limits.running)

    def tiles(self, tokens: int) -> int:
        """As many as such a step may need: each of its sequences may have one that is not full."""
        return -(-(-(-tokens // self.tile) + self.drawn(tokens)) // _ROUND) * _ROUND


class StepMemory:
    """Tensors that hold a step's numbers: on the device, or on the host."""

    def __init__(self, sizes: StepSizes, device: torch.device, pinned: bool = False) -> None:
        limits, most = sizes.limits, sizes.most_tokens
        rows, columns = limits.running, limits.pages_for(limits.context)

        def made(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

        self.numbers = made(rows + (len(TOKEN_NUMBERS) + _TILE_NUMBERS // 2) * most, dtype=torch.int64)
        """What was drawn, then TOKEN_NUMBERS one after the other, each of as many as the step has: a token that is
        known and one that only the device knows are looked up in one place. Behind them the tiles of a step in which
        every request decodes."""
        self.drawn, self._tokens = self.numbers[:rows], self.numbers[rows:]
        self.tiles = made(sizes.tiles(most), _TILE_NUMBERS, dtype=torch.int32)
        self.wanted = made(rows, dtype=torch.int64)
        """Of a step with prompts: the tokens that something is drawn after."""
        self.floats = made(len(ROW_FLOATS), rows, dtype=torch.float64)
        self.tables = made(rows, columns, dtype=torch.int32)
        self.scores = made(2, rows, dtype=torch.float64)
        """Log-probabilities of what was drawn: the model's own, and as sampled."""

    def of_tokens(self, count: int) -> Tensor:
        return self._tokens[: len(TOKEN_NUMBERS) * count].view(len(TOKEN_NUMBERS), count)

    def of_rows(self, rows: int) -> Tensor:
        """All that a step of so many decoding rows has of them: numbers of tokens, and tiles."""
        return self._tokens[: (len(TOKEN_NUMBERS) + _TILE_NUMBERS // 2) * rows]

    def tiles_of_rows(self, rows: int) -> Tensor:
        """Of a step in which every request decodes: one per row."""
        return self.of_rows(rows)[len(TOKEN_NUMBERS) * rows :].view(torch.int32).view(rows, _TILE_NUMBERS)


class RowColumns(NamedTuple):
    """A step in which every request decodes, as arrays over its rows."""

    source: NDArray[np.int64]
    """Which row of the last step drew its token."""
    position: NDArray[np.int64]
    place: NDArray[np.int64]
    tables: NDArray[np.int32]
    """The pages of each row, as many as the longest has."""
    floats: NDArray[np.float64]
    """ROW_FLOATS."""
    kind: DrawKind
    scored: bool
    known: NDArray[np.int64] | None = None
    """The tokens, where the host knows them."""


class Staging:
    """Host memory that a step's numbers are written into; pinned where they are then copied to a GPU."""

    def __init__(self, sizes: StepSizes, vocabulary: int, pinned: bool) -> None:
        self._sizes, self._vocabulary, self._page = sizes, vocabulary, sizes.limits.page_tokens
        self.host = StepMemory(sizes, torch.device("cpu"), pinned)
        # The same memory, as numpy has it: a list is written there in a tenth of the time.
        self._tiles, self._wanted, self._floats, self._tables = (
            getattr(self.host, name).numpy() for name in ("tiles", "wanted", "floats", "tables")
        )
        self._own = np.arange(sizes.most_tokens)
        self._drawn = sizes.limits.running
        self._pages: list[tuple[int, ...]] = [()] * sizes.limits.running
        self._samplings: list[Sampling | None] = [None] * sizes.limits.running
        self._kinds = [DrawKind.GREEDY] * sizes.limits.running

    def write_decoding(
        self, entries: Sequence[Scheduled], drawings: Sequence[TokenDraw], left: Mapping[str, int], rows: int
    ) -> DrawKind:
        """A step of so many rows, of which the last ones are padding. `left`: where the last step left each request's
        token."""
        numbers, tiles, count = self.host.of_tokens(rows).numpy(), self.host.tiles_of_rows(rows).numpy(), len(entries)
        self._write_single(entries, left, numbers)
        self._write_tiles(tiles, numbers, count)
        for row, entry in enumerate(entries):
            self._write_pages(row, entry.pages)
        return self._write_sampling(drawings)

    def write_columns(self, columns: RowColumns, rows: int) -> None:
        """The same of rows whose tokens the last step drew, without a look at any of them."""
        numbers, tiles = self.host.of_tokens(rows).numpy(), self.host.tiles_of_rows(rows).numpy()
        count, width = columns.tables.shape
        numbers[0, :count] = 0
        numbers[1:, :count] = columns.source, columns.position, columns.place
        self._pad(numbers, count)
        self._write_tiles(tiles, numbers, count)
        self._tables[:count, :width] = columns.tables
        self._floats[:, :count] = columns.floats
        self._pages[:count], self._samplings[:count] = [()] * count, [None] * count  # nobody's that is known here

    def _write_tiles(self, tiles: NDArray[np.int32], numbers: NDArray[np.int64], count: int) -> None:
        """One for each row that decodes."""
        tiles[:count, 0] = tiles[:count, 1] = self._own[:count]
        tiles[:count, 2] = 1
        tiles[:count, 3] = numbers[2, :count]
        tiles[count:] = 0

    def _pad(self, numbers: NDArray[np.int64], count: int) -> None:
        """Tokens from `count` on, which nobody looks at: what each is stands at its own place."""
        numbers[1, count:] = self._own[count : numbers.shape[1]]
        numbers[1, count:] += self._drawn
        numbers[0, count:] = numbers[2, count:] = 0
        numbers[3, count:] = -1

    def write_prompts(
        self, ordered: Sequence[Scheduled], drawings: Sequence[TokenDraw], left: Mapping[str, int], tokens: int
    ) -> DrawKind:
        """A step of so many tokens, of which the last ones are padding. The entries come with those of a single token
        first, the drawings in the order of the entries that sample."""
        single = sum(entry.count == 1 for entry in ordered)
        numbers = self.host.of_tokens(tokens).numpy()
        self._write_single(ordered[:single], left, numbers)
        tiles, wanted, begin = [(row, row, 1, ordered[row].start) for row in range(single)], [], single
        for row, entry in enumerate(ordered):
            self._write_pages(row, entry.pages)
            if row < single:
                last = row
            else:
                self._write_chunk(entry, left, numbers, begin)
                size = self._sizes.tile
                for at in range(0, entry.count, size):
                    tiles.append((row, begin + at, min(size, entry.count - at), entry.start + at))
                begin += entry.count
                last = begin - 1
            if entry.samples:
                wanted.append(last)
        if tiles:
            self._tiles[: len(tiles)] = tiles
        self._tiles[len(tiles) : self._sizes.tiles(tokens)] = 0
        self._wanted[: len(wanted)] = wanted
        self._wanted[len(wanted) :] = 0  # what is drawn there is looked at by nobody
        return self._write_sampling(drawings)

    def _write_single(self, entries: Sequence[Scheduled], left: Mapping[str, int], numbers: NDArray[np.int64]) -> None:
        """The tokens of entries that have one each, and padding behind them."""
        page, count = self._page, len(entries)
        known = [entry.request.tokens[entry.start] for entry in entries]
        source = [
            left[entry.request.name] if token == UNKNOWN else self._drawn + row
            for row, (entry, token) in enumerate(zip(entries, known, strict=True))
        ]
        numbers[0, :count], numbers[1, :count] = known, source
        self._pad(numbers, count)
        numbers[2, :count] = [entry.start for entry in entries]
        numbers[3, :count] = [entry.pages[entry.start // page] * page + entry.start % page for entry in entries]

    def _write_chunk(self, entry: Scheduled, left: Mapping[str, int], numbers: NDArray[np.int64], begin: int) -> None:
        """A chunk of a prompt, from the token `begin` of the step on."""
        end, page = entry.start + entry.count, self._page
        known = entry.request.tokens[entry.start : end]
        position = np.arange(entry.start, end)
        pages = np.array(entry.pages[entry.start // page : -(-end // page)])
        last = begin + entry.count - 1
        numbers[0, begin : last + 1], numbers[2, begin : last + 1] = known, position
        numbers[3, begin : last + 1] = pages[position // page - entry.start // page] * page + position % page
        if known[-1] == UNKNOWN:
            numbers[1, last] = left[entry.request.name]

    def _write_pages(self, row: int, pages: tuple[int, ...]) -> None:
        if self._pages[row] is not pages:
            self._pages[row] = pages
            self._tables[row, : len(pages)] = pages

    def _write_sampling(self, drawings: Sequence[TokenDraw]) -> DrawKind:
        """A row each; what has to be done to draw them all."""
        for row, drawing in enumerate(drawings):
            sampling = drawing.sampling
            if self._samplings[row] is not sampling:
                self._samplings[row], self._kinds[row] = sampling, kind_of(sampling, self._vocabulary)
                self._floats[:-1, row] = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
            if sampling.temperature > 0:
                self._floats[-1, row] = keyed_uniform(drawing.seed, drawing.answer, drawing.number)
        return max(self._kinds[: len(drawings)], default=DrawKind.GREEDY)
