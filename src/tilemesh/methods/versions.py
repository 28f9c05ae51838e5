"""Running an asynchronous pipeline: each pass with the version of the weights that its list says, updates in between.

The one idea: where a schedule keeps versions, each is memory of its own and the parameters point at the one a pass is
to read. Where it keeps none, updates are made in place behind autograd's back, so that a backward pass multiplies with
weights that have changed since its forward pass: AMPNet does that as it is, PipeMare puts an estimate of the old ones
there for the time of the pass. The lists are run by the runtime of every step (`parallel/run.py`). Who moves the
weights is handed in: plain SGD here, a run's optimizer in `train/asynchronous.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tilemesh.core.step.action import Payload, StepProgram, parts
from tilemesh.core.step.book import find
from tilemesh.core.step.versions import delays
from tilemesh.parallel.norms import norm_of
from tilemesh.parallel.run import ChunkPasses, Services

_KEPT_CHANGE = math.exp(-2)  # of a change of the weights, what is left in their mean change after the delay (PipeMare)
_MEASURED = 8  # updates of which one is measured
WeightUpdate = Callable[[Sequence[Tensor], int, float], None]
"""Moves weights, in place, by the gradients of their parameters, which it leaves zero. Given: the weights, in the order
of the parameters; how many updates were made before; what the learning rate is divided by (PipeMare)."""


@dataclass
class ChunkVersions:
    """A chunk's weights over a run: which versions there are, and what makes the next.

    `delay`: updates between a forward pass and the update of its gradient. `warmup`: of PipeMare, updates after which
    the learning rate is no longer divided by the delay; None: it never is, and nothing is corrected.
    """

    parameters: list[nn.Parameter]
    move: WeightUpdate
    keeps: bool
    delay: float = 1.0
    warmup: int | None = None
    version: int = 0
    """The newest, counted from the begin of the list."""
    updates: int = 0
    """Of the whole run."""
    stored: dict[int, list[Tensor]] = field(default_factory=dict)
    changes: list[Tensor] = field(default_factory=list)
    """Of PipeMare: the mean change of the weights by an update."""
    most: int = 1
    """Versions held at once, at most."""
    divergence: float = 0.0
    """How far the weights of a gradient are at most from those that it is applied to, by their norm: as many changes as
    updates lie between, each as large as the one that was measured last."""

    def __post_init__(self) -> None:
        self.stored[0] = [parameter.data for parameter in self.parameters]
        if self.warmup is not None:
            self.changes = [torch.zeros_like(value) for value in self.stored[0]]

    def begin(self) -> None:
        """The list begins again, with the weights that there are."""
        self.stored, self.version = {0: [parameter.data for parameter in self.parameters]}, 0

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
            result = run()
        for value, old in zip(values, kept, strict=True):
            value.copy_(old)
        return result

    @torch.no_grad()
    def update(self, needed: Collection[int]) -> None:
        """Step by the gradients. `needed`: versions that passes will read again."""
        before, divisor = self.stored[self.version], 1.0
        if self.warmup is not None:
            divisor = self.delay ** (1 - min(self.updates / max(1, self.warmup), 1.0))
        # Autograd keeps views of the weights that a forward pass read: their memory stays theirs while it is needed.
        is_kept = self.keeps and self.version in needed
        after = [value.clone() for value in before] if is_kept else before
        is_measured = self.updates % _MEASURED == 0
        old = [value.clone() for value in before] if self.changes or is_measured else []
        self.move(after, self.updates, divisor)
        if is_measured:
            change = norm_of(*(value - was for value, was in zip(after, old, strict=True)))
            size = norm_of(*after)
            self.divergence = (self.delay - 1) * change / max(size, 1e-30)
        keep = _KEPT_CHANGE ** (1 / max(1.0, self.delay - 1))
        for mean_change, value, was in zip(self.changes, after, old, strict=bool(self.changes)):
            mean_change.mul_(keep).add_(value - was, alpha=1 - keep)
        self.version, self.updates = self.version + 1, self.updates + 1
        self.stored = {version: values for version, values in self.stored.items() if self.keeps and version in needed}
        self.stored[self.version] = after
        self.most = max(self.most, len(self.stored))


class VersionedChunk:
    """A chunk's passes, each with its version of the weights."""

    def __init__(self, passes: ChunkPasses, versions: ChunkVersions, reads: Mapping[tuple[str, int], int]) -> None:
        """`reads`: the version that the forward (F) and the backward pass (B) of a microbatch read."""
        self.passes, self.versions, self.reads = passes, versions, reads
        self.left = dict(self.reads)

    def begin(self) -> None:
        """All passes are to come, with the weights that there are."""
        self.left = dict(self.reads)
        self.versions.begin()

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
        self.versions.update({*self.left.values()})

    def end(self) -> None:
        """Let the parameters be the newest version."""
        self.versions.read(self.versions.version)


def version_services(chunks: Mapping[int, VersionedChunk]) -> Services:
    """UPDATE, by the chunk itself."""
    return {("UPDATE", "weights"): lambda action: chunks[action.chunk].update()}


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
    move_of: Callable[[Sequence[nn.Parameter]], WeightUpdate],
    warmup: int | None = None,
) -> dict[int, VersionedChunk]:
    """Chunks of a rank with their versions. `move_of`: of a chunk's parameters. `warmup`: PipeMare's, in updates."""
    taus, updates = delays(program), find(program.name).updates
    chunks = {}
    for chunk, chunk_passes in passes.items():
        parameters = [value for value in modules[chunk].parameters() if value.requires_grad]
        correction = (warmup or 0) if updates and updates.is_corrected else None
        kept = ChunkVersions(parameters, move_of(parameters), program.keeps_versions, taus[chunk], correction)
        chunks[chunk] = VersionedChunk(chunk_passes, kept, version_reads(program, chunk))
    return chunks
