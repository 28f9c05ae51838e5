"""Adapters that an engine holds: low-rank additions to its matrices (LoRA), of which each request may name one.

The one idea: all of them lie side by side in the model's own matrices (`model.kinds.Adapted`), so that one batch has
rows of any. An adapter gets a number that is never given again and says its slot: pages are found by it, so what one
adapter computed is never another's, and a name may get other weights while requests of the old ones go on.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError, unknown
from tilemesh.model.adapter import A, B
from tilemesh.model.kinds import Adapted, AdapterRows, projections
from tilemesh.model.lora import PeftAdapter
from tilemesh.model.transformer import Transformer


@dataclass(frozen=True)
class LoadedAdapter:
    number: int
    """Above 0."""
    folder: str
    created: int
    """When it was loaded, in seconds since 1970."""
    weights: PeftAdapter


class AdapterSlots:
    """Which adapter lies where. Changed by the thread that takes steps, between two of them; all may read the names."""

    def __init__(self, rows: AdapterRows, model: Transformer) -> None:
        self._rows = rows
        self._shapes = {
            name: (layer.out_features, layer.in_features)
            for name, layer in projections(model)
            if isinstance(layer.kind, Adapted) and layer.kind.rows is rows
        }
        self._held: list[LoadedAdapter | None] = [None] * rows.slots
        self._given = 0
        self.names: Mapping[str, LoadedAdapter] = {}
        """A new mapping whenever it changes."""

    def number(self, name: str | None) -> int:
        """Of an adapter that a request names; 0: it names none."""
        if name is None:
            return 0
        if name not in self.names:
            raise unknown("adapter", name, sorted(self.names))
        return self.names[name].number

    def check(self, weights: PeftAdapter, folder: str) -> None:
        if weights.rank > self._rows.rank:
            raise UsageError(
                f"{folder} has rank {weights.rank} and there is room for {self._rows.rank}: start with --adapter-rank "
                f"{weights.rank}"
            )

    def put(self, name: str, folder: str, weights: PeftAdapter, in_use: Collection[int]) -> None:
        """Hold an adapter under a name, in place of the one that it had. `in_use`: numbers that requests still have."""
        others = {key: adapter for key, adapter in self.names.items() if key != name}
        kept = {*in_use, *(adapter.number for adapter in others.values())}
        free = [slot for slot, held in enumerate(self._held) if held is None or held.number not in kept]
        if not free:
            raise UsageError(
                f"{len(self._held)} adapters are held, which is all there is room for: drop one and wait for its "
                "requests, or start with more --adapters"
            )
        self._given += 1
        number = self._given * self._rows.slots + free[0] + 1
        self._held[free[0]] = adapter = LoadedAdapter(number, folder, int(time.time()), weights)
        self.names = {**others, name: adapter}

    def drop(self, name: str) -> None:
        """No request may name it any more; those that did go on."""
        self.number(name)
        self.names = {key: adapter for key, adapter in self.names.items() if key != name}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All of them as the model's matrices hold them, by the names of parameters."""
        rank = self._rows.rank
        for module, (outputs, inputs) in self._shapes.items():
            low, high = torch.zeros(len(self._held) * rank, inputs), torch.zeros(outputs, len(self._held) * rank)
            for slot, adapter in enumerate(self._held):
                if adapter is not None and module in adapter.weights.tensors:
                    columns = slice(slot * rank, slot * rank + adapter.weights.rank)
                    low[columns], high[:, columns] = adapter.weights.tensors[module]
            yield f"{module}.{A}", low
            yield f"{module}.{B}", high
