"""Exercises of chapter 2, with the wrong answers that have a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tilemesh.comm import Communicator, run_threads
from tilemesh.guide.apart import PATIENCE_S
from tilemesh.guide.exercise import choice, code, numeric
from tilemesh.guide.watched import WatchedCalls, watched

TOKEN = numeric(
    "token",
    "A token goes once round a ring of 6 ranks, one send and one receive at a time, and comes back to rank 0. A "
    "message takes 10 microseconds. How many microseconds does it take in all?",
    60,
    counted_in="µs",
    wrong={
        10: "10 would be right if all 6 messages travelled at the same time. Each rank waits for the token before it "
        "can pass it on, so the messages follow one another.",
        50: "5 messages bring the token from rank 0 to rank 5. It must also come back: from 5 to 0.",
        120: "120 counts each message twice, as a send and as a receive. The two are the ends of one message.",
        70: "70 counts one message too many: 6 ranks in a ring have 6 links between them.",
    },
    otherwise="Draw 6 ranks in a ring and count the arrows that the token follows until it is back.",
    explanation="6 messages, one after the other: nothing here is parallel. Chapter 3's ring keeps every rank busy.",
)

BUFFER = choice(
    "buffer",
    "After `handle = comm.isend(x, to=1)` the program goes on. What may it do with `x` before `handle.wait()`?",
    {
        "Read it, but not write to it.": None,
        "Read it and write to it: isend has copied it.": "A library *may* copy a small message aside, and then a "
        "program "
        "that writes seems to work. With larger messages the bytes are read later, and the other rank gets a mixture.",
        "Neither read nor write: it has been given away.": "Reading is safe: sending only reads the array, so its "
        "content stays as it is. What must not change until wait() is what will be sent.",
        "Anything, as soon as the other rank has called recv.": "This rank cannot know when the other has called recv, "
        "and the bytes may still be on their way then. wait() is how one knows.",
    },
    explanation="For irecv it is stricter: the array must be neither read nor written before wait() has returned.",
)

WAITS = choice(
    "waits",
    "Three ranks in a ring all call send, with an array of 16 MiB, to the next rank first, then recv from the one "
    "before. What happens?",
    {
        "All three wait for ever: a circle.": None,
        "It works, because three is odd.": "The number of ranks does not matter: each waits for its neighbour's "
        "receive, all round.",
        "Rank 0 goes first, then the others follow.": "Rank 0 has no right of way: its send needs rank 1's receive, "
        "which comes only after rank 1's send.",
        "It works with all message sizes, because MPI keeps copies.": "Small messages often pass, because they are "
        "copied aside; beyond some size (a few KiB) they are not, and the program hangs on the day its arrays grow.",
    },
    explanation="Begin with the receives (irecv), then send, then wait: that is how every algorithm in this project "
    "avoids it.",
)


def swap(comm: Communicator, mine: Any, other: int) -> Any:
    """The solution: both directions at once."""
    theirs = np.empty_like(mine)
    handles = [comm.irecv(theirs, source=other), comm.isend(mine, to=other)]
    for handle in handles:
        handle.wait()
    return theirs


class Swapped(NamedTuple):
    """What one rank saw of a try."""

    before: Any
    after: Any
    returned: Any
    calls: WatchedCalls


def why_not_swap(function: Callable[[Communicator, Any, int], Any]) -> str | None:
    """What is wrong with a swap, found by swapping on two threads and on four."""
    for ranks in (2, 4):
        results = run_threads(ranks, lambda comm: _try(comm, function), timeout_s=PATIENCE_S)
        wrong = [why for rank, swapped in enumerate(results) if (why := _why_wrong(rank, swapped)) is not None]
        # Wrong numbers on any rank say more than a wait that is missing: of two ranks that read too early one may be
        # lucky and find its message there.
        for rank, swapped in enumerate(results):
            if swapped.calls.unfinished:
                wrong.append(f"Rank {rank} got the right numbers, {swapped.calls.why_unfinished}")
        if wrong:
            return wrong[0]
    return None


def _why_wrong(rank: int, swapped: Swapped) -> str | None:
    before, returned, other = swapped.before, swapped.returned, rank ^ 1
    if swapped.calls.used_collective:
        return (
            f"Rank {rank} called a collective, for which all ranks must come together, and everybody's arrays move. "
            "Two ranks that swap need two messages: irecv, isend, and a wait for each."
        )
    if not np.array_equal(before, swapped.after):
        return (
            f"Rank {rank}'s own array was overwritten: it was received into the array that is sent. Receive into a new "
            "one, `np.empty_like(mine)`."
        )
    if np.shape(returned) != before.shape:
        return f"Rank {rank} got {returned!r}: return the array that came from rank {other}."
    if returned.dtype != before.dtype:
        return (
            f"Rank {rank} got {returned.dtype} numbers where rank {other} had sent {before.dtype}: messages are bytes, "
            "and a box of another dtype reads them as other numbers. Receive into `np.empty_like(mine)`."
        )
    if np.array_equal(returned, before):
        return f"Rank {rank} got its own array back: both directions are needed, each rank sends and receives."
    if not np.array_equal(returned, np.full(3, other)):
        return (
            f"Rank {rank} got {returned.tolist()} where rank {other} had sent {[other] * 3}: it was read before it had "
            "come. Wait for the receive before you return."
        )
    return None


def _try(comm: Communicator, function: Callable[[Communicator, Any, int], Any]) -> Swapped:
    mine = np.full(3, comm.rank)
    before = mine.copy()
    returned, calls = watched(comm, lambda: function(comm, mine, comm.rank ^ 1))
    return Swapped(before, mine.copy(), np.array(returned), calls)


SWAP = code(
    "swap",
    "Write a function with which two ranks swap arrays: each calls it with the other's number and gets the other's "
    "array. Neither may change `mine`.",
    '''import numpy as np

def swap(comm, mine, other):
    """Send `mine` to rank `other` and return the array that it sends here."""
    ...''',
    returns="the array that came from the other rank",
    solution=swap,
    correct=why_not_swap,
    explanation="Most programs do it by irecv and isend and then two waits. The pair is called a *sendrecv*: rings "
    "are made of it.",
)

EXERCISES = (TOKEN, WAITS, BUFFER, SWAP)
