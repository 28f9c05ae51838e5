"""Optimizer states in the host's memory: moved to the device a few parameters at a time, stepped there, moved back.

The one idea: states are needed once in a step and are most of what training holds (12 of 16 bytes per parameter in
`bf16-master`). Parameters are divided into parts of about `OFFLOAD_PART_BYTES` of states; each is an optimizer of its
own, whose states come in (IN), are stepped (UPDATE) and go out again (OUT), so the device holds those of one part. The
arithmetic is the same, and so are the bits. On a CPU the host's memory is where they are: nothing moves.

What it costs is every byte twice over the link to the host; it pays where states are what keeps a larger microbatch, or
the model itself, from fitting, and the fewer tokens a step has, the more it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from tilemesh.core.plan import OFFLOAD_PART_BYTES
from tilemesh.core.shard import Shard
from tilemesh.model.kernels import TORCH
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
        held: Mapping[str, Held],
        precision: str,
        kernels: str = TORCH,
        *,
        part_bytes: int = OFFLOAD_PART_BYTES,
        moves: bool | None = None,
    ) -> None:
        super().__init__(config, {}, precision, kernels)
        self.moves = any(mine.tensor.device.type != "cpu" for mine in held.values()) if moves is None else moves
        self._home: dict[int, tuple[Tensor, Tensor]] = {}  # a state and its memory on the host, by the state's id
        self.parts: list[Optimizer] = []
        for names in _parted(held, part_bytes):
            part = Optimizer(config, {name: held[name] for name in names}, precision, kernels)
            self.parts.append(part)
            self._out(part)
        self.shards = {name: mine.shard for name, mine in held.items()}
        self.parameters = {name: mine.tensor for name, mine in held.items()}
        self.stepped = {name: part.stepped[name] for part in self.parts for name in part.stepped}

    @property
    def is_ours(self) -> bool:
        return all(part.is_ours for part in self.parts)

    @property
    def divides(self) -> bool:
        return all(part.divides for part in self.parts)

    @property
    def is_capturable(self) -> bool:
        return False  # memory that goes and comes is at other addresses each time

    def move(self, rate: float | Tensor, divisor: Tensor | None = None) -> None:
        for part in self.parts:
            self._in(part)
            part.step(rate, divisor)
            self._out(part)

    def tensors(self) -> Iterator[tuple[str, Shard, Tensor]]:
        for part in self.parts:
            yield from part.tensors()

    def kept(self) -> Iterator[Tensor]:
        """What the device holds of the states between steps: nothing, where they move."""
        if not self.moves:
            yield from self.on_host()

    def on_host(self) -> Iterator[Tensor]:
        for part in self.parts:
            yield from part.kept()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._each(lambda part: part.load_weights(weights))

    def load(self, steps: int, tensors: Mapping[tuple[str, str], Tensor]) -> None:
        def loaded(part: Optimizer) -> None:
            before = {id(state) for state in part.kept()}
            part.load(steps, tensors)
            for gone in before - {id(state) for state in part.kept()}:
                self._home.pop(gone, None)

        self.steps = steps
        self._each(loaded)

    def _each(self, do: Callable[[Optimizer], None]) -> None:
        for part in self.parts:
            self._in(part)
            do(part)
            self._out(part)

    def _in(self, part: Optimizer) -> None:
        """IN: memory on the parameters' device, with the states in it."""
        for state in part.kept() if self.moves else ():
            device = next(iter(part.parameters.values())).device
            if id(state) in self._home:
                _, home = self._home[id(state)]
                state.data = torch.empty_like(home, device=device).copy_(home, non_blocking=True)

    def _out(self, part: Optimizer) -> None:
        """OUT: back to the host; the memory on the device is free for the next part."""
        for state in part.kept() if self.moves else ():
            if not _moves(state):
                continue
            if id(state) not in self._home:
                pinned = torch.empty_like(state, device="cpu", pin_memory=torch.cuda.is_available())
                self._home[id(state)] = (state, pinned.detach())
            _, home = self._home[id(state)]
            home.copy_(state.data, non_blocking=True)
            state.data = home
        if self.moves and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # what reads the host's memory next may be the host


def _moves(state: Tensor) -> bool:
    """A count of steps stays where it is."""
    return state.numel() > 1


def _parted(held: Mapping[str, Held], part_bytes: int) -> Iterator[list[str]]:
    """Names of parameters in parts of about so many bytes of states."""
    names: list[str] = []
    nbytes = 0
    for name, mine in held.items():
        names.append(name)
        nbytes += STATE_BYTES * mine.tensor.numel()
        if nbytes >= part_bytes:
            yield names
            names, nbytes = [], 0
    if names:
        yield names
