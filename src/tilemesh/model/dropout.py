"""Dropout whose mask is a function of where an element stands, and of nothing else.

The one idea: whether the element at (row, token, feature) of the whole batch is kept follows from a hash of the seed,
the layer, the place in the layer and those three numbers. There is no generator with a state to keep in step, so a
rank that holds a part of an activation makes exactly its part of the mask, a recomputed layer meets the same mask
again, and a run that is resumed needs the step's number alone. It is not bit-compatible with `torch.nn.Dropout`.

A draw is 32 bits, so a rate is exact to 2**-32, and all of its arithmetic is: a GPU multiplies 64-bit integers in
several steps, and a compiler that fuses the mask into the layer's kernels makes it anew for every element. The mixing
is two rounds of multiply and shift with the constants of Wellons' search for low bias (hash-prospector, 2018); seeds
are folded on the host by SplitMix64 (Steele, Lea and Flood 2014).

B: rows (sequences); T: tokens; D: features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor, nn

from tilemesh.core.errors import UsageError

_WORD, _HALF = 2**64, 2**32
_STEP = 0x9E3779B97F4A7C15  # the odd number nearest 2**64 / golden ratio: multiples of it fill the words evenly
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_SHORT_STEP = 0x9E3779B9 - _HALF  # the same for 32 bits, as an int32
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - _HALF


class Site(IntEnum):
    """Where in the model a mask is applied."""

    EMBEDDING = 0
    ATTENTION = 1
    MLP = 2


@dataclass(frozen=True)
class DropoutPlace:
    """Where the first element of a tensor stands in the whole activation of the step."""

    row: int = 0
    """Counted over the step's whole batch: all replicas and all accumulated microbatches."""
    token: int | Tensor = 0
    """Or of every token, int32, where they are not one run of the sequence."""
    feature: int = 0

    def __post_init__(self) -> None:
        if min(self.row, 0 if isinstance(self.token, Tensor) else self.token, self.feature) < 0:
            raise UsageError(f"{self} is before the beginning: expected numbers of at least 0")

    def stretch(self, first: int, tokens: int) -> DropoutPlace:
        """Of so many of the tokens, from one of them on."""
        where = self.token
        return replace(self, token=where[first : first + tokens] if isinstance(where, Tensor) else where + first)


ORIGIN = DropoutPlace()


def dropout(
    x_BTD: Tensor, rate: float, *, seed: int | Tensor, layer: int, site: Site, place: DropoutPlace = ORIGIN
) -> Tensor:
    """x with elements dropped at this rate and the rest scaled so that the mean stays; saves one byte an element."""
    if rate == 0:
        return x_BTD
    mask_BTD = keep_mask(x_BTD.shape, rate, seed=seed, layer=layer, site=site, place=place, device=x_BTD.device)
    return torch.where(mask_BTD, x_BTD * (1 / (1 - rate)), 0.0)


class DroppingPass(Protocol):
    """What is read of a pass here."""

    @property
    def dropout_seed(self) -> int | Tensor | None: ...
    @property
    def place(self) -> DropoutPlace: ...


class Dropout(nn.Module):
    """Drops by place. A module, so that a model can be given another kind."""

    def __init__(self, rate: float, layer: int, site: Site) -> None:
        super().__init__()
        self.rate, self.layer, self.site = rate, layer, site

    def forward(self, x_BTD: Tensor, now: DroppingPass) -> Tensor:
        if now.dropout_seed is None:
            return x_BTD
        return dropout(x_BTD, self.rate, seed=now.dropout_seed, layer=self.layer, site=self.site, place=now.place)


def keep_mask(
    shape: torch.Size | tuple[int, ...],
    rate: float,
    *,
    seed: int | Tensor,
    layer: int,
    site: Site,
    place: DropoutPlace = ORIGIN,
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
    row_B, token_T, feature_D = (
        start if isinstance(start, Tensor) else torch.arange(start, start + count, dtype=torch.int32, device=device)
        for start, count in ((place.row, rows), (place.token, tokens), (place.feature, features))
    )
    low, high = _stream(seed, fold_seed(layer, int(site)), device)
    key_B = _mix(low + row_B * _SHORT_STEP)
    key_BT = _mix(key_B[:, None] + high + token_T * _SHORT_STEP)[:, :, None]
    # The key comes in twice: two tokens whose keys lie few steps apart would else share draws, shifted.
    word_BTD = key_BT + feature_D * _SHORT_STEP
    draw_BTD = _mix(word_BTD, key_BT)
    return draw_BTD >= round(rate * _HALF) - _HALF // 2


def fold_seed(seed: int, *parts: int) -> int:
    """One seed out of several numbers, e.g. a run's seed and the step's number; between 0 and 2**63."""
    word = seed % _WORD
    for part in parts:
        word = (word + (part + 1) * _STEP) % _WORD
        for shift, factor in _ROUNDS:
            word = (word ^ (word >> shift)) * factor % _WORD
        word ^= word >> _LAST_SHIFT
    return word % 2**63


def _stream(seed: int | Tensor, place: int, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
    """Two 32-bit keys of a seed at a place in the model."""
    whole = seed if isinstance(seed, Tensor) else torch.full((), seed, dtype=torch.int64, device=device)
    low, high = _short(whole), _short(whole >> 32)
    low = _mix(low + _signed(place % _HALF))
    return low, _mix(high + low + _signed(place >> 32))


def _mix(word: Tensor, key: Tensor | int = 0) -> Tensor:
    """int32 to int32, every bit of the result hanging on every bit given; int32 wraps around, modulo 2**32."""
    word = (word ^ _shift(word, 16)) * _FIRST
    word = (word ^ _shift(word, 15) ^ key) * _SECOND
    return word ^ _shift(word, 16)


def _shift(word: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings zeros in; int32's own repeats the sign."""
    shifted: Tensor = (word >> bits) & (2 ** (32 - bits) - 1)
    return shifted


def _short(word: Tensor) -> Tensor:
    """The lower 32 bits as an int32."""
    return (((word & (_HALF - 1)) ^ (_HALF // 2)) - _HALF // 2).to(torch.int32)


def _signed(word: int) -> int:
    """The int32 with the same bits."""
    return word - _HALF if word >= _HALF // 2 else word
