"""Boosted regression trees: a model of numbers that is learnt from trials and small enough to travel with the package.

Every tree has the same depth, so that all of them descend at once, in arrays: thirty rows through three hundred trees
take half a millisecond. A tree is fitted to what the trees before it left over, and a share of it is added (gradient
boosting with squared error). The fit is deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilemesh.core.errors import UsageError

CUTS = 32  # places where a feature may be cut: evenly spread over its values
FEWEST = 4  # rows on either side of a cut
SHRINK = 1.0  # rows of zero that every leaf is averaged with

Array = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Trees:
    """A fitted model: where each tree's inner nodes cut, and its leaves, already scaled by their share.

    feature, cut: (trees, 2**depth - 1), nodes in the order of a heap; leaf: (trees, 2**depth).
    """

    base: float
    feature: Whole
    cut: Array
    leaf: Array

    def predict(self, rows: Sequence[Sequence[float]] | Array) -> Array:
        """One number for each row of features."""
        values = np.asarray(rows, dtype=np.float64)
        trees = np.arange(len(self.feature))
        node = np.zeros((len(values), len(trees)), dtype=np.int64)
        lines = np.arange(len(values))[:, None]
        for _ in range(_depth(self.leaf.shape[1])):
            right = values[lines, self.feature[trees, node]] > self.cut[trees, node]
            node = 2 * node + 1 + right
        return self.base + self.leaf[trees, node - self.feature.shape[1]].sum(axis=1)


def to_dict(model: Trees) -> dict[str, Any]:
    """As JSON values, rounded to five digits: a choice needs no more."""
    rounded = {name: [[_short(value) for value in tree] for tree in getattr(model, name)] for name in ("cut", "leaf")}
    return {"base": _short(model.base), "feature": model.feature.tolist(), **rounded}


def from_dict(values: Mapping[str, Any]) -> Trees:
    try:
        feature = np.array(values["feature"], dtype=np.int64)
        cut, leaf = (np.array(values[name], dtype=np.float64) for name in ("cut", "leaf"))
        base = float(values["base"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"a model of trees cannot be read: {error}") from error
    if feature.ndim != 2 or cut.shape != feature.shape or leaf.shape != (len(feature), feature.shape[1] + 1):
        raise UsageError("a model of trees cannot be read: its arrays do not belong together")
    _depth(leaf.shape[1])
    return Trees(base, feature, cut, leaf)


def fit(
    rows: Sequence[Sequence[float]] | Array,
    targets: Sequence[float] | Array,
    weights: Sequence[float] | Array,
    *,
    trees: int = 300,
    depth: int = 4,
    share: float = 0.08,
) -> Trees:
    """Fit to `targets`, each row counted by its weight; every tree sees a different four fifths of the rows."""
    values, wanted, weight = (np.asarray(given, dtype=np.float64) for given in (rows, targets, weights))
    if values.ndim != 2 or not len(values) == len(wanted) == len(weight):
        raise UsageError(f"fit: {values.shape} features, {wanted.shape} targets, {weight.shape} weights do not match")
    cuts = [_cuts(values[:, index]) for index in range(values.shape[1])]
    places = np.column_stack([np.searchsorted(at, values[:, index]) for index, at in enumerate(cuts)])
    base = float((weight * wanted).sum() / weight.sum())
    left = wanted - base
    chance = np.random.default_rng(0)
    inner = 2**depth - 1
    feature, cut, leaf = np.zeros((trees, inner), np.int64), np.zeros((trees, inner)), np.zeros((trees, inner + 1))
    for number in range(trees):
        seen = np.nonzero(chance.random(len(left)) < 0.8)[0]
        tree = Trees(0.0, feature[number : number + 1], cut[number : number + 1], leaf[number : number + 1])
        _grow(tree, places, cuts, left, weight, seen, 0)
        leaf[number] *= share
        left = left - tree.predict(values)
    return Trees(base, feature, cut, leaf)


def _grow(
    tree: Trees, places: Whole, cuts: Sequence[Array], left: Array, weight: Array, seen: Whole, node: int
) -> None:
    """Fill in a node and what is below it; a node that no cut improves sends everything left, to equal leaves."""
    inner = tree.feature.shape[1]
    if node >= inner:
        tree.leaf[0, node - inner] = _mean(left[seen], weight[seen])
        return
    best_cut = _best_cut(places[seen], cuts, left[seen], weight[seen])
    if best_cut is None:
        tree.cut[0, node] = np.inf
        for below in (2 * node + 1, 2 * node + 2):
            _grow(tree, places, cuts, left, weight, seen, below)
        return
    index, place = best_cut
    tree.feature[0, node], tree.cut[0, node] = index, cuts[index][place]
    low = places[seen, index] <= place
    _grow(tree, places, cuts, left, weight, seen[low], 2 * node + 1)
    _grow(tree, places, cuts, left, weight, seen[~low], 2 * node + 2)


def _best_cut(places: Whole, cuts: Sequence[Array], left: Array, weight: Array) -> tuple[int, int] | None:
    """(feature, which of its cuts) that leaves the least squared error, or None where none has rows on both sides."""
    best, best_place = 1e-12, None
    pulled = weight * left
    total, all_weight = pulled.sum(), weight.sum()
    before = total**2 / (all_weight + SHRINK)
    for index, at in enumerate(cuts):
        if not len(at):
            continue
        column = places[:, index]
        count = np.bincount(column, minlength=len(at) + 1).cumsum()[:-1]
        under = np.bincount(column, weight, len(at) + 1).cumsum()[:-1]
        sums = np.bincount(column, pulled, len(at) + 1).cumsum()[:-1]
        gain = sums**2 / (under + SHRINK) + (total - sums) ** 2 / (all_weight - under + SHRINK) - before
        gain[(count < FEWEST) | (len(column) - count < FEWEST)] = -1.0
        place = int(gain.argmax())
        if gain[place] > best:
            best, best_place = float(gain[place]), (index, place)
    return best_place


def _mean(left: Array, weight: Array) -> float:
    return float((weight * left).sum() / (weight.sum() + SHRINK))


def _cuts(values: Array) -> Array:
    """Between neighbouring values, or between quantiles where there are many."""
    known = np.unique(values)
    if len(known) <= CUTS:
        return (known[1:] + known[:-1]) / 2
    return np.unique(np.quantile(values, np.linspace(0, 1, CUTS + 1)[1:-1]))


def _depth(leaves: int) -> int:
    depth = leaves.bit_length() - 1
    if leaves != 2**depth:
        raise UsageError(f"a tree of {leaves} leaves: expected a power of two")
    return depth


def _short(value: float) -> float:
    """Infinity has no JSON: a cut that sends everything left is written as the largest number."""
    return float(f"{min(float(value), 1e300):.5g}")
