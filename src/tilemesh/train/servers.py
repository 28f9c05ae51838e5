"""Training by parameter servers: what each rank of such a run is, and the optimizer that a worker takes for its own.

The one idea: to the loop, a worker is a run whose optimizer happens to be elsewhere. A step pushes the gradient and
pulls weights; what a checkpoint keeps is fetched from the servers, what it held is sent to them. So worker 0 runs the
ordinary loop, with its journal, evaluations, checkpoints and signals; the other workers only step.

A worker is a replica: one rank, or a mesh of them. Servers know whole parameters and the first rank of each worker,
which gathers its gradients, talks to servers, and hands out what came: weights, the clock and what was said with them.

A killed rank ends the job, and a restart goes on from the newest checkpoint: under BSP as if nothing had happened.
Under SSP and ASP every worker goes on at worker 0's step, so of each other worker at most the steps that it was behind
are lost, and those that it was ahead are done twice.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.axes import Axes, coordinates, ordered, rank_at
from tilemesh.core.errors import RunError
from tilemesh.core.plan import MASTERED, ParallelPlan
from tilemesh.core.shard import Shard
from tilemesh.methods.link import ASKED, STOPPED, PushFigures, ServerLink
from tilemesh.methods.record import ServerEvent, append_record
from tilemesh.methods.rules import bound_of
from tilemesh.methods.server import ParameterServer, SharedNorm
from tilemesh.parallel.gradients import GradientStep, clip_factor, read
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.mesh import Axis
from tilemesh.parallel.pipeline import Pipeline
from tilemesh.parallel.shard import Held, take
from tilemesh.parallel.whole import handed_around
from tilemesh.runs.manifest import WEIGHT
from tilemesh.runs.names import SERVER_RECORDS
from tilemesh.train.config import TrainConfig
from tilemesh.train.loop import WARM_UP_STEPS, Interrupt
from tilemesh.train.memory import peak_bytes
from tilemesh.train.optimizer import Optimizer, stored_dtype
from tilemesh.train.record import IDLE, Recorder
from tilemesh.train.schedule import rate
from tilemesh.train.source import Microbatch, TextSource
from tilemesh.train.steps import Stepper
from tilemesh.train.update import UpdateGroup

SERVERS_AXIS = "server"
"""Under which a run counts what its workers pull from servers and push to them."""


def as_worker(config: TrainConfig) -> TrainConfig:
    """What a worker lays: one replica, on the CPU."""
    plan = dataclasses.replace(config.plan, dp=1)
    return dataclasses.replace(config, plan=plan, train=dataclasses.replace(config.train, device="cpu"))


def as_server(config: TrainConfig) -> TrainConfig:
    """What a server lays to hold a part of: the whole model, with the weights that are stepped."""
    precision = config.plan.precision if config.plan.precision not in MASTERED else "fp32"
    return dataclasses.replace(as_worker(config), plan=ParallelPlan(precision=precision))


def server_cuts(sizes: Sequence[int], servers: int) -> list[range]:
    """Which parameters each of at most as many servers holds: neighbours, together about as large as others'."""
    total, cuts, at, done = sum(sizes), [], 0, 0
    for server in range(servers):
        end = at + 1
        done += sizes[at]
        left = servers - server - 1
        while end < len(sizes) - left and (not left or done + sizes[end] / 2 <= total * (server + 1) / servers):
            done += sizes[end]
            end += 1
        cuts.append(range(at, end))
        at = end
    return cuts


class FlatWeights:
    """Parameters as views of one vector, in the order of their names, and what an optimizer remembers as others."""

    def __init__(self, parameters: Mapping[str, Held], servers: int) -> None:
        self.held = dict(parameters)
        tensors = [mine.tensor for mine in parameters.values()]
        self.flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        self.sizes = [tensor.numel() for tensor in tensors]
        for tensor, piece in zip(tensors, self.split(self.flat), strict=True):
            tensor.data = piece
        ends = [sum(self.sizes[:count]) for count in range(len(self.sizes) + 1)]
        self.parts = server_cuts(self.sizes, servers)
        self.cuts = [slice(ends[part.start], ends[part.stop]) for part in self.parts]

    def split(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split_with_sizes(self.sizes)
        return [piece.view(mine.tensor.shape) for piece, mine in zip(pieces, self.held.values(), strict=True)]


def flat_states(optimizer: Optimizer, kinds: Mapping[str, Sequence[str]]) -> list[Tensor]:
    """What an optimizer remembers, one vector for each kind; zeros where a parameter has fewer kinds than others."""
    vectors = []
    for number in range(max((len(names) for names in kinds.values()), default=0) if optimizer.steps else 0):
        pieces = [
            optimizer.state_of(name)[kinds[name][number]] if number < len(kinds[name]) else torch.zeros_like(value)
            for name, value in optimizer.stepped.items()
        ]
        vectors.append(torch.cat([piece.reshape(-1) for piece in pieces]))
    return vectors


class OptimizedShard:
    """A server's part of the weights, stepped by the run's optimizer."""

    def __init__(self, config: TrainConfig, parameters: Mapping[str, Held]) -> None:
        self.config, self.vectors = config, FlatWeights(parameters, 1)
        self.weights = self.vectors.flat
        self.optimizer = Optimizer(config.optimizer, parameters, as_server(config).plan.precision)

    def apply(self, gradient: Tensor, clock: int, share: float) -> None:
        for mine, piece in zip(self.vectors.held.values(), self.vectors.split(gradient), strict=True):
            mine.tensor.grad = piece
        now = float(np.float32(rate(clock, self.config.train.steps, self.config.optimizer)))  # as `Stepper` has it
        for group in self.optimizer.groups:
            if isinstance(group, UpdateGroup):
                group.share = share
        self.optimizer.step(now * share)

    def kept(self) -> list[Tensor]:
        return flat_states(self.optimizer, self.optimizer.kinds)

    def load(self, updates: int, kept: Sequence[Tensor]) -> None:
        columns = [self.vectors.split(value.clone()) for value in kept]
        tensors = {(WEIGHT, name): value.detach().clone() for name, value in self.optimizer.stepped.items()}
        for place, name in enumerate(self.optimizer.stepped):
            for kind, column in zip(self.optimizer.kinds[name], columns, strict=False):
                tensors[kind, name] = column[place]
        self.optimizer.load(updates if kept else 0, tensors)
        self.optimizer.steps = updates


class ServerOptimizer(Optimizer):
    """A worker's optimizer: a step is a push and a pull by its first rank. `last`: the clock at which a run ends."""

    link: ServerLink
    vectors: FlatWeights
    """Of the first rank alone, as are all parameters that it is the optimizer of: whole ones."""

    def __init__(self, seat: Seat, laid: Laid, last: int, recorder: Recorder) -> None:
        config, self.laid, self.replica = seat.config, laid, laid.mesh.comm
        self.is_first, self._own = self.replica.rank == 0, laid.gradients.stepped
        self._wide = stored_dtype(as_server(config).plan.precision)
        self._has_masters = config.plan.precision in MASTERED
        self._is_copy = self.replica.size > 1 or isinstance(laid, Pipeline) or self._has_masters
        """Whether what servers have is here besides what is trained: of a mesh, of weights elsewhere or of 16 bits."""
        parameters = self._whole() if self._is_copy else self._own if self.is_first else {}
        if self.is_first:
            self.vectors = FlatWeights(parameters, config.method.servers)
            self.link = ServerLink(seat.everyone, seat.servers, self.vectors.cuts)
        super().__init__(config.optimizer, parameters, as_server(config).plan.precision)
        self.clock, self.last, self.recorder, self.waits = 0, last, recorder, seat.number == 0
        """`waits`: with its last pull a worker waits for all others, so that what is saved then is what all did."""
        self.stop_requested: Callable[[], bool] = lambda: False
        """Whether this rank was asked to stop, which servers pass on to the worker that decides."""
        self.is_stopped = False
        """Whether the worker that decides has ended the run."""
        self.clips_elsewhere = clips_mean(config)
        self._is_bsp = is_bsp(config)
        self._figures = PushFigures()
        self._began = 0

    @property
    def divides_wide(self) -> bool:
        return self._has_masters

    def begin(self, clock: int, *, starts: bool) -> None:
        """Tell the servers what to begin with, which is what is here, or take it from them."""
        if self.is_first:
            if starts:
                steps = self.server_steps if len(self.server_steps) == len(self.link.servers) else []
                values = [self.vectors.flat, *flat_states(self, self.kinds)]
                self.link.start(clock, values, steps or [self.steps] * len(self.link.servers))
            self.clock = self.link.pull(self.vectors.flat)
        self._hand_out()
        self._began = self.clock

    def update(self, rate: float | Tensor, done: GradientStep) -> GradientStep:
        """The step as all workers made it: of what the servers applied meanwhile. Each of the other workers looks at
        its own."""
        self._figures = PushFigures(done.tokens, float(done.loss), float(done.norm), done.scale)
        self.step(rate, done.divisor)
        figures = np.array([done.loss, done.tokens, done.norm], np.float64)
        applied = self.link.applied() if self.is_first else None
        if self.waits and applied is not None:
            norm = applied.norm_of_mean if self._is_bsp else applied.norm
            figures[:] = applied.loss, applied.targets, norm
        loss, tokens, norm = self.replica.broadcast(figures).tolist()
        return dataclasses.replace(done, loss=loss, tokens=round(tokens), norm=norm)

    def step(self, rate: float | Tensor, divisor: Tensor | None = None) -> None:
        gradients = self._gradients()
        is_asked = bool(self.replica.max_over_ranks([float(self.stop_requested())])[0])
        if self.is_first:
            pushed = torch.cat([gradients[name].reshape(-1).to(self._wide) for name in self.stepped])
            self._exchange(pushed if divisor is None else pushed.div_(divisor), is_asked)
        self._hand_out()

    def _exchange(self, gradient: Tensor, is_asked: bool) -> None:
        began_s, nbytes = time.perf_counter(), self.vectors.flat.nbytes
        self.link.push(gradient, self.clock, self._figures)
        self.recorder.message(SERVERS_AXIS, "push", nbytes, began_s)
        is_last = self.waits and self.clock + 1 >= self.last
        began_s, held_s = time.perf_counter(), self.link.held_s
        self.clock = self.link.pull(self.vectors.flat, last=is_last, stop_requested=is_asked)
        if self.waits and not is_last and self.clock >= self.last:  # it was given up, and others went on to the end
            self.clock = self.link.pull(self.vectors.flat, last=True)
        self.recorder.message(SERVERS_AXIS, "pull", nbytes, began_s)
        # What a server made it wait for others is not exchange: it counts as waiting.
        self.recorder.seconds[IDLE] = self.recorder.seconds.get(IDLE, 0.0) + self.link.held_s - held_s

    def _whole(self) -> dict[str, Held]:
        """What is trained, whole and in the dtype in which it is stepped, on the first rank (a collective call)."""
        values = {name: mine.tensor.detach() for name, mine in self._own.items()}
        gathered = self.laid.gather(values, {name: mine.shard for name, mine in self._own.items()}) or {}
        return {
            name: Held(nn.Parameter(weight.to(self._wide)), Shard(name, tuple(weight.shape)))
            for name, weight in gathered.items()  # in the order of the model, as servers have it
        }

    def _gradients(self) -> Mapping[str, Tensor]:
        """Whole ones by name, on the first rank (a collective call)."""
        if self._is_copy:
            return self.laid.gather_gradients() or {}
        return {name: mine.tensor.grad for name, mine in self._own.items() if mine.tensor.grad is not None}

    @torch.no_grad()
    def _hand_out(self) -> None:
        """To all ranks of this replica: the clock, what servers said, and the weights that the first one has."""
        state = [self.clock, self.link.signal == ASKED, self.link.signal == STOPPED] if self.is_first else [0] * 3
        clock, is_asked, is_stopped = self.replica.broadcast(np.array(state, np.int64)).tolist()
        self.clock, self.is_asked_to_stop, self.is_stopped = clock, bool(is_asked), bool(is_stopped)
        if self._is_copy:
            for name, value in handed_around(self.replica, self.stepped, 0):
                if name in self._own:
                    self._own[name].tensor.copy_(take(self._own[name].shard, value))

    def reached(self, step: int) -> int:
        return self.clock

    def stop(self) -> None:
        """All others end after the step that they are at, and what is then read is what was made so far."""
        if self.clock < self.last:
            if self.is_first:
                self.link.stop()
                self.link.pull(self.vectors.flat, last=True)
            self._hand_out()

    def end(self) -> None:
        """Say to servers that this worker has ended."""
        if self.is_first:
            self.link.end()

    def tensors(self) -> Iterator[tuple[str, Shard, Tensor]]:
        if not self.is_first:
            return
        self.server_steps, (weights, *kept) = self.link.state(len(self.vectors.flat), self.vectors.flat, self.clock)
        self.steps = max(self.server_steps)
        for name, piece in zip(self.stepped, self.vectors.split(weights), strict=True):
            yield f"{WEIGHT}:{name}", self.shards[name], piece
        columns = [self.vectors.split(value) for value in kept]
        for place, name in enumerate(self.stepped):
            for kind, column in zip(self.kinds[name], columns, strict=False):
                yield f"{kind}:{name}", self.shards[name], column[place]

    def figures(self) -> dict[str, Any]:
        if not self.is_first:
            return {}
        servers = self.link.figures()
        ranks_told = [rank for server in servers for _, worker in server.pop("told") for rank in worker["ranks"]]
        others = [*ranks_told, *(self._of_server(number, server) for number, server in enumerate(servers))]
        return {"servers": servers, "pulling_s": self.link.waited_s, "others": others}

    def _of_server(self, number: int, server: dict[str, Any]) -> dict[str, Any]:
        """A server's time per step, as those of workers are told: at work, or waiting for messages."""
        steps = max(1, self.clock - self._began)
        figures = {"step_s": server["seconds"] / steps, "exchange_s": 0.0, "data_s": 0.0}
        figures["idle_s"] = max(0.0, server["seconds"] - server["busy_s"]) / steps
        memory = {key: server.pop(key) for key in ("peak_memory_bytes", "memory_baseline_bytes")}
        return {"name": f"server {number}", "is_server": True, **figures, **memory}


class WorkerSource(TextSource):
    """A worker's part of every batch; what is held out, whoever asks reads whole."""

    def held_out(self) -> Iterator[Microbatch]:
        mine, self.dp = self.dp, dataclasses.replace(self.dp, size=1, index=0)
        try:
            yield from super().held_out()
        finally:
            self.dp = mine


@dataclasses.dataclass(frozen=True)
class Seat:
    """A rank's place in a run with servers. `everyone`: workers as the plan lays them, then servers."""

    config: TrainConfig
    everyone: Communicator

    @property
    def axes(self) -> Axes:
        return ordered(self.config.plan.axes)

    @property
    def number(self) -> int | None:
        """Of the worker that this rank is of; None of a server."""
        rank = self.everyone.rank
        return coordinates(rank, self.axes)["dp"] if rank < self.config.plan.world else None

    @property
    def workers(self) -> list[int]:
        """The first ranks of all workers."""
        return [rank_at(dict.fromkeys(dict(self.axes), 0) | {"dp": n}, self.axes) for n in range(self.config.plan.dp)]

    @property
    def servers(self) -> range:
        return range(self.config.plan.world, self.everyone.size)

    @property
    def axis(self) -> Axis:
        assert self.number is not None
        return Axis("dp", self.config.plan.dp, self.number, tuple(self.workers), self.everyone)

    def replica(self) -> Communicator:
        """The ranks of this worker, or this server alone. A collective call of all."""
        group = self.everyone.split(self.everyone.size + self.everyone.rank if self.number is None else self.number)
        assert group is not None
        return group


def work(seat: Seat, stepper: Stepper, interrupt: Interrupt, baseline: int) -> None:
    """As a rank of a worker but the first: step until the clock of the last step, or until the first worker has decided
    to stop; then tell how long steps took."""
    optimizer, recorder, config = stepper.optimizer, stepper.recorder, seat.config
    assert isinstance(optimizer, ServerOptimizer)
    optimizer.stop_requested = lambda: interrupt.stop_requested
    optimizer.begin(0, starts=False)
    parts: list[list[float]] = []
    while optimizer.clock < optimizer.last and not optimizer.is_stopped:
        recorder.step = optimizer.clock + 1
        recorder.trace.on = recorder.trace.on and len(parts) < config.train.trace_steps
        began_s, before = time.perf_counter(), recorder.parts_s()
        with recorder.in_step():
            (loss, norm), number = *read([stepper(optimizer.clock + 1)]), recorder.step
        if stepper.is_bad(loss, norm):  # it has pushed nothing, and would make the same step again
            raise RunError(
                f"worker {seat.number}, step {number}: loss is {loss} and the gradient's norm {norm}; a smaller "
                "optimizer.lr or optimizer.clip may help"
            )
        exchange_s, data_s, idle_s = (now - then for now, then in zip(recorder.parts_s(), before, strict=True))
        parts.append([time.perf_counter() - began_s, exchange_s - idle_s, data_s, idle_s])
    recorder.trace.close()
    timed = parts[WARM_UP_STEPS:] or parts
    medians = [sorted(column)[len(column) // 2] for column in zip(*timed, strict=True)] or [0.0] * 4
    mine = np.array([*medians, peak_bytes(stepper.device), baseline], np.float64)
    everyone = optimizer.replica.all_gather(mine[None]).tolist()
    keys = ("step_s", "exchange_s", "data_s", "idle_s", "peak_memory_bytes", "memory_baseline_bytes")
    ranks = [
        {"name": f"worker {seat.number}" + f".{rank}" * (len(everyone) > 1), "is_server": False}
        | dict(zip(keys, figures, strict=True))
        for rank, figures in enumerate(everyone)
    ]
    if optimizer.is_first:
        optimizer.link.tell({"ranks": ranks})
    optimizer.end()
    stepper.close()


def server_shard(config: TrainConfig, parameters: Mapping[str, Held], number: int) -> OptimizedShard:
    """What the server of this number holds of a model's parameters, in memory of its own."""
    part = server_cuts([mine.tensor.numel() for mine in parameters.values()], config.method.servers)[number]
    own = list(parameters.items())[part.start : part.stop]
    copies = {name: Held(nn.Parameter(mine.tensor.detach().clone()), mine.shard) for name, mine in own}
    return OptimizedShard(config, copies)


def clips_mean(config: TrainConfig) -> bool:
    """Whether servers clip the mean of all workers' gradients, as data parallelism does; else each worker its own."""
    return config.optimizer.clip > 0 and is_bsp(config)


def is_bsp(config: TrainConfig) -> bool:
    """Whether workers wait for all others in every step."""
    return bound_of(config.method.consistency, config.method.staleness) == 0


def run_server(seat: Seat, parameters: Mapping[str, Held], folder: Path, interrupt: Interrupt, baseline: int) -> None:
    """As a server: hold this rank's part of the parameters until all workers have ended, and write what it did."""
    config, comm, method = seat.config, seat.everyone, seat.config.method
    number, bound = seat.servers.index(comm.rank), bound_of(method.consistency, method.staleness)
    record = folder / SERVER_RECORDS / f"{number}.jsonl"

    def keep(events: Sequence[ServerEvent]) -> None:
        try:
            append_record(record, events)
        except OSError as error:  # what was trained stays, with or without a record of it
            print(f"tilemesh: no record of server {number}: {error}", file=sys.stderr, flush=True)

    norm = SharedNorm(comm, seat.servers)

    def clipped(mean: Tensor) -> float:
        return clip_factor(norm(mean), config.optimizer.clip)

    shard, silence_s = server_shard(config, parameters, number), config.train.timeout_s / 2
    server = ParameterServer(
        comm, seat.workers, shard, bound, method.batch, started=False, silence_s=silence_s, keeper=0, keep=keep,
        stop_requested=lambda: interrupt.stop_requested, scale=clipped if clips_mean(config) else 1.0,
        measures=bound == 0,
        about=lambda: {"peak_memory_bytes": peak_bytes(shard.weights.device), "memory_baseline_bytes": baseline},
    )  # fmt: skip
    server.run()
