"""How long a rung should take, computed before it is measured: the slowest of three things a GPU does at once.

- arithmetic: 2 N³ operations at the peak of the units that do them;
- the L1 and shared memory: one line of 128 bytes, or one pass over the banks, per cycle and multiprocessor. The
  interpreter counts both at a small N; they grow with N³;
- device memory: every operand once.
What is left out (latency, the L2, instructions beside loads and products) is why a measured rung is slower.
"""

from dataclasses import dataclass

from tilemesh.core.hardware import DTYPE_BYTES, Device
from tilemesh.guide.ladder.interpret import Counted
from tilemesh.guide.ladder.rungs import Rung, count

# Of the tensor cores' peak on Hopper, mma.sync reaches 62.9 % on average; the rest needs wgmma
# (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking", 2024).
MMA_SYNC_SHARE = 0.629
_FP32_LANES = 128  # of a multiprocessor; each does a multiplication and an addition per cycle


@dataclass(frozen=True)
class RungTime:
    arithmetic_s: float
    loads_s: float
    memory_s: float

    @property
    def predicted_s(self) -> float:
        return max(self.arithmetic_s, self.loads_s, self.memory_s)

    @property
    def bound_by(self) -> str:
        named = {"arithmetic": self.arithmetic_s, "L1 and shared memory": self.loads_s, "device memory": self.memory_s}
        return max(named, key=lambda name: named[name])


def clock_hz(device: Device) -> float:
    """The clock at which the datasheet's float32 peak holds."""
    return device.peak("fp32") / (device.sm_count * _FP32_LANES * 2)


def peak(device: Device, units: str) -> float:
    return device.peak(units) * (1.0 if units == "fp32" else MMA_SYNC_SHARE)


def rung_time(rung: Rung, counted: Counted, counted_n: int, n: int, device: Device) -> RungTime:
    """counted: the rung's run in the interpreter, at `counted_n`."""
    cubes = (n / counted_n) ** 3
    cycles = (
        counted.total(shared=False).lines + counted.total(shared=True).passes + counted.stored(shared=True).passes
    ) * cubes
    size = 2 if rung.dtype == "float16" else DTYPE_BYTES["fp32"]
    return RungTime(
        2 * n**3 / peak(device, rung.units),
        cycles / (device.sm_count * clock_hz(device)),
        3 * n**2 * size / device.memory_bytes_per_s,
    )


def predicted_time(rung: Rung, n: int, device: Device) -> RungTime:
    """Counted at the smallest N that fills a tile, and whose rows are longer than a line of 128 bytes."""
    small = max(*rung.tile, 64)
    return rung_time(rung, count(rung, small)[0], small, n, device)


def intensity(rung: Rung, n: int) -> float:
    """FLOPs for each byte that the kernel asks global memory (in truth the L1 and L2 before it) for."""
    size = 2 if rung.dtype == "float16" else 4
    return 2 * n**3 / (rung.predicted(n)[0] * size)
