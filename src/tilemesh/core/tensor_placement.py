"""What each rank of a mesh has of a tensor, axis by axis: the words in which layouts are checked, explained and chosen.

Along each axis of a mesh a tensor is one of

    R       the same on every rank
    V       different on each rank, and nothing more is claimed
    P       a part of a sum on each rank: their sum is the value
    S(dim)  cut along a dim, into pieces that differ by at most one, larger ones first

The one idea: what ranks exchange follows from the placement before and the placement after, so a place where tensors
change hands says no more than these two, and whoever checks it reads what whoever runs it does. A value and its
gradient are placed each for itself: what all ranks have alike (R) and use differently has a gradient of parts (P).

Several axes may cut one dim: one after the other, in the order in which they are given. No arrays here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilemesh.core.axes import Axes
from tilemesh.core.errors import UsageError
from tilemesh.core.shard import Cut, Shard


@dataclass(frozen=True, order=True)
class Mark:
    """What ranks along one axis have: `kind` is one of R, V, P and S; `dim` is what S cuts, a number or a name."""

    kind: str
    dim: int | str | None = None

    def __str__(self) -> str:
        return self.kind if self.dim is None else f"{self.kind}({self.dim})"


R, V, P = Mark("R"), Mark("V"), Mark("P")


def S(dim: int | str) -> Mark:
    """Cut along a dim."""
    return Mark("S", dim)


_EXCHANGES = {
    ("P", "R"): "all_reduce",
    ("P", "S"): "reduce_scatter",
    ("S", "R"): "all_gather",
    ("S", "S"): "all_to_all",
    ("R", "S"): "slice",
    ("R", "P"): "divide",
    ("S", "P"): "pad",
}
SILENT = ("", "slice", "divide", "pad")
"""Exchanges in which nothing is sent: own rows of what all have, a share of it, zeros around own rows."""


def exchange_of(before: Mark, after: Mark) -> str:
    """What turns one into the other along an axis; empty where nothing has to be done. From V there is no way back."""
    if before == after or after == V:
        return ""
    if (before.kind, after.kind) not in _EXCHANGES:
        raise UsageError(f"from {before} to {after}: no exchange does this")
    return _EXCHANGES[before.kind, after.kind]


def can_follow(before: Mark, after: Mark) -> bool:
    """Whether an exchange turns one into the other."""
    return before == after or after == V or (before.kind, after.kind) in _EXCHANGES


@dataclass(frozen=True)
class TensorPlacement:
    """Marks by axis, those of R left out; of axes that cut one dim, the one that cuts first comes first."""

    marks: tuple[tuple[str, Mark], ...] = ()

    def __post_init__(self) -> None:
        names = [axis for axis, _ in self.marks]
        if len({*names}) < len(names):
            raise UsageError(f"an axis twice in a placement: {self}")
        kept = [(axis, mark) for axis, mark in self.marks if mark != R]
        by_dim = sorted((pair for pair in kept if pair[1].kind == "S"), key=lambda pair: str(pair[1].dim))
        others = sorted(pair for pair in kept if pair[1].kind != "S")
        object.__setattr__(self, "marks", (*by_dim, *others))

    @classmethod
    def of(cls, marks: Mapping[str, Mark] | None = None, **more: Mark) -> TensorPlacement:
        return cls((*(marks or {}).items(), *more.items()))

    def __getitem__(self, axis: str) -> Mark:
        return next((mark for name, mark in self.marks if name == axis), R)

    def __iter__(self) -> Iterator[tuple[str, Mark]]:
        return iter(self.marks)

    def put(self, axis: str, mark: Mark) -> TensorPlacement:
        """The same with another mark along an axis; a cut comes after those that there are."""
        return TensorPlacement((*(pair for pair in self.marks if pair[0] != axis), (axis, mark)))

    def axes_of(self, dim: int | str) -> tuple[str, ...]:
        """The axes that cut a dim, in order."""
        return tuple(axis for axis, mark in self.marks if mark == S(dim))

    def shard(self, shape: tuple[int, ...], axes: Axes, rank: int = 0, name: str = "a tensor") -> Shard:
        """What a rank holds of a tensor of this shape: all of it along axes of R, V and P."""
        cuts = []
        for axis, mark in self.marks:
            if mark.kind == "S":
                assert isinstance(mark.dim, int), mark
                cuts.append(Cut(axis, mark.dim))
        return Shard(name, shape, axes, rank, tuple(cuts))

    def __str__(self) -> str:
        return " ".join(f"{axis}:{mark}" for axis, mark in self.marks) or "R"


REPLICATED = TensorPlacement()


def parse(words: str) -> TensorPlacement:
    """A placement as it is typed: "R", or marks such as "tp:S0,dp:P" in the order in which axes cut."""
    marks: list[tuple[str, Mark]] = []
    for word in filter(None, re.split(r"[,\s]+", words.strip())):
        if word == "R" and not marks:
            continue
        fits = re.fullmatch(r"(\w+):(?:([RVP])|S\(?(\d+)\)?)", word)
        if not fits:
            raise UsageError(f"a placement of {word!r}: expected AXIS:R, AXIS:P, AXIS:V or AXIS:S0 (cut along dim 0)")
        marks.append((fits[1], Mark(fits[2]) if fits[2] else S(int(fits[3]))))
    return TensorPlacement(tuple(marks))


# A tensor that passes from one place to another ---------------------------------------------------------------------

Pair = tuple[Mark, Mark]
"""Of a value, and of its gradient."""
DUALS = frozenset({("R", "R"), ("R", "P"), ("P", "R"), ("S", "S"), ("V", "V")})
"""Which gradients values can have. Of parts of a sum each has the gradient of the sum. What all have alike has the same
gradient on each where all that follows is alike too, and parts of it where each rank goes on by itself."""


@dataclass(frozen=True)
class Crossing:
    """A place where a tensor passes between ranks along one axis: from one pair of marks to another.

    The value goes from the first mark of `before` to that of `after`, its gradient from the second of `after` to that
    of `before`, or with `has_gradient` unset nowhere.
    """

    axis: str
    before: Pair
    after: Pair
    has_gradient: bool = True

    def __post_init__(self) -> None:
        for value, gradient in (self.before, self.after):
            if (value.kind, gradient.kind) not in DUALS or value.dim != gradient.dim:
                raise UsageError(
                    f"a value of {value} over {self.axis} with a gradient of {gradient}: there is none such"
                )

    @property
    def value(self) -> str:
        """The exchange of the value."""
        return exchange_of(self.before[0], self.after[0])

    @property
    def gradient(self) -> str:
        """The exchange of its gradient."""
        return exchange_of(self.after[1], self.before[1])

    def why_not(self, wanted: Crossing) -> str:
        """Why this does not do what a place asks for; empty where it does."""
        ends = (("is", self.before, wanted.before), ("should become", self.after, wanted.after))
        for words, declared, right in ends:
            for what, mark, other in zip(("the value", "its gradient"), declared, right, strict=True):
                if self.axis != wanted.axis or mark != other:
                    return f"{what} {words} {other} over {wanted.axis} and is taken for {mark} over {self.axis}"
        if wanted.has_gradient and not self.has_gradient:
            return f"its gradient does not come back over {self.axis}"
        return ""
