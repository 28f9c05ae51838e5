"""A worker's side of parameter servers: its messages to each of them, and how it waits for their answers.

What a message is, both sides know from here: a header of six numbers (its kind, a clock and four that the kind gives
a meaning), and what follows it. The servers' side is `server.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError
from tilemesh.methods.simulate import NAP_S

START, PULL, PUSH, LEAVE, END, STATE, FIGURES, TELL, STOP = range(9)
HEADER, GRADIENT, REPLY, WEIGHTS, SQUARES = 1, 2, 3, 4, 5
"""Tags. A gradient's is also that of what a worker tells, weights' also that of what a server says of itself."""
FIELDS, REPLY_FIELDS = 6, 9
GO_ON, ASKED, STOPPED, AGAIN = range(4)
"""What a server says with its weights: to go on; that some rank was asked to stop, which the worker that keeps the
run's results decides on; that this worker has decided so, and all end; or that a last pull has to be made again."""
_PATIENCE_S = 5.0  # how long a worker waits in naps, which leave its core to others, before the watchdog counts


class PushFigures(NamedTuple):
    """What a worker says of a gradient: the targets that it is the mean over, their mean loss, its norm, and what the
    loss was multiplied by, which fp16 gradients are rounded by."""

    targets: float = 1.0
    loss: float = 0.0
    norm: float = 0.0
    scale: float = 1.0


class AppliedFigures(NamedTuple):
    """What servers applied between two reads of a worker, over all workers."""

    loss: float
    targets: float
    norm_of_mean: float
    """Of the mean gradient of an update, where servers measure it; the root mean square over the updates."""
    norm: float
    """Of the workers' own gradients, the root mean square over them."""


class ServerLink:
    """A worker's side. `cuts`: each server's part of the flat weights, in the order of `servers`."""

    def __init__(self, comm: Communicator, servers: Sequence[int], cuts: Sequence[slice]) -> None:
        if len(servers) != len(cuts) or not servers:
            raise UsageError(
                f"{len(servers)} servers and {len(cuts)} parts of the weights: expected as many, at least 1"
            )
        self.comm, self.servers, self.cuts = comm, tuple(servers), tuple(cuts)
        self.waited_s = self.held_s = 0.0
        """Seconds of all pulls, and of these what a server let this worker wait for others."""
        self.signal = GO_ON
        """What servers said with the newest weights."""
        self._applied = np.zeros((len(cuts), REPLY_FIELDS - 3))

    def pull(self, weights: Tensor, *, last: bool = False, stop_requested: bool = False) -> int:
        """Read the weights into a flat tensor; the clock at which this worker is, which a server that gave it up may
        have moved on. `last`: when all other workers have ended. `asked`: this rank was asked to stop.

        Servers give up a worker, and take it back, each at a moment of its own, so their clocks of it may differ then:
        the largest counts, and those that have a smaller one are asked again, for weights of that clock."""
        began_s, self.signal = time.perf_counter(), GO_ON
        places: Sequence[int] = range(len(self.servers))
        clocks = [0 for _ in places]
        while places:
            replies = self._pull_from(places, weights, max(clocks), last, stop_requested)
            for place, (clock, _) in zip(places, replies, strict=True):
                clocks[place] = clock
            self.signal = max(self.signal, *(signal for _, signal in replies if signal != AGAIN), GO_ON)
            again = {place for place, (_, signal) in zip(places, replies, strict=True) if signal == AGAIN}
            places = [place for place, clock in enumerate(clocks) if clock < max(clocks) or place in again]
        self.waited_s += time.perf_counter() - began_s
        return clocks[0]

    def _pull_from(
        self, places: Sequence[int], weights: Tensor, clock: int, last: bool, stop_requested: bool
    ) -> list[tuple[int, int]]:
        """The parts of some servers, the clocks at which they have this worker, `clock` at least, and what they say."""
        replies = [torch.zeros(REPLY_FIELDS, dtype=torch.float64) for _ in places]
        handles = []
        for place, reply in zip(places, replies, strict=True):
            server = self.servers[place]
            self._tell(server, PULL, clock, int(last), int(stop_requested))
            handles.append(self.comm.irecv(reply, server, REPLY, sized=False))
            handles.append(self.comm.irecv(weights[self.cuts[place]], server, WEIGHTS, sized=False))
        wait_in_naps(handles)
        self.held_s += max(float(reply[0]) for reply in replies)
        for place, reply in zip(places, replies, strict=True):
            self._applied[place] += reply[3:].numpy()
        return [(int(reply[1]), int(reply[2])) for reply in replies]

    def applied(self) -> AppliedFigures | None:
        """What was applied since the last call, as the pulls since then were told; None where nothing was."""
        seen, self._applied = self._applied, np.zeros_like(self._applied)
        loss_sum, targets, _, _, squares, pushes = seen[0].tolist()
        if not targets:
            return None
        # Each server has a part of a mean, and under SSP and ASP it may have made other updates than the others.
        of_mean = float(np.sqrt((seen[:, 2] / np.maximum(seen[:, 3], 1)).sum()))
        return AppliedFigures(loss_sum / targets, targets, of_mean, float(np.sqrt(squares / pushes)))

    def push(self, gradient: Tensor, clock: int, figures: PushFigures = PushFigures()) -> None:  # noqa: B008
        """Send a flat gradient; returns when it may be changed again."""
        header = torch.tensor([PUSH, clock, *figures], dtype=torch.float64)
        handles = []
        for server, cut in zip(self.servers, self.cuts, strict=True):
            handles.append(self.comm.isend(header, server, HEADER, sized=False))
            handles.append(self.comm.isend(gradient[cut], server, GRADIENT, sized=False))
        wait_in_naps(handles)

    def start(self, clock: int, values: Sequence[Tensor] = (), updates: Sequence[int] = ()) -> None:
        """Let the servers begin, at a clock: with their own weights, or with flat ones and what was remembered of them
        after so many updates, each server's own number."""
        for server, count in zip(self.servers, updates or [0] * len(self.servers), strict=True):
            self._tell(server, START, clock, len(values), count)
        for server, cut in zip(self.servers, self.cuts, strict=True):
            for value in values:
                self.comm.send(value[cut].contiguous(), server, WEIGHTS)

    def state(self, length: int, like: Tensor, step: int = 0) -> tuple[list[int], list[Tensor]]:
        """What a step's checkpoint keeps: the updates that each server has made, which differ where workers do not wait
        for one another, the weights, and what is remembered of them, flat; zeros of a server that has made none."""
        self._ask(STATE, step)
        vectors: list[Tensor] = []
        updates = []
        for server, cut in zip(self.servers, self.cuts, strict=True):
            own_updates, count = self._reply(server)
            updates.append(own_updates)
            for number in range(count):
                if number == len(vectors):
                    vectors.append(torch.zeros(length, dtype=like.dtype))
                self.comm.irecv(vectors[number][cut], server, WEIGHTS, sized=False).wait()
        return updates, vectors

    def figures(self) -> list[dict[str, Any]]:
        """What each server says of itself."""
        self._ask(FIGURES)
        figures = []
        for server in self.servers:
            body = torch.empty(self._reply(server)[1], dtype=torch.uint8)
            self.comm.irecv(body, server, WEIGHTS, sized=False).wait()
            figures.append(json.loads(bytes(body.numpy())))
        return figures

    def tell(self, figures: dict[str, Any]) -> None:
        """Say something of this worker to the first server, whose figures have it."""
        body = torch.frombuffer(bytearray(json.dumps(figures).encode()), dtype=torch.uint8)
        self._tell(self.servers[0], TELL, 0, len(body))
        self.comm.isend(body, self.servers[0], GRADIENT, sized=False).wait()

    def stop(self) -> None:
        """Let all other workers end after the step that they are at; what this one then pulls last is the run's."""
        self._ask(STOP)

    def leave(self) -> None:
        """Be waited for no more, until the next pull."""
        self._ask(LEAVE)

    def end(self) -> None:
        """The last message of a worker."""
        self._ask(END)

    def _ask(self, kind: int, clock: int = 0, first: int = 0, second: int = 0) -> None:
        for server in self.servers:
            self._tell(server, kind, clock, first, second)

    def _tell(self, server: int, kind: int, clock: int = 0, first: int = 0, second: int = 0) -> None:
        header = torch.tensor([kind, clock, first, second, 0, 0], dtype=torch.float64)
        self.comm.isend(header, server, HEADER, sized=False).wait()

    def _reply(self, server: int) -> tuple[int, int]:
        reply = torch.zeros(REPLY_FIELDS, dtype=torch.float64)
        self.comm.irecv(reply, server, REPLY, sized=False).wait()
        return int(reply[0]), int(reply[1])


def wait_in_naps(handles: Sequence[Any]) -> None:
    """Until all are done. A server may let a worker wait for many steps, in which the ranks that it waits for need the
    cores: a call of the communicator looks 10,000 times per second."""
    end_s = time.perf_counter() + _PATIENCE_S
    while not all(handle.test() for handle in handles) and time.perf_counter() < end_s:
        time.sleep(NAP_S)
    for handle in handles:
        handle.wait()


def even_cuts(length: int, servers: int) -> list[slice]:
    """A flat vector cut as evenly as it goes."""
    ends = [length * server // servers for server in range(servers + 1)]
    return [slice(begin, end) for begin, end in pairwise(ends)]
