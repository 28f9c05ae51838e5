"""Who draws answers: engines on the ranks that train, or ranks that do nothing else; begun, and later collected.

The one idea: a batch is asked for by its place among the prompts, begun with weights of a version, and collected as one
piece of bytes from each engine, in order. Where engines are on ranks of their own, the first rank that trains is linked
with them: it sends what is asked and, where they have another version, the weights; training goes on meanwhile. Such
ranks draw a batch when told to, or one after the other by themselves (`stream.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tilemesh.align.answers import Answers, PromptBatch
from tilemesh.align.generate import Generator, RolloutEngine
from tilemesh.align.record import HELD_OUT, EngineEvent
from tilemesh.align.stream import AnswerStream
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.launch.board import my_status
from tilemesh.parallel.agree import everyones, tell, tell_bytes
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.whole import handed_around
from tilemesh.train.memory import peak_bytes


class AnswerDrawing:
    """By engines of the ranks that train, each replica's own: a batch that is begun is drawn at once."""

    def __init__(self, answers: Answers, generator: Generator, mesh: Mesh, link: Communicator | None = None) -> None:
        """`link`: of the first rank that trains, with those that only draw."""
        self.answers, self.generator, self.mesh, self.link = answers, generator, mesh, link
        self._raw = b""
        self._version = 0  # of the weights that engines elsewhere have
        self._part = generator.place
        self._stream: AnswerStream | None = None

    def begin(self, batch: PromptBatch, version: int) -> None:
        """With the weights of now, which are this version (a collective call)."""
        with self.answers.timed("update"):
            self.generator.wait()
        with self.answers.timed("weight sync"):
            self.generator.update(version)
        with self.generator.together() as asks:
            self._raw = self.answers.draw(batch, *self._part) if asks else b""

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
        self._send(version, batch=batch)

    def finish(self) -> list[bytes]:
        with self.answers.timed("rollout"):
            pieces = self._told()
        count = int(tell(self.mesh.comm, str(len(pieces))))
        return [tell_bytes(self.mesh.comm, pieces[place] if pieces else b"") for place in range(count)]

    def memory(self) -> dict[str, list[int]]:
        self._tell(memory=True)
        pairs = [json.loads(raw) for raw in self._told()]
        return {key: [each[key] for each in pairs] for key in ("peak_memory_bytes", "memory_baseline_bytes") if pairs}

    def close(self) -> None:
        if sys.exc_info()[0] is None:  # a rank that failed is waited for by nobody
            self._tell()

    def _send(self, version: int, **words: Any) -> None:
        """The weights of now, where engines have others, and what to do with them (a collective call)."""
        with self.answers.timed("weight sync"):
            weights = self.generator.whole_weights() if version != self._version else None
            self._tell(version=version, sends=version != self._version, **words)
            if self.link is not None and version != self._version:
                for _ in handed_around(self.link, weights, 0):
                    pass
        self._version = version

    def _tell(self, **words: Any) -> None:
        if self.link is not None:
            tell(self.link, json.dumps(words))

    def _told(self) -> list[bytes]:
        """By each rank that draws, on the first that trains."""
        return [] if self.link is None else everyones(self.link, b"")[1:]


class StreamDrawing(RemoteDrawing):
    """By ranks that draw batch after batch."""

    def begin_batches(self, first: int, events: Sequence[Sequence[EngineEvent]] | None = None) -> None:
        """From this one on. `events`: of each engine, to be repeated."""
        self._tell(first=first, events=events)

    def renew(self, version: int, end: int) -> None:
        """Give them the weights of now, from which on batches before `end` may be begun (a collective call)."""
        self._send(version, end=end)

    def begin(self, batch: PromptBatch, version: int) -> None:
        """Held-out prompts, with weights that they have."""
        self._tell(held_out=version)
        self._tell(collect=(HELD_OUT, version))

    def collect(self, kind: str, number: int) -> list[bytes]:
        """A batch, in the order of prompts (a collective call)."""
        self._tell(collect=(kind, number))
        return self.finish()

    def happened(self) -> list[list[EngineEvent]]:
        """To each engine, since this was asked last; on the first rank that trains."""
        self._tell(happened=True)
        return [[EngineEvent(*each) for each in json.loads(raw)] for raw in self._told()]


class RepeatedDrawing(AnswerDrawing):
    """By engines of the ranks that train, what engines elsewhere drew meanwhile, one after the other."""

    def begin_batches(self, first: int, events: Sequence[Sequence[EngineEvent]] | None = None) -> None:
        assert events is not None
        assert self.generator.engine is not None
        self._stream = self._stream or AnswerStream(self.generator.engine, self.answers, *self._part)
        self._stream.begin(first, events[self._part[0]])
        self._version = 0

    def renew(self, version: int, end: int) -> None:
        assert self._stream is not None
        if version == self._version:
            return
        self._version = version
        with self.answers.timed("rollout"):
            self.generator.wait()
            self._stream.give(version, self.generator.local_weights, end)
            self._stream.wait_stalled()

    def begin(self, batch: PromptBatch, version: int) -> None:
        assert self._stream is not None
        self._raw = self._stream.collect(HELD_OUT, version)

    def collect(self, kind: str, number: int) -> list[bytes]:
        assert self._stream is not None
        self._raw = self._stream.collect(kind, number)
        return self.finish()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        super().close()


def serve_answers(link: Communicator, engine: RolloutEngine, answers: Answers, baseline: int) -> None:
    """As a rank that only draws: until the first rank that trains says that no more are asked for. `baseline`: bytes
    that this process had before it was one."""
    part, stream = (link.rank - 1, link.size - 1), None
    if answers.align.streams:
        assert engine.engine is not None
        stream = AnswerStream(engine.engine, answers, *part)
    try:
        while True:
            my_status().at("waiting for prompts")
            told = json.loads(tell(link, ""))
            if not told:
                return
            reply = b""
            weights = dict(handed_around(link, None, 0)) if told.get("sends") else None
            if "memory" in told:
                taken = {"peak_memory_bytes": peak_bytes(engine.device), "memory_baseline_bytes": baseline}
                reply = json.dumps(taken).encode()
            elif stream is not None:
                answered = _obey(stream, told, weights, part[0])
                if answered is None:
                    continue
                reply = answered
            else:
                if weights is not None:
                    engine.update(weights, told["version"])
                my_status().at(f"drawing answers with weights of version {told['version']}")
                reply = answers.draw(PromptBatch(*told["batch"]), *part)
            everyones(link, reply)
    finally:
        if stream is not None:
            stream.close()


def _obey(
    stream: AnswerStream, told: Mapping[str, Any], weights: Mapping[str, Tensor] | None, engine: int
) -> bytes | None:
    """What a rank that draws batch after batch is told; a reply, where one is waited for."""
    if "first" in told:
        to_do = None if told["events"] is None else [EngineEvent(*each) for each in told["events"][engine]]
        stream.begin(told["first"], to_do)
    elif "end" in told:
        stream.give(told["version"], weights, told["end"])
    elif "held_out" in told:
        stream.ask_held_out(told["held_out"])
    elif "happened" in told:
        return json.dumps(stream.happened()).encode()
    else:
        my_status().at("drawing answers, of which some are waited for")
        return stream.collect(*told["collect"])
    return None
