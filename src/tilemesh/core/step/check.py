"""Proof that the lists of a step do what a step must, by running them on symbols instead of numbers.

The proof fails, and says where, when
- a pass is missing, done twice, or done by a rank that does not hold its chunk;
- a pass finds its input, activations, weights or their version not there, or already given back;
- a message, collective or copy has no counterpart, or moves what is not there;
- ranks wait for one another for ever. A send counts as blocking until its receiver has come to the matching RECV, a
  REDUCE until all holders of the chunk have. What ends under this rule ends with any buffering: each rank follows its
  list and nothing another rank does later can stop an action that could go on, so one order of running proves all;
- gradients are not summed before the weights are updated, or the holders of a chunk do not all update it;
- something is left over at the end, or the bytes alive exceed what was allowed.

Replicas of the model (dp, tp) follow the same list at the same place, so their collectives meet in the same order.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import EVERY, Action, PassDone, StepProgram, makes, parts
from tilemesh.core.step.memory import StepBytes, memory_curve


class BrokenStepError(UsageError):
    """Lists of actions that do not make a step."""


Place = tuple[int, int, int]
"""Chunk, microbatch and slice."""


def check(program: StepProgram, sizes: StepBytes | None = None, most_bytes: float | None = None) -> None:
    """Proves a program, or raises, naming the first thing that is wrong. With `sizes` its memory is proved too."""
    _require_lists(program)
    _require_passes(program)
    _StepProof(program).run()
    if sizes is not None:
        _require_memory(program, sizes, most_bytes)


def _require_lists(program: StepProgram) -> None:
    """Every action is one this pipeline has, on a rank that holds its chunk."""
    if len(program.actions) != program.ranks:
        raise BrokenStepError(f"{program.name}: {len(program.actions)} lists of actions for {program.ranks} ranks")
    for rank, actions in enumerate(program.actions):
        for action in actions:
            for part in (action, *parts(action)) if action.kind == "FB" else (action,):
                words = f"{program.name}: rank {rank} does {part}"
                is_known = 0 <= part.chunk < program.chunks and 0 <= part.slice < program.slices
                if not is_known or not EVERY <= part.microbatch < program.microbatches:
                    raise BrokenStepError(f"{words}, which this pipeline does not have")
                holders = program.placement.holders[part.chunk]
                if part.microbatch != EVERY:
                    holders = (program.placement.rank(part.chunk, part.microbatch),)
                if rank not in holders:
                    raise BrokenStepError(f"{words}: chunk {part.chunk} lies on another rank, {holders[0]}")


def _require_passes(program: StepProgram) -> None:
    """Every pass once, and all passes of a microbatch through a chunk with one version of its weights, if declared."""
    versions: dict[PassDone, int] = {}
    for rank, actions in enumerate(program.actions):
        for action in actions:
            for part in parts(action):
                for event in makes(part):
                    if event in versions:
                        raise BrokenStepError(f"{program.name}: rank {rank} does {part} twice")
                    versions[event] = part.version
    for chunk in range(program.chunks):
        for microbatch in range(program.microbatches):
            for piece in range(program.slices):
                place = (chunk, microbatch, piece)
                events = [PassDone("F", *place), PassDone("I", *place), PassDone("W", *place)]
                for event in events:
                    if event not in versions:
                        kind = "B" if event.kind != "F" and events[1] not in versions else event.kind
                        raise BrokenStepError(f"{program.name}: nobody does {Action(kind, *place)}")
                if program.keeps_versions and len({versions[event] for event in events}) > 1:
                    raise BrokenStepError(
                        f"{program.name}: {Action('F', *place)} reads version {versions[events[0]]} of the weights and "
                        f"its backward pass another, expected the same"
                    )


def _require_memory(program: StepProgram, sizes: StepBytes, most_bytes: float | None) -> None:
    """Nothing is given back that was not there, all is given back at the end, and the peak is as low as allowed."""
    # Without an UPDATE gradients are what the step is for: they stay.
    passing = sizes if "UPDATE" in program.kinds else dataclasses.replace(sizes, gradients=(), reduced=())
    slack = 1e-9 * max(map(max, memory_curve(program, sizes)))
    for rank, curve in enumerate(memory_curve(program, passing)):
        where = min(range(len(curve)), key=lambda place: curve[place])
        if curve[where] < -slack:
            raise BrokenStepError(
                f"{program.name}: rank {rank} gives back more than it holds with {program.actions[rank][where - 1]}: "
                f"{curve[where]:g} bytes are left"
            )
        if abs(curve[-1] - curve[0]) > slack:
            raise BrokenStepError(
                f"{program.name}: rank {rank} began with {curve[0]:g} bytes and ends with {curve[-1]:g}"
            )
    for rank, curve in enumerate(memory_curve(program, sizes)):
        if most_bytes is not None and max(curve) > most_bytes + slack:
            action = program.actions[rank][max(0, curve.index(max(curve)) - 1)]
            raise BrokenStepError(
                f"{program.name}: rank {rank} holds {max(curve):g} bytes after {action}, "
                f"expected at most {most_bytes:g}"
            )


class _RankState:
    """What is on one rank, as symbols."""

    def __init__(self, program: StepProgram, rank: int) -> None:
        self.program, self.rank = program, rank
        self.here: set[PassDone] = set()
        """Passes done here, and those of other ranks whose message has come."""
        self.sent: set[PassDone] = set()
        self.kept: dict[Place, str] = {}
        """Activations: whole, input (to be computed again), for W; "out " before it while they are on the host."""
        actions = program.actions[rank]
        self.cut = {action.chunk for action in actions if action.kind == "GATHER"}
        self.gathered: set[int] = set()
        first = {(action.of, action.chunk): action.kind for action in reversed(actions) if action.kind in ("OUT", "IN")}
        self.out = {key for key, kind in first.items() if kind == "IN"}
        self.began_out = set(self.out)
        self.versions = {chunk: [0] for chunk in program.placement.held[rank]}
        self.unsummed: defaultdict[int, int] = defaultdict(int)
        """Weight gradients of a chunk since its last REDUCE."""
        self.sums: defaultdict[int, int] = defaultdict(int)

    def fail(self, action: Action, words: str) -> BrokenStepError:
        return BrokenStepError(f"{self.program.name}: rank {self.rank} does {action} and {words}")

    def do(self, action: Action) -> None:
        """One action that waits for nobody any more; raises when what it needs is not there."""
        place = (action.chunk, action.microbatch, action.slice)
        match action.kind:
            case "F" | "B" | "I" | "W" | "FB":
                for part in parts(action):
                    self.do_pass(part)
            case "RECOMPUTE":
                self.require_weights(action)
                self.expect(action, place, "input", "its input is not there or the forward pass kept everything")
                self.kept[place] = "whole"
            case "SEND":
                event = PassDone("F" if action.of == "activation" else "I", *place)
                if event not in self.here or event in self.sent:
                    raise self.fail(action, "has nothing to send" if event not in self.here else "has sent it before")
                self.sent.add(event)
            case "RECV":
                event = (
                    PassDone("F", place[0] - 1, *place[1:])
                    if action.of == "activation"
                    else PassDone("I", place[0] + 1, *place[1:])
                )
                if event in self.here:
                    raise self.fail(action, "has it already")
                self.here.add(event)
            case "GATHER" | "FREE":
                if (action.chunk in self.gathered) == (action.kind == "GATHER"):
                    raise self.fail(
                        action, "the weights are whole already" if action.kind == "GATHER" else "none are gathered"
                    )
                if action.kind == "GATHER" and ("weights", action.chunk) in self.out:
                    raise self.fail(action, "its part of the weights is on the host")
                (self.gathered.add if action.kind == "GATHER" else self.gathered.remove)(action.chunk)
            case "REDUCE":
                if not self.unsummed[action.chunk]:
                    raise self.fail(action, "there is no gradient to sum since the last time")
                self.unsummed[action.chunk] = 0
                self.sums[action.chunk] += 1
            case "UPDATE":
                self.update(action)
            case "OUT" | "IN":
                self.move(action, place)

    def do_pass(self, part: Action) -> None:
        place = (part.chunk, part.microbatch, part.slice)
        for event in self.program.needs(part):
            if event not in self.here:
                raise self.fail(part, f"{Action(event.kind, *event[1:])} has not happened or not arrived before it")
        if part.kind != "W":  # W multiplies what is kept: it reads no weights
            self.require_weights(part)
        if part.kind == "F":
            self.kept[place] = "input" if place in self.program.recomputed else "whole"
        elif part.kind == "W":
            self.expect(part, place, "for W", "what I left for it is not there")
            del self.kept[place]
        else:
            self.expect(part, place, "whole", "its activations are not there: on the host, or not computed again yet")
            self.kept[place] = "for W"
            if part.kind == "B":
                del self.kept[place]
        self.unsummed[part.chunk] += part.kind in ("B", "W")
        self.here.update(makes(part))

    def require_weights(self, part: Action) -> None:
        chunk = part.chunk
        if chunk in self.cut and chunk not in self.gathered:
            raise self.fail(part, "the weights are not gathered")
        if ("weights", chunk) in self.out:
            raise self.fail(part, "the weights are on the host")
        if part.version not in self.versions[chunk]:
            versions = ", ".join(map(str, self.versions[chunk]))
            raise self.fail(part, f"reads version {part.version} of the weights, held are {versions}")

    def expect(self, action: Action, place: Place, state: str, words: str) -> None:
        if self.kept.get(place) != state:
            raise self.fail(action, words)

    def move(self, action: Action, place: Place) -> None:
        is_out = action.kind == "OUT"
        if action.of == "activation":
            state = self.kept.get(place, "")
            if state not in ("whole", "input") if is_out else not state.startswith("out "):
                raise self.fail(action, "there is nothing to move" if is_out else "nothing of it is on the host")
            self.kept[place] = f"out {state}" if is_out else state.removeprefix("out ")
            return
        key = (action.of, action.chunk)
        if (key in self.out) == is_out:
            raise self.fail(action, "it is on the host already" if is_out else "it is not on the host")
        (self.out.add if is_out else self.out.remove)(key)

    def update(self, action: Action) -> None:
        chunk, versions = action.chunk, self.versions[action.chunk]
        if {("states", chunk), ("weights", chunk)} & self.out:
            raise self.fail(action, "the optimizer states or weights are on the host")
        must_sum = self.sums[chunk] or len(self.program.placement.holders[chunk]) > 1
        if must_sum and (self.unsummed[chunk] or not self.sums[chunk]):
            raise self.fail(action, "gradients have not been summed by a REDUCE since")
        if not must_sum and not self.unsummed[chunk]:
            raise self.fail(action, "there is no gradient since the last time")
        if action.version != versions[-1] + 1:
            raise self.fail(action, f"makes version {action.version} of the weights, expected {versions[-1] + 1}")
        self.unsummed[chunk] = self.sums[chunk] = 0
        self.versions[chunk] = [*versions, action.version][-self.program.versions :]

    def finish(self) -> None:
        """Nothing may be left over."""
        left: dict[str, Sequence[object]] = {
            "activations": sorted(self.kept),
            "gathered weights": sorted(self.gathered),
            "data on the host or off it": sorted(self.out ^ self.began_out),
        }
        for words, values in left.items():
            if values:
                raise BrokenStepError(f"{self.program.name}: rank {self.rank} ends with {words} left over: {values[0]}")


class _StepProof:
    """All ranks, run together."""

    def __init__(self, program: StepProgram) -> None:
        self.program = program
        self.is_lowered = bool({"SEND", "RECV"} & program.kinds)
        self.states = [_RankState(program, rank) for rank in range(program.ranks)]
        self.at = [0] * program.ranks

    def current(self, rank: int) -> Action | None:
        actions = self.program.actions[rank]
        return actions[self.at[rank]] if self.at[rank] < len(actions) else None

    def run(self) -> None:
        moving = True
        while moving:
            moving = False
            for rank in range(self.program.ranks):
                while self.advance(rank):
                    moving = True
        stuck = [f"rank {rank} at {action}" for rank in range(self.program.ranks) if (action := self.current(rank))]
        if stuck:
            raise BrokenStepError(f"{self.program.name} deadlocks: {', '.join(stuck[:4])} wait for ever")
        for state in self.states:
            state.finish()
        self.require_updates()

    def advance(self, rank: int) -> bool:
        """Does the next action of a rank, with everybody who has to take part; False if it has to wait."""
        action = self.current(rank)
        if action is None:
            return False
        together = self.partners(rank, action)
        if together is None:
            return False
        for partner, theirs in together:
            self.states[partner].do(theirs)
            self.at[partner] += 1
        return True

    def partners(self, rank: int, action: Action) -> Sequence[tuple[int, Action]] | None:
        """Who does what at this moment; None while somebody is not there yet."""
        program = self.program
        if action.kind in ("SEND", "RECV"):
            forward = action.of == "activation"
            step = 1 if forward == (action.kind == "SEND") else -1
            other = action.chunk + step
            if not 0 <= other < program.chunks:
                raise BrokenStepError(f"{program.name}: rank {rank} does {action}, and there is no chunk {other}")
            partner = program.placement.rank(other, action.microbatch)
            theirs = action._replace(kind="RECV" if action.kind == "SEND" else "SEND", chunk=other)
            if partner == rank or self.current(partner) != theirs:
                return None
            # The sender first: it says when there is nothing to send.
            pairs = [(rank, action), (partner, theirs)]
            return pairs if action.kind == "SEND" else pairs[::-1]
        if action.kind == "REDUCE":
            holders = program.placement.holders[action.chunk]
            all_there = all(self.current(holder) == action for holder in holders)
            return [(holder, action) for holder in holders] if all_there else None
        if not self.is_lowered:
            for part in parts(action):
                for event in program.needs(part):
                    home = program.placement.rank(event.chunk, event.microbatch)
                    if home == rank and event not in self.states[rank].here:
                        return [(rank, action)]  # never to come: the rank itself says so
                    if home != rank:
                        if event not in self.states[home].here:
                            return None
                        self.states[rank].here.add(event)
        return [(rank, action)]

    def require_updates(self) -> None:
        """A step that updates weights updates those of every chunk, alike on all its holders."""
        if "UPDATE" not in self.program.kinds:
            return
        for chunk, holders in enumerate(self.program.placement.holders):
            newest = {holder: self.states[holder].versions[chunk][-1] for holder in holders}
            if len(set(newest.values())) > 1 or not min(newest.values()):
                rank = min(newest, key=lambda holder: newest[holder])
                raise BrokenStepError(
                    f"{self.program.name}: rank {rank} ends with version {newest[rank]} of chunk {chunk}: others were "
                    "updated, expected an UPDATE of it"
                )
