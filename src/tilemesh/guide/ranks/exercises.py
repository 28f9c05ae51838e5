"""Exercises of chapter 1, with the wrong answers that have a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilemesh.guide.exercise import choice, code, listing, numeric

Groups = tuple[list[int], list[int]]

WORLD_SUM = numeric(
    "world_sum",
    "8 ranks call all_reduce, each with an array that holds its own rank. What does the result hold on rank 3?",
    28,
    wrong={
        3: "3 is what rank 3 gave. all_reduce returns the sum over all ranks, and the same one on every rank.",
        36: "36 is 1 + 2 + ... + 8. Ranks are counted from 0, so the last of 8 ranks is rank 7.",
        24: "24 is 8 times 3: it would be right if every rank had given 3. Each gives its own number.",
        6: "6 is 0 + 1 + 2 + 3, the sum up to rank 3 (a *scan*). all_reduce adds up all ranks.",
    },
    otherwise="Write down what each of the 8 ranks gives, beginning with rank 0, and add it up.",
    explanation="0 + 1 + ... + 7 = 28, and it is the same on all 8 ranks: that is what the `all` of all_reduce means.",
)

COLUMN = listing(
    "column",
    "16 ranks form a mesh of dp = 4 rows by tp = 4 columns, numbered row by row: 0 to 3 are the first row. Which "
    "ranks are in rank 6's data-parallel group (its column), itself included?",
    (2, 6, 10, 14),
    wrong={
        (4, 5, 6, 7): "That is rank 6's row, its tensor-parallel group: ranks that share one copy of the model. The "
        "data-parallel group holds the ranks with the same *part* of the model: same tp index, other dp index.",
        (2, 10, 14): "All but one: a rank is a member of its own groups.",
        (
            6,
            7,
            8,
            9,
        ): "Four neighbours, but counted from rank 6. Groups do not begin at the rank that asks: all members "
        "must come to the same list. Rank 6 has tp index 6 % 4 = 2; find all ranks with that index.",
        (1, 5, 9, 13): "These have tp index 1. Rank 6 has 6 % 4 = 2.",
    },
    otherwise="Rank r has tp index r % tp and dp index r // tp. The data-parallel group of a rank: all ranks with the "
    "same tp index.",
    explanation="Rank 6 has tp index 2, and so have 2, 10 and 14: they hold the same part of the model and average its "
    "gradients.",
)

MEMORY = choice(
    "memory",
    "Rank 0 executes `weights[0] = 1.0` on a numpy array that every rank made by the same line. What do the others "
    "see?",
    {
        "Nothing: each rank has an array of its own, until somebody sends something.": None,
        "The new value, as soon as rank 0 has written it.": "That is how *threads* of one process behave. Ranks are "
        "processes: each has its own memory, and the same line of code made a separate array in each.",
        "The new value, after all ranks have waited for one another (a *barrier*).": "A barrier makes ranks wait for "
        "one another; it moves no data. Only a message or a collective does.",
        "An error, because the array belongs to rank 0.": "No array belongs to another rank: each made its own by "
        "executing the same line, and each may write to its own.",
    },
    explanation="This is why parallel programs need messages, and why the rest of this guide is about what to send "
    "when.",
)


def groups_of(rank: int, dp: int, tp: int) -> Groups:
    """The solution: (tensor-parallel group, data-parallel group) of a rank, as lists of ranks."""
    row, place = divmod(rank, tp)
    return [row * tp + index for index in range(tp)], [index * tp + place for index in range(dp)]


def data_major(rank: int, dp: int, tp: int) -> Groups:
    """Wrong: lays neighbouring ranks along dp."""
    place, row = divmod(rank, dp)
    return [index * dp + row for index in range(tp)], [place * dp + index for index in range(dp)]


def local_numbers(rank: int, dp: int, tp: int) -> Groups:
    """Wrong: numbers inside the group instead of ranks of the world."""
    return list(range(tp)), list(range(dp))


def why_not_groups(function: Callable[[int, int, int], Any]) -> str | None:
    """What is wrong with the groups, found on meshes of several shapes."""
    for dp, tp in ((2, 4), (3, 2), (2, 2), (1, 4)):
        for rank in range(dp * tp):
            expected = groups_of(rank, dp, tp)
            groups = function(rank, dp, tp)
            try:
                tensor, data = (sorted(int(member) for member in group) for group in groups)
            except Exception as error:
                return f"groups_of({rank}, dp={dp}, tp={tp}) did not return two lists of ranks: {error!r}"
            if (tensor, data) == expected:
                continue
            return f"Rank {rank} of dp = {dp}, tp = {tp}: {_reason(rank, dp, tp, (tensor, data))}"
    return None


def _reason(rank: int, dp: int, tp: int, groups: Groups) -> str:
    expected = groups_of(rank, dp, tp)
    if groups == (expected[1], expected[0]):
        return "the two groups are right but in the other order: the tensor-parallel group comes first."
    if [sorted({*group, rank}) for group in groups] == list(expected):
        return "the rank itself is missing: it is a member of its own groups."
    if groups == local_numbers(rank, dp, tp):
        return "these are numbers *inside* the groups, from 0 on in each. The function returns ranks of the world."
    if groups == data_major(rank, dp, tp):
        return (
            "this lays neighbouring ranks along dp. In this project tp varies fastest (model-major): ranks 0 to tp-1 "
            "share one copy of the model, because they talk most and should be closest together."
        )
    return f"expected {expected[0]} and {expected[1]}, got {groups[0]} and {groups[1]}. Use rank // tp and rank % tp."


GROUPS = code(
    "groups_of",
    "Write a function that says who is in a rank's two groups on a mesh of dp rows by tp columns, numbered row by row.",
    '''def groups_of(rank, dp, tp):
    """(tensor-parallel group, data-parallel group): two lists of ranks of the
    world."""
    ...''',
    returns="two lists of ranks: the tensor-parallel group, then the data-parallel group",
    solution=groups_of,
    correct=why_not_groups,
    explanation="tilemesh's own version, `core/axes.py`, does the same for any number of axes.",
)

EXERCISES = (WORLD_SUM, MEMORY, COLUMN, GROUPS)
