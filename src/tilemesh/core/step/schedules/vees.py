"""Schedules on a V of two chunks per rank that keep less: V-Half and V-Min (Qi et al. 2024, "controllable memory").

The one idea: all microbatches do the same, a fixed number of slots apart, so one of them, the *block*, says
everything. It passes down the V, up again, and back the same way; on each of these four legs it moves on by a fixed
number of slots per rank. A microbatch takes six slots per rank (F, I and W of two chunks), so blocks six slots apart
fit if no two of a rank's passes fall on the same slot modulo six. The slower the legs, the longer activations live
and the less a rank waits: legs of 2, 1, 2, 1 slots keep about half of what 1F1B keeps, 1, 1, 1, 1 a third.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import Action, Kind, StepProgram
from tilemesh.core.step.fill import fill
from tilemesh.core.step.placement import vee
from tilemesh.core.step.schedule import PipelineSchedule, PipeShape, RankLoad
from tilemesh.core.step.simulate import StepTimes

Legs = tuple[int, int, int, int]
HALF: Legs = (2, 1, 2, 1)
LEAST: Legs = (1, 1, 1, 1)
_PERIOD = 6
_MOST_DELAY = 6  # slots a block waits at a turn of the V, at most: all residues modulo six


def from_legs(shape: PipeShape, legs: Legs) -> tuple[tuple[Action, ...], ...]:
    """The block of these legs, repeated; weight gradients where ranks would wait if all passes took equally long."""
    block = find_block(shape.stages, legs)
    if block is None:
        raise UsageError(f"no block of legs {legs} fits {shape.stages} ranks")
    bare = _repeated(f"legs {legs}", shape.microbatches, block, _PERIOD)
    return fill(bare, StepTimes.even(2 * shape.stages, 1, 1, 1), [_held(slots) for slots in block]).actions


def _slots_s(shape: PipeShape, load: RankLoad) -> float:
    """Their slots are equally long: where F, I and W are not, a rank waits in every one, but in a short V."""
    return shape.microbatches * max(0.0, 3 * load.longest_s - load.slowest_s) if shape.stages > 3 else 0.0


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
    for delays in sorted(product(range(_MOST_DELAY), repeat=3), key=lambda each: (sum(each), each)):
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


SCHEDULES = (
    PipelineSchedule(
        "v-half",
        "half of 1F1B's bubble at half its memory, on a V",
        lambda shape: from_legs(shape, HALF),
        vee,
        is_searched=True,
        is_split=True,
        waits_s=lambda shape, load: load.input_s + 0.4 * load.forward_s + _slots_s(shape, load) / 2,
    ),
    PipelineSchedule(
        "v-min",
        "two thirds of 1F1B's bubble at a third of its memory, on a V",
        lambda shape: from_legs(shape, LEAST),
        vee,
        is_split=True,
        waits_s=lambda shape, load: load.forward_s + 0.9 * load.input_s + _slots_s(shape, load),
    ),
)
