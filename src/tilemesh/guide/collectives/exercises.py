"""Exercises of chapter 3, with the wrong answers that have a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilemesh.comm import Communicator, run_threads
from tilemesh.guide.apart import PATIENCE_S
from tilemesh.guide.exercise import choice, code, numeric
from tilemesh.guide.watched import WatchedCalls, watched

RING_BYTES = numeric(
    "ring_bytes",
    "8 ranks all-reduce 800 MB with the ring algorithm. How many MB does each rank send?",
    1400,
    counted_in="MB",
    wrong={
        700: "700 MB is the first half, the reduce-scatter: 7 messages of 100 MB. The sums must then travel round once "
        "more (the all-gather).",
        1600: "1600 MB would be 2 rounds of the whole array. In each half a rank sends 7 of the 8 pieces: its own last "
        "one need not be sent.",
        5600: "5600 MB is what the minimal version sends: the whole array to each of the 7 others. The ring sends "
        "pieces.",
        800: "800 MB would be the whole array once. Reduce-scatter and all-gather each send 7 pieces of 100 MB.",
    },
    otherwise="Cut the array into 8 pieces of 100 MB. Count the messages of one rank in the reduce-scatter, then in "
    "the all-gather.",
    explanation="2 (n-1)/n times the array: 2 · 7/8 · 800 MB. It hardly depends on n, which is why rings scale.",
)

ROUNDS = numeric(
    "tree_rounds",
    "64 ranks all-reduce with a binomial tree: up to rank 0, then down again. How many rounds, one after the other?",
    12,
    wrong={
        6: "6 = log2(64) rounds bring the sum to rank 0. It must also come down to everybody.",
        126: "126 = 2 · 63 rounds is the ring. A tree halves the number of ranks that still take part in every round.",
        64: "64 would be one rank after the other. In a tree many pairs work at the same time: 32, then 16, then 8.",
        63: "63 messages are sent on the way up, but up to 32 of them at the same time: count rounds, not messages.",
    },
    otherwise="In each round on the way up half of the ranks that still hold something hand it over and are done.",
    explanation="2 log2(64) = 12 rounds against 126 of the ring: the tree wins while α dominates, the ring while "
    "bytes do.",
)

BACKWARD = choice(
    "backward",
    "In the forward pass every rank gives its part of x, and all_gather copies all parts to all ranks. Backward, "
    "each rank "
    "has gradients for its copies of all parts. Which collective gives every rank the summed gradient of its own part?",
    {
        "reduce_scatter": None,
        "all_gather": "all_gather gave every rank a copy of every part. Backward has a gradient for each copy; those "
        "of one part must be *added*, which all_gather does not do.",
        "all_reduce": "all_reduce adds up the gradients of the copies, but leaves the whole on every rank. Each rank "
        "needs the gradient of its own part only: half of the work is wasted.",
        "broadcast": "broadcast sends one rank's array to all. Here every rank holds something that others need.",
    },
    explanation="Copying and adding are each other's transpose: all_gather and reduce_scatter, broadcast and reduce. "
    "Chapters 5 and 6 use both.",
)


def ring_gather(comm: Communicator, value: int) -> list[int]:
    """The solution: n-1 times, hand on what came last, and note whose it was."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    values, carried = [0] * comm.size, np.array([value])
    values[comm.rank] = value
    for turn in range(1, comm.size):
        box = np.empty_like(carried)
        handles = [comm.irecv(box, source=before), comm.isend(carried, to=after)]
        for handle in handles:
            handle.wait()
        carried = box
        values[(comm.rank - turn) % comm.size] = int(carried[0])
    return values


def why_not_ring(function: Callable[[Communicator, int], Any]) -> str | None:
    """What is wrong with a ring, found on five threads whose messages are watched."""
    ranks = 5
    results = run_threads(ranks, lambda comm: _watched(comm, function), timeout_s=PATIENCE_S)
    expected = [10 * rank for rank in range(ranks)]
    for rank, (result, calls) in enumerate(results):
        why = _ring_reason(rank, ranks, result, expected)
        if not calls.peers and not calls.used_collective:
            return (
                f"Rank {rank} returned {result} without any message. What other ranks were given it can only know from "
                "messages: send, recv, isend, irecv."
            )
        if why is not None:
            return f"Rank {rank} returned {result}: {why}"
        if calls.used_collective:
            return (
                "The values are right, but a built-in collective brought them. Write it with messages: send, recv, "
                "isend, irecv."
            )
        strangers = calls.peers - {(rank + 1) % ranks, (rank - 1) % ranks}
        if strangers:
            return (
                f"The values are right, but rank {rank} exchanged messages with rank {min(strangers)}. In a ring a "
                "rank talks to its two neighbours only, and passes on what it got."
            )
    for rank, (_, calls) in enumerate(results):  # of ranks that read too early some may have been lucky
        if calls.unfinished:
            return f"Rank {rank}'s values are right, {calls.why_unfinished}"
    return None


def _watched(comm: Communicator, function: Callable[[Communicator, int], Any]) -> tuple[Any, WatchedCalls]:
    return watched(comm, lambda: function(comm, 10 * comm.rank))


def _ring_reason(rank: int, ranks: int, result: Any, expected: list[int]) -> str | None:
    try:
        values = [int(value) for value in result]
    except (TypeError, ValueError):
        return f"expected a list of {ranks} numbers."
    if values == expected:
        return None
    if sorted(values) == expected:
        return (
            "all values are there, but in the order in which they came. Put each at its owner's place: what comes in "
            "round t was given by rank (rank - t) % n."
        )
    neighbour = expected[(rank - 1) % ranks]
    if values.count(neighbour) > 1 and neighbour:
        return (
            "the neighbour's value stands in several places: every rank sent its own value each time. Hand on what "
            "came in the round before."
        )
    if any(value not in expected for value in values) or values.count(0) >= ranks - (rank > 0):
        return (
            "these numbers were never sent. Messages are bytes: what was sent as whole numbers must arrive in a box of "
            "whole numbers, such as np.empty_like(carried), not np.empty(1), which holds float64."
        )
    missing = set(expected) - set(values)
    if len(missing) == 1 and len(values) == ranks:
        return f"the value {missing.pop()} never came: one round is missing. n ranks need n-1 rounds."
    return f"expected {expected}, one value per rank in the order of ranks."


RING = code(
    "ring_gather",
    "Write an all_gather by a ring: each rank gives one number and gets the numbers of all ranks, in the order of "
    "ranks. A rank may only talk to rank - 1 and rank + 1 (in a circle).",
    '''import numpy as np

def ring_gather(comm, value):
    """A list with every rank's value, in rank order."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    ...''',
    returns="a list with every rank's value, in the order of ranks",
    solution=ring_gather,
    correct=why_not_ring,
    explanation="Add what comes instead of noting it, and you have a reduce_scatter; one after the other, an "
    "all_reduce.",
)

EXERCISES = (RING_BYTES, ROUNDS, BACKWARD, RING)
