"""What a bench of collectives measures: cells, their sizes, what must move in each, and the least time that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilemesh.core.calibration import Calibration
from tilemesh.core.errors import UsageError
from tilemesh.core.units import format_bytes, parse_bytes

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
ITEM = 4  # float32
MOST_BYTES = 1 << 50  # beyond it seconds and bandwidths are no longer numbers
STEP = 4  # from size to size of a range


@dataclass(frozen=True)
class Cell:
    """One collective of `nbytes` (the whole payload: all blocks together) on so many ranks. `buffers`: whose memory."""

    collective: str
    ranks: int
    nbytes: int
    buffers: str = "ordinary"

    @property
    def elements(self) -> int:
        """Of the whole payload: at least one; where each rank has a block of its own, as many for every rank."""
        blocks = 1 if self.collective in ("all_reduce", "broadcast") else self.ranks
        return -(-max(1, self.nbytes // ITEM) // blocks) * blocks

    @property
    def payload(self) -> int:
        return self.elements * ITEM

    @property
    def elements_in(self) -> int:
        """Elements a rank gives."""
        return self.elements // self.ranks if self.collective == "all_gather" else self.elements

    @property
    def elements_out(self) -> int:
        """Elements a rank gets."""
        return self.elements // self.ranks if self.collective == "reduce_scatter" else self.elements

    @property
    def read_bytes(self) -> int:
        """The fewest that all ranks together must read: every input once."""
        inputs = {"broadcast": 1, "all_gather": 1}.get(self.collective, self.ranks)
        return self.payload * inputs

    @property
    def written_bytes(self) -> int:
        """The fewest that must be written: every result once; a broadcast's root may have it where it is."""
        return self.payload * {"reduce_scatter": 1, "broadcast": self.ranks - 1}.get(self.collective, self.ranks)

    @property
    def bus_factor(self) -> float:
        """Of the algorithm's bandwidth: what each rank's link would carry (as nccl's own tests count it)."""
        n = self.ranks
        factors = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}
        return factors.get(self.collective, (n - 1) / n)

    def limit_s(self, calibration: Calibration | None, cache_bytes: int) -> tuple[float | None, str]:
        """The least time on one machine, or None and why: every input read and every result written at full speed,
        apart or as copies, which stores that pass by the caches make quicker than both apart."""
        if calibration is None or calibration.all_cores is None:
            return None, "this machine is not calibrated: run `tilemesh calibrate`"
        rates = calibration.all_cores
        read, write, copy = rates.read_bytes_per_s, rates.write_bytes_per_s, rates.copy_bytes_per_s
        if not read or not write or not copy:
            return None, "reading, writing and copying were not calibrated apart"
        if self.read_bytes + self.written_bytes < 2 * cache_bytes:
            return None, f"fits into the caches ({format_bytes(cache_bytes)}), whose speed is not calibrated"
        apart_s = self.read_bytes / read + self.written_bytes / write
        both = min(self.read_bytes, self.written_bytes)
        copied_s = 2 * both / copy + (self.read_bytes - both) / read + (self.written_bytes - both) / write
        return min(apart_s, copied_s), ""


def array_words(buffers: str) -> str:
    """Which arrays a cell is measured with, for people: "empty" alone would read as arrays without elements."""
    return "arrays from comm.empty" if buffers == "empty" else f"{buffers} arrays"


def cells_of(collective: str, ranks: int, sizes: Sequence[int], buffers: str) -> list[Cell]:
    """The cells to measure for these sizes: several that come to the same payload (1 B and 4 B do) are one."""
    cells = [Cell(collective, ranks, size, buffers) for size in sizes]
    return list({cell.payload: cell for cell in reversed(cells)}.values())[::-1]


def parse_sizes(text: str) -> list[int]:
    """`4B..64MiB` (by powers of four), or sizes with commas between."""
    shown = text if len(text) < 100 else f"{text[:100]}…"
    if ".." in text:
        low, high = (_size(part, shown) for part in text.split("..", 1))
        if not 0 < low <= high:
            raise UsageError(f"--sizes {text}: expected the smaller size first, such as 4B..64MiB")
        sizes = [low]
        while sizes[-1] * STEP <= high:
            sizes.append(sizes[-1] * STEP)
        return sizes if sizes[-1] == high else [*sizes, high]
    sizes = [_size(part, shown) for part in text.split(",")]
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--sizes {text}: expected sizes such as 1KiB,1MiB or a range such as 4B..64MiB")
    return sizes


def _size(text: str, among: str) -> int:
    size = parse_bytes(text)
    if size > MOST_BYTES:
        raise UsageError(f"--sizes {among}: expected at most {format_bytes(MOST_BYTES)}")
    return size


def parse_ranks(text: str, most: int | None = None) -> list[int]:
    """Numbers of ranks; `most`: what this can be done for."""
    try:
        ranks = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--ranks {text}: expected whole numbers with commas between, such as 2,4,8") from None
    if min(ranks) < 1:
        raise UsageError(f"--ranks {text}: expected at least 1")
    if most is not None and max(ranks) > most:
        raise UsageError(f"--ranks {text}: expected at most {most:,} ranks here")
    return ranks
