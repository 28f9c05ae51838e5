"""Running an asynchronous pipeline: each pass with the version of the weights that its list says, updates in between.

The one idea: where a schedule keeps versions, each is memory of its own and the parameters point at the one a pass is
to read. Where it keeps none, updates are made in place behind autograd's back, so that a backward pass multiplies with
weights that have changed since its forward pass: AMPNet does that as it is, PipeMare puts an estimate of the old ones
there for the time of the pass. The lists are run by the runtime of every step (`parallel/run.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tilemesh.core.step.action import Payload, StepProgram, parts
from tilemesh.core.step.asynchronous import delays
from tilemesh.parallel.pipeline import Pipeline
from tilemesh.parallel.run import ChunkPasses, StepRunner, StepServices

_KEPT_CHANGE = math.exp(-2)  # of a change of the weights, what is left in their mean change after the delay (PipeMare)


@dataclass
class ChunkVersions:
    """A chunk's weights over a run: which versions there are, and SGD that makes the next.

    `delay`: updates between a forward pass and the update of its gradient. `warmup`: of PipeMare, updates after which
    the learning rate is no longer divided by the delay; None: it never is, and nothing is corrected.
    """

    parameters: list[nn.Parameter]
    rate: Callable[[int], float]
    keeps: bool
    delay: float = 1.0
    warmup: int | None = None
    version: int = 0
    stored: dict[int, list[Tensor]] = field(default_factory=dict)
    changes: list[Tensor] = field(default_factory=list)
    most: int = 1
    """Versions held at once, at most."""

    def __post_init__(self) -> None:
        self.stored[0] = [parameter.data for parameter in self.parameters]
        if self.warmup is not None:
            self.changes = [torch.zeros_like(value) for value in self.stored[0]]

    def read(self, version: int) -> None:
        """Let the parameters be a version."""
        for parameter, value in zip(self.parameters, self.stored[version], strict=True):
            parameter.data = value

    @torch.no_grad()
    def corrected(self, run: Callable[[], Tensor | None]) -> Tensor | None:
        """A backward pass with the weights that its forward pass is expected to have read."""
        values = self.stored[self.version]
        kept = [value.clone() for value in values]
        for value, change in zip(values, self.changes, strict=True):
            value.sub_(change, alpha=self.delay - 1)
        with torch.enable_grad():
            made = run()
        for value, old in zip(values, kept, strict=True):
            value.copy_(old)
        return made

    @torch.no_grad()
    def update(self, last_use: Mapping[int, bool]) -> None:
        """Step by the gradients. `last_use`: versions that no pass will read again."""
        before, rate = self.stored[self.version], self.rate(self.version)
        if self.warmup is not None:
            rate /= self.delay ** (1 - min(self.version / max(1, self.warmup), 1.0))
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        after = [value.clone() for value in before] if self.keeps else before
        for number, (value, gradient) in enumerate(zip(after, gradients, strict=True)):
            value.data.sub_(gradient, alpha=rate)
            if self.changes:
                keep = _KEPT_CHANGE ** (1 / max(1.0, self.delay - 1))
                self.changes[number].mul_(keep).sub_(gradient, alpha=rate * (1 - keep))
            gradient.zero_()
        del self.stored[self.version]
        self.version += 1
        if self.keeps:
            self.stored[self.version - 1] = before
            self.stored = {v: kept for v, kept in self.stored.items() if not last_use.get(v, True)}
        self.stored[self.version] = after
        self.most = max(self.most, len(self.stored))


class VersionedChunk:
    """A chunk's passes, each with its version of the weights."""

    def __init__(self, passes: ChunkPasses, versions: ChunkVersions, reads: Mapping[tuple[str, int], int]) -> None:
        """`reads`: the version that the forward (F) and the backward pass (B) of a microbatch read."""
        self.passes, self.versions, self.reads = passes, versions, reads
        self.left = dict(self.reads)

    def forward(self, microbatch: int, piece: int, x: Tensor | None, *, keeps: bool) -> Tensor | None:
        self.versions.read(self.left.pop(("F", microbatch)))
        return self.passes.forward(microbatch, piece, x, keeps=keeps)

    def backward(self, microbatch: int, piece: int, gradient: Tensor | None, *, splits: bool) -> Tensor | None:
        self.versions.read(self.left.pop(("B", microbatch)))
        if self.versions.changes and self.versions.delay > 1:
            return self.versions.corrected(lambda: self.passes.backward(microbatch, piece, gradient, splits=splits))
        return self.passes.backward(microbatch, piece, gradient, splits=splits)

    def recompute(self, microbatch: int, piece: int) -> None:
        self.passes.recompute(microbatch, piece)

    def weights(self, microbatch: int, piece: int) -> None:
        self.passes.weights(microbatch, piece)

    def landing(self, microbatch: int, piece: int, of: Payload) -> Tensor:
        return self.passes.landing(microbatch, piece, of)

    def update(self) -> None:
        needed = set(self.left.values())
        self.versions.update({version: version not in needed for version in self.versions.stored})


class VersionServices(StepServices):
    """UPDATE, by the chunk itself."""

    def __init__(self, chunks: Mapping[int, VersionedChunk]) -> None:
        self.chunks = chunks

    def update(self, chunk: int) -> None:
        self.chunks[chunk].update()


def version_reads(program: StepProgram, chunk: int) -> dict[tuple[str, int], int]:
    """Which version the passes of a chunk read, by kind and microbatch."""
    return {
        (part.kind, part.microbatch): part.version
        for actions in program.actions
        for action in actions
        for part in parts(action)
        if part.chunk == chunk
    }


def versioned(
    program: StepProgram,
    passes: Mapping[int, ChunkPasses],
    modules: Mapping[int, nn.Module],
    rate: Callable[[int], float],
    warmup: int | None = None,
) -> dict[int, VersionedChunk]:
    """Chunks of a rank with their versions. `warmup`: PipeMare's, counted in updates."""
    taus = delays(program)
    made = {}
    for chunk, chunk_passes in passes.items():
        parameters = list(modules[chunk].parameters())
        correction = (warmup or 0) if program.name == "pipemare" else None
        kept = ChunkVersions(parameters, rate, program.keeps_versions, taus[chunk], correction)
        made[chunk] = VersionedChunk(chunk_passes, kept, version_reads(program, chunk))
    return made


def run_pipeline(
    laid: Pipeline, program: StepProgram, pieces: list[object], rate: Callable[[int], float], warmup: int | None = None
) -> dict[int, VersionedChunk]:
    """Train a laid model by an asynchronous schedule, microbatch after microbatch; this rank's chunks after it.

    `program`: with its messages. Gradients of an update are means over its tokens.
    """
    updates = sum(action.kind == "UPDATE" for action in program.actions[laid.mesh.pp.index])
    tokens = pieces[0].tokens.numel() * len(pieces) // updates  # type: ignore[attr-defined]
    modules = {number: part.module for number, part in laid.parts.items()}
    passes: dict[int, ChunkPasses] = dict(laid.passers)
    chunks = versioned(program, passes, modules, rate, warmup)
    runner = StepRunner(program, laid.mesh.pp.comm, chunks, VersionServices(chunks))
    laid.data.pieces, laid.data.scale = pieces, 1 / tokens  # type: ignore[assignment]
    laid.buckets.begin(1 / tokens)
    runner()
    laid.data.pieces = ()
    for chunk in chunks.values():
        chunk.versions.read(chunk.versions.version)
    return chunks
