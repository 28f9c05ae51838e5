"""What a piece of work needs, and the least time a ceiling allows it.

The one idea: FLOPs, bytes and messages are counted once, beside each operator, and the same count serves the
limit column, the cost model and the roofline. A limit is a bound, not a forecast: it has no launches, no
latency and no imperfect overlap in it, so nothing correct runs below it (with data that comes from memory).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tilemesh.core.calibration import Calibration
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.hardware import DTYPE_BYTES, Device

SHORT_DTYPES: Mapping[str, str] = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
LONG_DTYPES: Mapping[str, str] = {short: name for name, short in SHORT_DTYPES.items()}


def short_dtype(dtype: str) -> tuple[str, int]:
    """What a torch dtype is called in a `Cost`, and the bytes of an element: ("bf16", 2) for bfloat16."""
    if dtype not in SHORT_DTYPES:
        raise unknown("dtype", dtype, SHORT_DTYPES)
    short = SHORT_DTYPES[dtype]
    return short, DTYPE_BYTES[short]


@dataclass(frozen=True)
class Cost:
    """Work, counted. `dtype` is what the FLOPs are done in and means nothing where there are none."""

    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    messages: int = 0
    bytes_sent: int = 0
    launches: int = 0
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("flops", "bytes_read", "bytes_written", "messages", "bytes_sent", "launches"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} of a cost is {getattr(self, name)}: expected 0 or more")

    @property
    def bytes_moved(self) -> int:
        """Bytes to and from memory; what goes over a link is `bytes_sent`."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """FLOPs per byte of memory traffic; infinite for work that touches no memory."""
        if self.bytes_moved:
            return self.flops / self.bytes_moved
        return math.inf if self.flops else 0.0

    def __add__(self, other: object) -> Cost:
        if not isinstance(other, Cost):
            return NotImplemented
        if self.flops and other.flops and self.dtype != other.dtype:
            # A bf16 FLOP costs a sixteenth of an fp32 one on some devices: their sum would mean nothing.
            raise UsageError(
                f"FLOPs in {self.dtype} and {other.dtype} do not add up: keep two costs, use limits_s on both"
            )
        return Cost(
            flops=self.flops + other.flops,
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_written=self.bytes_written + other.bytes_written,
            messages=self.messages + other.messages,
            bytes_sent=self.bytes_sent + other.bytes_sent,
            launches=self.launches + other.launches,
            dtype=other.dtype if other.flops else self.dtype,
        )

    def __radd__(self, other: object) -> Cost:
        # sum() starts from 0.
        return self if other == 0 else NotImplemented

    def __mul__(self, times: int) -> Cost:
        if isinstance(times, bool) or not isinstance(times, int):
            return NotImplemented
        return Cost(
            flops=self.flops * times,
            bytes_read=self.bytes_read * times,
            bytes_written=self.bytes_written * times,
            messages=self.messages * times,
            bytes_sent=self.bytes_sent * times,
            launches=self.launches * times,
            dtype=self.dtype,
        )

    __rmul__ = __mul__


@dataclass(frozen=True)
class Ceiling:
    """What bounds work on one device: matmul peak by dtype, and memory bandwidth for copying, reading, writing.

    A copied byte counts twice, once read and once written, so a datasheet has one figure for all three.
    """

    source: str
    """Where the figures come from, for the reader of a limit."""
    flops_per_s: Mapping[str, float] = field(hash=False)
    copy_bytes_per_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float

    @classmethod
    def of_device(cls, device: Device) -> Ceiling:
        """The datasheet's ceiling."""
        rate = device.memory_bytes_per_s
        return cls(f"{device.name} datasheet", device.peak_flops_per_s, rate, rate, rate)

    @classmethod
    def of_calibration(cls, calibration: Calibration, part: str) -> Ceiling:
        """The ceiling measured for a part of a machine: "one_core", "all_cores" or "gpu"."""
        rates = calibration.rates(part)
        copy = rates.copy_bytes_per_s
        if copy is None:
            raise UsageError(f"'{part}' of {calibration.words} has no copy bandwidth: calibrate this machine again")
        return cls(
            source=f"{part} of {calibration.words}, measured {calibration.when}",
            flops_per_s=rates.matmul_flops_per_s,
            copy_bytes_per_s=copy,
            read_bytes_per_s=rates.read_bytes_per_s or copy,
            write_bytes_per_s=rates.write_bytes_per_s or copy,
        )

    def peak(self, dtype: str) -> float:
        """FLOP/s in that dtype, or an error that names the dtypes there are."""
        if dtype not in self.flops_per_s:
            known = ", ".join(self.flops_per_s) or "none"
            raise UsageError(f"no matmul peak for dtype '{dtype}' ({self.source}): known are {known}")
        return self.flops_per_s[dtype]

    def ridge(self, dtype: str) -> float:
        """The intensity, FLOPs per byte copied, above which work is bound by compute."""
        return self.peak(dtype) / self.copy_bytes_per_s


def compute_s(cost: Cost, ceiling: Ceiling) -> float:
    """Seconds the FLOPs need at the peak of their dtype."""
    return cost.flops / ceiling.peak(cost.dtype) if cost.flops else 0.0


def memory_s(cost: Cost, ceiling: Ceiling) -> float:
    """Seconds the memory traffic needs.

    As many bytes as are both read and written go at the copy rate, the rest at the rate of reading or writing
    alone: on a CPU the three differ, and the copy rate for all would be a "limit" that plain reads beat.
    """
    both = min(cost.bytes_read, cost.bytes_written)
    return (
        2 * both / ceiling.copy_bytes_per_s
        + (cost.bytes_read - both) / ceiling.read_bytes_per_s
        + (cost.bytes_written - both) / ceiling.write_bytes_per_s
    )


def limit_s(cost: Cost, ceiling: Ceiling) -> float:
    """The least time the work can take: the larger of compute and memory, as if they overlapped perfectly."""
    return max(compute_s(cost, ceiling), memory_s(cost, ceiling))


def limits_s(costs: Iterable[Cost], ceiling: Ceiling) -> float:
    """The limit of steps that run one after the other; their dtypes may differ."""
    return sum((limit_s(cost, ceiling) for cost in costs), 0.0)


def bound_by(cost: Cost, ceiling: Ceiling) -> Literal["compute", "memory"]:
    """Which side of the roofline the work lies on; exactly on the ridge counts as compute."""
    return "compute" if compute_s(cost, ceiling) >= memory_s(cost, ceiling) else "memory"
