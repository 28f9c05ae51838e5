"""A parameter server and its workers over a communicator's messages: pull weights, compute, push a gradient.

The one idea: a server holds a flat part of the weights and one `StalenessRule`, which decides everything; here are only
the messages. A worker talks to every server, each for its part. Nothing is a collective call, so no worker waits for
another unless the rule says so. A server asks nobody: it looks at its inbox, one open receipt per worker.

What each side promises when a process dies: a push counts once per server, however often it is sent, because clocks are
counted there. A worker from which nothing came for `silence_s` while others wait for it is given up and may come back
with its next pull. Weights and optimizer states outlive a server only in checkpoints (`state`, `start`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError
from tilemesh.methods.record import ServerEvent, staleness
from tilemesh.methods.rules import Push, StalenessRule

_START, _PULL, _PUSH, _LEAVE, _END, _STATE, _FIGURES = range(7)
_HEADER, _GRADIENT, _REPLY, _WEIGHTS = 1, 2, 3, 4  # tags
_FIELDS = 4  # of a header: kind, clock, and two numbers that the kind gives a meaning
_NAP_S = 2e-4
_PATIENCE_S = 5.0  # how long a worker waits in naps, which leave its core to others, before the watchdog counts


class ServedShard(Protocol):
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


def mean_update(shard: ServedShard, pushes: Sequence[Push], gradients: Sequence[Tensor], workers: int) -> None:
    """Pushes as one update; a server and the replay of what it did both call this."""
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    shard.apply(total / len(pushes), max(push.clock for push in pushes), len(pushes) / workers)


@dataclass
class _Mail:
    """What a server waits for from one worker."""

    handle: Any
    header: Tensor
    gradient: Tensor | None = None
    heard_s: float = 0.0


class ParameterServer:
    """One server rank. `workers`: ranks of `comm`; `started`: whether it serves at once or waits for `start`."""

    def __init__(
        self,
        comm: Communicator,
        workers: Sequence[int],
        shard: ServedShard,
        bound: float = 0.0,
        batch: int = 1,
        *,
        started: bool = True,
        silence_s: float = math.inf,
    ) -> None:
        self.comm, self.workers, self.shard, self.silence_s = comm, tuple(workers), shard, silence_s
        self.rule = StalenessRule(workers, bound, batch)
        self.events: list[ServerEvent] = []
        self.updates, self.given_up = 0, list[int]()
        self.busy_s = self.nbytes = 0.0
        self._started = started
        self._last: int | None = None  # who reads when all others have ended
        self._gradients: dict[Push, Tensor] = {}
        self._asked: dict[int, float] = {}  # readers that wait, since when
        self.waited_s = dict.fromkeys(self.workers, 0.0)
        self._sending: list[tuple[Any, Tensor]] = []
        self._copy: tuple[int, Tensor] = (-1, shard.weights)
        self._inbox = {worker: self._listen(worker) for worker in self.workers}

    def run(self) -> None:
        """Serve until every worker has ended, or was given up and nobody is left."""
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
                if self.given_up and not set(self._inbox) - set(self.given_up):
                    break  # those that are left are dead
                time.sleep(_NAP_S)
        for handle, _ in self._sending:
            handle.wait()

    def figures(self) -> dict[str, Any]:
        """What a run's summary says of a server."""
        pulls = sum(event.kind == "pull" for event in self.events)
        return {
            "updates": self.updates, "pulls": pulls, "bytes": self.nbytes, "busy_s": self.busy_s,
            "waited_s": [self.waited_s[worker] for worker in self.workers], "given_up": self.given_up,
            "staleness": sorted(staleness(self.events).items()),
        }  # fmt: skip

    def _listen(self, worker: int) -> _Mail:
        header = torch.zeros(_FIELDS, dtype=torch.int64)
        return _Mail(self.comm.irecv(header, worker, _HEADER, sized=False), header, heard_s=time.monotonic())

    def _take(self, worker: int, mail: _Mail) -> None:
        """A message of a worker has come."""
        kind, clock, first, second = mail.header.tolist()
        if mail.gradient is None and kind == _PUSH:
            mail.gradient = torch.empty_like(self.shard.weights)
            mail.handle = self.comm.irecv(mail.gradient, worker, _GRADIENT, sized=False)
            return
        gradient, mail.gradient = mail.gradient, None
        if kind == _START:
            self._load(worker, clock, count=first, updates=second)
        elif kind == _PULL:
            self.rule.join(worker)
            self.given_up = [other for other in self.given_up if other != worker]
            self._asked[worker] = time.monotonic()
            self._last = worker if first else self._last
        elif kind == _PUSH:
            assert gradient is not None
            self._push(worker, clock, gradient)
        elif kind == _STATE:
            self._tell_state(worker)
        elif kind == _FIGURES:
            self._tell_text(worker, json.dumps(self.figures()))
        elif kind in (_LEAVE, _END):
            self.rule.leave(worker)
        if kind == _END:
            del self._inbox[worker]
        else:
            self._inbox[worker] = self._listen(worker)
        self._go_on()

    def _push(self, worker: int, clock: int, gradient: Tensor) -> None:
        self.nbytes += gradient.nbytes
        self.rule.join(worker)
        if self.rule.push(worker, clock):
            self._gradients[Push(worker, clock)] = gradient
            self.events.append(ServerEvent("push", (Push(worker, clock),), self.updates))

    def _go_on(self) -> None:
        """Apply what is due, and answer the readers that may read now."""
        for group in self.rule.due():
            gradients = [self._gradients.pop(push) for push in group]
            mean_update(self.shard, group, gradients, len(self.workers))
            self.updates += 1
            self.events.append(ServerEvent("apply", tuple(group), self.updates))
        if not self._started:
            return
        for worker in [worker for worker in self._asked if self._may_answer(worker)]:
            self.waited_s[worker] += time.monotonic() - self._asked.pop(worker)
            if self._copy[0] != self.updates:  # one copy for all readers of a version: it stays while it is sent
                self._copy = (self.updates, self.shard.weights.clone())
            clock = self.rule.clocks[worker]
            self.events.append(ServerEvent("pull", (Push(worker, clock),), self.updates))
            self._send(worker, torch.tensor([self.updates, clock]), _REPLY)
            self._send(worker, self._copy[1], _WEIGHTS)
            self.nbytes += self._copy[1].nbytes

    def _may_answer(self, worker: int) -> bool:
        if worker == self._last:
            return not set(self._inbox) - {worker} - set(self.given_up)
        return self.rule.may_read(worker)

    def _give_up_silent(self) -> None:
        """Of the slowest workers, those that nothing came from for too long while others wait."""
        if not self._asked or math.isinf(self.silence_s):
            return
        late = time.monotonic() - self.silence_s
        slowest = self.rule.slowest
        for worker in [worker for worker, clock in self.rule.clocks.items() if clock == slowest]:
            if worker not in self._asked and self._inbox[worker].heard_s < late:
                self.rule.leave(worker)
                self.given_up.append(worker)
                self._go_on()

    def _load(self, worker: int, clock: int, count: int, updates: int) -> None:
        """Begin at a clock with weights and states that a worker has read from a checkpoint; none: as they are."""
        values = [torch.empty_like(self.shard.weights) for _ in range(count)]
        for value in values:
            self.comm.recv(value, worker, _WEIGHTS)
        if values:
            self.shard.weights.copy_(values[0])
            self.shard.load(updates, values[1:])
        self.rule = StalenessRule(self.workers, self.rule.bound, self.rule.batch, clock)
        self.updates, self._copy, self._started = updates, (-1, self.shard.weights), True

    def _tell_state(self, worker: int) -> None:
        values = [self.shard.weights, *self.shard.kept()]
        self._send(worker, torch.tensor([self.updates, len(values)]), _REPLY)
        for value in values:
            self._send(worker, value.clone(), _WEIGHTS)

    def _tell_text(self, worker: int, text: str) -> None:
        body = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self._send(worker, torch.tensor([0, len(body)]), _REPLY)
        self._send(worker, body, _WEIGHTS)

    def _send(self, worker: int, tensor: Tensor, tag: int) -> None:
        self._sending.append((self.comm.isend(tensor, worker, tag, sized=False), tensor))


class ServerLink:
    """A worker's side. `cuts`: each server's part of the flat weights, in the order of `servers`."""

    def __init__(self, comm: Communicator, servers: Sequence[int], cuts: Sequence[slice]) -> None:
        if len(servers) != len(cuts) or not servers:
            raise UsageError(
                f"{len(servers)} servers and {len(cuts)} parts of the weights: expected as many, at least 1"
            )
        self.comm, self.servers, self.cuts = comm, tuple(servers), tuple(cuts)
        self.waited_s = 0.0

    def pull(self, weights: Tensor, *, last: bool = False) -> int:
        """Read the weights into a flat tensor; the clock at which this worker is, which a server that gave it up may
        have moved on. `last`: when all other workers have ended."""
        began_s = time.perf_counter()
        replies = [torch.zeros(2, dtype=torch.int64) for _ in self.servers]
        self._ask(_PULL, 0, int(last))
        handles = []
        for server, cut, reply in zip(self.servers, self.cuts, replies, strict=True):
            handles.append(self.comm.irecv(reply, server, _REPLY, sized=False))
            handles.append(self.comm.irecv(weights[cut], server, _WEIGHTS, sized=False))
        wait_in_naps(handles)
        self.waited_s += time.perf_counter() - began_s
        return max(int(reply[1]) for reply in replies)

    def push(self, gradient: Tensor, clock: int) -> None:
        """Send a flat gradient; returns when it may be changed again."""
        header = torch.tensor([_PUSH, clock, 0, 0])
        handles = []
        for server, cut in zip(self.servers, self.cuts, strict=True):
            handles.append(self.comm.isend(header, server, _HEADER, sized=False))
            handles.append(self.comm.isend(gradient[cut], server, _GRADIENT, sized=False))
        wait_in_naps(handles)

    def start(self, clock: int, values: Sequence[Tensor] = (), updates: int = 0) -> None:
        """Let the servers begin, at a clock: with their own weights, or with flat ones and what was remembered of them
        after so many updates."""
        self._ask(_START, clock, len(values), updates)
        for server, cut in zip(self.servers, self.cuts, strict=True):
            for value in values:
                self.comm.send(value[cut].contiguous(), server, _WEIGHTS)

    def state(self, length: int, like: Tensor) -> tuple[int, list[Tensor]]:
        """Updates made so far, the weights, and what is remembered of them, flat: what a checkpoint keeps."""
        self._ask(_STATE)
        found: list[Tensor] = []
        updates = 0
        for server, cut in zip(self.servers, self.cuts, strict=True):
            updates, count = self._reply(server)
            for number in range(count):
                if number == len(found):
                    found.append(torch.empty(length, dtype=like.dtype))
                self.comm.irecv(found[number][cut], server, _WEIGHTS, sized=False).wait()
        return updates, found

    def figures(self) -> list[dict[str, Any]]:
        """What each server says of itself."""
        self._ask(_FIGURES)
        found = []
        for server in self.servers:
            body = torch.empty(self._reply(server)[1], dtype=torch.uint8)
            self.comm.irecv(body, server, _WEIGHTS, sized=False).wait()
            found.append(json.loads(bytes(body.numpy())))
        return found

    def leave(self) -> None:
        """Be waited for no more, until the next pull."""
        self._ask(_LEAVE)

    def end(self) -> None:
        """The last message of a worker."""
        self._ask(_END)

    def _ask(self, kind: int, clock: int = 0, first: int = 0, second: int = 0) -> None:
        for server in self.servers:
            self.comm.isend(torch.tensor([kind, clock, first, second]), server, _HEADER, sized=False).wait()

    def _reply(self, server: int) -> tuple[int, int]:
        reply = torch.zeros(2, dtype=torch.int64)
        self.comm.irecv(reply, server, _REPLY, sized=False).wait()
        first, second = reply.tolist()
        return first, second


def wait_in_naps(handles: Sequence[Any]) -> None:
    """Until all are done. A server may let a worker wait for many steps, in which the ranks that it waits for need the
    cores: a call of the communicator looks 10,000 times per second."""
    end_s = time.perf_counter() + _PATIENCE_S
    while not all(handle.test() for handle in handles) and time.perf_counter() < end_s:
        time.sleep(_NAP_S)
    for handle in handles:
        handle.wait()


def even_cuts(length: int, servers: int) -> list[slice]:
    """A flat vector cut as evenly as it goes."""
    ends = [length * server // servers for server in range(servers + 1)]
    return [slice(begin, end) for begin, end in pairwise(ends)]
