"""A toy paged cache, written against `KeyValueCache` alone: pages of four tokens in one pool, a table per sequence.

It attends one token and one sequence at a time. A pass may have a sequence per row, padded at the left or the right, or
all sequences packed into a single row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilemesh.model.cache import DenseCache, KeyValueCache

PAGE = 4
Model = Callable[[Tensor, KeyValueCache], Tensor]


class Piece(NamedTuple):
    """New tokens of one sequence, and where they stand in the pass."""

    sequence: int
    row: int
    columns: slice
    start: int


class PagedCache:
    def __init__(self, capacity: int, pages: int, seed: int = 0) -> None:
        self.capacity = capacity
        self.positions_BT = torch.empty(0, 0, dtype=torch.int64)
        self.free = random.Random(seed).sample(range(pages), pages)  # in no order, so neighbours are never neighbours
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.pieces: list[Piece] = []
        self.pools: dict[int, tuple[Tensor, Tensor]] = {}
        self.pages = pages

    def schedule(self, chunks: Mapping[int, Tensor], how: str) -> Tensor:
        """Take pages for each sequence's new tokens; returns them as the model is to get them."""
        longest = max(len(chunk) for chunk in chunks.values())
        shape = (1, sum(map(len, chunks.values()))) if how == "packed" else (len(chunks), longest)
        tokens_BT, self.positions_BT = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        self.pieces, column = [], 0
        for row, (sequence, chunk) in enumerate(chunks.items()):
            start = self.lengths.get(sequence, 0)
            first = {"packed": column, "left": 0, "right": longest - len(chunk)}[how]
            columns, column = slice(first, first + len(chunk)), column + len(chunk)
            piece = Piece(sequence, 0 if how == "packed" else row, columns, start)
            tokens_BT[piece.row, columns] = chunk
            self.positions_BT[piece.row, columns] = torch.arange(start, start + len(chunk))
            self.lengths[sequence] = start + len(chunk)
            table = self.tables.setdefault(sequence, [])
            while len(table) * PAGE < self.lengths[sequence]:
                table.append(self.free.pop())
            self.pieces.append(piece)
        return tokens_BT

    def attend(
        self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, *, window: int = 0, cap: float = 0.0,
        sinks_H: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if layer not in self.pools:
            shape = (self.pages, PAGE, *k_BTKE.shape[2:])
            self.pools[layer] = (k_BTKE.new_full(shape, torch.nan), v_BTKE.new_full(shape, torch.nan))
        keys, values = self.pools[layer]
        y_BTHE = torch.zeros_like(q_BTHE)
        shared = q_BTHE.shape[2] // k_BTKE.shape[2]
        for sequence, row, columns, start in self.pieces:
            table = torch.tensor(self.tables[sequence])
            for step, column in enumerate(range(columns.start, columns.stop)):
                page, place = divmod(start + step, PAGE)
                keys[table[page], place] = k_BTKE[row, column]
                values[table[page], place] = v_BTKE[row, column]
                end = start + step + 1
                first = max(0, end - window) if window else 0
                k_SHE = keys[table].flatten(0, 1)[first:end].repeat_interleave(shared, dim=1)
                v_SHE = values[table].flatten(0, 1)[first:end].repeat_interleave(shared, dim=1)
                q_HE = q_BTHE[row, column]
                scores_HS = torch.einsum("he,she->hs", q_HE, k_SHE).div(q_HE.shape[-1] ** 0.5)
                if cap:
                    scores_HS = cap * torch.tanh(scores_HS / cap)
                total_H = scores_HS.logsumexp(-1)
                if sinks_H is not None:
                    total_H = torch.logaddexp(total_H, sinks_H)
                y_BTHE[row, column] = torch.einsum("hs,she->he", (scores_HS - total_H[:, None]).exp(), v_SHE)
        return y_BTHE


def through_pages(model: Model, sequences: Sequence[Tensor], capacity: int, how: str, seed: int) -> list[Tensor]:
    """Each sequence's logits, from passes over pieces of some of them: prompts in chunks beside single tokens."""
    draw, cache = random.Random(seed), PagedCache(capacity, sum(-(-len(tokens) // PAGE) for tokens in sequences), seed)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    while waiting := [number for number, tokens in enumerate(sequences) if cache.lengths.get(number, 0) < len(tokens)]:
        chunks = {}
        for number in draw.sample(waiting, draw.randint(1, len(waiting))):
            start = cache.lengths.get(number, 0)
            chunks[number] = sequences[number][start : start + draw.choice((1, 1, 2, 3, 5))]
        made_BTV = model(cache.schedule(chunks, how), cache)
        for sequence, row, columns, _ in cache.pieces:
            logits[sequence].append(made_BTV[row, columns])
    assert not cache.free
    return [torch.cat(parts) for parts in logits]


def through_rows(model: Model, sequences: Sequence[Tensor], capacity: int, seed: int) -> list[Tensor]:
    """The same by a `DenseCache`: a row per sequence, which gets some tokens or none in a pass."""
    draw, cache = random.Random(seed), DenseCache(len(sequences), capacity)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    while any(length < len(tokens) for length, tokens in zip(cache.lengths, sequences, strict=True)):
        starts = list(cache.lengths)
        counts = [min(draw.choice((0, 1, 1, 2, 5)), len(tokens) - start)
                  for start, tokens in zip(starts, sequences, strict=True)]  # fmt: skip
        tokens_BT = torch.ones(len(sequences), max(counts), dtype=torch.int64)
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            tokens_BT[row, :count] = sequences[row][start : start + count]
        made_BTV = model(tokens_BT, cache.extend(counts))
        for row, count in enumerate(counts):
            logits[row].append(made_BTV[row, :count])
    return [torch.cat(parts) for parts in logits]
