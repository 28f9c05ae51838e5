"""From tokens to sequences: how documents are packed, which targets count, and which sequence stands at a position.

The one idea: a sequence is a number, and so is where a run stands in its data. Sequence i of a source, and the source
and sequence at a position of a mixture, are pure functions: a checkpoint keeps one integer, whatever the packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilemesh.core.errors import UsageError
from tilemesh.data.order import Order, permuted
from tilemesh.data.stream import Corpus, Stream

IGNORED = -100
"""A target that counts for nothing in the loss, as the model and torch have it."""

PERIOD = 4096
"""Positions after which the sources of a mixture repeat: weights are kept to one part in so many."""

Packing = Literal["stream", "documents", "none"]


class SamplePair(NamedTuple):
    """What a model is given, and what it is to predict after each token.

    With packing by documents, a token t that begins a document inside of the sequence is given as -1 - t, which is how
    a model takes it (`marked`).
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]


class Samples:
    """The sequences of one stream. `end`: the token that ends a document."""

    def __init__(self, stream: Stream, context: int, packing: Packing, end: int) -> None:
        self.stream, self.context, self.packing, self.end = stream, context, packing, end

    def __len__(self) -> int:
        return len(self._rows) if self.packing == "none" else self.stream.samples(self.context)

    def __getitem__(self, index: int) -> SamplePair:
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin, length = index * self.context, self.context + 1
        if self.packing == "none":
            begin, length = self._rows[index].tolist()
        tokens, counts = self.stream.tokens(begin, length), self.stream.counts(begin, length)
        inputs = np.full(self.context, self.end, np.int64)
        targets = np.full(self.context, IGNORED, np.int64)
        inputs[: length - 1] = tokens[:-1]
        targets[: length - 1] = np.where(counts[1:], tokens[1:], IGNORED)
        if self.packing == "documents":
            begins = self.stream.begins_among(begin, tokens, self.end)
            targets[begins[1:]] = IGNORED  # nothing before it says how the next document begins
            inputs[begins[:-1]] = -1 - inputs[begins[:-1]]
        return SamplePair(inputs, targets)

    def tokens(self, index: int) -> int:
        """Tokens of a sequence, without those that fill it up to the context."""
        return int(self._rows[index, 1]) - 1 if self.packing == "none" else self.context

    @cached_property
    def _rows(self) -> NDArray[np.int64]:
        """(begin, tokens) of each sequence of a document by itself; longer ones are cut, each piece's last target being
        the next one's first token."""
        begins = self.stream.begins(self.end)
        ends = np.append(begins[1:], self.stream.length)
        pieces = np.maximum(0, -(-(ends - begins - 1) // self.context))
        which = np.repeat(np.arange(len(begins)), pieces)
        first = np.concatenate([[0], np.cumsum(pieces)[:-1]]) if len(pieces) else np.zeros(0, np.int64)
        begin = begins[which] + (np.arange(len(which)) - first[which]) * self.context
        return np.stack([begin, np.minimum(self.context + 1, ends[which] - begin)], axis=1)


class Mixture:
    """The sequence at each position of a run, from one source or from several by their weights."""

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float], seed: int) -> None:
        for number, source in enumerate(sources):
            if not len(source):
                which = f"source {number + 1} of data.mixture" if len(sources) > 1 else "the text"
                raise UsageError(
                    f"no samples: {which} is shorter than one sequence ({source.stream.length} tokens are left for "
                    f"training, a sequence takes {source.context + 1}); give more data or a shorter context"
                )
        self.sources = list(sources)
        self.orders = [Order(len(source), seed + number) for number, source in enumerate(sources)]
        self.slots = apportioned(weights, PERIOD) if len(sources) > 1 else [1]
        # Which source each place of a period takes, and how often it was taken before in the same period.
        owners = np.repeat(np.arange(len(self.slots)), self.slots)
        period = len(owners)
        self._owner = owners[[permuted(place, period, seed) for place in range(period)]]
        self._before = np.zeros(period, np.int64)
        for number in range(len(self.slots)):
            mine = self._owner == number
            self._before[mine] = np.arange(int(mine.sum()))

    def __len__(self) -> int:
        """Sequences of all sources together."""
        return sum(len(source) for source in self.sources)

    def at(self, position: int) -> SamplePair:
        source, index = self.place(position)
        return self.sources[source][index]

    def tokens(self, position: int) -> int:
        source, index = self.place(position)
        return self.sources[source].tokens(index)

    def place(self, position: int) -> tuple[int, int]:
        """(source, sequence) at a position, counted from the run's beginning."""
        period, place = divmod(position, len(self._owner))
        source = int(self._owner[place])
        taken = period * self.slots[source] + int(self._before[place])
        return source, self.orders[source].at(taken)


def apportioned(weights: Sequence[float], total: int) -> list[int]:
    """So many slots shared out by weights, each getting at least one: largest remainders first."""
    scaled = [weight / sum(weights) * total for weight in weights]
    slots = [max(1, int(share)) for share in scaled]
    by_rest = sorted(range(len(weights)), key=lambda number: scaled[number] - slots[number], reverse=True)
    for turn in range(total - sum(slots)):
        slots[by_rest[turn % len(slots)]] += 1
    while sum(slots) > total:  # many sources so small that one slot each is more than their share
        slots[max(range(len(slots)), key=lambda number: slots[number])] -= 1
    return slots


def train_mixture(corpus: Corpus, context: int, packing: Packing, seed: int) -> Mixture:
    """What a run trains on, position by position."""
    sources = [Samples(part.train, context, packing, corpus.tokenizer.end) for part in corpus.parts]
    return Mixture(sources, [part.weight for part in corpus.parts], seed)


def held_out_samples(corpus: Corpus, context: int, packing: Packing, most: int) -> list[SamplePair]:
    """The first held-out sequences, of each source in turn: always the same ones."""
    sources = [Samples(part.held_out, context, packing, corpus.tokenizer.end) for part in corpus.parts]
    samples: list[Any] = []
    for index in range(max((len(source) for source in sources), default=0)):
        samples += [source[index] for source in sources if index < len(source)][: most - len(samples)]
        if len(samples) >= most:
            break
    return samples
