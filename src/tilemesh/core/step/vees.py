"""Schedules on a V of two chunks per rank: ZB-V, V-Half and V-Min (Qi et al. 2024, "controllable memory").

The one idea: all microbatches do the same, a fixed number of slots apart, so one of them, the *block*, says
everything. It passes down the V, up again, and back the same way; on each of these four legs it moves on by a fixed
number of slots per rank. A microbatch takes six slots per rank (F, I and W of two chunks), so blocks six slots apart
fit if no two of a rank's passes fall on the same slot modulo six. The slower the legs, the longer activations live
and the less a rank waits: legs of 2, 1, 2, 1 slots keep about half of what 1F1B keeps, 1, 1, 1, 1 a third.

ZB-V keeps as much as 1F1B and never waits between a rank's first and last pass when F, I and W take equally long. It
is written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import Action, Kind, StepProgram
from tilemesh.core.step.fill import fill
from tilemesh.core.step.placement import vee
from tilemesh.core.step.simulate import StepTimes

Legs = tuple[int, int, int, int]
LEGS: dict[str, Legs] = {"v-half": (2, 1, 2, 1), "v-min": (1, 1, 1, 1)}
_PERIOD = 6
_MOST_DELAY = 6  # slots a block waits at a turn of the V, at most: all residues modulo six


def zb_v(ranks: int, microbatches: int) -> StepProgram:
    """Forward passes until the first microbatch is through the V, then all six passes of it in turn."""
    count = max(microbatches, 2 * ranks - 1)  # with fewer the order is the same, with passes left out
    lists = []
    for rank in range(ranks):
        chunks = (rank, 2 * ranks - 1 - rank)
        done = {(kind, leg): 0 for kind in "FIW" for leg in (0, 1)}
        actions: list[Action] = []

        def do(
            kinds: str, leg: int, chunks: tuple[int, int] = chunks, done: dict[tuple[str, int], int] = done,
            actions: list[Action] = actions,
        ) -> None:  # fmt: skip
            for kind in kinds:
                actions.append(Action(kind, chunks[leg], done[kind, leg]))  # type: ignore[arg-type]
                done[kind, leg] += 1

        do("F" * (2 * (ranks - rank) - 1), 0)
        for _ in range(rank):
            do("F", 1)
            do("F", 0)
        for _ in range(ranks - rank):
            do("FIW", 1)
        while done["F", 1] < count:
            do("FIW" if done["F", 0] < count else "IW", 0)
            do("FIW", 1)
        for _ in range(rank):
            do("I", 0)
            do("I", 1)
        for _ in range(ranks - rank):
            do("IW", 0)
        for leg in (1, 0):
            do("W" * (count - done["W", leg]), leg)
        lists.append(tuple(action for action in actions if action.microbatch < microbatches))
    return StepProgram("zb-v", vee(ranks), microbatches, tuple(lists))


def vee_schedule(name: str, ranks: int, microbatches: int) -> StepProgram:
    """One of LEGS."""
    return from_legs(name, ranks, microbatches, LEGS[name], StepTimes.even(2 * ranks, 1, 1, 1))


@cache
def held_in_vee(name: str, ranks: int) -> tuple[int, ...]:
    """The most passes whose activations each rank of one of LEGS holds at once, from F to W."""
    block = find_block(ranks, LEGS[name])
    return () if block is None else tuple(map(_held, block))


def from_legs(name: str, ranks: int, microbatches: int, legs: Legs, times: StepTimes) -> StepProgram:
    """The block of these legs, repeated; weight gradients where ranks would wait under these times."""
    block = find_block(ranks, legs)
    if block is None:
        raise UsageError(f"{name}: no block of legs {legs} fits {ranks} ranks")
    bare = _repeated(name, microbatches, block, _PERIOD)
    return fill(bare, times, [_held(slots) for slots in block])


def stretched(
    ranks: int, microbatches: int, stretch: tuple[float, ...], times: StepTimes, most_held: int, patience: float
) -> StepProgram:
    """A block in seconds instead of slots: a leg takes `stretch` times its pass and message per rank.

    Passes of one rank may overlap in it; they are done in the order in which they would begin.
    """
    forward_s, input_s = times.forward_s[0], times.input_s[0]
    passes_s = (forward_s, forward_s, input_s, input_s)
    down, up, back, home = (
        factor * (pass_s + times.transfer_s) for factor, pass_s in zip(stretch, passes_s, strict=True)
    )
    last = ranks - 1
    turn = last * down + forward_s
    turn_back = turn + last * up + forward_s
    turn_home = turn_back + last * back + input_s
    block = [
        (rank * down, turn + (last - rank) * up, turn_back + rank * back, turn_home + (last - rank) * home)
        for rank in range(ranks)
    ]
    bare = _repeated("search", microbatches, block, 2 * (forward_s + input_s + times.weight_s[0]))
    return fill(bare, times, [most_held] * ranks, patience)


def _repeated(
    name: str, microbatches: int, block: Sequence[tuple[float, float, float, float]], period: float
) -> StepProgram:
    """F and I of every rank, ordered by when they begin if blocks follow one another."""
    ranks = len(block)
    orders = []
    for rank, begins in enumerate(block):
        down, up = rank, 2 * ranks - 1 - rank
        kinds: tuple[tuple[Kind, int], ...] = (("F", down), ("F", up), ("I", up), ("I", down))
        timed = [
            (begin + period * m, leg, Action(kinds[leg][0], kinds[leg][1], m))
            for m in range(microbatches)
            for leg, begin in enumerate(begins)
        ]
        orders.append(tuple(action for _, _, action in sorted(timed)))
    return StepProgram(name, vee(ranks), microbatches, tuple(orders))


def find_block(ranks: int, legs: Legs) -> list[tuple[int, int, int, int]] | None:
    """Slots of F, F, I, I of the first microbatch on every rank, with the least delay at the V's turns."""
    last = ranks - 1
    for delays in sorted(product(range(_MOST_DELAY), repeat=3), key=lambda given: (sum(given), given)):
        up = last * legs[0] + 1 + delays[0]
        back = up + last * legs[1] + 1 + delays[1]
        home = back + last * legs[2] + 1 + delays[2]
        block = [
            (rank * legs[0], up + (last - rank) * legs[1], back + rank * legs[2], home + (last - rank) * legs[3])
            for rank in range(ranks)
        ]
        if all(len({slot % _PERIOD for slot in slots}) == 4 for slots in block):
            return block
    return None


def _held(slots: tuple[int, int, int, int]) -> int:
    """Passes whose activations a rank holds at once when blocks follow one another: F to W.

    The two weight gradients of a block take the two slots modulo six that are left, each the next after its I.
    """
    free = [slot for slot in range(_PERIOD) if slot not in {taken % _PERIOD for taken in slots}]
    back, home = slots[2] + 1, slots[3] + 1
    pairs = ((free[0], free[1]), (free[1], free[0]))
    waits = min(([(one - back) % _PERIOD, (two - home) % _PERIOD] for one, two in pairs), key=sum)
    lives = ((slots[1], back + waits[0] + 1), (slots[0], home + waits[1] + 1))
    latest = max(end for _, end in lives)
    return max(
        sum(begin <= moment - _PERIOD * m < end for begin, end in lives for m in range(moment // _PERIOD + 1))
        for moment in range(latest, latest + _PERIOD)
    )
