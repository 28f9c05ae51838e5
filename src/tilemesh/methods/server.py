"""A parameter server over a communicator's messages; its workers pull weights, compute and push gradients (`link.py`).

The one idea: a server holds a flat part of the weights and one `StalenessRule`, which decides everything; here are only
the messages. A worker talks to every server, each for its part. Nothing is a collective call, so no worker waits for
another unless the rule says so. A server asks nobody: it looks at its inbox, one open receipt per worker.

What each side promises when a process dies: a push counts once per server, however often it is sent, because clocks are
counted there. A worker from which nothing came for `silence_s` while others wait for it is given up and may come back
with its next pull. Weights and optimizer states outlive a server only in checkpoints (`state`, `start`).

Who stops whom: a rank that is asked to stop says so to servers with its next pull (a server knows it of itself), they
say it to the worker that keeps the run's results, and this one decides: at the end of its step it says STOP. Servers
then answer every other worker at once, all end, and what the keeper reads last is what its checkpoint holds. A push of
a clock that the keeper has not made is not in it: under BSP a stopped run is at one clock, as if nobody had asked.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import RunError
from tilemesh.methods import link
from tilemesh.methods.record import ServerEvent, staleness
from tilemesh.methods.rules import Push, StalenessRule
from tilemesh.methods.simulate import NAP_S
from tilemesh.parallel.norms import norm_of, norms_of

_MEASURED = 7  # prime, so that each of a few workers gets its turn


class ServerShard(Protocol):
    """What a server holds: a flat part of the weights, and how it is updated."""

    weights: Tensor

    def apply(self, gradient: Tensor, clock: int, share: float) -> None:
        """One update by the mean of some workers' gradients. `share`: the part of all workers that they are, by which
        the learning rate is multiplied, so that all workers together move the weights as far as one update of all."""

    def kept(self) -> list[Tensor]:
        """What is remembered of the weights, flat, each as long as they are."""

    def load(self, updates: int, kept: Sequence[Tensor]) -> None:
        """What `kept` gave after so many updates."""


class SgdShard:
    """Plain SGD, which remembers nothing."""

    def __init__(self, weights: Tensor, rate: float) -> None:
        self.weights, self.rate = weights, rate

    def apply(self, gradient: Tensor, clock: int, share: float) -> None:
        self.weights.sub_(gradient, alpha=self.rate * share)

    def kept(self) -> list[Tensor]:
        return []

    def load(self, updates: int, kept: Sequence[Tensor]) -> None:
        return None


class MeanUpdate(NamedTuple):
    """An update as it was applied."""

    mean: Tensor
    """The pushes' mean gradient, times `scale`."""
    scale: float


def mean_update(
    shard: ServerShard,
    pushes: Sequence[Push],
    gradients: Sequence[Tensor],
    workers: int,
    scale: float | Callable[[Tensor], float] = 1.0,
    targets: Sequence[float] = (),
) -> MeanUpdate:
    """Pushes as one update, of their mean times `scale`, or what that says of the mean.

    `targets`: of which each gradient is the mean, so that all of them count alike, as by data parallelism; by default
    equally many. A server and the replay of what it did both call this."""
    counts = targets or [1.0] * len(pushes)
    weights = [count * len(pushes) / max(sum(counts), 1.0) for count in counts]  # exactly 1 where all are equal
    mean = gradients[0] * weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        mean.add_(gradient, alpha=weight)
    mean /= len(pushes)
    factor = scale(mean) if callable(scale) else scale
    if factor != 1.0:
        mean *= factor
    shard.apply(mean, max(push.clock for push in pushes), len(pushes) / workers)
    return MeanUpdate(mean, factor)


class SharedNorm:
    """The norm of a gradient of which each server has a part: every update they tell one another the square of theirs.

    For BSP alone, where all servers make the same updates in the same order; each waits here for the slowest."""

    def __init__(self, comm: Communicator, servers: Sequence[int]) -> None:
        self.comm, self.servers = comm, tuple(servers)

    def __call__(self, part: Tensor) -> float:
        mine = norms_of([part]).double().square()
        squares = {server: torch.zeros_like(mine) for server in self.servers if server != self.comm.rank}
        handles = [self.comm.isend(mine, server, link.SQUARES, sized=False) for server in squares]
        handles += [self.comm.irecv(square, server, link.SQUARES, sized=False) for server, square in squares.items()]
        link.wait_in_naps(handles)
        squares[self.comm.rank] = mine
        return math.sqrt(sum(float(squares[server]) for server in self.servers))  # in one order: all have the same


class Divergence:
    """How far the weights that a gradient is applied to are from those that it was computed from, by their norm: the
    difference from a synchronous step, which has none. Of one read in `_MEASURED`, whose weights are kept meanwhile."""

    def __init__(self) -> None:
        self._reads, self._count = dict[Push, Tensor](), 0
        self.seen: list[float] = []

    def read(self, push: Push, weights: Tensor) -> None:
        """`weights`: that nobody changes."""
        if self._count % _MEASURED == 0:
            self._reads[push] = weights
        self._count += 1

    def note(self, pushes: Sequence[Push], weights: Tensor) -> None:
        for push in pushes:
            read = self._reads.pop(push, None)
            if read is not None:
                self.seen.append(norm_of(weights - read) / max(norm_of(weights), 1e-30))

    def figures(self) -> dict[str, float]:
        count = len(self.seen)
        return {"mean": sum(self.seen) / max(1, count), "most": max(self.seen, default=0.0), "gradients": count}


@dataclass
class _Mail:
    """What a server waits for from one worker."""

    handle: Any
    header: Tensor
    body: Tensor | None = None
    """Of a push or of what a worker tells, after its header has come."""
    heard_s: float = 0.0


class ParameterServer:
    """One server rank. `workers`: ranks of `comm`; `started`: whether it serves at once or waits for `start`."""

    def __init__(
        self,
        comm: Communicator,
        workers: Sequence[int],
        shard: ServerShard,
        bound: float = 0.0,
        batch: int = 1,
        *,
        started: bool = True,
        silence_s: float = math.inf,
        keeper: int | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
        scale: float | Callable[[Tensor], float] = 1.0,
        measures: bool = False,
        about: Callable[[], dict[str, Any]] = dict,
        keep: Callable[[Sequence[ServerEvent]], None] = lambda events: None,
    ) -> None:
        """`silence_s`: after which a worker that others wait for is given up; `keeper`: the worker without which a run
        has no results; `asked`: whether this rank was asked to stop; `scale`: as `mean_update` takes it; `measures`:
        whether it takes the norm of every mean, to tell workers; `about`: what else its figures say; `keep`: takes what
        was done since it was last called, when a checkpoint is taken and at the end."""
        self.comm, self.workers, self.shard, self.silence_s = comm, tuple(workers), shard, silence_s
        self.keeper, self.stop_requested, self.scale, self.measures = keeper, stop_requested, scale, measures
        self.about, self.keep, self._kept = about, keep, 0
        self.rule = StalenessRule(workers, bound, batch)
        self.events: list[ServerEvent] = []
        self.updates, self.given_up = 0, list[int]()
        self.busy_s = self.nbytes = 0.0
        self._started, self._ended_s = started, time.monotonic()
        self._last: int | None = None  # who reads when all others have ended
        self._told, self._is_over = link.GO_ON, False  # over: the last read is answered, nothing is applied any more
        self._gradients: dict[Push, tuple[Tensor, link.PushFigures]] = {}
        # Since each worker's last read: summed loss, targets, squares of means, updates, squares of pushes, pushes.
        self._applied = {worker: np.zeros(link.REPLY_FIELDS - 3) for worker in self.workers}
        self._asked: dict[int, float] = {}  # readers that wait, since when
        self.waited_s = dict.fromkeys(self.workers, 0.0)
        self.divergence = Divergence()
        self.reports: dict[int, Any] = {}
        """What workers have said of themselves."""
        self._began_s = time.monotonic()
        self._sending: list[tuple[Any, Tensor]] = []
        self._copy: tuple[int, Tensor] = (-1, shard.weights)
        self._inbox = {worker: self._listen(worker) for worker in self.workers}

    def run(self) -> None:
        """Serve until every worker has ended; those that were given up may come back for a while after the others."""
        while self._inbox:
            moved = False
            for worker, mail in list(self._inbox.items()):
                if mail.handle.test():
                    mail.handle.wait()
                    began_s = time.perf_counter()
                    self._take(worker, mail)
                    self.busy_s += time.perf_counter() - began_s
                    moved = True
            self._sending = [(handle, kept) for handle, kept in self._sending if not handle.test()]
            if not moved:
                self._give_up_silent()
                self._let_ask_again()
                if not self._inbox.keys() - set(self.given_up) and self._are_dead(time.monotonic() - self._ended_s):
                    break
                time.sleep(NAP_S)
        for handle, _ in self._sending:
            handle.wait()
        self._keep_events()

    def _are_dead(self, waited_s: float) -> bool:
        """Whether those that were given up, and are all that is left, will not come back any more."""
        if self.keeper not in self._inbox:
            return waited_s > self.silence_s
        if waited_s > 2 * self.silence_s:
            raise RunError(
                f"worker {self.keeper}, which writes the checkpoints, has said nothing for {waited_s:.0f} s, and all "
                "others have ended: see why it hangs, and go on from the newest checkpoint with --resume"
            )
        return False

    def _keep_events(self) -> None:
        self.keep(self.events[self._kept :])
        self._kept = len(self.events)

    def figures(self) -> dict[str, Any]:
        """What a run's summary says of a server."""
        pulls = sum(event.kind == "pull" for event in self.events)
        return {
            "updates": self.updates, "pulls": pulls, "bytes": self.nbytes, "busy_s": self.busy_s,
            "seconds": time.monotonic() - self._began_s,
            "waited_s": [self.waited_s[worker] for worker in self.workers], "given_up": self.given_up,
            "staleness": sorted(staleness(self.events).items()), "divergence": self.divergence.figures(),
            **self.about(),
        }  # fmt: skip

    def _listen(self, worker: int) -> _Mail:
        header = torch.zeros(link.FIELDS, dtype=torch.float64)
        return _Mail(self.comm.irecv(header, worker, link.HEADER, sized=False), header, heard_s=time.monotonic())

    def _take(self, worker: int, mail: _Mail) -> None:
        """A message of a worker has come."""
        # A push has figures where others have whole numbers, and its loss need be no number.
        kind, clock, first, second = map(int, mail.header[:4].nan_to_num().tolist())
        if mail.body is None and kind in (link.PUSH, link.TELL):
            mail.body = (
                torch.empty(first, dtype=torch.uint8) if kind == link.TELL else torch.empty_like(self.shard.weights)
            )
            mail.heard_s = time.monotonic()  # it speaks, however long its gradient takes
            mail.handle = self.comm.irecv(mail.body, worker, link.GRADIENT, sized=False)
            return
        body, mail.body = mail.body, None
        if kind == link.START:
            self._load(worker, clock, count=first, updates=second)
        elif kind == link.PULL:
            self.rule.join(worker, at_least=clock)
            self.given_up = [other for other in self.given_up if other != worker]
            self._asked[worker] = time.monotonic()
            self._last = worker if first else self._last
            self._told = max(self._told, link.ASKED if second else link.GO_ON)
        elif kind == link.PUSH:
            assert body is not None
            self._push(worker, clock, body, link.PushFigures(*mail.header[2:].tolist()))
        elif kind == link.TELL:
            assert body is not None
            self.reports[worker] = json.loads(bytes(body.numpy()))
        elif kind == link.STOP:
            self._told = link.STOPPED
        elif kind == link.STATE:
            self._tell_state(worker, clock)
        elif kind == link.FIGURES:
            self._tell_text(worker, json.dumps({**self.figures(), "told": sorted(self.reports.items())}))
        elif kind in (link.LEAVE, link.END):
            self.rule.leave(worker)
        if kind == link.END:
            del self._inbox[worker]
            self._ended_s = time.monotonic()
        else:
            self._inbox[worker] = self._listen(worker)
        self._go_on()

    def _push(self, worker: int, clock: int, gradient: Tensor, figures: link.PushFigures) -> None:
        self.nbytes += gradient.nbytes
        self.rule.join(worker)
        if self.rule.push(worker, clock):
            self._gradients[Push(worker, clock)] = gradient, figures
            self.events.append(ServerEvent("push", (Push(worker, clock),), self.updates, figures.scale))

    def _go_on(self) -> None:
        """Apply what is due, and answer the readers that may read now."""
        for group in () if self._is_over else self.rule.due():
            gradients, figures = zip(*(self._gradients.pop(push) for push in group), strict=True)
            self.divergence.note(group, self.shard.weights)
            targets = [signal.targets for signal in figures]
            update = mean_update(self.shard, group, gradients, len(self.workers), self.scale, targets)
            self.updates += 1
            self._count(update, figures)
            self.events.append(ServerEvent("apply", tuple(group), self.updates, update.scale))
        if not self._started:
            return
        for worker in [worker for worker in self._asked if self._may_answer(worker)]:
            signal = max(self._told, link.ASKED if self.stop_requested() else link.GO_ON)
            # Who is to end makes no gradient of what it reads, and may be ahead of the bound.
            self._answer(worker, signal, counts=signal != link.STOPPED or worker == self._last)
            self._is_over = self._is_over or worker == self._last

    def _count(self, update: MeanUpdate, figures: Sequence[link.PushFigures]) -> None:
        """Add an update to what workers are told with their next weights."""
        square = float(norms_of([update.mean]).double().square()) / update.scale**2 if self.measures else 0.0
        losses = sum(push.loss * push.targets for push in figures)
        squares = sum(push.norm**2 for push in figures)
        seen = [losses, sum(push.targets for push in figures), square, 1.0, squares, len(figures)]
        for applied in self._applied.values():
            applied += seen

    def _answer(self, worker: int, signal: int, *, counts: bool) -> None:
        waited_s = time.monotonic() - self._asked.pop(worker)
        self.waited_s[worker] += waited_s
        if self._copy[0] != self.updates:  # one copy for all readers of a version: it stays while it is sent
            self._copy = (self.updates, self.shard.weights.clone())
        clock = self.rule.clocks[worker]
        if counts:
            self.events.append(ServerEvent("pull", (Push(worker, clock),), self.updates))
            self.divergence.read(Push(worker, clock), self._copy[1])
        self._reply(worker, waited_s, clock, signal, *self._applied[worker].tolist())
        self._applied[worker][:] = 0.0
        self._send(worker, self._copy[1], link.WEIGHTS)
        self.nbytes += self._copy[1].nbytes

    def _may_answer(self, worker: int) -> bool:
        if worker == self._last:
            return not set(self._inbox) - {worker} - set(self.given_up)
        return self._told == link.STOPPED or self.rule.may_read(worker)

    def _let_ask_again(self) -> None:
        """Who reads last waits for all others, however long that takes: now and then it hears that it has to."""
        if self._last in self._asked and time.monotonic() - self._asked[self._last] > self.silence_s / 2:
            self._answer(self._last, link.AGAIN, counts=False)

    def _give_up_silent(self) -> None:
        """Of those that others wait for, the slowest, or at the end all: those that nothing came from for too long."""
        if not self._asked or math.isinf(self.silence_s):
            return
        late = time.monotonic() - self.silence_s
        slowest = self.rule.slowest
        is_end = self._last in self._asked
        for worker in [worker for worker, clock in self.rule.clocks.items() if is_end or clock == slowest]:
            if worker not in self._asked and self._inbox[worker].heard_s < late:
                self.rule.leave(worker)
                self.given_up.append(worker)
                self._go_on()

    def _load(self, worker: int, clock: int, count: int, updates: int) -> None:
        """Begin at a clock with weights and states that a worker has read from a checkpoint; none: as they are."""
        values = [torch.empty_like(self.shard.weights) for _ in range(count)]
        for value in values:
            self.comm.recv(value, worker, link.WEIGHTS)
        if values:
            self.shard.weights.copy_(values[0])
            self.shard.load(updates, values[1:])
        self.rule = StalenessRule(self.workers, self.rule.bound, self.rule.batch, clock)
        self.updates, self._copy, self._started = updates, (-1, self.shard.weights), True
        self._began_s = time.monotonic()
        self.events.append(ServerEvent("start", (Push(worker, clock),), updates))

    def _tell_state(self, worker: int, step: int) -> None:
        self.events.append(ServerEvent("state", (Push(worker, step),), self.updates))
        self._keep_events()
        values = [self.shard.weights, *self.shard.kept()]
        self._reply(worker, self.updates, len(values))
        for value in values:
            self._send(worker, value.clone(), link.WEIGHTS)

    def _tell_text(self, worker: int, text: str) -> None:
        body = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self._reply(worker, 0, len(body))
        self._send(worker, body, link.WEIGHTS)

    def _reply(self, worker: int, *values: float) -> None:
        rest = [0.0] * (link.REPLY_FIELDS - len(values))
        self._send(worker, torch.tensor([*values, *rest], dtype=torch.float64), link.REPLY)

    def _send(self, worker: int, tensor: Tensor, tag: int) -> None:
        self._sending.append((self.comm.isend(tensor, worker, tag, sized=False), tensor))
