"""Modules in a row as a run has one placed module: on the stages of a pipeline, each placed on ranks of its own.

The one idea: parameters keep the numbers of their modules (`chunks.3.weight`) however many stages there are, so that a
checkpoint is a checkpoint on any mesh. A call in training makes both passes of all microbatches and leaves gradients.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor, nn

from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.parallel.agree import tell
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.placed import cut_words, gradient_norm
from tilemesh.parallel.staged import Chained, Joints, Microbatch, stage
from tilemesh.plan.place.cost import MeshCost


class StagedCall(nn.Module):
    """This rank's modules of a row, and calls of the whole row."""

    def __init__(
        self, row: Chained, mesh: Mesh, plan: ParallelPlan, pins: Mapping[str, str], tensors: Sequence[Tensor],
        joints: Joints,
    ) -> None:  # fmt: skip
        super().__init__()
        self.mesh, self.plan = mesh, plan
        count, uneven = divmod(len(row.chunks), plan.chunks)
        if uneven or not count:
            raise UsageError(
                f"{len(row.chunks)} modules on {plan.chunks_words}, {plan.chunks} chunks: give as many to each, or set "
                "another plan.pp"
            )
        modules = list(row.chunks.items())
        pieces = [Chained(dict(modules[at : at + count])) for at in range(0, len(modules), count)]
        own = [_pins(piece, pins, at == len(pieces) - 1, len(tensors)) for at, piece in enumerate(pieces)]
        meshes = [{axis: size for axis, size in mesh.shape if axis != "pp"}] * plan.pp
        example = self._cut(tensors)
        staged = stage(pieces, mesh.comm, meshes, example, pins=own, schedule=plan.schedule, joints=joints)
        self.parts = (staged,)  # no module of this one: its modules are
        self.placed = tuple(chunk.placed for chunk in staged.passers.values())
        rows = [placed.get_submodule("chunks") for placed in self.placed]
        self.chunks = nn.ModuleDict({name: each for own in rows for name, each in own.named_children()})
        self.shards = {name: shard for placed in self.placed for name, shard in placed.shards.items()}

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """The loss; in training with both passes made."""
        tensors = (*inputs, *named.values())
        [staged] = self.parts
        return staged.step(self._cut(tensors)) if torch.is_grad_enabled() else staged.evaluate(tensors[:1], tensors[1:])

    def _cut(self, tensors: Sequence[Tensor]) -> list[Microbatch]:
        return [([first], more) for first, *more in cut_rows(tensors, self.plan.accumulation)]

    def train(self, mode: bool = True) -> StagedCall:
        for placed in self.placed:
            placed.train(mode)
        return super().train(mode)

    @property
    def generators(self) -> dict[int, torch.Generator]:
        [staged] = self.parts
        return {number: chunk.placed.generator for number, chunk in staged.passers.items()}

    def gradient_norm(self) -> float:
        return gradient_norm(self, self.shards, self.mesh.comm)

    def placements(self) -> dict[str, str]:
        """Of all parameters, as pins say it (a collective call)."""
        own = {name: cut_words(self.shards[name]) for name, _ in self.named_parameters()}
        per_stage = self.mesh.comm.size // self.plan.pp
        texts = [tell(self.mesh.comm, json.dumps(own), at * per_stage) for at in range(self.plan.pp)]
        return {name: words for text in texts for name, words in json.loads(text).items()}

    def figures(self, cost: MeshCost) -> tuple[float, float]:
        """Seconds of a step but for its update, and bytes that a rank sends within its stage (a collective call): all
        stages once, and the longest once for each further microbatch."""
        programs = [local for placed in self.placed for local in next(iter(placed.programs.values())).programs]
        seconds, sent = cost.of_program(*programs)
        stages = np.asarray(self.mesh.comm.all_gather(np.array([seconds]))).reshape(self.plan.pp, -1).max(1)
        count = self.plan.accumulation
        return float(stages.sum() + (count - 1) * stages.max()), count * sent


def cut_rows(tensors: Sequence[Tensor], count: int) -> list[tuple[Tensor, ...]]:
    """A batch as so many microbatches of as many rows each."""
    rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    if count > 1 and (len(rows) > 1 or not min(rows) or min(rows) % count):
        raise UsageError(
            f"tensors of {', '.join(map(str, sorted(rows)))} rows cannot be cut into {count} microbatches alike: "
            "set another plan.accumulation"
        )
    return [*zip(*(tensor.chunk(count) for tensor in tensors), strict=True)] if count > 1 else [tuple(tensors)]


def _pins(piece: Chained, pins: Mapping[str, str], is_last: bool, inputs: int) -> dict[str, str]:
    """Those that name something here; what comes from the stage before lies as the row's first input does."""
    names = [name for name, _ in (*piece.named_parameters(), *piece.named_buffers())]
    names += [f"input{at}" for at in range(inputs if is_last else 1)] + (["output0"] if is_last else [])
    return {name: pin for name, pin in pins.items() if any(fnmatchcase(each, name) for each in names)}


def by_place(pins: Mapping[str, str], names: Sequence[str], row: Chained) -> dict[str, str]:
    """Pins with inputs by their places, each of which names something."""
    places = {name: f"input{at}" for at, name in enumerate(names)}
    by_place_name = {places.get(name, name): pin for name, pin in pins.items()}
    known = _pins(row, by_place_name, True, len(names))
    if unknown := [name for name in by_place_name if name not in known]:
        raise UsageError(f"no tensor is called {unknown[0]}: expected a name such as chunks.0.weight or {names[0]}")
    return by_place_name
