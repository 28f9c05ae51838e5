"""The memory hierarchy of this machine, measured: registers, caches, memory, another process, the disk.

Latency is the time of one read that must wait for the one before: a chain of addresses in random order, one per cache
line, so that no prefetcher can guess the next. Bandwidth is many reads that need not wait. Both are a few lines of C;
where there is no compiler the latencies are left out, and numpy measures the bandwidths.
"""

from __future__ import annotations

import ctypes
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tilemesh.core.units import format_bytes, format_rate, format_seconds
from tilemesh.guide.clock import repeated
from tilemesh.guide.locality.build import library
from tilemesh.guide.locality.caches import cache_sizes

Array = np.ndarray[Any, Any]

LINE = 64  # bytes of a cache line on most processors
SECONDS = 0.04  # of one reading

PROGRAM = """
long chase(const long *next, long steps) {          /* each address is known only when the one before was read */
    long at = 0;
    for (long step = 0; step < steps; step++) at = next[at];
    return at;
}
double total(const double *x, long count, long times) {      /* eight sums at once: no read waits for another */
    double s[8] = {0};
    for (long time = 0; time < times; time++)
        for (long i = 0; i + 8 <= count; i += 8)
            for (int j = 0; j < 8; j++) s[j] += x[i + j];
    return s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7];
}
long chain(long steps) {                              /* every addition needs the result of the one before */
    long a = 0, b = 1;
    for (long step = 0; step < steps; step++) {
        a += b;
        __asm__ volatile("" : "+r"(a));               /* the compiler may not compute it in advance */
    }
    return a;
}
"""

TYPICAL_S = {
    "register": 0.3e-9,
    "L1d": 1.3e-9,
    "L2": 4e-9,
    "L3": 15e-9,
    "memory": 90e-9,
    "loopback": 20e-6,
    "disk": 1e-3,
}
"""Orders of magnitude that many machines share: what the cost model says before this one is measured."""


@dataclass(frozen=True)
class MemoryLevel:
    """One level: seconds until one read has come, and bytes per second of many. None: could not be measured."""

    name: str
    size_bytes: int
    latency_s: float | None
    bytes_per_s: float | None

    def words(self) -> str:
        size = format_bytes(self.size_bytes) if self.size_bytes else ""
        latency = "-" if self.latency_s is None else format_seconds(self.latency_s)
        rate = "-" if self.bytes_per_s is None else format_rate(self.bytes_per_s, "B/s")
        return f"{self.name:<10} {size:>9} {latency:>10} {rate:>12}"


def measure() -> list[MemoryLevel]:
    """Every level, fastest first."""
    compiled = library(PROGRAM)
    measured = []
    if compiled is not None:
        compiled.chain.restype = ctypes.c_long
        measured.append(MemoryLevel("register", 0, _per_step(lambda steps: compiled.chain(ctypes.c_long(steps))), None))
    for name, size in levels().items():
        measured.append(MemoryLevel(name, size, _latency_s(compiled, size), _read_rate(compiled, size)))
    return [*measured, _loopback(), _disk()]


def levels() -> dict[str, int]:
    """Half of each data cache, so that what is read fits; and memory, several times the last cache."""
    caches = cache_sizes() or {"L1d": 32 << 10, "L2": 1 << 20}
    last = max(caches.values())
    return {**{name: size // 2 for name, size in caches.items()}, "memory": min(max(4 * last, 64 << 20), 256 << 20)}


def cycle_of(size_bytes: int) -> Array:
    """A chain through every cache line of so many bytes, in random order: entry i holds the index of the next."""
    per_line = LINE // 8
    lines = np.random.default_rng(4).permutation(size_bytes // LINE) * per_line
    chain = np.zeros(size_bytes // 8, np.int64)
    chain[lines] = np.roll(lines, -1)
    return chain


def _latency_s(compiled: ctypes.CDLL | None, size: int) -> float | None:
    if compiled is None:
        return None
    chain = cycle_of(size)
    compiled.chase.restype = ctypes.c_long
    place = chain.ctypes.data_as(ctypes.c_void_p)
    return _per_step(lambda steps: compiled.chase(place, ctypes.c_long(steps)))


def _read_rate(compiled: ctypes.CDLL | None, size: int) -> float:
    x = np.ones(size // 8)
    if compiled is None:
        return size / _per_step(lambda steps: [x.sum() for _ in range(steps)])
    compiled.total.restype = ctypes.c_double
    place = x.ctypes.data_as(ctypes.c_void_p)
    return size / _per_step(lambda steps: compiled.total(place, ctypes.c_long(x.size), ctypes.c_long(steps)))


def _per_step(run: Callable[[int], object]) -> float:
    """Seconds of one step: as many as fill `SECONDS`, the best of three readings."""
    steps, took = 1, 0.0
    while took < SECONDS:
        steps *= 4
        began = time.perf_counter()
        run(steps)
        took = time.perf_counter() - began
    return min(took, *repeated(lambda: run(steps), 2)) / steps


def _loopback(size: int = 8 << 20) -> MemoryLevel:
    """Another process over TCP on this machine; here a thread, which the operating system's network cannot tell."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_echo, args=(server, size))
        thread.start()
        with socket.create_connection(server.getsockname()) as wire:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(200):
                began = time.perf_counter()
                wire.sendall(b"x")
                wire.recv(1)
                times.append((time.perf_counter() - began) / 2)
            began = time.perf_counter()
            wire.sendall(bytes(size))
            wire.recv(1)
            rate = size / (time.perf_counter() - began)
        thread.join()
    return MemoryLevel("loopback", 0, float(np.median(times)), rate)


def _echo(server: socket.socket, size: int) -> None:
    wire, _ = server.accept()
    with wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(200):
            wire.sendall(wire.recv(1))
        left = size
        while left:
            left -= len(wire.recv(min(left, 1 << 20)))
        wire.sendall(b"x")


def _disk(size: int = 32 << 20) -> MemoryLevel:
    """A file that must really be written (fsync): 4 KiB for the latency, more for the bandwidth."""
    with tempfile.NamedTemporaryFile() as file:
        sync = partial(os.fsync, file.fileno())
        times = repeated(lambda: os.pwrite(file.fileno(), bytes(4096), 0), after=sync)
        began = time.perf_counter()
        file.write(bytes(size))
        file.flush()
        sync()
        rate = size / (time.perf_counter() - began)
    return MemoryLevel("disk", 0, float(np.median(times)), rate)
