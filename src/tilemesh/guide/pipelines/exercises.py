"""Exercises of chapter 7, with the wrong answers that have a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import Action, StepProgram
from tilemesh.core.step.book import build
from tilemesh.core.step.check import check
from tilemesh.core.step.memory import StepBytes, memory_peaks
from tilemesh.core.step.placement import loop
from tilemesh.core.step.simulate import StepTimes, simulate
from tilemesh.guide.exercise import choice, code, numeric

BUBBLE = numeric(
    "bubble",
    "A pipeline of 4 stages, 12 microbatches, GPipe. Which fraction of all devices' time is bubble?",
    3 / 15,
    unit="fraction",
    wrong={
        0.25: "25 % is 3 / 12: the bubble compared with the useful time. As a fraction of all time it is 3 / (12 + 3).",
        3 / 16: "3 / 16 divides by N + D. A pass takes N + D - 1 slots: the last microbatch needs D - 1 more.",
        1 / 3: "33 % is 4 / 12. A device waits for D - 1 = 3 slots, and the whole lasts 12 + 3.",
        0.75: "75 % would be a pipeline with one microbatch, where only one of 4 devices works at a time.",
    },
    otherwise="With D stages and N microbatches a pass takes N + D - 1 slots, of which every device works N.",
    explanation="(D-1)/(D-1+N) = 3/15. Four times as many microbatches would make it 3/51, at the price of smaller "
    "ones.",
)

RATE = numeric(
    "throughput",
    "Stages of 10, 5, 15 and 5 ms, each on a device of its own. How many items per second come out once the pipeline "
    "is full?",
    1 / 0.015,
    wrong={
        1 / 0.035: "28.6 is one item per 35 ms: what a single device does, one item after the other.",
        4
        / 0.035: "114 assumes that four devices work four times as fast. They would if all stages took the same time; "
        "here three of them wait for the slowest.",
        200.0: "200 is the fastest stage alone, 5 ms. What comes out is as slow as the slowest stage.",
        100.0: "100 is the first stage alone, 10 ms. Items pile up before the 15 ms stage.",
    },
    otherwise="All items pass every stage. Which stage can begin a new item least often?",
    explanation="One item per 15 ms, 66.7 per second. Each item still takes at least 35 ms from end to end.",
)

LATENCY = choice(
    "latency",
    "A model of 4 equal stages runs on 4 devices as a pipeline. What happens to the time of *one* request?",
    {
        "It stays the same, plus the transfers between devices.": None,
        "It becomes 4 times shorter.": "Throughput can become 4 times higher. One request still passes all stages, one "
        "after the other.",
        "It becomes 4 times longer.": "Each stage takes a quarter of the whole, and there are four: the sum is what "
        "it was.",
        "It becomes shorter once the pipeline is full.": "Filling the pipeline keeps devices busy with *other* "
        "requests; this one passes the same stages in the same time, or waits for a slower neighbour.",
    },
    explanation="To shorten one request, several devices must work on it at the same time: tensor parallelism.",
)


def one_f_one_b(rank: int, stages: int, microbatches: int) -> list[str]:
    """The solution: as many forward passes ahead as there are stages behind, then in turns."""
    ahead = min(stages - rank - 1, microbatches)
    order = [f"F{microbatch}" for microbatch in range(ahead)]
    for microbatch in range(microbatches):
        if ahead + microbatch < microbatches:
            order.append(f"F{ahead + microbatch}")
        order.append(f"B{microbatch}")
    return order


def why_not_1f1b(function: Callable[[int, int, int], Any]) -> str | None:
    """What is wrong with a schedule: proved, timed and measured like those that tilemesh runs."""
    stages, microbatches = 4, 8
    try:
        lists = [_actions(rank, function(rank, stages, microbatches)) for rank in range(stages)]
    except UsageError as error:
        return str(error)
    for rank, actions in enumerate(lists):
        wanted = {(kind, microbatch) for kind in "FB" for microbatch in range(microbatches)}
        missing = sorted(wanted - {(action.kind, action.microbatch) for action in actions})
        if missing:
            kind, number = missing[0]
            return f"Rank {rank} never does {kind}{number}: every microbatch needs a forward and a backward pass."
        words = [f"{action.kind}{action.microbatch}" for action in actions]
        twice = [word for word in words if words.count(word) > 1]
        if twice:
            return f"Rank {rank} does {twice[0]} {words.count(twice[0])} times: every pass is done once."
        unknown = [word for word in words if int(word[1:]) >= microbatches]
        if unknown:
            return f"Rank {rank} does {unknown[0]}: there are {microbatches} microbatches, 0 to {microbatches - 1}."
        for microbatch in range(microbatches):
            places = {action.kind: place for place, action in enumerate(actions) if action.microbatch == microbatch}
            if places["B"] < places["F"]:
                return f"Rank {rank} does B{microbatch} before F{microbatch}: backward needs what forward kept."
    yours = StepProgram("yours", loop(stages), microbatches, tuple(map(tuple, lists)))
    try:
        check(yours)
    except UsageError as error:
        return f"The checker refuses it: {error}"
    return _slower_or_larger(yours, build("1f1b", stages, microbatches))


def _actions(rank: int, words: Sequence[str]) -> list[Action]:
    actions = []
    for word in words:
        text = str(word)
        if text[:1] not in ("F", "B") or not text[1:].isdecimal():
            raise UsageError(f"Rank {rank} has '{word}' in its list: expected F or B and a number, such as F0")
        actions.append(Action("F" if text[0] == "F" else "B", rank, int(text[1:])))
    return actions


def _slower_or_larger(yours: StepProgram, wanted: StepProgram) -> str | None:
    times, sizes = StepTimes.even(yours.chunks, 1.0, 1.0, 1.0), StepBytes.activations(yours.chunks)
    ours, theirs = simulate(yours, times).total_s, simulate(wanted, times).total_s
    kept, least = memory_peaks(yours, sizes), memory_peaks(wanted, sizes)
    if ours > theirs and kept[0] < least[0]:
        return (
            f"It is right but takes {ours:g} where 1F1B takes {theirs:g}: too few microbatches are under way. The "
            "first rank must have done as many forward passes as there are stages before its first backward pass comes."
        )
    if ours > theirs:
        return (
            f"It is right but takes {ours:g} where 1F1B takes {theirs:g}: ranks near the end do forward passes "
            "although a "
            "backward pass, for which the ranks before them wait, is possible. The last rank needs none ahead."
        )
    if kept == least:
        return None
    if all(peak == yours.microbatches for peak in kept):
        return (
            f"This is GPipe: as fast, but every rank keeps all {yours.microbatches} microbatches. Do a backward pass "
            "as soon as there is one to do."
        )
    rank = next(rank for rank in range(yours.ranks) if kept[rank] != least[rank])
    return (
        f"Rank {rank} keeps {kept[rank]:g} microbatches where {least[rank]:g} are enough: ranks nearer to the end need "
        "fewer forward passes ahead, stages - rank - 1."
    )


SCHEDULE = code(
    "one_f_one_b",
    "Write the 1F1B schedule: the list of one rank's passes, such as ['F0', 'F1', 'B0', ...]. It must be as fast as "
    "GPipe and keep as few microbatches as possible.",
    '''def one_f_one_b(rank, stages, microbatches):
    """The passes of a rank in order: 'F3' is the forward pass of microbatch 3,
    'B3' its backward pass."""
    ...''',
    returns="a list of passes, such as ['F0', 'B0']",
    solution=one_f_one_b,
    correct=why_not_1f1b,
    explanation="tilemesh's own is `core/step/schedules/one_f_one_b.py`; one checker, clock and drawing serve both.",
)

EXERCISES = (RATE, LATENCY, BUBBLE, SCHEDULE)
