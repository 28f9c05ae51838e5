"""Some prompts of a batch, their answers under way, and what these are worth: on a rank with an engine.

The one idea: who asks an engine, and when, is not known here. A part of a batch says what is to be asked in a turn, is
given what was answered, and is scored when nobody goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tilemesh.align.config import FeedbackConfig
from tilemesh.align.generate import EngineSeat, packed_bytes
from tilemesh.align.prompts import Prompt, PromptSource
from tilemesh.align.rewards import Rewards
from tilemesh.align.turns import ENVIRONMENT, AnswerTurns, rollout_of
from tilemesh.core.shard import share
from tilemesh.serve.answers import Completion
from tilemesh.serve.request import Sampling
from tilemesh.train.record import Recorder


class PromptBatch(NamedTuple):
    """Prompts of a batch, by their place; or those that are held out."""

    first: int
    size: int
    answers: int
    is_held_out: bool = False

    def prompts(self, source: PromptSource) -> list[Prompt]:
        if self.is_held_out:
            return list(source.held_out())
        return [source.at(self.first + place) for place in range(self.size)]


class PhaseClock:
    """Seconds that phases of a step took so far, beside its update."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.seconds = recorder, dict[str, float]()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        with self.recorder.span(phase):
            yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begun


class Answers:
    """What draws and scores some of a batch's answers."""

    def __init__(
        self, align: FeedbackConfig, seat: EngineSeat, turns: AnswerTurns, rewards: Rewards, recorder: Recorder
    ) -> None:
        self.align, self.seat, self.turns, self.rewards = align, seat, turns, rewards
        self.timed = PhaseClock(recorder)

    def batch(self, number: int) -> PromptBatch:
        return PromptBatch(number * self.align.prompts, self.align.prompts, self.align.answers)

    def held_out(self) -> PromptBatch:
        return PromptBatch(0, len(self.turns.prompts.held_out()), self.align.pass_k, True)

    def begin(self, batch: PromptBatch, part: int, parts: int) -> DrawnPart:
        """One part of the prompts."""
        prompts = batch.prompts(self.turns.prompts)
        begin, count = share(len(prompts), parts, part)
        return DrawnPart(self, prompts[begin : begin + count], begin, batch.answers)

    def draw(self, batch: PromptBatch, part: int, parts: int) -> bytes:
        """One part of the prompts, answered and scored; empty where there is none."""
        drawn, turn = self.begin(batch, part, parts), 0
        with self.timed("rollout"):
            while asked := drawn.asked(turn):
                drawn.add(turn, self.seat.answer(*zip(*asked, strict=True)))
                turn += 1
                drawn.hear(turn)
        with self.timed("reward"):
            return drawn.scored()


class DrawnPart:
    """Answers of one engine to some prompts, of which the first is number `begin` of its batch."""

    def __init__(self, answers: Answers, prompts: Sequence[Prompt], begin: int, each: int) -> None:
        self._answers, self._turns, self._begin, self._each = answers, answers.turns, begin, each
        self._talks = self._going = answers.turns.begun(prompts, each)

    def asked(self, turn: int) -> list[tuple[list[int], Sampling]]:
        """Of the engine; nothing where no conversation goes on."""
        return self._turns.asked(self._going, self._each, turn)

    def add(self, turn: int, completions: Sequence[Completion]) -> None:
        self._turns.add(self._going, 1 if turn else self._each, completions)

    def hear(self, turn: int) -> bool:
        """What an environment says before a turn; whether any conversation goes on."""
        self._going = self._turns.heard(self._going, turn)
        return bool(self._going)

    def scored(self) -> bytes:
        """Packed, with what a verifier pays; empty where there was no prompt."""
        if not self._talks:
            return b""
        group = [self._begin + place // self._each for place in range(len(self._talks))]
        rollout = rollout_of(self._talks, group, self._answers.align.temperature)
        paid = self._answers.rewards.verify([each.item for each in self._talks])
        unheard = [f"{ENVIRONMENT}{each.failure}" for each in self._talks if each.failure]
        return packed_bytes(rollout, paid.parts, [*paid.failures, *unheard])
