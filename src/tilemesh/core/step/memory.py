"""Bytes alive on every rank between its actions: the memory curve of a step, by liveness.

Counted is what the actions make and give back. What a rank holds all the time (its part of weights and optimizer
states) is the caller's to add; what a pass needs only while it runs is not on the curve, which is read between actions.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilemesh.core.step.action import Action, StepProgram, parts

_NOTHING: Sequence[float] = ()


@dataclass(frozen=True)
class StepBytes:
    """Bytes by chunk; of activations those of one microbatch and slice. What is left empty counts as nothing."""

    kept: Sequence[float] = _NOTHING
    """Activations from a forward pass until its backward pass, the chunk's input among them."""
    kept_for_weights: Sequence[float] = _NOTHING
    """What is left of them, with the gradients they are multiplied with, from I to W."""
    inputs: Sequence[float] = _NOTHING
    """What a forward pass keeps that will be computed again: the chunk's input."""
    outputs: Sequence[float] = _NOTHING
    """A chunk's output, and the gradient of it: in a buffer from the pass until it is sent, and from RECV until it is
    used. Counted where the lists have messages."""
    weights: Sequence[float] = _NOTHING
    """Gathered, or moved in from the host."""
    gradients: Sequence[float] = _NOTHING
    """From a chunk's first weight gradient until REDUCE ..."""
    reduced: Sequence[float] = _NOTHING
    """... and what is left of it until UPDATE."""
    states: Sequence[float] = _NOTHING
    """Optimizer states, while they are not in the host's memory."""

    @classmethod
    def activations(cls, chunks: int, kept: float = 1.0, kept_for_weights: float = 0.0) -> StepBytes:
        """Activations alone, all chunks alike."""
        return cls(kept=[kept] * chunks, kept_for_weights=[kept_for_weights] * chunks)


def memory_curve(program: StepProgram, sizes: StepBytes) -> list[list[float]]:
    """For each rank the bytes alive before its first action and after every action."""
    curves = []
    for rank, actions in enumerate(program.actions):
        ledger = _Ledger(program, rank, sizes)
        curve = [ledger.alive]
        for action in actions:
            ledger.apply(action)
            curve.append(ledger.alive)
        curves.append(curve)
    return curves


def memory_peaks(program: StepProgram, sizes: StepBytes) -> list[float]:
    """The highest point of each rank's curve."""
    return [max(curve) for curve in memory_curve(program, sizes)]


Moment = tuple[int, ...]
"""What a rank holds between two actions: of each of its chunks the passes from F to B or I, then those from I to W."""


def fullest_moments(actions: Iterable[Action], chunks: Sequence[int]) -> tuple[Moment, ...]:
    """The moments at which a rank with these passes and chunks can hold most activations, whatever a pass of each chunk
    keeps: what `memory_peaks` finds of it is the largest of these, for any sizes."""
    place = {chunk: 2 * number for number, chunk in enumerate(chunks)}
    counts = [0] * (2 * len(chunks))
    moments: set[Moment] = set()
    grew = False
    for action in actions:
        if action.kind == "F":
            counts[place[action.chunk]] += 1
            grew = True
            continue
        passes = parts(action)
        if grew and passes:  # all others give something back
            moments.add(tuple(counts))
            grew = False
        for part in passes:
            counts[place[part.chunk]] += _AHEAD[part.kind]
            counts[place[part.chunk] + 1] += _BEHIND[part.kind]
            grew = grew or part.kind in "FI"
    return largest_moments(moments)


def largest_moments(moments: set[Moment]) -> tuple[Moment, ...]:
    """Without those that hold no more of anything than another one does."""
    largest: list[Moment] = []
    for moment in sorted(moments, key=sum, reverse=True):
        if not any(all(map(operator.le, moment, other)) for other in largest):
            largest.append(moment)
    return tuple(largest)


_AHEAD = {"F": 1, "B": -1, "I": -1, "W": 0}
_BEHIND = {"F": 0, "B": 0, "I": 1, "W": -1}


def away_peaks(program: StepProgram, sizes: StepBytes) -> list[float]:
    """The most activations that each rank has in the host's memory at once."""
    peaks = []
    for rank, actions in enumerate(program.actions):
        ledger = _Ledger(program, rank, sizes)
        most = 0.0
        for action in actions:
            ledger.apply(action)
            most = max(most, ledger.away)
        peaks.append(most)
    return peaks


class _Ledger:
    """What one rank holds."""

    def __init__(self, program: StepProgram, rank: int, sizes: StepBytes) -> None:
        self.program, self.sizes = program, sizes
        self.has_messages = "SEND" in program.kinds
        moved = {(action.kind, action.of, action.chunk) for action in reversed(program.actions[rank])}
        moves_weights = sorted({chunk for kind, of, chunk in moved if kind == "OUT" and of == "weights"})
        # What comes in before it ever went out begins the step on the host.
        first = {(action.of, action.chunk): action.kind for action in reversed(program.actions[rank])}
        self.alive = sum(
            self.size("states", chunk)
            for chunk in program.placement.held[rank]
            if ("IN", "states", chunk) not in moved or first["states", chunk] == "OUT"
        )
        # Weights are the caller's to add, but for those that a step moves.
        self.alive += sum(self.size("weights", chunk) for chunk in moves_weights if first["weights", chunk] == "OUT")
        self.away = 0.0
        """Activations in the host's memory."""
        self.has_gradient: set[int] = set()
        self.has_reduced: set[int] = set()
        self.computed_again: set[tuple[int, int, int]] = set()

    def size(self, what: str, chunk: int) -> float:
        values: Sequence[float] = getattr(self.sizes, what)
        return values[chunk] if values else 0.0

    def _dropped(self, what: str, chunks: set[int], chunk: int) -> float:
        """The bytes that go with a chunk's gradient, if there is one."""
        if chunk not in chunks:
            return 0.0
        chunks.remove(chunk)
        return self.size(what, chunk)

    def apply(self, action: Action) -> None:
        for part in parts(action):
            self.alive += self._pass(part)
        chunk, which = action.chunk, (action.chunk, action.microbatch, action.slice)
        match action.kind:
            case "SEND" | "RECV":
                # An activation that leaves is this chunk's output, one that comes that of the chunk before; of
                # gradients it is the other way round.
                is_own = (action.kind == "SEND") == (action.of == "activation")
                self.alive += self.size("outputs", chunk if is_own else chunk - 1) * (
                    -1 if action.kind == "SEND" else 1
                )
            case "RECOMPUTE":
                self.computed_again.add(which)
                self.alive += self.size("kept", chunk) - self.size("inputs", chunk)
            case "GATHER":
                self.alive += self.size("weights", chunk)
            case "FREE":
                self.alive -= self.size("weights", chunk)
            case "REDUCE":
                self.alive -= self._dropped("gradients", self.has_gradient, chunk)
                if chunk not in self.has_reduced:
                    self.has_reduced.add(chunk)
                    self.alive += self.size("reduced", chunk)
            case "UPDATE":
                self.alive -= self._dropped("gradients", self.has_gradient, chunk)
                self.alive -= self._dropped("reduced", self.has_reduced, chunk)
            case "OUT" | "IN":
                what: str = action.of
                if what == "activation":
                    is_input = which in self.program.recomputed and which not in self.computed_again
                    what = "inputs" if is_input else "kept"
                    self.away += self.size(what, chunk) * (1 if action.kind == "OUT" else -1)
                self.alive += self.size(what, chunk) * (1 if action.kind == "IN" else -1)

    def _pass(self, part: Action) -> float:
        """The difference a pass makes."""
        chunk, top = part.chunk, self.program.chunks - 1
        change = 0.0
        if part.kind in ("W", "B") and chunk not in self.has_gradient:
            self.has_gradient.add(chunk)
            change += self.size("gradients", chunk)
        if part.kind == "W":
            return change - self.size("kept_for_weights", chunk)
        if part.kind == "F":
            is_input = (chunk, part.microbatch, part.slice) in self.program.recomputed
            change += self.size("inputs" if is_input else "kept", chunk)
        else:
            change += self.size("kept_for_weights", chunk) * (part.kind == "I") - self.size("kept", chunk)
        if self.has_messages:
            # F takes the output of the chunk before and leaves its own; B takes the gradient of its output.
            taken, left = (chunk - 1, chunk) if part.kind == "F" else (chunk, chunk - 1)
            change += (self.size("outputs", left) if 0 <= left < top else 0.0) - (
                self.size("outputs", taken) if 0 <= taken < top else 0.0
            )
        return change
