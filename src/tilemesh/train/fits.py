"""Whether a layout fits the memory of this machine, before a rank starts; and the nearest layout that does.

The one idea: a refusal must be certain. Weights, gradients and optimizer states are there whatever a run does, so they
have to fit. The rest of a peak is predicted, and is refused only where it is far beyond what there is. What is moved to
the host's memory has to fit as predicted: whoever moves it can leave it where it is. Ranks on other hosts have memory
of their own: only as many count as this host has.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tilemesh.core.conflicts import is_runnable
from tilemesh.core.context import membership
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import CPU, H200, Cluster, device_for, make_node
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.program import chunk_layers
from tilemesh.core.units import format_bytes
from tilemesh.model.kernels import TORCH
from tilemesh.model.work.task import STATE_BYTES, Code
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.memory import RankMemory, Room
from tilemesh.plan.nearest import changes, nearest_layouts, smaller_microbatches, without_offload
from tilemesh.train.config import TrainConfig
from tilemesh.train.rules import kinds_of

FAR = 1.5
"""Times what there is: a predicted peak beyond that is refused. Measured peaks were within some percent of predicted
ones, so a run that is refused for this would not have been a near thing."""
_LESS = 0.9
"""Of a predicted peak: what is offered to a run that ran out of memory needs at most so much of it."""
_MOST_TRIES = 40
"""Layouts that are looked at for one that fits."""
_NONE_FITS = "no layout near it fits either: train a smaller model, or one with fewer tokens per microbatch"


@dataclass(frozen=True)
class _Pool:
    """Memory that some ranks share: a host's, or a GPU's."""

    words: str
    have: int
    host: int
    """Bytes of the host's memory."""
    on_gpu: bool
    here: int
    """Ranks on this host."""
    ranks: int
    """Of those, what shares it."""
    is_alone: bool
    """Whether each rank has such a memory to itself, and all of them are known."""
    room: Room


def check_fits(
    made: TrainConfig, memory_bytes: int, gpus: Sequence[str], accepts: Callable[[ParallelPlan], bool]
) -> None:
    """Refuse a layout that this machine cannot hold. `accepts`: whether training takes another plan in its place."""
    on_gpu = made.train.device != "cpu" and bool(gpus)
    member = membership()
    here = made.plan.world if member is None else member.local_size
    _check_offload(made, memory_bytes, on_gpu, here)
    pool = _pool(made, memory_bytes, gpus if on_gpu else (), here)
    if pool is None or made.lora.rank:  # a GPU without figures; frozen weights have neither gradients nor states
        return
    sure, peak = _needs(made, made.plan, pool)
    if sure <= pool.have and peak <= FAR * pool.have:
        return
    needed = f"{format_bytes(sure)} for weights, gradients and optimizer states alone"
    if sure <= pool.have:
        needed = f"{format_bytes(peak)} as predicted"
    ranks = f"{pool.ranks} rank{'s' * (pool.ranks > 1)}"
    raise UsageError(
        f"{made.plan.short()}: {ranks} need{'s' * (pool.ranks == 1)} {needed}, and {pool.words} has "
        f"{format_bytes(pool.have)} of memory; {_nearest_words(made, pool, accepts)}"
    )


def less_memory(
    made: TrainConfig, memory_bytes: int, gpus: Sequence[str], accepts: Callable[[ParallelPlan], bool]
) -> str:
    """What a run that ran out of memory was predicted to need, and the nearest layout that needs less."""
    on_gpu = made.train.device != "cpu" and bool(gpus)
    member = membership()
    here = made.plan.world if member is None else member.local_size
    pool = _pool(made, memory_bytes, gpus if on_gpu else (), here)
    if pool is None or made.lora.rank:
        return "train on shorter sequences (train.context) or with smaller microbatches (plan.microbatch)"
    _, peak = _needs(made, made.plan, pool)
    ranks = f"{pool.ranks} rank{'s' * (pool.ranks > 1)}"
    for other in itertools.islice(_others(made, on_gpu), _MOST_TRIES):
        needed = _needs(made, other, pool)[1] if other.batch == made.batch and accepts(other) else peak
        if needed < _LESS * peak:
            less = f"--set {changes(made.plan, other)} needs {format_bytes(needed)}"
            break
    else:
        less = "no layout near it needs much less: train a smaller model, or one with a shorter context"
    need = f"{ranks} of {made.plan.short()} need{'s' * (pool.ranks == 1)} {format_bytes(peak)} as predicted"
    return f"{need}, besides what Python and its libraries take; {less}"


def _pool(made: TrainConfig, memory_bytes: int, gpus: Sequence[str], here: int) -> _Pool | None:
    device = device_for(gpus[0]) if gpus else CPU
    if device is None:
        return None
    is_chunked = bool(gpus) and made.kernels_on("cuda").loss != TORCH
    cluster = Cluster((make_node(device, made.plan.world),))
    room = Room(made.model, cluster, made.context, _code(made), is_chunked)
    if not gpus:
        return _Pool("this machine", memory_bytes, memory_bytes, False, here, here, False, room)
    sharing = -(-here // len(gpus))
    is_alone = sharing == 1 and here == made.plan.world
    words = f"the GPU ({gpus[0]})"
    return _Pool(words, device.usable_bytes, memory_bytes, True, here, sharing, is_alone, room)


def _needs(made: TrainConfig, plan: ParallelPlan, pool: _Pool) -> tuple[int, int]:
    """Bytes of states, and at the predicted peak, of the ranks that share a memory: of those with the least, where it
    is not known which they are. A peak is without what processes hold beside tensors, much of which they share."""
    stages = pool.room.stages(plan, _counts(made, plan))
    sizes = list(zip(*(_stage_bytes(made, stage) for stage in stages), strict=True))
    if pool.is_alone:
        return max(sizes[0]), max(sizes[1])
    if pool.ranks >= plan.world:
        replicas = plan.dp * plan.tp
        return replicas * sum(sizes[0]), replicas * sum(sizes[1])
    return pool.ranks * min(sizes[0]), pool.ranks * min(sizes[1])


def _stage_bytes(made: TrainConfig, stage: RankMemory) -> tuple[int, int]:
    """Of one rank: states, and the peak."""
    optimizer = int(stage.optimizer_bytes * _kept_by_optimizer(made))
    states = stage.weights_bytes + stage.gradients_bytes - stage.later_bytes + optimizer
    return states, stage.total_bytes - stage.reserved_bytes - stage.optimizer_bytes + optimizer


def _kept_by_optimizer(made: TrainConfig) -> float:
    """Of the two moments that memory is predicted with, what this optimizer keeps; a master copy it keeps too."""
    kinds = len(kinds_of(made.optimizer, "layers.0.weight", (1, 1)))
    if made.train.method == "server":  # servers keep it
        return 0.0
    optimizer = STATE_BYTES[made.plan.precision][2]
    moment = 8 if made.plan.precision == "fp64" else 4
    return (optimizer - (2 - kinds) * moment) / optimizer


def _nearest_words(made: TrainConfig, pool: _Pool, accepts: Callable[[ParallelPlan], bool]) -> str:
    weights, gradients, optimizer = STATE_BYTES[made.plan.precision]
    once = count_parameters(made.model).total * int(weights + gradients + optimizer * _kept_by_optimizer(made))
    if not pool.on_gpu and pool.ranks >= made.plan.world and once > pool.have:
        return f"one replica's take {format_bytes(once)}: train a smaller model, or use a machine with more memory"
    for other in itertools.islice(_others(made, pool.on_gpu), _MOST_TRIES):
        if other.batch != made.batch or not accepts(other) or _needs(made, other, pool)[1] > pool.have:
            continue
        if not other.offloads or _host_bytes(made, other, pool.on_gpu, pool.here) <= pool.host:
            return f"the nearest layout that works: --set {changes(made.plan, other)}"
    return _NONE_FITS


def _others(made: TrainConfig, on_gpu: bool) -> Iterator[ParallelPlan]:
    """Near layouts: the same with smaller microbatches; the same mesh with more shared by replicas, computed again or
    moved to the host; other meshes."""
    yield from smaller_microbatches(made.plan)
    yield from without_offload(made.plan)
    if on_gpu and not made.plan.offloads:
        for what in ("activations", "optimizer", "optimizer+activations"):
            other = dataclasses.replace(made.plan, offload=what)
            if is_runnable(other):
                yield other
    yield from (other for other in nearest_layouts(made.model, made.plan) if other != made.plan)


def _check_offload(made: TrainConfig, have: int, on_gpu: bool, here: int) -> None:
    """Refuse an offload that the host's memory has no room for, with the nearest layout that it has room for.

    On a CPU the host's memory is the device's: there all that the ranks hold is counted.
    """
    plan = made.plan
    if not plan.offloads:
        return
    needed = _host_bytes(made, plan, on_gpu, here)
    if needed <= have:
        return
    others = (other for other in without_offload(plan) if _host_bytes(made, other, on_gpu, here) <= have)
    fitting = next(others, None)
    ranks = f"{here} rank{'s' * (here > 1)}"
    taken = f"that of {ranks} takes {format_bytes(needed)} of the host's memory and it has {format_bytes(have)}"
    if not on_gpu:
        taken = (
            f"on a CPU nothing leaves the memory, of which {ranks} take{'s' * (here == 1)} {format_bytes(needed)} and "
            "this machine has "
            f"{format_bytes(have)}"
        )
    nearest = _NONE_FITS if fitting is None else f"the nearest layout that works: --set {changes(plan, fitting)}"
    raise UsageError(f"plan.offload is {plan.offload}: {taken}; {nearest}")


def _host_bytes(made: TrainConfig, plan: ParallelPlan, on_gpu: bool, here: int) -> int:
    """What so many ranks keep in the host's memory: what is moved there, or on a CPU all."""
    device = H200 if on_gpu else CPU  # of a GPU nothing counts here but that it is one
    room = Room(made.model, Cluster((make_node(device, plan.world),)), made.context, _code(made))
    counts = _counts(made, plan)
    stages = room.host_bytes(plan, counts) if on_gpu else [stage.total_bytes for stage in room.stages(plan, counts)]
    return sum(stages) * plan.dp * plan.tp * here // plan.world


def _code(made: TrainConfig) -> Code:
    return "compiled" if made.train.compile else "eager"


def _counts(made: TrainConfig, plan: ParallelPlan) -> tuple[int, ...]:
    return chunk_layers(plan, made.model.layers) if plan.pp > 1 else (made.model.layers,)
