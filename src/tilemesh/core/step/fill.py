"""Puts weight gradients into the gaps of a schedule: passes W wait for nothing else and can be done at any time.

The one idea: the order of F and I on every rank is given; a clock runs over it, and a rank that would wait for a
message does a weight gradient that is due instead. A rank that holds as many activations as it may does one first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import Action, StepProgram
from tilemesh.core.step.simulate import StepTimes, Timed, number


def fill(program: StepProgram, times: StepTimes, most_held: Sequence[int], patience: float = 0.0) -> StepProgram:
    """The program with every W where its rank would else wait.

    `program` has F and I alone. `most_held`: passes of chunks per rank whose activations are there, from F to W.
    `patience`: how much of a weight gradient's time a gap must last for it to be put there; below 1 it may delay what
    comes after the gap.
    """
    numbered = number(program)
    costs_s = [times.of(action) for action in numbered.costs]
    orders = [deque(zip(*pair, strict=True)) for pair in zip(program.actions, numbered.lists, strict=True)]
    pending: list[deque[Action]] = [deque() for _ in orders]
    lists: list[list[Action]] = [[] for _ in orders]
    kept = [0] * program.ranks
    ends: list[float | None] = [None] * numbered.events
    sleeping: dict[int, list[tuple[float, int]]] = {}
    turns = [(0.0, rank) for rank in range(program.ranks)]
    while turns:
        now, rank = heapq.heappop(turns)
        if not orders[rank]:
            lists[rank] += pending[rank]
            continue
        action, timed = orders[rank][0]
        came, missing = _arrival(timed, ends, times.transfer_s)
        late = bool(pending[rank]) and action.kind == "F" and kept[rank] >= most_held[rank]
        waits = came > now if missing is None else True
        if pending[rank] and (late or waits):
            took = times.weight_s[pending[rank][0].chunk]
            if late or missing is not None or came - now >= patience * took:
                lists[rank].append(pending[rank].popleft())
                kept[rank] -= 1
                heapq.heappush(turns, (now + took, rank))
                continue
        if missing is not None:
            sleeping.setdefault(missing, []).append((now, rank))
            continue
        if came > now:
            heapq.heappush(turns, (came, rank))
            continue
        orders[rank].popleft()
        lists[rank].append(action)
        (event,) = timed.raised
        ends[event] = end = now + costs_s[timed.cost]
        if action.kind == "F":
            kept[rank] += 1
        else:
            pending[rank].append(action._replace(kind="W"))
        heapq.heappush(turns, (end, rank))
        for since, sleeper in sleeping.pop(event, ()):
            heapq.heappush(turns, (max(since, now), sleeper))
    if any(orders):
        raise UsageError(f"{program.name} deadlocks: its forward passes and input gradients wait in a circle")
    return StepProgram(program.name, program.placement, program.microbatches, tuple(map(tuple, lists)), program.slices)


def _arrival(timed: Timed, ends: Sequence[float | None], transfer_s: float) -> tuple[float, int | None]:
    """When what a pass needs is there, and what of it nobody has begun yet."""
    came = 0.0
    for events, after_s in ((timed.near, 0.0), (timed.far, transfer_s)):
        for event in events:
            end = ends[event]
            if end is None:
                return came, event
            came = max(came, end + after_s)
    return came, None
