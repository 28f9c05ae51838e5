"""Dropout whose mask is a function of where an element stands, and of nothing else.

The one idea: whether the element at (row, token, feature) of the whole batch is kept follows from a hash of the seed,
the layer, the place in the layer and those three numbers. There is no generator with a state to keep in step, so a
rank that holds a part of an activation makes exactly its part of the mask, a recomputed layer meets the same mask
again, and a run that is resumed needs the step's number alone. It is not bit-compatible with `torch.nn.Dropout`.

The hash is SplitMix64 (Steele, Lea and Flood 2014): a counter times an odd constant, then two multiply-and-shift
rounds. Each 64-bit word decides two neighbouring features, 32 bits each, so a rate is exact to 2**-32.

B: rows (sequences); T: tokens; D: features; P: pairs of features.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError

_WORD = 2**64
_STEP = 0x9E3779B97F4A7C15  # the odd number nearest 2**64 / golden ratio: multiples of it fill the words evenly
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_HALF = 2**32


class Site(IntEnum):
    """Where in the model a mask is applied."""

    EMBEDDING = 0
    ATTENTION = 1
    MLP = 2


@dataclass(frozen=True)
class Place:
    """Where the first element of a tensor stands in the whole activation of the step."""

    row: int = 0
    """Counted over the step's whole batch: all replicas and all accumulated microbatches."""
    token: int = 0
    feature: int = 0

    def __post_init__(self) -> None:
        if min(self.row, self.token, self.feature) < 0:
            raise UsageError(f"{self} is before the beginning: expected numbers of at least 0")


ORIGIN = Place()


def dropout(x_BTD: Tensor, rate: float, *, seed: int | Tensor, layer: int, site: Site, place: Place = ORIGIN) -> Tensor:
    """x with elements dropped at this rate and the rest scaled so that the mean stays; saves one byte an element."""
    if rate == 0:
        return x_BTD
    mask_BTD = keep_mask(x_BTD.shape, rate, seed=seed, layer=layer, site=site, place=place, device=x_BTD.device)
    return torch.where(mask_BTD, x_BTD * (1 / (1 - rate)), 0.0)


def keep_mask(
    shape: torch.Size | tuple[int, ...],
    rate: float,
    *,
    seed: int | Tensor,
    layer: int,
    site: Site,
    place: Place = ORIGIN,
    device: torch.device | str | None = None,
) -> Tensor:
    """True where an element is kept, for the block of this (B, T, D) shape that begins at `place`.

    `seed`: a whole number, or a 0-d int64 tensor (then a compiled model is not compiled anew for each step).
    """
    if len(shape) != 3:
        raise UsageError(f"a mask of shape {tuple(shape)}: expected three dims, (rows, tokens, features)")
    if not 0 <= rate < 1:
        raise UsageError(f"dropout is {rate}: expected at least 0 and below 1")
    rows, tokens, features = shape
    row_B = torch.arange(place.row, place.row + rows, device=device)
    token_T = torch.arange(place.token, place.token + tokens, device=device)
    first, last = place.feature // 2, (place.feature + features + 1) // 2
    pair_P = torch.arange(first, last, device=device)

    stream = _hash(_as_word(seed, device) + _signed(fold_seed(layer, int(site))))
    # A row and a token share one word, 32 bits each: no two positions meet.
    start_BT = _hash(stream + (row_B[:, None] * _HALF + token_T) * _signed(_STEP))
    word_BTP = _hash(start_BT[:, :, None] + pair_P * _signed(_STEP))
    draw_BTD = torch.stack((word_BTP & (_HALF - 1), _shift(word_BTP, 32)), dim=-1).flatten(-2)
    skip = place.feature - 2 * first
    return draw_BTD[..., skip : skip + features] >= round(rate * _HALF)


def fold_seed(seed: int, *parts: int) -> int:
    """One seed out of several numbers, e.g. a run's seed and the step's number; between 0 and 2**63."""
    word = seed % _WORD
    for part in parts:
        word = (word + (part + 1) * _STEP) % _WORD
        for shift, factor in _ROUNDS:
            word = (word ^ (word >> shift)) * factor % _WORD
        word ^= word >> _LAST_SHIFT
    return word % 2**63


def _as_word(seed: int | Tensor, device: torch.device | str | None) -> Tensor:
    if isinstance(seed, Tensor):
        return seed
    return torch.full((), seed, dtype=torch.int64, device=device)


def _hash(word: Tensor) -> Tensor:
    """The finaliser of SplitMix64. int64 wraps around, which is the arithmetic modulo 2**64 it is defined in."""
    for shift, factor in _ROUNDS:
        word = (word ^ _shift(word, shift)) * _signed(factor)
    return word ^ _shift(word, _LAST_SHIFT)


def _shift(word: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings zeros in; int64's own repeats the sign."""
    shifted: Tensor = (word >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _signed(word: int) -> int:
    """The int64 with the same bits."""
    return word - _WORD if word >= _WORD // 2 else word
