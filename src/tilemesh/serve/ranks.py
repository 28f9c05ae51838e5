"""A runner whose model is computed by other processes: tensor parallel ranks, or one that is a replica of its own.

The one idea: a step is a value, so it can be sent. The scheduler, drawing and text stay with the engine; tokens and
page numbers go to every rank, logits come back from the first. A rank that dies takes the pages with it: that step's
requests fail, ranks are started again, and what the scheduler still knows is computed anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from tilemesh.core.context import outside_any_job
from tilemesh.core.cores import available_cores
from tilemesh.core.errors import RunError
from tilemesh.launch.calls import Ranks
from tilemesh.launch.rank import set_threads
from tilemesh.serve.batch import TokenSpan, token_span
from tilemesh.serve.request import ServeRequest
from tilemesh.serve.runner import RequestLogits, logits_by_request
from tilemesh.serve.scheduler import ServeLimits, StepPlan
from tilemesh.serve.wire import pack_step, pack_tensor, receive, send, unpack_tensor

_START_S = 600.0
_END_S = 60.0  # within which ranks that have nothing to do any more are gone
_LOOK_S = 0.1
_RESTARTS_PER_HOUR = 5


class RanksLostError(RunError):
    """Ranks that computed a model are gone, and with them what lay in pages."""


class StartedRanks(Protocol):
    """Those that compute one replica."""

    def step(self, plan: StepPlan, spans: Sequence[TokenSpan]) -> Tensor:
        """The logits that are wanted, one span's after the other's."""

    def embed(self, tokens: Sequence[int], pooling: str, adapter: int) -> list[float]: ...

    def order(
        self, header: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]] = (), everywhere: bool = False
    ) -> None:
        """What is no pass, as `order_ranks`. `everywhere`: of the ranks of all replicas that share experts."""

    def ready(self) -> None: ...

    def close(self) -> None: ...


class RankRunner:
    """`ranks` processes that share each matrix. `shared_by`: how many such groups share this machine's cores. `ep`:
    so many replicas hold the experts together, and `begin` starts the ranks of all."""

    ahead = decode_rows = None

    def explain(self) -> list[str]:
        return ["each rank chooses programs for its own part of the model: without --mesh they are told"]

    def __init__(
        self,
        source: str,
        limits: ServeLimits,
        ranks: int,
        *,
        dtype: str | None = None,
        device: str = "cpu",
        step: int | None = None,
        invariant: bool = False,
        adapters: int = 0,
        adapter_rank: int = 0,
        shared_by: int = 1,
        say: Callable[[str], None] = lambda text: None,
        ep: int = 1,
        begin: Callable[[Mapping[str, str], tuple[Any, ...]], StartedRanks] | None = None,
    ) -> None:
        self.limits, self.ranks, self.invariant = limits, ranks, invariant
        self._say = say
        options = {"dtype": dtype, "device": device, "step": step, "invariant": invariant}
        options |= {"adapters": adapters, "adapter_rank": adapter_rank, "tp": ranks, "ep": ep}
        self._arguments = (os.path.abspath(source), dataclasses.asdict(limits), options)
        self._shared_by = shared_by
        self._start = partial(RankProcesses, ranks) if begin is None else begin
        self._started: list[float] = []
        self._group = self._begin()

    def run(
        self, plan: StepPlan, wants_all: Callable[[ServeRequest], bool] = lambda request: False
    ) -> Mapping[str, RequestLogits]:
        spans = [token_span(entry, wants_all(entry.request)) for entry in plan.entries]
        return logits_by_request(spans, self._group.step(plan, spans))

    def write_weights(self, tensors: Iterable[tuple[str, Tensor]], everywhere: bool = False) -> None:
        """As `Runner.write_weights`: each rank is sent every whole tensor and keeps its part. `everywhere`: the ranks
        of all replicas that hold experts together."""
        self._group.order({"order": "weights"}, tensors, everywhere)

    def embed(self, tokens: Sequence[int], pooling: str, adapter: int = 0) -> list[float]:
        """As `Runner.embed`."""
        return self._group.embed(tokens, pooling, adapter)

    def sleep(self, level: int) -> None:
        self._group.order({"order": "sleep", "level": level})

    def wake(self) -> None:
        self._group.order({"order": "wake"})

    def restart(self) -> None:
        """Start ranks again after some were lost; gives up when that happens again and again."""
        self.close()
        now = time.monotonic()
        self._started = [at for at in self._started if now - at < 3600]
        if len(self._started) > _RESTARTS_PER_HOUR:
            raise RunError(f"ranks were lost {len(self._started)} times within an hour: the engine stops")
        self._group = self._begin()
        self._group.ready()
        self._say(f"{self.ranks} ranks started again")

    def ready(self) -> None:
        """Wait until the ranks have read their weights."""
        self._group.ready()

    def close(self) -> None:
        self._group.close()

    def _begin(self) -> StartedRanks:
        self._started.append(time.monotonic())
        threads = max(1, available_cores() // (self.ranks * self._shared_by))
        environ = outside_any_job()
        set_threads(environ, threads)
        return self._start(environ, self._arguments)


def embedding_order(tokens: Sequence[int], pooling: str, adapter: int) -> dict[str, Any]:
    return {"order": "embed", "tokens": list(tokens), "pooling": pooling, "adapter": adapter}


def order_ranks(
    connections: Sequence[socket.socket], header: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]] = ()
) -> Mapping[str, Any]:
    """Have ranks do what `rank.obey` knows, with these tensors, and wait for them; returns what the first says."""
    for connection in connections:
        send(connection, header)
    for name, tensor in tensors:
        told, body = pack_tensor(tensor)
        for connection in connections:
            send(connection, {"name": name, **told}, body)
    for connection in connections:
        send(connection, {"name": None})
    first, *_ = [receive(connection)[0] for connection in connections]
    return first


class RankProcesses:
    """Ranks from their start to their end, and a socket to each."""

    def __init__(self, ranks: int, environ: Mapping[str, str], arguments: tuple[Any, ...]) -> None:
        self.ended: str | None = None
        """Why there are no ranks any more."""
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tilemesh-"))  # of mode 0700
            self._listening = listening = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            address = os.path.join(folder, "steps")
            listening.bind(address)
            listening.listen(ranks)
            listening.settimeout(_LOOK_S)
            self._watcher = threading.Thread(
                target=self._live, args=(ranks, environ, address, arguments), name="tilemesh-ranks", daemon=True
            )
            stack.callback(self._watcher.join, _END_S)  # their sockets are closed by then, so they return by themselves
            self._watcher.start()
            self._ranks, self._connections = ranks, list[socket.socket]()
            self._stack = stack.pop_all()

    def step(self, plan: StepPlan, spans: Sequence[TokenSpan]) -> Tensor:
        with self.connected() as connections:
            header, body = pack_step(plan, spans)
            for connection in connections:
                send(connection, header, body)
            return unpack_tensor(*receive(connections[0]))

    def embed(self, tokens: Sequence[int], pooling: str, adapter: int) -> list[float]:
        with self.connected() as connections:
            vector: list[float] = order_ranks(connections, embedding_order(tokens, pooling, adapter))["vector"]
            return vector

    def order(
        self, header: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]] = (), everywhere: bool = False
    ) -> None:
        with self.connected() as connections:
            order_ranks(connections, header, tensors)

    @contextlib.contextmanager
    def connected(self) -> Iterator[list[socket.socket]]:
        self.ready()
        try:
            yield self._connections
        except (OSError, EOFError) as error:
            self._watcher.join(10)  # who died, and how, is known a moment later
            raise RanksLostError(f"a rank that computes this model is gone: {self.ended or error}") from None

    def close(self) -> None:
        self._stack.close()

    def ready(self) -> None:
        """Wait for a connection of each rank."""
        sockets: dict[int, socket.socket] = {}
        end = time.monotonic() + _START_S
        while not self._connections and len(sockets) < self._ranks:
            if self.ended is not None:
                raise RunError(f"the ranks that compute the model did not start: {self.ended}")
            if time.monotonic() > end:
                raise RunError(f"the ranks that compute the model did not start within {_START_S:.0f} s")
            try:
                connection, _ = self._listening.accept()
            except TimeoutError:
                continue
            self._stack.callback(connection.close)
            connection.settimeout(None)
            header, _ = receive(connection)
            sockets[header["rank"]] = connection
        self._connections = self._connections or [sockets[rank] for rank in range(self._ranks)]

    def _live(self, ranks: int, environ: Mapping[str, str], address: str, arguments: tuple[Any, ...]) -> None:
        """Start ranks, pass on what they print, and end them; a rank that dies ends the others."""
        try:
            with Ranks(ranks, environ=environ) as started:
                started.begin("tilemesh.serve.rank:serve_steps", address, *arguments)
                started.results()
            self.ended = "they have ended"
        except BaseException as error:
            self.ended = str(error)
