"""Timers for CUDA, both for `timing.compare`: kernel time and call time, never mixed.

*Kernel time* (`KernelTimer`): several calls, on rotating input sets, are captured into one CUDA graph; the replay is
timed with CUDA events and divided. No host cost is in it, but the GPU's own gap between two kernels is.
*Call time* (`call_timer`): a host loop of eager calls with a synchronised start and end: what a user's loop sees,
the larger of host cost and kernel time.

Inputs that stay in the L2 make every memory-bound kernel look fast, so they rotate: `rotating_sets`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch

from tilemesh.core.energy import EnergyMeter, cpu_counter, gpu_counter
from tilemesh.core.errors import RunError, UsageError
from tilemesh.measure.timing import Call, LoopTimer, Reading, Ready, reason_of, without_collection

T = TypeVar("T")

# One replay lasts about this long: 2000 times the resolution of a CUDA event (0.5 µs).
MIN_REPLAY_S = 1e-3

# A synchronise costs about 10 µs; a reading this long makes that half a percent.
MIN_CALL_READING_S = 2e-3

MOST_CALLS_IN_GRAPH = 1024

# Sets rotate through this many times the L2 before one comes round again.
L2_TIMES = 2.0
MOST_SETS = 512


def energy_meter(device: torch.device) -> EnergyMeter:
    """Of a GPU's board, or of this machine's processors."""
    if device.type != "cuda":
        return EnergyMeter(cpu_counter())
    return EnergyMeter(gpu_counter(str(torch.cuda.get_device_properties(device).uuid)))


def sets_needed(bytes_per_set: int, l2_bytes: int) -> int:
    """How many input sets it takes that none is still in the L2 when its turn comes again; at most 512.

    At the cap (sets below about 0.4 MB on an H200) the inputs do stay in the L2, for every candidate alike.
    """
    if bytes_per_set < 1 or l2_bytes < 0:
        raise UsageError(f"sets_needed(bytes_per_set={bytes_per_set}, l2_bytes={l2_bytes}): expected positive sizes")
    return min(MOST_SETS, max(2, math.ceil(L2_TIMES * l2_bytes / bytes_per_set)))


def rotating_sets(make: Callable[[int], T], bytes_per_set: int, l2_bytes: int | None = None) -> list[T]:
    """Input sets `make(0)`, `make(1)`, … enough to go past the L2 (this GPU's, when not given)."""
    l2 = l2_cache_bytes() if l2_bytes is None else l2_bytes
    return [make(index) for index in range(sets_needed(bytes_per_set, l2))]


def l2_cache_bytes() -> int:
    """The size of this GPU's L2, as its driver says."""
    return int(torch.cuda.get_device_properties().L2_cache_size)


def call_timer(device: torch.device | int | None = None) -> LoopTimer:
    """Call time: the host loop's clock starts and stops with the GPU idle."""

    def synchronise() -> None:
        torch.cuda.synchronize(device)

    return LoopTimer(start=synchronise, finish=synchronise, min_reading_s=MIN_CALL_READING_S)


class Captured(Protocol):
    """Work recorded for replay; `result` is what its last call returned, refilled by each replay."""

    result: object

    def replay_s(self) -> float: ...


class Graphs(Protocol):
    """What `KernelTimer` needs of CUDA; a test puts its own in place."""

    def warm(self, body: Callable[[], object]) -> None: ...

    def capture(self, body: Callable[[], object]) -> Captured: ...


class KernelTimer:
    """Kernel time by graph replay. A candidate that cannot be captured raises, with the reason, from `prepare`."""

    def __init__(self, graphs: Graphs | None = None, *, min_replay_s: float = MIN_REPLAY_S) -> None:
        self.graphs = graphs or CudaGraphs()
        self.min_replay_s = min_replay_s

    def prepare(self, call: Call, *, sets: int, warmup: int) -> Ready:
        """Warm up, capture one pass over the sets, then as many passes as make a replay long enough."""

        def calls_in_turn(count: int) -> object:
            for index in range(count - 1):
                call(index % sets)
            return call((count - 1) % sets)

        self.graphs.warm(lambda: calls_in_turn(max(warmup, sets)))
        captured = self.graphs.capture(lambda: calls_in_turn(sets))
        captured.replay_s()  # the first replay uploads the graph
        passes = self._passes(captured.replay_s(), sets)
        if passes > 1:
            # Rebound, not kept beside the first: both graphs' memory at once might not fit.
            del captured
            captured = self.graphs.capture(lambda: calls_in_turn(passes * sets))
            captured.replay_s()
        return _Replay(captured, calls=passes * sets, sets=sets)

    def _passes(self, one_pass_s: float, sets: int) -> int:
        wanted = math.ceil(self.min_replay_s / one_pass_s) if one_pass_s > 0 else MOST_CALLS_IN_GRAPH
        return max(1, min(wanted, MOST_CALLS_IN_GRAPH // sets))


class _Replay:
    def __init__(self, captured: Captured, calls: int, sets: int) -> None:
        self.captured, self.calls, self.sets = captured, calls, sets

    def read(self) -> Reading:
        return Reading(self.captured.replay_s() / self.calls, self.calls)

    def last(self) -> tuple[object, int]:
        return self.captured.result, (self.calls - 1) % self.sets


@functools.cache
def _capture_stream(index: int) -> torch.cuda.Stream:
    """One for all captures on a GPU, as torch itself has it where none is named.

    cuBLAS keeps 32 MiB of workspace for every (thread, stream) that ever multiplied, until the process ends. With a
    stream for each capture that became 64 MiB per captured training step (forward and backward run on two threads).
    """
    stream: torch.cuda.Stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
    return stream


class CudaGraphs:
    """Capture and replay on a stream of their own, as capture requires."""

    def __init__(self, device: torch.device | int | None = None, one_pool: bool = False) -> None:
        """`one_pool`: all captures use the same memory. They must then be replayed one after the other, and what they
        leave must lie in memory that was there before."""
        if not torch.cuda.is_available():
            raise UsageError("kernel time needs an NVIDIA GPU and torch with CUDA; here torch sees none")
        index = device.index if isinstance(device, torch.device) else device
        self.stream = _capture_stream(torch.cuda.current_device() if index is None else index)
        self._pool: Any = torch.cuda.graph_pool_handle() if one_pool else None

    def warm(self, body: Callable[[], object]) -> None:
        self.run(body)
        self.stream.synchronize()

    def run(self, body: Callable[[], T]) -> T:
        """Run on the capture stream: library workspaces and compiled kernels belong to a stream's first use.

        In order with what the caller's stream does before and after; nothing is waited for.
        """
        outside = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(outside)
        with torch.cuda.stream(self.stream):
            done = body()
        outside.wait_stream(self.stream)
        return done

    def capture(self, body: Callable[[], object]) -> CudaCaptured:
        """Record what `body` launches; its Python runs once, now."""
        graph = torch.cuda.CUDAGraph()
        pool = self._pool or torch.cuda.graph_pool_handle()
        outside = torch.cuda.current_stream(self.stream.device)
        result: object = None
        failure: Exception | None = None
        try:
            # thread_local: another thread's allocation (a compile worker's, say) is no error of this capture's.
            with (
                without_collection(),
                torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                try:
                    result = body()
                except Exception as error:  # kept here: ending a broken capture raises again, less helpfully
                    failure = error
        except Exception as error:
            failure = failure or error
        if failure is not None:
            torch.cuda.set_stream(outside)
            self._recover(graph, pool)
            raise RunError(f"cannot be captured in a CUDA graph: {reason_of(failure)}") from failure
        return CudaCaptured(graph, self.stream, result)

    def forget(self) -> None:
        """Of captures that share memory, and that nobody holds any more: the next ones share other memory."""
        if self._pool is not None:
            self._pool = torch.cuda.graph_pool_handle()

    def _recover(self, broken: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Undo what a broken capture leaves behind in torch up to 2.12; later versions need none of it.

        The allocator goes on asking the graph which memory is its own, so the graph has to stay, and the asking is
        ended by hand; the random generator believes in the capture until another one ends well.
        """
        _BROKEN.append(broken)
        with suppress(AttributeError, RuntimeError):  # not in this torch, or ended already
            torch._C._cuda_endAllocateToPool(self.stream.device_index, pool)
        with suppress(RuntimeError):
            torch.cuda.synchronize(self.stream.device)
            scratch = torch.zeros(1, device=self.stream.device)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self.stream, capture_error_mode="thread_local"):
                scratch.add_(1)
            torch.cuda.synchronize(self.stream.device)


# Graphs whose capture failed; see CudaGraphs._recover.
_BROKEN: list[torch.cuda.CUDAGraph] = []


class CudaCaptured:
    """Work recorded for replay, on this GPU."""

    def __init__(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, result: Any) -> None:
        self.graph, self.stream, self.result = graph, stream, result
        self.began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def replay(self) -> None:
        """On the caller's stream, without a wait."""
        self.graph.replay()

    def replay_s(self) -> float:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            # The GPU is kept busy by an untimed replay while the host submits the timed one: the time a graph's
            # launch takes would otherwise lie between the first event and the first kernel.
            self.graph.replay()
            self.began.record()
            self.graph.replay()
            self.ended.record()
        self.ended.synchronize()
        return float(self.began.elapsed_time(self.ended)) / 1e3
