"""Optimizer states in the host's memory: moved to the device a few parameters at a time, stepped there, moved back.

The one idea: states are needed once in a step and are most of what training holds (12 of 16 bytes per parameter in
`bf16-master`). Parameters are divided into parts of about `OFFLOAD_PART_BYTES` of states; each is an optimizer of its
own, whose states come in (IN), are stepped (UPDATE) and go out again (OUT). While one part is stepped the next comes in
and the one before goes out, so the device holds those of three parts and the link is busy in both directions. The
arithmetic is the same, and so are the bits. On a CPU the host's memory is where they are: nothing moves.

What it costs is every byte once in either direction over the link to the host; it pays where states are what keeps a
larger microbatch, or the model itself, from fitting, and the fewer tokens a step has, the more it costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from tilemesh.core.plan import OFFLOAD_PART_BYTES, OFFLOAD_PARTS
from tilemesh.core.shard import Shard
from tilemesh.model.kernels import TORCH
from tilemesh.parallel.host import HostLink, Mark, packed_bytes, packed_into
from tilemesh.parallel.matrices import MatrixGroup
from tilemesh.parallel.shard import Held
from tilemesh.train.config import OptimizerConfig
from tilemesh.train.optimizer import Optimizer

STATE_BYTES = 12
"""Per parameter at most: a float32 master and two moments."""


class HostOptimizer(Optimizer):
    """An `Optimizer` whose states are on the host between steps.

    `moves`: whether they move at all; by default where the parameters are not on the host.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        trained: Mapping[str, Held],
        precision: str,
        kernels: str = TORCH,
        matrices: MatrixGroup | None = None,
        *,
        part_bytes: int = OFFLOAD_PART_BYTES,
        moves: bool | None = None,
    ) -> None:
        super().__init__(config, {}, precision, kernels)
        self.device = next(iter(trained.values())).tensor.device
        self.moves = self.device.type != "cpu" if moves is None else moves
        self.link = HostLink(self.device)
        self._homes: dict[int, tuple[Tensor, Tensor]] = {}  # a state and its memory on the host, by the state's id
        self.parts: list[Optimizer] = []
        for names in _parted(trained, part_bytes):
            part = Optimizer(config, {name: trained[name] for name in names}, precision, kernels, matrices=matrices)
            self.parts.append(part)
            self._out(part)
        self.shards = {name: mine.shard for name, mine in trained.items()}
        self.kinds = {name: kinds for part in self.parts for name, kinds in part.kinds.items()}
        self.parameters = {name: mine.tensor for name, mine in trained.items()}
        self.stepped = {name: part.stepped[name] for part in self.parts for name in part.stepped}
        self.mastered = frozenset(name for part in self.parts for name in part.mastered)
        self.groups = [group for part in self.parts for group in part.groups]
        self.is_ours = all(part.is_ours for part in self.parts)

    @property
    def is_capturable(self) -> bool:
        return False  # memory that goes and comes is at other addresses each time

    @torch.no_grad()
    def move(self, rate: float | Tensor, divisor: Tensor | None = None) -> None:
        slots = self._slots(OFFLOAD_PARTS)
        gone: list[Mark] = []
        ready = [self._in(self.parts[0], slots[0])]
        for number, part in enumerate(self.parts):
            after = number + 1
            if after < len(self.parts):  # comes in while this part is stepped, where the third last went out
                free = gone[after - len(slots)] if after >= len(slots) else None
                ready.append(self._in(self.parts[after], slots[after % len(slots)], free))
            self.link.wait(ready[number])
            part.step(rate, divisor)
            gone.append(self._out(part))
        self.link.wait(gone[-1])  # the slots are given back, and the next step reads what went out

    @contextmanager
    def here(self, part: Optimizer) -> Iterator[Optimizer]:
        """The states of one part, on the device meanwhile."""
        self.link.wait(self._in(part, self._slots(1)[0]))
        yield part
        self.link.wait(self._out(part))
        self.link.settle()

    def settle(self) -> None:
        self.link.settle()

    def tensors(self) -> Iterator[tuple[str, Shard, Tensor]]:
        self.settle()
        yield from super().tensors()

    def kept(self) -> Iterator[Tensor]:
        """What the device holds of the states between steps: nothing, where they move."""
        if not self.moves:
            yield from self.on_host()

    def on_host(self) -> Iterator[Tensor]:
        self.settle()
        yield from super().kept()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        for part in self.parts:
            with self.here(part):
                part.load_weights(weights)

    def load(self, steps: int, tensors: Mapping[tuple[str, str], Tensor]) -> None:
        self.steps = steps
        for part in self.parts:
            with self.here(part):
                before = {id(state) for state in part.kept()}
                part.load(steps, tensors)
                for gone in before - {id(state) for state in part.kept()}:
                    self._homes.pop(gone, None)

    def _moved(self, part: Optimizer) -> list[Tensor]:
        """A part's states that have memory on the host."""
        return [state for state in part.kept() if id(state) in self._homes]

    def _slots(self, count: int) -> list[Tensor]:
        """Memory on the device for the states of so many parts at once."""
        size = max(packed_bytes(self._moved(part)) for part in self.parts)
        return [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(min(count, len(self.parts)))]

    def _in(self, part: Optimizer, slot: Tensor, after: Mark = None) -> Mark:
        """IN: the states come into memory on the device."""
        states = self._moved(part)
        pairs = [
            (place, self._homes[id(state)][1]) for state, place in zip(states, packed_into(slot, states), strict=True)
        ]
        mark = self.link.into(pairs, after)
        for state, (place, _) in zip(states, pairs, strict=True):
            state.data = place
        return mark

    def _out(self, part: Optimizer) -> Mark:
        """OUT: back to the host; new states get memory there."""
        if not self.moves:
            return None
        states = [state for state in part.kept() if _moves(state)]
        new = [state for state in states if id(state) not in self._homes]
        for state, home in zip(new, self.link.memory.like(new), strict=True):
            self._homes[id(state)] = (state, home)
        mark = self.link.out([(state.data, self._homes[id(state)][1]) for state in states], keeps=True)
        if new:  # their memory on the device goes now
            self.link.settle()
        for state in states:
            state.data = self._homes[id(state)][1]
        return mark


def _moves(state: Tensor) -> bool:
    """A count of steps stays where it is."""
    return state.numel() > 1


def _parted(trained: Mapping[str, Held], part_bytes: int) -> Iterator[list[str]]:
    """Names of parameters in parts of about so many bytes of states."""
    names: list[str] = []
    nbytes = 0
    for name, mine in trained.items():
        names.append(name)
        largest = replace(mine.shard, rank=0, at=0)  # also of experts that others hold: all ranks make the same parts
        nbytes += STATE_BYTES * math.prod(largest.shape)
        if nbytes >= part_bytes:
            yield names
            names, nbytes = [], 0
    if names:
        yield names
