"""Length and memory of the schedules that the planner searches, without walking through every microbatch.

Closed forms for equal chunks; for uneven ones the pace of the steady state, read off short simulations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tilemesh.core.step.book import build
from tilemesh.core.step.schedules import warmup
from tilemesh.core.step.simulate import StepTimes, simulate

_SETTLED_ROUNDS = 2  # rounds of `stages` microbatches before the pace of a pipeline is looked at
_STEADY_ROUNDS = 3  # rounds that must take equally long to be its pace
_SAME = 1e-9
_CHEAP_PASSES = 8_000  # to walk through for the pace of one pipeline


def in_flight(name: str, stage: int, stages: int, microbatches: int, interleave: int = 1) -> int:
    """The most passes of chunks whose activations a stage of gpipe, 1f1b or interleaved holds at once."""
    return warmup(name, stage, stages, microbatches, interleave) + 1


def bubble_fraction(name: str, stages: int, microbatches: int, interleave: int = 1) -> float:
    """(p-1)/(m+p-1), and (p-1)/(v m+p-1) interleaved: what simulation gives when all chunks take equally long."""
    chunks = interleave if name == "interleaved" else 1
    return (stages - 1) / (chunks * microbatches + stages - 1)


def simulated_passes(stages: int, microbatches: int, interleave: int) -> int:
    """How many passes `simulated_s` walks through where the pace is steady from the start: its least cost."""
    first = _SETTLED_ROUNDS * stages + microbatches % stages
    walked = microbatches if microbatches <= first + stages else 2 * first + stages
    return 2 * stages * interleave * walked


def simulated_s(
    name: str,
    stages: int,
    microbatches: int,
    interleave: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
) -> float:
    """Length of a step without walking through all of it: the steady state repeats every `stages` microbatches.

    Short runs, each a round longer, show what one more round costs; when that has stayed the same it is taken for the
    rest. Equal stages are at their pace at once and give what simulating everything gives; uneven ones may drift for
    some rounds, which are walked as long as they are cheap, and tests hold what is left.
    """
    times = StepTimes(forward_s, backward_s, [0.0] * len(backward_s))

    def total_s(count: int) -> float:
        return simulate(_built(name, stages, count, interleave), times).total_s

    whole = _SETTLED_ROUNDS * stages + microbatches % stages
    if microbatches <= whole + stages:
        return total_s(microbatches)
    even = len({*forward_s}) == len({*backward_s}) == 1
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
    least_s = _least_s(stages, microbatches, forward_s, backward_s)
    return least_s if least_s > paced_s * (1 + _SAME) else paced_s


def _least_s(stages: int, microbatches: int, forward_s: Sequence[float], backward_s: Sequence[float]) -> float:
    """What no order of passes is shorter than: a stage's work, after the first input has come to it and before the last
    gradient has left it. A stage that is busiest by little sets the pace only after many rounds."""
    return max(
        sum(forward_s[:stage])
        + microbatches * (sum(forward_s[stage::stages]) + sum(backward_s[stage::stages]))
        + sum(backward_s[:stage])
        for stage in range(stages)
    )


_built = functools.lru_cache(maxsize=32)(build)
