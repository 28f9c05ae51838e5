"""The rungs: which text, with which constants, on which grid, and how many reads it must come to.

`global_reads` and `shared_reads` are formulas in N, written down from the algorithm and not from the text. The counting
interpreter runs the text, and the two must agree exactly.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from tilemesh.core.errors import UsageError
from tilemesh.kernels.ladder.interpret import Counted, launch

Formula = Callable[[int, Mapping[str, int]], float]


@dataclass(frozen=True)
class Rung:
    key: str
    title: str
    change: str  # what it does that the rung before does not
    file: str
    constants: Mapping[str, int]
    block: tuple[int, int]
    tile: tuple[int, int]  # rows and columns of C that one block computes
    reads: str  # the formula of the global reads, for people
    global_reads: Formula
    shared_reads: Formula
    across_first: bool = True  # blockIdx.x counts along a row of C; in the first rungs it counts down
    dtype: str = "float32"
    units: str = "fp32"  # which arithmetic units multiply: fp32, tf32 or fp16
    dynamic: int = 0  # elements of dynamic shared memory

    def grid(self, n: int) -> tuple[int, int]:
        if n % self.tile[0] or n % self.tile[1]:
            raise UsageError(f"N = {n}: rung {self.key} computes tiles of {self.tile[0]}x{self.tile[1]}, and N must be a multiple")
        down, across = n // self.tile[0], n // self.tile[1]
        return (across, down) if self.across_first else (down, across)

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1]

    def text(self) -> str:
        """What is compiled and what is interpreted: the constants, then the file."""
        given = "".join(f"constexpr int {name} = {value};\n" for name, value in self.constants.items())
        return given + source(self.file)

    def predicted(self, n: int) -> tuple[int, int]:
        """Elements read from global and from shared memory."""
        return _exact(self.global_reads(n, self.constants)), _exact(self.shared_reads(n, self.constants))


def source(file: str) -> str:
    return (resources.files("tilemesh.kernels.ladder") / "cuda" / file).read_text()


def _exact(reads: float) -> int:
    if reads != int(reads):
        raise UsageError(f"{reads} reads: N is no multiple of the tile")
    return int(reads)


def none(n: int, c: Mapping[str, int]) -> float:
    return 0


def _tiled(n: int, c: Mapping[str, int]) -> float:
    return 2 * n**3 / c["L"]


def _from_registers(n: int, c: Mapping[str, int]) -> float:
    return 2 * n**3 / c["V"]


def _by_warps(n: int, c: Mapping[str, int]) -> float:
    return n**3 / c["WM"] + n**3 / c["WN"]


def _shared_rung(key: str, title: str, change: str, file: str, v: int = 8, l: int = 128, s: int = 16, **more: int) -> Rung:  # noqa: E741
    constants = {"V": v, "L": l, "S": s, **more}
    return Rung(key, title, change, file, constants, ((l // v) ** 2, 1), (l, l), "2N³/L", _tiled, _from_registers)


def _register_rung(key: str, title: str, change: str, file: str, reads: str, formula: Formula, v: int = 8, side: int = 16) -> Rung:
    return Rung(key, title, change, file, {"V": v}, (side, side), (side * v, side * v), reads, formula, none, across_first=False)


def v1(side: int = 32) -> Rung:
    return Rung("v1", "one element per thread", "the three loops as they are", "v1.cu", {}, (side, side), (side, side), "2N³",
                lambda n, c: 2 * n**3, none, across_first=False)  # fmt: skip


def v1_5(v: int = 8, side: int = 16) -> Rung:
    return _register_rung("v1.5", "V×V elements per thread", "an element of A serves V columns", "v1_5.cu", "N³/V + N³",
                          lambda n, c: n**3 / c["V"] + n**3, v, side)  # fmt: skip


def v2(v: int = 8, side: int = 16) -> Rung:
    return _register_rung("v2", "outer products in registers", "an element of A serves V columns, one of B serves V rows", "v2.cu",
                          "2N³/V", _from_registers, v, side)  # fmt: skip


def v3(**sizes: int) -> Rung:
    return _shared_rung("v3", "tiles in shared memory", "the threads of a block fetch tiles together and share them", "v3.cu", **sizes)


def coalescing(**sizes: int) -> Rung:
    return _shared_rung("coalescing", "neighbours read neighbours", "a warp's reads of A lie in 4 sectors, not in 32", "coalescing.cu", **sizes)


def padding(**sizes: int) -> Rung:
    return _shared_rung("padding", "no bank asked twice", "rows of sA are padded, a thread's columns lie apart", "padding.cu",
                        **{"PAD": 2, **sizes})  # fmt: skip


def vector(**sizes: int) -> Rung:
    return _shared_rung("vector", "four elements per load", "float4 loads and stores", "vector.cu", **{"PAD": 4, **sizes})


def double_buffer(**sizes: int) -> Rung:
    return _shared_rung("double buffering", "the next tile while this one is multiplied", "two tiles, one barrier", "double_buffer.cu",
                        **{"PAD": 4, **sizes})  # fmt: skip


def tensor_cores(l: int = 128, s: int = 16, wm: int = 64, wn: int = 32) -> Rung:  # noqa: E741
    constants = {"L": l, "S": s, "WM": wm, "WN": wn}
    return Rung("tensor cores", "products of a warp", "mma.sync on operands rounded to tf32", "tensor_cores.cu", constants,
                (l // wm * (l // wn) * 32, 1), (l, l), "2N³/L", _tiled, _by_warps, units="tf32")  # fmt: skip


def half(lm: int = 128, ln: int = 256, s: int = 32, wm: int = 64, wn: int = 64, stages: int = 4) -> Rung:
    constants = {"LM": lm, "LN": ln, "S": s, "WM": wm, "WN": wn, "STAGES": stages}
    ring = stages * (lm * (s + 8) + s * (ln + 8))
    return Rung("lower precision", "float16 operands", "half the bytes, larger tiles, asynchronous copies, ldmatrix", "half.cu", constants,
                (lm // wm * (ln // wn) * 32, 1), (lm, ln), "N³/LM + N³/LN", lambda n, c: n**3 / c["LM"] + n**3 / c["LN"], _by_warps,
                dtype="float16", units="fp16", dynamic=ring)  # fmt: skip


def ladder() -> tuple[Rung, ...]:
    """The CUDA rungs from the first to the last; our Triton and Gluon kernels come after them (`ours.py`)."""
    return (v1(), v1_5(), v2(), v3(), coalescing(), padding(), vector(), double_buffer(), tensor_cores(), half())


def operands(rung: Rung, n: int, seed: int) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    return tuple(random.standard_normal((n, n)).astype(rung.dtype) for _ in range(2))  # type: ignore[return-value]


def count(rung: Rung, n: int, seed: int = 0) -> tuple[Counted, float]:
    """Runs the rung's text on the CPU: what it read, and its largest error against float64, over N times the largest product."""
    a, b = operands(rung, n, seed)
    c = np.full((n, n), np.nan, rung.dtype)
    views = {name: (x.view(np.uint16) if rung.dtype == "float16" else x) for name, x in (("A", a), ("B", b), ("C", c))}
    counted = launch(rung.text(), "matmul", rung.grid(n), rung.block, {**views, "N": n}, rung.dynamic)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = np.abs(c.astype(np.float64) - exact).max() / (np.abs(a).max() * np.abs(b).max() * np.sqrt(n))
    return counted, float(error)
