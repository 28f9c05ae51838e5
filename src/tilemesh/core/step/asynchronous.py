"""Asynchronous pipelines: no flush between updates, so passes read weights of different versions, which the lists say.

All four run passes in the order of 1F1B and never wait for the pipeline to empty. They differ in when a rank updates
its chunk and which version a pass reads:

    pipedream      an update after every backward pass; a microbatch goes back through the weights that it came through,
                   so rank r of p keeps p - r versions (Narayanan et al. 2019)
    pipedream-2bw  an update after every m microbatches, from gradients of the version before: two versions, all passes
                   of microbatch k (from 0) read max(k // m - 1, 0) (Narayanan et al. 2021); m is at least p
    ampnet         an update after every backward pass and one version: a microbatch goes back through weights that have
                   changed since (Gaunt et al. 2017)
    pipemare       the same lists; the runtime divides the learning rate by the delay at first, and takes for the way
                   back an estimate of the weights of the way forth (Yang et al. 2019)
"""

from __future__ import annotations

import math

from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.plan import ASYNCHRONOUS
from tilemesh.core.step.action import Action, StepProgram
from tilemesh.core.step.placement import loop
from tilemesh.core.step.schedules import one_f_one_b


def asynchronous(name: str, ranks: int, microbatches: int, per_update: int = 1) -> StepProgram:
    """The lists of so many microbatches, updates included; messages are added as to any program.

    `per_update`: microbatches of one update, for pipedream-2bw.
    """
    if name not in ASYNCHRONOUS:
        raise unknown("asynchronous schedule", name, ASYNCHRONOUS)
    if ranks < 1 or microbatches < 1 or per_update < 1:
        raise UsageError(f"{name} of {ranks} stages and {microbatches} microbatches: expected at least 1 of each")
    is_double = name == "pipedream-2bw"
    if is_double and (per_update < ranks or microbatches % per_update):
        raise UsageError(
            f"pipedream-2bw with {ranks} stages takes updates of at least as many microbatches, and whole ones: "
            f"per_update is {per_update} of {microbatches}"
        )
    if not is_double and per_update != 1:
        raise UsageError(f"{name} updates after every microbatch: per_update {per_update} is for pipedream-2bw")
    stashes = name.startswith("pipedream")
    lists = []
    for rank, order in enumerate(one_f_one_b(ranks, microbatches).actions):
        actions: list[Action] = []
        read: dict[int, int] = {}
        made = done = 0
        for action in order:
            microbatch = action.microbatch
            if is_double:
                read[microbatch] = max(microbatch // per_update - 1, 0)
            elif action.kind == "F" or not stashes:
                read[microbatch] = made
            actions.append(action._replace(version=read[microbatch]))
            if action.kind == "B":
                done += 1
                if done % per_update == 0:
                    made += 1
                    actions.append(Action("UPDATE", rank, version=made, of="weights"))
        lists.append(tuple(actions))
    versions = 2 if is_double else ranks if stashes else 1
    return StepProgram(name, loop(ranks), microbatches, tuple(lists), versions=versions, keeps_versions=stashes)


def held_versions(program: StepProgram) -> list[int]:
    """Versions of its weights that each rank holds at most: the newest, and those that passes will still read."""
    most_held = []
    for actions in program.actions:
        last = {
            (action.chunk, action.version): place
            for place, action in enumerate(actions)
            if action.kind not in ("UPDATE", "SEND", "RECV")
        }
        held, most = {(chunk, 0) for chunk, _ in last}, 1
        for place, action in enumerate(actions):
            if action.kind == "UPDATE":
                newest = (action.chunk, action.version)
                held = {key for key in held if last.get(key, -1) > place} | {newest}
            most = max(most, len(held))
        most_held.append(most)
    return most_held


def copies_of_weights(name: str, rank: int, ranks: int, microbatches: int) -> int:
    """Copies of its weights that a rank has at most: versions, and for pipemare their mean change. 1: no other than
    the weights themselves."""
    match name:
        case "pipedream":
            ahead = min(ranks - rank, microbatches)  # forward passes before the first update, all of version 0
            return min(ahead, microbatches - ahead + 2)
        case "pipedream-2bw":
            return 2 if microbatches >= 2 * ranks else 1
    return 2 if name == "pipemare" else 1


def delays(program: StepProgram) -> list[float]:
    """Of each chunk, updates between the forward pass of a microbatch and the update of its gradient, in the middle of
    the run: what PipeMare calls tau."""
    of_chunks = []
    for actions in program.actions:
        read = {action.microbatch: action.version for action in actions if action.kind == "F"}
        made = [0.0] * program.microbatches
        version, waiting = 0, list[int]()
        for action in actions:
            if action.kind == "B":
                waiting.append(action.microbatch)
            elif action.kind == "UPDATE":
                version += 1
                for microbatch in waiting:
                    made[microbatch] = version - read[microbatch]
                waiting = []
        middle = made[len(made) // 2 : max(len(made) // 2 + 1, math.ceil(0.75 * len(made)))]
        of_chunks.append(sum(middle) / len(middle))
    return of_chunks
