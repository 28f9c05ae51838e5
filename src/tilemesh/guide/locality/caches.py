"""The caches of this machine's CPU, and a small simulated one that counts misses."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tilemesh.core.errors import UsageError

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
LINE_BYTES = 64  # of the CPUs in use today; Apple's have 128


def cache_sizes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> dict[str, int]:
    """Bytes by level of the first core's data caches, such as {"L1d": 65536, "L2": 1048576}; empty where unknown."""
    if sys.platform == "darwin" and root == Path("/sys/devices/system/cpu/cpu0/cache"):
        return _of_macos()
    sizes = {}
    for index in sorted(root.glob("index*")):
        try:
            kind, level, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            sizes[f"L{level}{'d' if kind == 'Data' else ''}"] = int(size.rstrip("KMG")) * _UNITS.get(size[-1], 1)
    return sizes


def _of_macos() -> dict[str, int]:
    sizes = {}
    for name, key in (("L1d", "hw.l1dcachesize"), ("L2", "hw.l2cachesize")):
        done = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip().isdigit():
            sizes[name] = int(done.stdout)
    return sizes


@dataclass
class SimulatedCache:
    """Sets of lines; in each set the line that was used longest ago makes room (LRU)."""

    size_bytes: int
    line_bytes: int = LINE_BYTES
    ways: int = 0  # lines in a set; 0: all lines are one set
    hits: int = 0
    misses: int = 0
    _sets: list[OrderedDict[int, None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        lines = self.size_bytes // self.line_bytes
        self.ways = self.ways or lines
        if lines < 1 or lines % self.ways:
            raise UsageError(
                f"a cache of {self.size_bytes} bytes has {lines} lines: not a multiple of {self.ways} ways"
            )
        self._sets = [OrderedDict() for _ in range(lines // self.ways)]

    def touch(self, address: int) -> bool:
        """One access; True if the line was there."""
        line = address // self.line_bytes
        lines = self._sets[line % len(self._sets)]
        if line in lines:
            lines.move_to_end(line)
            self.hits += 1
            return True
        self.misses += 1
        lines[line] = None
        if len(lines) > self.ways:
            lines.popitem(last=False)
        return False

    def run(self, addresses: Iterable[int]) -> SimulatedCache:
        for address in addresses:
            self.touch(address)
        return self
