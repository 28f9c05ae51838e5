"""Sizes that are not known yet: polynomials with whole coefficients over named sizes, as `2*batch + 1`.

A size is an `int` where it is known and a `Size` where it is not. Two sizes are equal when they are the same
polynomial, so `batch*4` equals `4*batch`; nothing is assumed about a name except that it stands for one number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tilemesh.core.errors import UsageError

Dim: TypeAlias = "int | Size"
Shape: TypeAlias = "tuple[Dim, ...]"


@dataclass(frozen=True)
class Size:
    """The sum of `factor * name * name * ...`; `terms` are sorted, without zeros."""

    terms: tuple[tuple[tuple[str, ...], int], ...]

    def __add__(self, other: Dim) -> Dim:
        return _sum([*self.terms, *_terms(other)])

    def __mul__(self, other: Dim) -> Dim:
        products = [
            (tuple(sorted(names + more)), factor * times)
            for names, factor in self.terms
            for more, times in _terms(other)
        ]
        return _sum(products)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Dim:
        return self * -1

    def __sub__(self, other: Dim) -> Dim:
        return self + -other

    def __rsub__(self, other: Dim) -> Dim:
        return -self + other

    def __floordiv__(self, other: Dim) -> Dim:
        """An exact division by a number or by one product of names; others are refused."""
        divisor = _terms(other)
        if len(divisor) != 1:
            raise UsageError(f"{self} cannot be divided by {other}: divide by a number or by a product of sizes")
        names, factor = divisor[0]
        quotient = []
        for own, times in self.terms:
            left = list(own)
            for name in names:
                if name not in left:
                    raise UsageError(f"{self} is not a multiple of {other}")
                left.remove(name)
            if times % factor:
                raise UsageError(f"{self} is not a multiple of {other}")
            quotient.append((tuple(left), times // factor))
        return _sum(quotient)

    def __rfloordiv__(self, other: int) -> Dim:
        if other == 0:
            return 0
        raise UsageError(f"{other} cannot be divided by {self}, which is not known yet")

    def __str__(self) -> str:
        products = ["*".join(names if factor == 1 and names else (str(factor), *names)) for names, factor in self.terms]
        return " + ".join(products).replace("+ -", "- ")

    __repr__ = __str__


def symbol(name: str) -> Size:
    """A size with this name, not known yet."""
    if not name.isidentifier():
        raise UsageError(f"a size is called {name!r}; give a name made of letters, digits and underscores")
    return Size((((name,), 1),))


def product(sizes: Iterable[Dim]) -> Dim:
    total: Dim = 1
    for size in sizes:
        total = total * size
    return total


def known(size: Dim, values: Mapping[str, int]) -> int:
    """The number that a size is, given the numbers of its names."""
    if isinstance(size, int):
        return size
    total = 0
    for names, factor in size.terms:
        for name in names:
            if name not in values:
                raise UsageError(f"the size {name} is not known; give its value")
            factor *= values[name]
        total += factor
    return total


def numbers(shape: Iterable[Dim], values: Mapping[str, int] | None = None) -> tuple[int, ...]:
    """A shape whose sizes are known, or follow from the numbers of their names."""
    return tuple(known(size, values or {}) for size in shape)


def _terms(size: Dim) -> tuple[tuple[tuple[str, ...], int], ...]:
    return size.terms if isinstance(size, Size) else (((), size),)


def _sum(terms: Iterable[tuple[tuple[str, ...], int]]) -> Dim:
    sums: dict[tuple[str, ...], int] = {}
    for names, factor in terms:
        sums[names] = sums.get(names, 0) + factor
    kept = tuple(sorted((names, factor) for names, factor in sums.items() if factor))
    if not kept:
        return 0
    return kept[0][1] if len(kept) == 1 and kept[0][0] == () else Size(kept)
