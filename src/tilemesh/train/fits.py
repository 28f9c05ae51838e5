"""Whether a layout fits the memory of this machine, before a rank starts; and the nearest layout that does.

The one idea: a refusal must be certain. Weights, gradients and optimizer states are there whatever a run does, so they
have to fit. The rest of a peak is predicted, and is refused only where it is far beyond what there is. What is moved to
the host's memory has to fit as predicted: whoever moves it can leave it where it is. Ranks on other hosts have memory
of their own: only as many count as this host has.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

from tilemesh.core.conflicts import is_runnable
from tilemesh.core.context import membership
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import CPU, H200, Cluster, Device, device_for, make_node
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.program import chunk_layers
from tilemesh.core.units import format_bytes
from tilemesh.model.kernels import TORCH
from tilemesh.model.work.task import STATE_BYTES, Code
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.memory import RankMemory, Room
from tilemesh.plan.nearest import changes, nearest_layouts, smaller_microbatches, without_offload
from tilemesh.train.config import TrainConfig
from tilemesh.train.rules import kept_share

FAR = 1.5
"""Times what there is: a predicted peak beyond that is refused. Measured peaks were within some percent of predicted
ones, so a run that is refused for this would not have been a near thing."""
_LESS = 0.9
"""Of a predicted peak: what is offered to a run that ran out of memory needs at most so much of it."""
_MOST_TRIES = 40
"""Layouts that are looked at for one that fits."""
_NONE_FITS = "no layout near it fits either: train a smaller model, or one with fewer tokens per microbatch"


class MemoryFit:
    """A configuration on this machine. `accepts`: whether training takes another plan in its place."""

    def __init__(
        self, config: TrainConfig, memory_bytes: int, gpus: Sequence[str], accepts: Callable[[ParallelPlan], bool]
    ) -> None:
        self.config, self.accepts = config, accepts
        self.host_bytes = memory_bytes
        self.on_gpu = config.train.device != "cpu" and bool(gpus)
        member = membership()
        self.here = config.plan.world if member is None else member.local_size
        """Ranks on this host."""
        self.sharing = -(-self.here // len(gpus)) if self.on_gpu else self.here
        """Of those, what shares the memory that counts: a GPU's, or the host's."""
        self.is_alone = self.on_gpu and self.sharing == 1 and self.here == config.plan.world
        """Whether each rank has such a memory to itself, and all of them are known."""
        self.device = device_for(gpus[0]) if self.on_gpu else CPU
        """None for a GPU without figures."""
        self.words = f"the GPU ({gpus[0]})" if self.on_gpu else "this machine"
        self.have = self.device.usable_bytes if self.on_gpu and self.device is not None else memory_bytes

    @property
    def is_known(self) -> bool:
        """Whether it can be said what ranks need: frozen weights have neither gradients nor states."""
        return self.device is not None and not self.config.lora.rank

    @functools.cached_property
    def room(self) -> Room:
        """What is predicted of memory here."""
        assert self.device is not None
        is_chunked = self.on_gpu and self.config.kernels_on("cuda").loss != TORCH
        return self._room(self.device, self.config.plan, is_chunked)

    def check(self) -> None:
        """Refuse a layout that this machine cannot hold."""
        self._check_offload()
        if not self.is_known:
            return
        plan, have = self.config.plan, self.have
        sure, peak = self._needs(plan)
        if sure <= have and peak <= FAR * have:
            return
        needed = f"{format_bytes(sure)} for weights, gradients and optimizer states alone"
        if sure <= have:
            needed = f"{format_bytes(peak)} as predicted"
        raise UsageError(
            f"{plan.short()}: {_ranks(self.sharing)} need{'s' * (self.sharing == 1)} {needed}, and {self.words} has "
            f"{format_bytes(have)} of memory; {self._nearest_words()}"
        )

    def advice(self) -> str:
        """What a run that ran out of memory was predicted to need, and the nearest layout that needs less."""
        if not self.is_known:
            return "train on shorter sequences (train.context) or with smaller microbatches (plan.microbatch)"
        plan = self.config.plan
        _, peak = self._needs(plan)
        less = "no layout near it needs much less: train a smaller model, or one with a shorter context"
        for other in self._others():
            needed = self._needs(other)[1]
            if needed < _LESS * peak:
                less = f"--set {changes(plan, other)} needs {format_bytes(needed)}"
                break
        need = f"need{'s' * (self.sharing == 1)} {format_bytes(peak)} as predicted"
        ranks = f"{_ranks(self.sharing)} of {plan.short()} {need}"
        return f"{ranks}, besides what Python and its libraries take; {less}"

    def _room(self, device: Device, plan: ParallelPlan, is_chunked: bool = False) -> Room:
        code: Code = "compiled" if self.config.train.compile else "eager"
        cluster = Cluster((make_node(device, plan.world),))
        return Room(self.config.model, cluster, self.config.context, code, is_chunked)

    def _counts(self, plan: ParallelPlan) -> tuple[int, ...]:
        layers = self.config.model.layers
        return chunk_layers(plan, layers) if plan.pp > 1 else (layers,)

    def _needs(self, plan: ParallelPlan) -> tuple[int, int]:
        """Bytes of states, and at the predicted peak, of the ranks that share a memory: of those with the least, where
        it is not known which they are. A peak is without what processes hold beside tensors, much of which they
        share."""
        stages = self.room.stages(plan, self._counts(plan))
        sizes = list(zip(*(self._stage_bytes(stage) for stage in stages), strict=True))
        if self.is_alone:
            return max(sizes[0]), max(sizes[1])
        if self.sharing >= plan.world:
            replicas = plan.replicas * plan.tp
            return replicas * sum(sizes[0]), replicas * sum(sizes[1])
        return self.sharing * min(sizes[0]), self.sharing * min(sizes[1])

    def _stage_bytes(self, stage: RankMemory) -> tuple[int, int]:
        """Of one rank: states, and the peak."""
        optimizer = int(stage.optimizer_bytes * self._kept_by_optimizer())
        states = stage.weights_bytes + stage.gradients_bytes - stage.later_bytes + optimizer
        return states, stage.total_bytes - stage.reserved_bytes - stage.optimizer_bytes + optimizer

    def _kept_by_optimizer(self) -> float:
        is_kept = self.config.train.method != "server"  # servers keep it
        return is_kept * kept_share(self.config.optimizer, self.config.plan.precision)

    def _nearest_words(self) -> str:
        plan = self.config.plan
        weights, gradients, optimizer = STATE_BYTES[plan.precision]
        per_parameter = int(weights + gradients + optimizer * self._kept_by_optimizer())
        once = count_parameters(self.config.model).total * per_parameter
        if not self.on_gpu and self.sharing >= plan.world and once > self.have:
            return f"one replica's take {format_bytes(once)}: train a smaller model, or use a machine with more memory"
        for other in self._others():
            fits = self._needs(other)[1] <= self.have
            if fits and (not other.offloads or self._on_host(other) <= self.host_bytes):
                return _nearest(plan, other)
        return _NONE_FITS

    def _others(self) -> Iterator[ParallelPlan]:
        """Near layouts of the same batch that training takes."""
        near = itertools.islice(self._near(), _MOST_TRIES)
        return (other for other in near if other.batch == self.config.batch and self.accepts(other))

    def _near(self) -> Iterator[ParallelPlan]:
        """The same with smaller microbatches; the same mesh with more shared by replicas, computed again or moved to
        the host; other meshes."""
        plan = self.config.plan
        yield from smaller_microbatches(plan)
        yield from without_offload(plan)
        if self.on_gpu and not plan.offloads:
            for what in ("activations", "optimizer", "optimizer+activations"):
                other = dataclasses.replace(plan, offload=what)
                if is_runnable(other):
                    yield other
        yield from (other for other in nearest_layouts(self.config.model, plan) if other != plan)

    def _check_offload(self) -> None:
        """Refuse an offload that the host's memory has no room for, with the nearest layout that it has room for.

        On a CPU the host's memory is the device's: there all that the ranks hold is counted.
        """
        plan, have = self.config.plan, self.host_bytes
        if not plan.offloads:
            return
        needed = self._on_host(plan)
        if needed <= have:
            return
        fitting = next((other for other in without_offload(plan) if self._on_host(other) <= have), None)
        ranks, room = _ranks(self.here), format_bytes(have)
        taken = f"that of {ranks} takes {format_bytes(needed)} of the host's memory and it has {room}"
        if not self.on_gpu:
            taken = (
                f"on a CPU nothing leaves the memory, of which {ranks} take{'s' * (self.here == 1)} "
                f"{format_bytes(needed)} and this machine has {room}"
            )
        nearest = _NONE_FITS if fitting is None else _nearest(plan, fitting)
        raise UsageError(f"plan.offload is {plan.offload}: {taken}; {nearest}")

    def _on_host(self, plan: ParallelPlan) -> int:
        """Bytes that the ranks here keep in the host's memory: what is moved there, or on a CPU all."""
        room = self._room(H200 if self.on_gpu else CPU, plan)  # of a GPU nothing counts here but that it is one
        counts = self._counts(plan)
        if self.on_gpu:
            stages = room.host_bytes(plan, counts)
        else:
            stages = [stage.total_bytes for stage in room.stages(plan, counts)]
        return sum(stages) * plan.replicas * plan.tp * self.here // plan.world


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def _nearest(plan: ParallelPlan, other: ParallelPlan) -> str:
    return f"the nearest layout that works: --set {changes(plan, other)}"
