"""Length and memory of schedules without walking through every microbatch: what a search over many layouts asks.

Closed forms for equal chunks; for uneven ones the pace of the steady state, read off short simulations. Tests hold both
to the simulator and to liveness.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from tilemesh.core.plan import ASYNCHRONOUS, is_listed
from tilemesh.core.step.action import StepProgram, parts
from tilemesh.core.step.book import build, chunk_placement, is_split, listed
from tilemesh.core.step.memory import Moment, fullest_moments
from tilemesh.core.step.schedules import warmup
from tilemesh.core.step.simulate import StepTimes, simulate
from tilemesh.core.step.vees import held_in_vee

_SETTLED_ROUNDS = 2  # rounds of `stages` microbatches before the pace of a pipeline is looked at
_STEADY_ROUNDS = 3  # rounds that must take equally long to be its pace
_SETTLED_FOR_MEMORY = 3  # rounds after which a rank holds no more than before
_SAME = 1e-9
_CHEAP_PASSES = 8_000  # to walk through for the pace of one pipeline

ALL_AT_ONCE = ("gpipe", "breadth-first", "terapipe")
"""Schedules that do all forward passes first, so that what they hold grows with the microbatches."""

Held = tuple[tuple[int, int], ...]
"""Passes whose activations a rank holds at its fullest moments: from F to B or I, and from I to W."""


def most_held(name: str, rank: int, stages: int, microbatches: int, interleave: int = 1) -> Held:
    """The moments of a schedule at which a rank can hold most, whatever either kind takes.

    Exact for equal chunks and, on a V, from 2p - 1 microbatches on; at least what is held otherwise.
    """
    if is_listed(name):
        return _held_in_list(listed(name), rank)
    p, m, r = stages, microbatches, rank
    match name:
        case "zb-h1" | "zb-h2":
            ahead = min(p - r if name == "zb-h1" else 2 * (p - r) - 1, m)
            late = min(r if name == "zb-h1" else 2 * r, m - ahead)
            return (ahead, late), (ahead - 1, late + 1)
        case "zb-v":
            most = min(2 * p, 2 * m)
            return (most, 0), (most - 1, 1), (min(p - 1 - r, 2 * m), min(2 * r + 1, 2 * m))
        case "v-half" | "v-min":
            most = min(held_in_vee(name, p)[r], 2 * m)
            return (most, 0), (max(0, most - 4), min(4, most))
        case "dualpipe" | "dualpipe-v":
            whole, place = (p, min(r, p - 1 - r)) if name == "dualpipe" else (2 * p, r)
            return (whole + 1, 0), (whole // 2 - 1 - place, place + 2)
        case "chimera":
            return ((min(m, p // 2 + 1 + min(r, p - 1 - r)), 0),)
        case "breadth-first" | "gpipe" | "terapipe":
            return ((m * interleave, 0),)
    return ((warmup(name, rank, stages, microbatches, interleave) + 1, 0),)


def _held_in_list(program: StepProgram, rank: int) -> Held:
    """Every moment of a rank's list: what it holds until the backward pass, and from there to the weight gradient."""
    ahead = late = 0
    moments = {(0, 0)}
    for action in program.actions[rank]:
        for part in parts(action):
            ahead += {"F": 1, "B": -1, "I": -1, "W": 0}[part.kind]
            late += {"F": 0, "B": 0, "I": 1, "W": -1}[part.kind]
        moments.add((ahead, late))
    return tuple(sorted(moments))


def program_for_memory(name: str, stages: int, microbatches: int, interleave: int, slices: int = 1) -> StepProgram:
    """A step that holds as much as that of so many microbatches: of most schedules a shorter one, as the steady state
    repeats."""
    return _built(name, stages, _settled(name, stages, microbatches), interleave, slices)


def moments_for_memory(
    name: str, rank: int, stages: int, microbatches: int, interleave: int, slices: int = 1
) -> tuple[Moment, ...]:
    """The moments of that step at which a rank can hold most."""
    return _moments(name, rank, stages, _settled(name, stages, microbatches), interleave, slices)


def _settled(name: str, stages: int, microbatches: int) -> int:
    enough = _SETTLED_FOR_MEMORY * stages + microbatches % stages
    return microbatches if name in ALL_AT_ONCE or is_listed(name) else min(microbatches, enough)


@functools.lru_cache(maxsize=16384)
def _moments(name: str, rank: int, stages: int, microbatches: int, interleave: int, slices: int) -> tuple[Moment, ...]:
    return fullest_moments(_built(name, stages, microbatches, interleave, slices), rank)


@functools.cache
def bubble_fraction(name: str, stages: int, microbatches: int, interleave: int = 1) -> float:
    """What a step waits, if all chunks take equally long, F, I and W too: (p-1)/(m+p-1) for 1F1B and GPipe,
    (p-1)/(v m+p-1) interleaved."""
    if stages == 1:
        return 0.0
    if name in ("gpipe", "1f1b", "interleaved", *ASYNCHRONOUS):
        chunks = interleave if name == "interleaved" else 1
        return (stages - 1) / (chunks * microbatches + stages - 1)
    chunks = chunk_placement(name, stages, interleave).chunks
    each = stages / chunks / 3
    return 1 - microbatches / simulated_s(
        name, stages, microbatches, interleave, StepTimes.even(chunks, each, each, each)
    )


class RankLoad(NamedTuple):
    """What closed forms need of a pipeline's times: one microbatch's work on the busiest rank, on all the others
    together, and of that the parts F, I and W; the longest of an average rank's F, I and W; and a message's time."""

    slowest_s: float
    others_s: float
    forward_s: float
    input_s: float
    weight_s: float
    longest_s: float
    transfer_s: float

    @classmethod
    def of(cls, held: Sequence[Sequence[int]], times: StepTimes, ways: int = 1) -> RankLoad:
        """For ranks that hold these chunks. `ways`: with two directions each sees half of the microbatches."""
        parts = [
            [sum([taken[chunk] for chunk in mine]) / ways for mine in held]
            for taken in (times.forward_s, times.input_s, times.weight_s)
        ]
        work = [sum(each) for each in zip(*parts, strict=True)]
        f, i, w = (sum(each) - max(each) for each in parts)
        return cls(max(work), sum(work) - max(work), f, i, w, max(map(sum, parts)) / len(held), times.transfer_s)


def closed_form_s(name: str, stages: int, microbatches: int, interleave: int, load: RankLoad) -> float:
    """Length of a step, quickly: all microbatches through the busiest rank, and the bubble of the schedule.

    What simulation gives for equal chunks of GPipe, 1F1B, interleaved 1F1B, ZB-H1 and ZB-H2, and on a V where I is no
    shorter than F; a ranking for the others.
    """
    f, i, w = load.forward_s, load.input_s, load.weight_s
    total = microbatches * load.slowest_s
    if stages == 1:
        return total
    match name:
        case "zb-h1":
            waits = max(f, f + i - w)
        case "zb-h2":
            waits = max(f, f + i - 2 * w)
        case "zb-v":
            waits = max(f / 2, i / 2, i - w)
        case "v-half" | "v-min":
            # Their slots are equally long: where F, I and W are not, a rank waits in every one, but in a short V.
            slots = microbatches * max(0.0, 3 * load.longest_s - load.slowest_s) if stages > 3 else 0.0
            waits = i + 0.4 * f + slots / 2 if name == "v-half" else f + 0.9 * i + slots
        case "dualpipe-v":
            waits = max(f, f + i - w)
        case "dualpipe":
            waits = (f + i - w) * (stages / 2 - 1) / (stages - 1)
        case "chimera":
            waits = (f + i + w) * (stages - 2) / (stages - 1)
        case _:
            waits = load.others_s / (interleave if name in ("interleaved", "breadth-first") else 1)
    return total + waits + _messages(name, stages, interleave) * load.transfer_s


def _messages(name: str, stages: int, interleave: int) -> int:
    """Messages that delay a step: the first microbatch's way through all chunks, and the last one's back."""
    if name == "interleaved":
        return 2 * (interleave * stages - 1)
    return 2 * (stages - 1)


def simulated_passes(stages: int, microbatches: int, interleave: int) -> int:
    """How many passes `simulated_s` walks through where the pace is steady from the start: its least cost."""
    first = _SETTLED_ROUNDS * stages + microbatches % stages
    walked = microbatches if microbatches <= first + stages else 2 * first + stages
    return 2 * stages * interleave * walked


def simulated_s(name: str, stages: int, microbatches: int, interleave: int, times: StepTimes) -> float:
    """Length of a step without walking through all of it: the steady state repeats every `stages` microbatches.

    Short runs, each a round longer, show what one more round costs; when that has stayed the same it is taken for the
    rest. Equal stages are at their pace at once and give what simulating everything gives; uneven ones may drift for
    some rounds, which are walked as long as they are cheap, and tests hold what is left.
    """

    def total_s(count: int) -> float:
        return simulate(_built(name, stages, count, interleave), times).total_s

    whole = _SETTLED_ROUNDS * stages + microbatches % stages
    if microbatches <= whole + stages or is_listed(name):
        return total_s(microbatches)
    even = all(len({*taken}) == 1 for taken in (times.forward_s, times.input_s, times.weight_s))
    even = even and name in ("gpipe", "1f1b", "interleaved")
    walked = 2 * stages * interleave * whole
    taken_s = total_s(whole)
    rounds_s: list[float] = []
    while whole < microbatches:
        whole += stages
        longer_s = total_s(whole)
        rounds_s.append(longer_s - taken_s)
        taken_s = longer_s
        walked += 2 * stages * interleave * whole
        last = rounds_s[-_STEADY_ROUNDS:]
        if even or walked > _CHEAP_PASSES or (len(last) == _STEADY_ROUNDS and max(last) - min(last) <= _SAME * taken_s):
            break
    paced_s = taken_s + rounds_s[-1] * ((microbatches - whole) // stages)
    shortest_s = least_s(name, stages, microbatches, interleave, times)
    return shortest_s if shortest_s > paced_s * (1 + _SAME) else paced_s


def least_s(name: str, stages: int, microbatches: int, interleave: int, times: StepTimes) -> float:
    """What no order of passes is shorter than: a rank's work, after the first input has come to it and, where backward
    passes are whole, before the last gradient has left it. A rank that is busiest by little sets the pace only after
    many rounds."""
    placement = chunk_placement(name, stages, interleave)
    if len(placement.directions) > 1:
        return 0.0

    def work_s(chunks: Sequence[int]) -> float:
        return sum(times.forward_s[chunk] + times.input_s[chunk] + times.weight_s[chunk] for chunk in chunks)

    return max(
        sum(times.forward_s[: held[0]])
        + microbatches * work_s(held)
        + (0.0 if is_split(name) else sum(times.input_s[: held[0]]) + sum(times.weight_s[: held[0]]))
        for held in placement.held
    )


@functools.lru_cache(maxsize=32)
def _built(name: str, stages: int, microbatches: int, interleave: int, slices: int = 1) -> StepProgram:
    return build(name, stages, microbatches, interleave if interleave > 1 else None, slices)
