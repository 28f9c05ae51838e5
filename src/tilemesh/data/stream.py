"""Tokens one after the other, with what is known of each: where documents begin, and which tokens count as targets.

Sample i of a stream is the tokens from i x context on, one more than a sequence for the targets. `samples.py` makes
sequences of it, and `order.py` says which sequence stands at which position.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilemesh.data.order import Order
from tilemesh.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Stream:
    """Tokens one after the other, in one or several arrays (shards), which samples may span."""

    parts: tuple[NDArray[Any], ...]
    counted: tuple[NDArray[Any], ...] = ()
    """Of each part, which tokens count as targets (not 0); empty: all do."""
    kept_begins: tuple[NDArray[np.int64], ...] = ()
    """Of each part, at which of its tokens documents begin; empty: after each token that ends one."""

    @property
    def length(self) -> int:
        return sum(len(part) for part in self.parts)

    def samples(self, context: int) -> int:
        """Whole sequences; the last token is only ever a target."""
        return max(0, (self.length - 1) // context)

    def sample(self, index: int, context: int) -> NDArray[np.int64]:
        """context + 1 tokens: inputs and, one further, targets."""
        return self.tokens(index * context, context + 1)

    def tokens(self, begin: int, count: int) -> NDArray[np.int64]:
        """So many tokens from a place on; fewer where the stream ends."""
        return _taken(self.parts, begin, count)

    def counts(self, begin: int, count: int) -> NDArray[np.bool_]:
        """Of the same tokens, which count as targets."""
        if not self.counted:
            return np.ones(min(count, self.length - begin), np.bool_)
        return _taken(self.counted, begin, count).astype(np.bool_)

    def stretch(self, number: int, here: slice) -> Stream:
        """Some tokens of one part, with what is known of them."""
        part = self.parts[number]
        first, last, _ = here.indices(len(part))
        kept = [begins[(begins >= first) & (begins < last)] - first for begins in self.kept_begins[number : number + 1]]
        return Stream((part[here],), tuple(counted[here] for counted in self.counted[number : number + 1]), tuple(kept))

    def begins(self, end: int) -> NDArray[np.int64]:
        """Where documents begin: at the beginning, and as was kept; else after each token that ends one."""
        if self.kept_begins:
            return self._begins
        begins, before = [np.zeros(min(1, self.length), np.int64)], 0
        for part in self.parts:
            begins.append(np.flatnonzero(np.asarray(part) == end) + before + 1)
            before += len(part)
        joined = np.concatenate(begins)
        return joined[joined < before]

    def begins_among(self, begin: int, tokens: NDArray[np.int64], end: int) -> NDArray[np.bool_]:
        """Of tokens taken from a place on, which begin a document; the first, before which none is known, does not."""
        begins = np.zeros(len(tokens), np.bool_)
        if self.kept_begins:
            first, last = np.searchsorted(self._begins, [begin + 1, begin + len(tokens)])
            begins[self._begins[first:last] - begin] = True
        else:
            begins[1:] = tokens[:-1] == end
        return begins

    @cached_property
    def _begins(self) -> NDArray[np.int64]:
        """Those that were kept, over all parts, and the beginning of the stream."""
        before = np.cumsum([0, *(len(part) for part in self.parts)])
        kept = [begins + place for begins, place in zip(self.kept_begins, before, strict=False)]
        return np.unique(np.concatenate([np.zeros(min(1, self.length), np.int64), *kept]))

    def fingerprint(self) -> str:
        """A short name of the content: length, and a checksum of some of it spread over the whole."""
        digest = hashlib.sha256(str(self.length).encode())
        for part in (*self.parts, *self.counted, *self.kept_begins):
            step = max(1, len(part) // (1 << 20))
            digest.update(zlib.crc32(np.ascontiguousarray(part[::step]).tobytes()).to_bytes(4, "little"))
        return digest.hexdigest()[:16]


def _taken(parts: Sequence[NDArray[Any]], begin: int, wanted: int) -> NDArray[np.int64]:
    taken: list[NDArray[Any]] = []
    for part in parts:
        if wanted and begin < len(part):
            piece = part[begin : begin + wanted]
            taken.append(piece)
            wanted -= len(piece)
            begin = 0
        else:
            begin -= len(part) if not taken else 0
    return np.concatenate([np.asarray(piece, np.int64) for piece in taken]) if taken else np.zeros(0, np.int64)


@dataclass(frozen=True)
class CorpusPart:
    """One of the sources that a run learns from."""

    train: Stream
    held_out: Stream
    weight: float = 1.0


@dataclass(frozen=True)
class Corpus:
    """What a run learns from and what it is judged by."""

    parts: tuple[CorpusPart, ...]
    tokenizer: Tokenizer
    words: str
    """For people: where it came from and how much."""

    @property
    def train(self) -> Stream:
        """Of the first source, which mostly is the only one."""
        return self.parts[0].train

    @property
    def held_out(self) -> Stream:
        return self.parts[0].held_out

    @property
    def counts_all(self) -> bool:
        """Whether every token is a target that counts."""
        return not any(part.train.counted for part in self.parts)

    def fingerprint(self) -> str:
        """A short name of the content."""
        names = [part.train.fingerprint() for part in self.parts]
        return names[0] if len(names) == 1 else hashlib.sha256("".join(names).encode()).hexdigest()[:16]


def batch(stream: Stream, order: Order, position: int, rows: Iterable[int], context: int) -> NDArray[np.int64]:
    """(rows, context + 1) tokens: the given rows of the batch that begins at a position."""
    return np.stack([stream.sample(order.at(position + row), context) for row in rows])


def cut_end(stream: Stream, fraction: float) -> tuple[Stream, Stream]:
    """The end of a stream held out, across its parts."""
    keep = stream.length - int(stream.length * fraction)
    return _cut(stream, keep, False), _cut(stream, keep, True)


def _cut(stream: Stream, keep: int, is_end: bool) -> Stream:
    """What comes before a place, or what comes from it on."""
    before = 0
    kept = Stream(())
    for number, part in enumerate(stream.parts):
        here = min(max(0, keep - before), len(part))
        before += len(part)
        stretch = stream.stretch(number, slice(here, None) if is_end else slice(0, here))
        if stretch.length:
            kept = Stream(
                kept.parts + stretch.parts, kept.counted + stretch.counted, kept.kept_begins + stretch.kept_begins
            )
    return kept
