"""What the locality studies measure: each function returns times (or rates) by variant, ours interleaved.

C where there is a compiler; without one the loop nests are written in numpy, which shows the same order of rows and
columns, and studies that need C return nothing.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tilemesh.core.errors import RunError
from tilemesh.guide.locality.build import library, source
from tilemesh.guide.locality.traffic import NESTS, operands
from tilemesh.measure.sample import Sample
from tilemesh.measure.timing import LoopTimer, compare

# Tiles that suit caches of 32 KiB and more, and 16 to 32 vector registers.
TILES = {"B1": 8, "B2": 8, "V1": 4, "V2": 8}
TILE_NAMES = {"cache_tiles": ("B1", "B2"), "register_tiles": ("V1", "V2"), "both_tiles": ("B1", "B2", "V1", "V2")}


def timed(calls: Mapping[str, Callable[[], Any]], repeats: int = 5, seconds: float = 4.0) -> dict[str, Sample]:
    candidates = {name: functools.partial(_ignoring_sets, call) for name, call in calls.items()}
    return dict(compare(candidates, timer=LoopTimer(min_reading_s=1e-3), repeats=repeats, seconds=seconds, warmup=1))


def _ignoring_sets(call: Callable[[], Any], index: int) -> Any:
    return call()


def address(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


# Loop nests -----------------------------------------------------------------------------------------------------------


def sizes_for(key: str, n: int, tiles: Mapping[str, int] = TILES) -> dict[str, int]:
    return {"N": n, **{name: tiles[name] for name in TILE_NAMES.get(key, ())}}


def nest_times(n: int, tiles: Mapping[str, int] = TILES, repeats: int = 3) -> dict[str, Sample]:
    """Seconds of each loop nest for an n x n x n product, and of numpy's own."""
    calls: dict[str, Callable[[], Any]] = {}
    for nest in NESTS:
        a, b, c, _ = operands(n, nest.turned)
        compiled = nest.function(sizes_for(nest.key, n, tiles))
        function = compiled or functools.partial(IN_NUMPY[nest.key], tiles=tiles)
        calls[nest.key] = functools.partial(function, a, b, c)
    a, b, c, _ = operands(n)
    calls["numpy"] = functools.partial(np.matmul, a, b, out=c)
    return timed(calls, repeats)


def _numpy_ijk(a: Any, b: Any, c: Any, tiles: Mapping[str, int]) -> None:
    for i in range(len(a)):
        for j in range(len(a)):
            c[i, j] = np.dot(a[i], b[:, j])


def _numpy_ikj(a: Any, b: Any, c: Any, tiles: Mapping[str, int]) -> None:
    for i in range(len(a)):
        for k in range(len(a)):
            c[i] += a[i, k] * b[k]


def _numpy_cache_tiles(a: Any, bt: Any, c: Any, tiles: Mapping[str, int]) -> None:
    for i in range(0, len(a), tiles["B1"]):
        for j in range(0, len(a), tiles["B2"]):
            c[i : i + tiles["B1"], j : j + tiles["B2"]] = a[i : i + tiles["B1"]] @ bt[j : j + tiles["B2"]].T


def _numpy_register_tiles(a: Any, b: Any, c: Any, tiles: Mapping[str, int]) -> None:
    for i in range(0, len(a), tiles["V1"]):
        for j in range(0, len(a), tiles["V2"]):
            c[i : i + tiles["V1"], j : j + tiles["V2"]] = a[i : i + tiles["V1"]] @ b[:, j : j + tiles["V2"]]


def _numpy_both_tiles(a: Any, b: Any, c: Any, tiles: Mapping[str, int]) -> None:
    for i in range(0, len(a), tiles["B1"]):
        rows = np.ascontiguousarray(a[i : i + tiles["B1"]])
        for j in range(0, len(a), tiles["B2"]):
            c[i : i + tiles["B1"], j : j + tiles["B2"]] = rows @ np.ascontiguousarray(b[:, j : j + tiles["B2"]])


IN_NUMPY: dict[str, Callable[..., None]] = {
    "ijk": _numpy_ijk,
    "ikj": _numpy_ikj,
    "cache_tiles": _numpy_cache_tiles,
    "register_tiles": _numpy_register_tiles,
    "both_tiles": _numpy_both_tiles,
}


def tile_map(n: int, sides: Sequence[int], repeats: int = 3) -> dict[tuple[int, int], float] | None:
    """Seconds by (rows, columns) of the tile of B that is kept; None without a compiler."""
    built = library(source("tile_map.c"), {"N": n})
    if built is None:
        return None
    a, b, c, _ = operands(n)
    places = [address(x) for x in (a, b, c)]
    best: dict[tuple[int, int], float] = {}
    for _ in range(repeats):
        for rows in sides:
            for columns in sides:
                begin = time.perf_counter()
                built.tile_map(*places, rows, columns)
                taken = time.perf_counter() - begin
                best[rows, columns] = min(taken, best.get((rows, columns), taken))
    return best


# Layout ---------------------------------------------------------------------------------------------------------------


def layout_times(n: int = 2048) -> dict[str, Sample]:
    """A matrix's logical and physical transpose, and the sum over rows of each; a copied and a broadcast vector."""
    matrix = np.random.default_rng(0).standard_normal((n, n)).astype(np.float32)
    vector = np.ones(n, np.float32)
    turned, copied = matrix.T, np.ascontiguousarray(matrix.T)
    other, out = np.ones_like(matrix), np.empty_like(matrix)
    repeated = np.tile(vector, (n, 1))
    return timed(
        {
            "logical transpose": lambda: matrix.T,
            "physical transpose": lambda: np.ascontiguousarray(matrix.T),
            "add to its view": lambda: np.add(other, turned, out=out),
            "add to its copy": lambda: np.add(other, copied, out=out),
            "vector by stride 0": lambda: np.add(matrix, vector, out=out),
            "vector copied first": lambda: np.add(matrix, repeated, out=out),
        }
    )


# Programs that need C -------------------------------------------------------------------------------------------------


def fused_times(n: int = 2**22) -> dict[str, Sample]:
    built = library(source("fused.c"), {"N": n})
    arrays = [np.ones(n, np.float32) for _ in range(7)]
    if built is None:
        a, b, c, d, e, t, u = arrays
        return timed(
            {
                "three_loops": lambda: (np.add(a, b, out=t), np.multiply(t, c, out=u), np.add(u, d, out=e)),
                "fused": lambda: _fused_in_blocks(arrays),
            }
        )
    places = [address(x) for x in arrays]
    return timed({name: functools.partial(built[name], *places) for name in ("three_loops", "fused")})


def _fused_in_blocks(arrays: Sequence[Any], block: int = 4096) -> None:
    """numpy cannot fuse, but it can keep its temporaries in the L1."""
    for begin in range(0, len(arrays[0]), block):
        a, b, c, d, e = (array[begin : begin + block] for array in arrays[:5])
        np.add((a + b) * c, d, out=e)


def convolution_times(height: int = 1024, width: int = 1024, tile: int = 64) -> dict[str, Sample]:
    built = library(source("convolution.c"), {"H": height, "W": width, "T": tile})
    if built is None:
        return {}
    random = np.random.default_rng(0)
    image = random.standard_normal((height + 2, width + 2)).astype(np.float32)
    weights, out = random.standard_normal(9).astype(np.float32), np.zeros((height, width), np.float32)
    places = [address(x) for x in (image, weights, out)]
    return timed({name: functools.partial(built[name], *places) for name in ("plain", "tiled")})


def vector_times(n: int = 4096) -> dict[str, Sample]:
    """Inside the L1, where arithmetic and not memory decides."""
    built = library(source("vectors.c"))
    if built is None:
        return {}
    arrays = [np.ones(n, np.float32) for _ in range(3)]
    places = [*(address(x) for x in arrays), ctypes.c_long(n)]
    return timed({name: functools.partial(built[name], *places) for name in ("one_by_one", "four_by_four")})


def gather_times(n: int = 2**22, reads: int = 2**18, ahead: int = 16) -> dict[str, Sample]:
    """Random reads of 16 MiB: with and without asking beforehand, and along a chain."""
    built = library(source("gather.c"))
    if built is None:
        return {}
    built.gather.restype, built.chase.restype = ctypes.c_float, ctypes.c_long
    random = np.random.default_rng(0)
    values, order = np.ones(n, np.float32), random.integers(0, n, reads, dtype=np.int32)
    around = random.permutation(n).astype(np.int32)
    following = np.empty(n, np.int32)
    following[around] = np.roll(around, -1)
    count = ctypes.c_long(reads)
    return timed(
        {
            "independent": lambda: built.gather(address(values), address(order), count, ctypes.c_long(0)),
            "prefetched": lambda: built.gather(address(values), address(order), count, ctypes.c_long(ahead)),
            "chained": lambda: built.chase(address(following), count),
        }
    )


# Threads --------------------------------------------------------------------------------------------------------------


def together(calls: Sequence[Callable[[], Any]]) -> None:
    """Each call in a thread of its own; ctypes lets go of Python's lock while C runs."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def sharing_times(increments: int = 2_000_000, threads: int = 2) -> dict[str, Sample]:
    """Counters that lie in one cache line, and counters 64 elements apart: nobody reads another's."""
    built = library(source("threads.c"))
    if built is None:
        return {}
    counters = np.zeros(64 * (threads + 1), np.int64)
    begin = -counters.ctypes.data // 8 % 16  # on a line of 128 bytes, so that neighbours do share one

    def run(apart: int) -> None:
        calls = [
            functools.partial(
                built.count_up,
                ctypes.c_void_p(counters.ctypes.data + 8 * (begin + index * apart)),
                ctypes.c_long(increments),
            )
            for index in range(threads)
        ]
        together(calls)

    return timed({"one line": lambda: run(1), "lines apart": lambda: run(32)})


def contention_times(cache_bytes: int, threads: int = 2, times: int = 200) -> dict[str, Sample]:
    """Sweeps over arrays: one thread with half of a cache, and then so many that together they ask for twice of it."""
    built = library(source("threads.c"))
    if built is None:
        return {}
    built.sweep.restype = ctypes.c_float

    def run(size: int, count: int) -> Callable[[], None]:
        arrays = [np.ones(max(16, size // 4), np.float32) for _ in range(count)]

        def call() -> None:
            together(
                [
                    functools.partial(built.sweep, address(x), ctypes.c_long(len(x)), ctypes.c_long(times))
                    for x in arrays
                ]
            )

        return call

    return timed({"alone": run(cache_bytes // 2, 1), "together": run(cache_bytes // 2, threads)})


def thread_times(counts: Sequence[int], work: int = 20_000_000) -> dict[int, Sample]:
    """The same arithmetic in all, cut over more and more threads."""
    built = library(source("threads.c"))
    if built is None:
        return {}
    built.work.restype = ctypes.c_float
    calls = {
        str(count): functools.partial(
            together, [functools.partial(built.work, ctypes.c_float(1.0), ctypes.c_long(work // count))] * count
        )
        for count in counts
    }
    return {int(name): sample for name, sample in timed(calls).items()}


def openmp_times(counts: Sequence[int], n: int = 2**21) -> dict[int, Sample]:
    """A dot product by OpenMP; empty where the compiler has none."""
    try:
        built = library(source("openmp.c"), options=("-fopenmp",))
    except (RunError, OSError):
        return {}
    if built is None:
        return {}
    built.dot.restype = ctypes.c_double
    a, b = np.ones(n, np.float32), np.ones(n, np.float32)
    calls = {
        str(count): functools.partial(built.dot, address(a), address(b), ctypes.c_long(n), ctypes.c_int(count))
        for count in counts
    }
    return {int(name): sample for name, sample in timed(calls).items()}
