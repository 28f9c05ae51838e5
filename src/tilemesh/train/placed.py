"""Checkpoints of a placed module and its optimizer, by boxes: written on one mesh, gone on from on another.

    checkpoints = PlacedCheckpoints("runs/bert", placed, optimizer)
    for step in range(checkpoints.restore(), 100):
        ...
        checkpoints.save(step + 1)

The files are those of every run (`runs/checkpoint.py`): each rank writes its own boxes, none counts until all have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilemesh.core.errors import RunError, UsageError
from tilemesh.parallel.placed import PlacedModule
from tilemesh.runs.checkpoint import FAILED, Writer
from tilemesh.runs.manifest import WEIGHT
from tilemesh.runs.names import CHECKPOINTS
from tilemesh.runs.reader import Reader
from tilemesh.runs.tensors import Part, parts_of
from tilemesh.train.resume import sound_checkpoint

Say = Callable[[str], None]


class PlacedCheckpoints:
    """A run's folder as a placed module's. Every call is one of all ranks together."""

    def __init__(
        self, folder: str | Path, placed: PlacedModule, optimizer: torch.optim.Optimizer, *, keep: int = 2,
        say: Say = print,
    ) -> None:  # fmt: skip
        self.folder, self.placed, self.optimizer, self.say = Path(folder), placed, optimizer, say
        self.comm = placed.mesh.comm
        self.writer = Writer(
            self.folder / CHECKPOINTS, self.comm.rank, ranks=self.comm.size, keep=keep, background=False,
            written_by={"mesh": dict(placed.mesh.shape)}, say=say,
        )  # fmt: skip
        names = {id(value): name for name, value in placed.named_parameters()}
        stepped = [value for group in optimizer.param_groups for value in group["params"]]
        if strange := [tuple(value.shape) for value in stepped if id(value) not in names]:
            raise UsageError(f"the optimizer has a parameter of shape {strange[0]} that the placed module has not")
        self.stepped = [names[id(value)] for value in stepped]
        """Names of parameters in the optimizer's order."""

    def save(self, step: int) -> None:
        """Write all that training goes on from after so many steps."""
        values = {
            "position": step, "optimizer_steps": step, "scale": {"scale": 1.0, "good": 0},
            "numbers": {name: self._numbers(name) for name in self.stepped},
            "generator": self.placed.generator.get_state().numpy().tobytes().hex(),
        }  # fmt: skip
        self.writer.begin(step, self._parts(), values)
        self.writer.settle(bool(self.comm.all_reduce(np.array([self.writer.state == FAILED], np.int64))[0]))
        self.comm.barrier()  # it is there for all, or for none

    def _parts(self) -> Iterator[Part]:
        for name, value in self.placed.own().items():
            yield from parts_of(f"{WEIGHT}:{name}", self.placed.shards[name], value)
        for name, state in self._states():
            for kind, value in state.items():
                if self._is_shard(name, value):
                    yield from parts_of(f"{kind}:{name}", self.placed.shards[name], value)

    def _states(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        stepped = (value for group in self.optimizer.param_groups for value in group["params"])
        for name, value in zip(self.stepped, stepped, strict=True):
            yield name, self.optimizer.state.get(value, {})

    def _is_shard(self, name: str, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) == self.placed.shards[name].shape

    def _numbers(self, name: str) -> dict[str, float]:
        """States of an optimizer that are one number: how often it stepped."""
        state = dict(self._states())[name]
        numbers = {
            kind: value for kind, value in state.items() if not self._is_shard(name, value) and value is not None
        }
        if strange := [kind for kind, value in numbers.items() if isinstance(value, Tensor) and value.numel() != 1]:
            raise UsageError(
                f"the optimizer's {strange[0]} of {name} is not cut as the parameter is: it cannot be kept"
            )
        return {kind: float(value) for kind, value in numbers.items()}

    @torch.no_grad()
    def restore(self) -> int:
        """Go on from the newest checkpoint that is whole, whatever mesh wrote it: its step, 0 where there is none."""
        path = sound_checkpoint(self.folder, self.comm, self.say)
        if path is None:
            return 0
        reader, own = Reader(path), self.placed.own()
        stored = {name.removeprefix(f"{WEIGHT}:") for name in reader.names if name.startswith(f"{WEIGHT}:")}
        if different := sorted(stored.symmetric_difference(own)):
            where = "the checkpoint" if different[0] in stored else "this module"
            raise RunError(f"{path}: {different[0]} is in {where} alone: it is another module's checkpoint")
        for name, value in own.items():
            value.copy_(reader.local(f"{WEIGHT}:{name}", self.placed.shards[name]))
        values = reader.manifest.values
        states = {at: self._state(reader, name, values) for at, name in enumerate(self.stepped)}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict(
            {"state": {at: each for at, each in states.items() if each}, "param_groups": groups}
        )
        self.placed.generator.set_state(torch.frombuffer(bytearray.fromhex(values["generator"]), dtype=torch.uint8))
        self.writer.last = reader.manifest.step
        return reader.manifest.step

    def _state(self, reader: Reader, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        numbers = {kind: torch.tensor(value) for kind, value in values["numbers"].get(name, {}).items()}
        kinds = [
            kind for kind, _, of in (each.partition(":") for each in reader.names) if of == name and kind != WEIGHT
        ]
        return numbers | {kind: reader.local(f"{kind}:{name}", self.placed.shards[name]) for kind in kinds}
