"""Tokens one after the other, and the samples and batches that are cut from them.

The one idea: a sample is a number. Sample i of a stream is the tokens from i x context on, one more than a sequence
for the targets; `order.py` says which number stands at which position, so a batch is a pure function of (seed,
position) and a checkpoint keeps one integer.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilemesh.data.order import Order
from tilemesh.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Stream:
    """Tokens one after the other, in one or several arrays (shards), which samples may span."""

    parts: tuple[NDArray[Any], ...]

    @property
    def length(self) -> int:
        return sum(len(part) for part in self.parts)

    def samples(self, context: int) -> int:
        """Whole sequences; the last token is only ever a target."""
        return max(0, (self.length - 1) // context)

    def sample(self, index: int, context: int) -> NDArray[np.int64]:
        """context + 1 tokens: inputs and, one further, targets."""
        begin, wanted = index * context, context + 1
        taken: list[NDArray[Any]] = []
        for part in self.parts:
            if wanted and begin < len(part):
                piece = part[begin : begin + wanted]
                taken.append(piece)
                wanted -= len(piece)
                begin = 0
            else:
                begin -= len(part) if not taken else 0
        return np.concatenate([np.asarray(piece, np.int64) for piece in taken])

    def fingerprint(self) -> str:
        """A short name of the content: length, and a checksum of some of it spread over the whole."""
        digest = hashlib.sha256(str(self.length).encode())
        for part in self.parts:
            step = max(1, len(part) // (1 << 20))
            digest.update(zlib.crc32(np.ascontiguousarray(part[::step]).tobytes()).to_bytes(4, "little"))
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Corpus:
    """What a run learns from and what it is judged by."""

    train: Stream
    held_out: Stream
    tokenizer: Tokenizer
    words: str
    """For people: where it came from and how much."""


def batch(stream: Stream, order: Order, position: int, rows: Iterable[int], context: int) -> NDArray[np.int64]:
    """(rows, context + 1) tokens: the given rows of the batch that begins at a position."""
    return np.stack([stream.sample(order.at(position + row), context) for row in rows])


def cut_end(whole: Stream, fraction: float) -> tuple[Stream, Stream]:
    """The end of a stream held out, across its parts."""
    keep = whole.length - int(whole.length * fraction)
    train, held = [], []
    for part in whole.parts:
        train.append(part[:keep])
        held.append(part[keep:] if keep < len(part) else part[:0])
        keep = max(0, keep - len(part))
    return Stream(tuple(p for p in train if len(p))), Stream(tuple(p for p in held if len(p)))
