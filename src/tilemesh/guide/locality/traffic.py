"""How many elements a loop nest reads: by formula, and counted by running its C text in the ladder's interpreter.

Three levels are told apart as in the formulas: arrays in memory, buffers that stand for the L1 (`__shared__` in the
text, `static` for the C compiler), and registers (local arrays), whose reads cost nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilemesh.core.errors import RunError, UsageError
from tilemesh.guide.ladder.interpret import Counted, launch
from tilemesh.guide.ladder.rungs import with_constants
from tilemesh.guide.locality.build import library, source
from tilemesh.guide.locality.caches import SimulatedCache

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class LoopNest:
    """A product of N x N matrices: its text, its function, and the reads it must come to."""

    key: str
    file: str
    title: str
    memory_reads: Callable[[Sizes], int]  # elements from memory
    buffer_reads: Callable[[Sizes], int]  # elements from the L1 to registers, where the text tells them apart
    formula: str
    turned: bool = False  # B is given by columns

    def text(self, sizes: Sizes) -> str:
        self.check(sizes)
        return with_constants(source(self.file), sizes)

    def check(self, sizes: Sizes) -> None:
        for tile, of in (("B1", "N"), ("B2", "N"), ("V1", "B1"), ("V2", "B2"), ("V1", "N"), ("V2", "N")):
            if tile in sizes and of in sizes and sizes[of] % sizes[tile]:
                raise UsageError(f"{tile} = {sizes[tile]}: expected a divisor of {of} = {sizes[of]}")

    def function(self, sizes: Sizes) -> Callable[[Any, Any, Any], None] | None:
        """Compiled, to be called with A, B and C; None without a compiler."""
        self.check(sizes)
        built = library(source(self.file), sizes)
        if built is None:
            return None
        compiled = built[self.key]

        def call(a: Any, b: Any, c: Any) -> None:
            compiled(*(x.ctypes.data_as(ctypes.c_void_p) for x in (a, b, c)))

        return call


def _untiled(s: Sizes) -> int:
    return 2 * s["N"] ** 3


def none(s: Sizes) -> int:
    return 0


NESTS = (
    LoopNest("ijk", "order.c", "i, j, k: rows times columns", _untiled, none, "n³ + n³"),
    LoopNest(
        *("ikj", "order.c", "i, k, j: rows of B added up"),
        lambda s: s["N"] ** 2 + 2 * s["N"] ** 3,
        none,
        "n² + n³ + n³ of C",
    ),
    LoopNest(
        *("cache_tiles", "cache_tiles.c", "tiles for the L1"),
        lambda s: s["N"] ** 2 + s["N"] ** 3 // s["B1"],
        _untiled,
        "n² + n³/b1",
        turned=True,
    ),
    LoopNest(
        *("register_tiles", "register_tiles.c", "tiles in registers"),
        lambda s: s["N"] ** 3 // s["V2"] + s["N"] ** 3 // s["V1"],
        none,
        "n³/v2 + n³/v1",
    ),
    LoopNest(
        *("both_tiles", "both_tiles.c", "tiles in both"),
        lambda s: s["N"] ** 2 + s["N"] ** 3 // s["B1"],
        lambda s: s["N"] ** 3 // s["V2"] + s["N"] ** 3 // s["V1"],
        "n² + n³/b1, then n³/v2 + n³/v1",
    ),
)


def nest_of(key: str) -> LoopNest:
    return next(nest for nest in NESTS if nest.key == key)


def operands(n: int, turned: bool = False) -> tuple[Any, Any, Any, Any]:
    """A, B as the nest wants it, a C of zeros, and the product."""
    random = np.random.default_rng(n)
    a, b = (random.standard_normal((n, n)).astype(np.float32) for _ in range(2))
    return a, np.ascontiguousarray(b.T) if turned else b, np.zeros((n, n), np.float32), a.astype(np.float64) @ b


def count(nest: LoopNest, sizes: Sizes) -> Counted:
    """What the text reads and writes, counted in one thread; the result is checked on the way."""
    a, b, c, product = operands(sizes["N"], nest.turned)
    counted = _run(nest, sizes, a, b, c)
    if np.abs(c - product).max() > sizes["N"] * 2**-20 * np.abs(a).max() * np.abs(b).max():
        raise RunError(f"{nest.key} did not compute the product")
    return counted


def misses(nest: LoopNest, sizes: Sizes, cache: SimulatedCache) -> int:
    """Lines that a simulated cache does not hold when the nest asks for them; the arrays lie one after another."""
    a, b, c, _ = operands(sizes["N"], nest.turned)
    begin = {name: index * (a.nbytes + cache.line_bytes) for index, name in enumerate(("A", "B", "Bt", "C"))}

    def observe(name: str, places: Any) -> None:
        for place in places:
            cache.touch(begin[name] + int(place) * a.itemsize)

    _run(nest, sizes, a, b, c, observe)
    return cache.misses


def _run(nest: LoopNest, sizes: Sizes, a: Any, b: Any, c: Any, observe: Any = None) -> Counted:
    arrays = {"A": a, "Bt" if nest.turned else "B": b, "C": c}
    return launch(nest.text(sizes), nest.key, (1, 1), (1, 1), arrays, observer=observe)


# Other programs -------------------------------------------------------------------------------------------------------


def intensity(function: str, n: int = 8) -> tuple[int, int]:
    """Operations, and elements read or written, of `three_loops` or `fused`."""
    arrays = {name: np.ones(n, np.float32) for name in "ABCDETU"}
    counted = launch(with_constants(source("fused.c"), {"N": n}), function, (1, 1), (1, 1), arrays)
    moved = counted.total(shared=False).elements + counted.stored(shared=False).elements
    if not (arrays["E"] == 3).all():
        raise RunError(f"{function} did not compute D + (A + B) C")
    return 3 * n, moved


def convolution_reads(function: str, height: int, width: int, tile: int) -> int:
    """Elements of the image that `plain` or `tiled` reads from memory."""
    random = np.random.default_rng(0)
    image = random.standard_normal((height + 2, width + 2)).astype(np.float32)
    weights, out = random.standard_normal(9).astype(np.float32), np.zeros((height, width), np.float32)
    text = with_constants(source("convolution.c"), {"H": height, "W": width, "T": tile})
    arrays = {"image": image, "weights": weights, "out": out}
    counted = launch(text, function, (1, 1), (1, 1), arrays)
    windows = np.lib.stride_tricks.sliding_window_view(image, (3, 3)).astype(np.float64)
    if not np.allclose(out, (windows * weights.reshape(3, 3)).sum((2, 3)), atol=1e-4):
        raise RunError(f"{function} did not compute the convolution")
    return counted.reads["image"].elements


def convolution_formula(function: str, height: int, width: int, tile: int) -> int:
    """9 for each output, or (T + 2)² for each tile of T²."""
    return 9 * height * width if function == "plain" else height // tile * (width // tile) * (tile + 2) ** 2


# `one_by_one` and `four_by_four` of vectors.c, as the interpreter knows vectors.
_ADDITIONS = """
void one_by_one(const float* a, const float* b, float* c) {
    for (int i = 0; i < N; ++i) {
        c[i] = a[i] + b[i];
    }
}

void four_by_four(const float* a, const float* b, float* c) {
    for (int i = 0; i < N / 4; ++i) {
        float4 x = reinterpret_cast<const float4*>(a)[i];
        float4 y = reinterpret_cast<const float4*>(b)[i];
        reinterpret_cast<float4*>(c)[i] = x + y;
    }
}
"""


def turns(function: str, n: int = 256) -> int:
    """How often the loop of `one_by_one` or `four_by_four` goes round: as often as it writes."""
    a, b, c = np.ones(n, np.float32), np.ones(n, np.float32), np.zeros(n, np.float32)
    counted = launch(with_constants(_ADDITIONS, {"N": n}), function, (1, 1), (1, 1), {"a": a, "b": b, "c": c})
    if not (c == 2).all():
        raise RunError(f"{function} did not add")
    return counted.writes["c"].requests
