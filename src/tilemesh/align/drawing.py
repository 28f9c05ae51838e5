"""Who draws answers: engines on the ranks that train, or ranks that do nothing else; begun, and later collected.

The one idea: a batch is asked for by its place among the prompts, begun with weights of a version, and collected as one
piece of bytes from each engine, in order. Where engines are on ranks of their own, the first rank that trains is linked
with them: it sends what is asked and, where they have another version, the weights; training goes on meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from tilemesh.align.config import FeedbackConfig
from tilemesh.align.generate import Generator, RolloutEngine, packed_bytes
from tilemesh.align.prompts import Prompt, PromptSource
from tilemesh.align.rewards import Rewards
from tilemesh.align.turns import AnswerTurns, rollout_of
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.shard import share
from tilemesh.launch.board import my_status
from tilemesh.parallel.agree import everyones, tell, tell_bytes
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.whole import handed_around
from tilemesh.train.memory import peak_bytes
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
    """What draws and scores some of a batch's answers, on a rank with an engine."""

    def __init__(self, align: FeedbackConfig, turns: AnswerTurns, rewards: Rewards, recorder: Recorder) -> None:
        self.align, self.turns, self.rewards, self.timed = align, turns, rewards, PhaseClock(recorder)

    def draw(self, batch: PromptBatch, part: int, parts: int) -> bytes:
        """One part of the prompts, answered and verified; empty where there is none."""
        prompts = batch.prompts(self.turns.prompts)
        begin, count = share(len(prompts), parts, part)
        mine = prompts[begin : begin + count]
        if not mine:
            return b""
        with self.timed("rollout"):
            drawn = self.turns.draw(mine, batch.answers)
        group = [begin + place for place in range(count) for _ in range(batch.answers)]
        rollout = rollout_of(drawn, group, self.align.temperature)
        with self.timed("reward"):
            paid = self.rewards.verify([each.item for each in drawn])
        return packed_bytes(rollout, paid.parts, paid.failures)


class AnswerDrawing:
    """By engines of the ranks that train, each replica's own: a batch that is begun is drawn at once."""

    def __init__(self, answers: Answers, generator: Generator, mesh: Mesh, link: Communicator | None = None) -> None:
        """`link`: of the first rank that trains, with those that only draw."""
        self.answers, self.generator, self.mesh, self.link = answers, generator, mesh, link
        self._raw = b""
        self._version = 0  # of the weights that engines elsewhere have

    def begin(self, batch: PromptBatch, version: int) -> None:
        """With the weights of now, which are this version (a collective call)."""
        with self.answers.timed("update"):
            self.generator.wait()
        with self.answers.timed("weight sync"):
            self.generator.update(version)
        dp = self.mesh.dp
        with self.generator.together() as asks:
            self._raw = self.answers.draw(batch, dp.index, dp.size) if asks else b""

    def finish(self) -> list[bytes]:
        """What was begun, in the order of prompts (a collective call)."""
        return everyones(self.mesh.comm, self._raw)

    def memory(self) -> dict[str, list[int]]:
        """Of ranks that only draw, on the first that trains: nothing where there are none."""
        return {}

    def close(self) -> None:
        self.generator.close()


class RemoteDrawing(AnswerDrawing):
    """By ranks that do nothing else, beside which the others go on."""

    def begin(self, batch: PromptBatch, version: int) -> None:
        with self.answers.timed("weight sync"):
            weights = self.generator.whole_weights() if version != self._version else None
            if self.link is not None:
                tell(self.link, json.dumps({"batch": batch, "version": version, "sends": version != self._version}))
                if version != self._version:
                    for _ in handed_around(self.link, weights, 0):
                        pass
        self._version = version

    def finish(self) -> list[bytes]:
        with self.answers.timed("rollout"):
            pieces = everyones(self.link, b"")[1:] if self.link is not None else []
        count = int(tell(self.mesh.comm, str(len(pieces))))
        return [tell_bytes(self.mesh.comm, pieces[place] if pieces else b"") for place in range(count)]

    def memory(self) -> dict[str, list[int]]:
        if self.link is None:
            return {}
        tell(self.link, json.dumps({"memory": True}))
        pairs = [json.loads(raw) for raw in everyones(self.link, b"")[1:]]
        return {key: [each[key] for each in pairs] for key in ("peak_memory_bytes", "memory_baseline_bytes")}

    def close(self) -> None:
        if self.link is not None and sys.exc_info()[0] is None:  # a rank that failed is waited for by nobody
            tell(self.link, json.dumps({}))


def serve_answers(link: Communicator, engine: RolloutEngine, answers: Answers, baseline: int) -> None:
    """As a rank that only draws: until the first rank that trains says that no more are asked for. `baseline`: bytes
    that this process had before it was one."""
    while True:
        my_status().at("waiting for prompts")
        told = json.loads(tell(link, ""))
        if not told:
            return
        if "memory" in told:
            taken = {"peak_memory_bytes": peak_bytes(engine.device), "memory_baseline_bytes": baseline}
            everyones(link, json.dumps(taken).encode())
            continue
        if told["sends"]:
            engine.update(dict(handed_around(link, None, 0)), told["version"])
        my_status().at(f"drawing answers with weights of version {told['version']}")
        everyones(link, answers.draw(PromptBatch(*told["batch"]), link.rank - 1, link.size - 1))
