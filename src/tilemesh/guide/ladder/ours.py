"""The last rungs: our Triton kernel and our warp-specialised Gluon kernel, as they are used outside the guide.

They are not CUDA text, so other interpreters count them: Triton's own for the first, and for the second the stand-ins
of `tests/cpu/gluon_machine.py`, which run its source. A is read once for each column of tiles, B once for each row.
"""

from dataclasses import dataclass
from typing import Any

from tilemesh.core.errors import UsageError
from tilemesh.kernels.matmul.config import Config


@dataclass(frozen=True)
class OurRung:
    key: str
    title: str
    change: str
    config: Config

    reads = "N³/BLOCK_M + N³/BLOCK_N"
    dtype = "float16"
    units = "fp16"

    def predicted(self, n: int) -> int:
        """Elements of A and B read from global memory."""
        if n % self.config.block_m or n % self.config.block_n:
            raise UsageError(f"N = {n}: expected a multiple of {self.config.block_m} and {self.config.block_n}")
        return n**3 // self.config.block_m + n**3 // self.config.block_n

    def case(self, n: int) -> dict[str, Any]:
        """What a row says of it."""
        reads = self.predicted(n)
        return {"rung": self.key, "n": n, "units": self.units, "global_reads": reads, "config": self.config.label}


def our_rungs() -> tuple[OurRung, ...]:
    return (
        OurRung(
            *("Triton", "the compiler places the tiles", "whole warp groups multiply (wgmma); loads through TMA"),
            Config("tma", 128, 256, 64, 8, 3),
        ),
        OurRung(
            *("pingpong", "warps of different trades", "one warp loads, two groups take turns at the tensor cores"),
            Config("pingpong", stages=5),
        ),
        OurRung(
            *("paired", "both groups on one tile", "a tile of 128×256, half of its rows each: fewer reads"),
            Config("pingpong", 128, 256, stages=3, paired=True),
        ),
    )
