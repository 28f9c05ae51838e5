"""The rungs: which text, with which constants, on which grid, and how many reads it must come to.

`global_reads` and `shared_reads` are formulas in N, written down from the algorithm and not from the text. The counting
interpreter runs the text, and the two must agree exactly.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

from tilemesh.core.errors import UsageError
from tilemesh.guide.ladder.interpret import Counted, launch

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
    fetch: int = 1  # elements that a thread fetches at a time
    dynamic: int = 0  # elements of dynamic shared memory
    edits: Mapping[str, str] = field(default_factory=dict)  # what this rung writes otherwise than the file

    def grid(self, n: int) -> tuple[int, int]:
        if n % self.tile[0] or n % self.tile[1]:
            raise UsageError(
                f"N = {n}: rung {self.key} computes tiles of {self.tile[0]}x{self.tile[1]}, and N must be a multiple"
            )
        down, across = n // self.tile[0], n // self.tile[1]
        return (across, down) if self.across_first else (down, across)

    def __post_init__(self) -> None:
        c = self.constants
        fetched = [c[side] * c["S"] for side in ("L", "LM", "LN") if side in c]
        bad = [elements for elements in fetched if elements % (self.threads * self.fetch)]
        if bad:
            raise UsageError(
                f"rung {self.key}: {self.threads} threads that fetch {self.fetch} elements each cannot share {bad[0]}"
            )

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1]

    def text(self) -> str:
        """What is compiled and what is interpreted: the constants, then the file."""
        text = source(self.file)
        for before, after in self.edits.items():
            assert before in text, before
            text = text.replace(before, after)
        return with_constants(text, self.constants)

    def predicted(self, n: int) -> tuple[int, int]:
        """Elements read from global and from shared memory."""
        return _exact(self.global_reads(n, self.constants)), _exact(self.shared_reads(n, self.constants))


def source(file: str) -> str:
    return (resources.files("tilemesh.guide.ladder") / "cuda" / file).read_text()


def with_constants(text: str, constants: Mapping[str, int]) -> str:
    """A text with the sizes that it is compiled or interpreted for."""
    return "".join(f"constexpr int {name} = {value};\n" for name, value in constants.items()) + text


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


# How a rung of each family is made: (key, title, change, file) are its first four fields.
_Names = tuple[str, str, str, str]


def _register_rung(names: _Names, reads: str, formula: Formula, v: int, side: int) -> Rung:
    tile = (side * v, side * v)
    return Rung(*names, {"V": v}, (side, side), tile, reads, formula, none, across_first=False)


def _shared_rung(
    names: _Names,
    v: int,
    tile: int,
    s: int,
    pad: int | None = None,
    fetch: int = 1,
    edits: Mapping[str, str] | None = None,
) -> Rung:
    constants = {"V": v, "L": tile, "S": s, "BLOCKS": 2} | ({} if pad is None else {"PAD": pad})
    block = ((tile // v) ** 2, 1)
    tiles = (tile, tile)
    return Rung(*names, constants, block, tiles, "2N³/L", _tiled, _from_registers, fetch=fetch, edits=edits or {})


# In v3's text: threads that are neighbours fetch a row of A's elements, not a column's ...
_ALONG_ROWS = {
    "sA[element / L][element % L]": "sA[element % S][element / S]",
    "A[(row + element % L) * N + ko + element / L]": "A[(row + element / S) * N + ko + element % S]",
    "neighbours in different rows": "neighbours in one row",
}
# ... and the columns of a thread lie apart, in rows with elements that nobody uses at their end.
_APART = {
    "sA[S][L]": "sA[S][L + PAD]",
    "sB[k][tx * V + x]": "sB[k][x * SIDE + tx]",
    "column + tx * V + y": "column + y * SIDE + tx",
}


def v1(side: int = 32) -> Rung:
    names = ("v1", "one element per thread", "the three loops as they are", "v1.cu")
    return Rung(*names, {}, (side, side), (side, side), "2N³", lambda n, c: 2 * n**3, none, across_first=False)


def v1_5(v: int = 8, side: int = 16) -> Rung:
    names = ("v1.5", "V×V elements per thread", "an element of A serves V columns", "v1_5.cu")
    return _register_rung(names, "N³/V + N³", lambda n, c: n**3 / c["V"] + n**3, v, side)


def v2(v: int = 8, side: int = 16) -> Rung:
    names = ("v2", "outer products in registers", "an element of B serves V rows as well", "v2.cu")
    return _register_rung(names, "2N³/V", _from_registers, v, side)


def v3(v: int = 8, tile: int = 128, s: int = 16) -> Rung:
    names = ("v3", "tiles in shared memory", "the threads of a block fetch tiles together and share them", "v3.cu")
    return _shared_rung(names, v, tile, s)


def coalescing(v: int = 8, tile: int = 128, s: int = 16) -> Rung:
    change = "a warp's reads of A lie in 4 sectors, not in 32"
    return _shared_rung(("coalescing", "neighbours read neighbours", change, "v3.cu"), v, tile, s, edits=_ALONG_ROWS)


def padding(v: int = 8, tile: int = 128, s: int = 16, pad: int = 2) -> Rung:
    names = ("padding", "no bank asked twice", "rows of sA are padded, a thread's columns lie apart", "v3.cu")
    return _shared_rung(names, v, tile, s, pad, edits=_ALONG_ROWS | _APART)


def vector(v: int = 8, tile: int = 128, s: int = 16, pad: int = 4) -> Rung:
    names = ("vector loads", "four elements per load", "float4 loads and stores", "vector.cu")
    return _shared_rung(names, v, tile, s, pad, fetch=4)


def double_buffer(v: int = 8, tile: int = 128, s: int = 16, pad: int = 4) -> Rung:
    change = "the next tile is fetched while this one is multiplied"
    names = ("double buffering", "two tiles, one barrier", change, "double_buffer.cu")
    return _shared_rung(names, v, tile, s, pad, fetch=4)


def tensor_cores(tile: int = 128, s: int = 16, wm: int = 64, wn: int = 32) -> Rung:
    names = ("tensor cores", "products of a warp", "mma.sync on operands rounded to tf32", "tensor_cores.cu")
    constants = {"L": tile, "S": s, "WM": wm, "WN": wn, "BLOCKS": 2}
    block = (tile // wm * (tile // wn) * 32, 1)
    return Rung(*names, constants, block, (tile, tile), "2N³/L", _tiled, _by_warps, units="tf32", fetch=4)


def half(lm: int = 128, ln: int = 128, s: int = 64, wm: int = 64, wn: int = 64, stages: int = 3) -> Rung:
    change = "half the bytes, asynchronous copies, ldmatrix"
    return Rung(
        *("lower precision", "float16 operands", change, "half.cu"),
        {"LM": lm, "LN": ln, "S": s, "WM": wm, "WN": wn, "STAGES": stages},
        block=(lm // wm * (ln // wn) * 32, 1),
        tile=(lm, ln),
        reads="N³/LM + N³/LN",
        global_reads=lambda n, c: n**3 / c["LM"] + n**3 / c["LN"],
        shared_reads=_by_warps,
        dtype="float16",
        units="fp16",
        fetch=8,
        dynamic=stages * (lm * (s + 8) + s * (ln + 8)),
    )


def ladder() -> tuple[Rung, ...]:
    """The CUDA rungs from the first to the last; our Triton and Gluon kernels come after them (`ours.py`)."""
    return (v1(), v1_5(), v2(), v3(), coalescing(), padding(), vector(), double_buffer(), tensor_cores(), half())


def operands(rung: Rung, n: int, seed: int) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    return tuple(random.standard_normal((n, n)).astype(rung.dtype) for _ in range(2))  # type: ignore[return-value]


def count(rung: Rung, n: int, seed: int = 0) -> tuple[Counted, float]:
    """Runs the rung's text on the CPU: what it read, and its largest error, over max|a| max|b| sqrt(N)."""
    a, b = operands(rung, n, seed)
    c = np.full((n, n), np.nan, rung.dtype)
    views = {name: (x.view(np.uint16) if rung.dtype == "float16" else x) for name, x in (("A", a), ("B", b), ("C", c))}
    counted = launch(rung.text(), "matmul", rung.grid(n), rung.block, {**views, "N": n}, rung.dynamic)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = np.abs(c.astype(np.float64) - exact).max() / (np.abs(a).max() * np.abs(b).max() * np.sqrt(n))
    return counted, float(error)
