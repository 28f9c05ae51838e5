"""Exercises of chapter 16, with the wrong answers that have a reason."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

from tilemesh.guide.exercise import choice, code, numeric

Own = Sequence[Sequence[float]]
Between = Sequence[Sequence[Sequence[float]]]

SENT = numeric(
    "rows_and_k",
    "C = A·B has 4,000 × 4,000 numbers of 2 bytes. Rows of A are cut over 4 groups of ranks, and within each group K "
    "is cut over 8 ranks, which sum by a ring. How many MB does each rank send?",
    14,
    counted_in="MB",
    wrong={
        56: "56 sums all of C. A group has a quarter of its rows, 8 MB, and sums only those.",
        7: "7 is the reduce_scatter. A ring all-reduce gathers the sums again: twice that.",
        16: "16 is 2 × 8 MB. Each rank sends 7 of the 8 pieces, twice.",
        12: "12 sums over the 4 groups. They have different rows; what is summed lies on the 8 ranks of a group.",
    },
    otherwise="A group's rows of C have 32 MB / 4; a ring over n ranks sends 2 (n-1)/n of what it sums.",
    explanation="32 MB / 4 = 8 MB, times 2 · 7/8: 14 MB. With K cut over all 32 ranks it would be 62 MB.",
)

PINNED = choice(
    "one_pin",
    "In relu(x·A)·B only A is annotated: cut by columns. What follows for B, if nothing is to be exchanged before the "
    "second product?",
    {
        "B is cut by rows, and the product is a sum of parts.": None,
        "B is cut by columns too.": "h = relu(x·A) is cut by columns, and those are what h·B sums over: a rank would "
        "need rows of B for them, and columns of h that it does not have for whole columns of B.",
        "B is whole on every rank.": "It may be, but each rank needs only the rows that its columns of h meet.",
        "Nothing follows: every tensor needs an annotation.": "Rules say in which ways a product can be cut; with one "
        "of its inputs known, few are left.",
    },
    explanation="That is Megatron's cut (chapter 6), found from one annotation. GSPMD does the same for whole models.",
)

SPACE = numeric(
    "how_many",
    "A model has 32 layers that are alike, each of 7 operators that can be cut in 4 ways. All layers are to be cut in "
    "the same way. Among how many placements is the best one?",
    4**7,
    wrong={
        28: "28 is 7 · 4: as if the operators were asked one after the other. Every combination is another placement.",
        7**4: "2,401 is 7^4: each of 7 operators has 4 ways, 4 · 4 · 4 · ...",
        32 * 4**7: "524,288 counts the layers again: they are alike, and choose once.",
        896: "896 is 32 · 7 · 4: every combination is another placement, and the layers choose once.",
    },
    otherwise="The choices of the operators of one layer, multiplied.",
    explanation="4^7 = 16,384. If layers differed it would be 4^224, more than there are atoms: sharing makes it "
    "small, before any solver begins.",
)


def cheapest(own: Own, between: Between) -> Any:
    """The solution: for each way of the last operator the best beginning that ends in it."""
    best = [(seconds, [way]) for way, seconds in enumerate(own[0])]
    for edge, row in zip(between, own[1:], strict=True):
        best = [
            min((before + edge[ways[-1]][way] + seconds, [*ways, way]) for before, ways in best)
            for way, seconds in enumerate(row)
        ]
    return min(best)[1]


def each_alone(own: Own, between: Between) -> Any:
    """Wrong: edges cost nothing."""
    return [min(range(len(ways)), key=ways.__getitem__) for ways in own]


def one_after_the_other(own: Own, between: Between) -> Any:
    """Wrong: the best next step from where one stands."""
    chosen = [min(range(len(own[0])), key=own[0].__getitem__)]
    for place in range(1, len(own)):
        last = chosen[-1]
        chosen.append(min(range(len(own[place])), key=lambda way: between[place - 1][last][way] + own[place][way]))
    return chosen


def only_edges(own: Own, between: Between) -> Any:
    """Wrong: operators cost nothing."""
    return cheapest([[0.0] * len(ways) for ways in own], between)


def price(own: Own, between: Between, ways: Sequence[int]) -> float:
    total = sum(seconds[way] for seconds, way in zip(own, ways, strict=True))
    return total + sum(table[a][b] for table, a, b in zip(between, ways, ways[1:], strict=False))


def why_not_cheapest(function: Callable[[Any, Any], Any]) -> str | None:
    """Compare with every combination, and name what an answer that is dearer seems to have left out."""
    chance = random.Random(0)
    for _ in range(60):
        sizes = [chance.randint(2, 3) for _ in range(chance.randint(2, 5))]
        own = [[chance.randint(1, 9) for _ in range(size)] for size in sizes]
        between = [
            [[0 if chance.random() < 0.3 else chance.randint(1, 9) for _ in range(b)] for _ in range(a)]
            for a, b in itertools.pairwise(sizes)
        ]
        ways = function([list(row) for row in own], [[list(row) for row in table] for table in between])
        task = f"own = {own}, between = {between}"
        if len(ways) != len(sizes) or not all(
            isinstance(way, Integral) and way in range(size) for way, size in zip(ways, sizes, strict=True)
        ):
            return f"{task}: you chose {ways!r:.60}: expected one number for each operator, a place in its row of own."
        mine = price(own, between, ways)
        best = min(price(own, between, each) for each in itertools.product(*map(range, sizes)))
        if mine > best + 1e-9:
            return f"{task}: your {list(ways)} takes {mine:g}, the best {best:g}. {_reason(own, between, list(ways))}"
    return None


def _reason(own: Own, between: Between, ways: list[int]) -> str:
    if ways == each_alone(own, between):
        return "Each operator has its own cheapest way, and what lies between them was not counted."
    if ways == only_edges(own, between):
        return "The edges are as cheap as can be; what the operators themselves take was not counted."
    if ways == one_after_the_other(own, between):
        return "Each step is the best from where it stands. Keep a beginning for every way of the last operator."
    return "The least sum is wanted; in between[i][a][b], a is the way of operator i and b that of operator i + 1."


CHEAPEST = code(
    "cheapest",
    "Write the chooser for a chain of operators, such as layers in a row: a way for each so that all takes least. "
    "Trying all combinations is right, but too slow beyond a few operators.",
    '''def cheapest(own, between):
    """A list with one way for each operator: the one with the least sum.

    own[i][a]: seconds of operator i, done in way a.
    between[i][a][b]: seconds to exchange what operator i gives, if it is done
    in way a and operator i + 1 in way b.
    """
    ...''',
    returns="a list of ways, one for each operator",
    solution=cheapest,
    correct=why_not_cheapest,
    explanation="Dynamic programming: of all beginnings that end alike, only the best can be part of the best whole. "
    "Ours does it for graphs: `parallel/choose/dynamic.py`.",
)  # fmt: skip

EXERCISES = (SENT, PINNED, SPACE, CHEAPEST)
