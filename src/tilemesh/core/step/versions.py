"""Versions of the weights in the lists of an asynchronous schedule: how many a rank holds, how old they are."""

from __future__ import annotations

import math

from tilemesh.core.step.action import StepProgram


def held_versions(program: StepProgram) -> list[int]:
    """Versions of its weights that each rank holds at most: the newest, and those that passes will still read."""
    most_held = []
    for actions in program.actions:
        last = {
            (action.chunk, action.version): place
            for place, action in enumerate(actions)
            if action.kind not in ("UPDATE", "SEND", "RECV")
        }
        alive, most = {(chunk, 0) for chunk, _ in last}, 1
        for place, action in enumerate(actions):
            if action.kind == "UPDATE":
                newest = (action.chunk, action.version)
                alive = {key for key in alive if last.get(key, -1) > place} | {newest}
            most = max(most, len(alive))
        most_held.append(most)
    return most_held


def delays(program: StepProgram) -> list[float]:
    """Of each chunk, updates between the forward pass of a microbatch and the update of its gradient, in the middle of
    the run: what PipeMare calls tau."""
    of_chunks = []
    for actions in program.actions:
        read = {action.microbatch: action.version for action in actions if action.kind == "F"}
        ages = [0.0] * program.microbatches
        version, waiting = 0, list[int]()
        for action in actions:
            if action.kind == "B":
                waiting.append(action.microbatch)
            elif action.kind == "UPDATE":
                version += 1
                for microbatch in waiting:
                    ages[microbatch] = version - read[microbatch]
                waiting = []
        middle = ages[len(ages) // 2 : max(len(ages) // 2 + 1, math.ceil(0.75 * len(ages)))]
        of_chunks.append(sum(middle) / len(middle))
    return of_chunks
