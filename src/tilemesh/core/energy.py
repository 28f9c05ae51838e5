"""Joules: what a GPU's board (NVML) or a CPU's package and memory (RAPL) have drawn, and a model where neither says it.

Both are counters of a whole device that only grow: the difference of two readings is what everybody who used the device
meanwhile drew together. They are refreshed at moments of their own, so a stretch of time that is not much longer than
that has no figure. The model (`modelled_watts`) is a straight line from idle to the board's limit.
"""

from __future__ import annotations

import ctypes
import functools
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

RAPL = Path("/sys/class/powercap")
_RAPL_PARTS = ("package", "dram")  # a package's own parts (cores, graphics) are in its figure; memory is not


@dataclass(frozen=True)
class EnergyCounter:
    """Joules since some moment; `device` tells apart what is counted, so that two ranks of one device add up once."""

    source: str
    device: int
    read: Callable[[], float]
    least_s: float = 0.0
    """Shorter stretches have no figure: many times as long as the counter stands still."""


class EnergyMeter:
    """Joules between calls. `source`: who counts them, or why nobody does."""

    def __init__(self, counter: EnergyCounter | str) -> None:
        self.counter = None if isinstance(counter, str) else counter
        self.source = counter if isinstance(counter, str) else counter.source
        self._last, self._last_s = self._read(), time.monotonic()

    def take(self) -> float | None:
        """Since the last call; None where nobody counts, or where that was too short a time ago."""
        before, before_s = self._last, self._last_s
        self._last, self._last_s = self._read(), time.monotonic()
        if before is None or self._last is None or self.counter is None:
            return None
        return None if self._last_s - before_s < self.counter.least_s else self._last - before

    @property
    def why_none(self) -> str:
        """Why `take` returned None every time."""
        if self.counter is None:
            return self.source
        return f"not measured: nothing took {self.counter.least_s:g} s, which {self.source}'s counter needs"

    def _read(self) -> float | None:
        return None if self.counter is None else self.counter.read()


def modelled_watts(limit_w: float, busy: float, idle_share: float) -> float:
    """What a device draws that computes for a share of the time: from an idle share of its limit up to the limit."""
    return limit_w * (idle_share + (1 - idle_share) * busy)


def gpu_counter(uuid: str, library: Any | None = None) -> EnergyCounter | str:
    """Of the GPU with this UUID, as torch and nvidia-smi print it; or why there is none. `library`: NVML, loaded."""
    library = library if library is not None else _nvml()
    if library is None:
        return "not measured: the driver's library libnvidia-ml.so.1 cannot be loaded"
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) != 0:
        return f"not measured: NVML knows no device {name}"

    def read() -> float:
        library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) != 0:
        return "not measured: this GPU counts no energy (NVML; from Volta on)"
    return EnergyCounter("NVML", _number(name), read, least_s=2.0)  # it stands still for up to 0.1 s


def cpu_counter(folder: Path = RAPL) -> EnergyCounter | str:
    """Of all packages of this machine, with their memory where it is counted; or why there is none."""
    domains = [
        domain for domain in sorted(folder.glob("intel-rapl:*")) if _text(domain / "name").startswith(_RAPL_PARTS)
    ]
    if not domains:
        return "not measured: this machine has no RAPL counters"
    unread = [domain for domain in domains if not _text(domain / "energy_uj")]
    if unread:
        return f"not measured: {unread[0] / 'energy_uj'} cannot be read (as root: chmod a+r)"
    ranges = [int(_text(domain / "max_energy_range_uj") or 0) for domain in domains]
    last, total = [int(_text(domain / "energy_uj")) for domain in domains], 0

    def read() -> float:
        nonlocal last, total
        now = [int(_text(domain / "energy_uj")) for domain in domains]
        # A counter begins again at zero after its range: from a minute to hours.
        total += sum(
            new - old if new >= old else new - old + wrap for new, old, wrap in zip(now, last, ranges, strict=True)
        )
        last = now
        return total / 1e6

    return EnergyCounter("RAPL", _number(gethostname()), read, least_s=0.05)  # for about a millisecond


@functools.cache
def _nvml() -> Any | None:
    """NVML, begun once for the process; its functions return 0 where all is well."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _number(name: str) -> int:
    return zlib.crc32(name.encode())
