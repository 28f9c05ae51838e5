"""Which sample stands where: an epoch's order as a pure function of (seed, epoch, place), with no list to keep.

The one idea: a permutation of 0..n-1 is a small block cipher. Four Feistel rounds permute the next power of four at
least as large as n, and a value that falls outside is enciphered again until it falls inside (cycle walking), which
is still a bijection. So the order needs no memory, any place can be asked for alone, and neither the number of ranks
nor where a run was stopped is in it: a position is just the number of samples taken so far.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from tilemesh.core.errors import UsageError

_WORD = 2**64
_ROUNDS = 4  # Luby and Rackoff 1988: four rounds with random functions pass for a random permutation


@dataclass(frozen=True)
class Order:
    """Samples 0..samples-1, each exactly once an epoch, differently in every epoch."""

    samples: int
    seed: int

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError("no samples: the text is shorter than one sequence; give more data or a shorter context")

    def at(self, position: int) -> int:
        """The sample at a position, counted from the run's beginning over all epochs."""
        epoch, place = divmod(position, self.samples)
        return permuted(place, self.samples, _mixed(self.seed, epoch))

    def rows(self, position: int, count: int) -> Iterator[int]:
        """The samples of the next `count` positions."""
        return (self.at(position + row) for row in range(count))


def rows_of(batch: int, dp: int, index: int, accumulation: int, micro: int) -> range:
    """Which rows of a step's batch microbatch `micro` of replica `index` takes.

    Replicas hold contiguous blocks and microbatches contiguous blocks of those: all of them together are the batch,
    once, whatever dp and accumulation are.
    """
    if batch % (dp * accumulation):
        raise UsageError(f"a batch of {batch} does not divide into {dp} replicas x {accumulation} microbatches")
    size = batch // (dp * accumulation)
    begin = (index * accumulation + micro) * size
    return range(begin, begin + size)


def permuted(place: int, count: int, key: int) -> int:
    """The place's image under the permutation of 0..count-1 that the key names."""
    if not 0 <= place < count:
        raise UsageError(f"place {place} of {count}: expected at least 0 and below")
    half = (max(count - 1, 1).bit_length() + 1) // 2  # bits of each half; both together span at least count
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for round_key in _round_keys(key):
            left, right = right, left ^ (_mixed(round_key, right) & mask)
        place = left << half | right
        if place < count:
            return place


@functools.lru_cache(maxsize=64)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(_mixed(key, number) for number in range(_ROUNDS))


def _mixed(seed: int, number: int) -> int:
    """One word out of two numbers: SplitMix64's finaliser (Steele, Lea and Flood 2014)."""
    word = (seed + (number + 1) * 0x9E3779B97F4A7C15) % _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % _WORD
    return word ^ (word >> 31)
