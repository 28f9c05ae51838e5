"""How many cores this process may really use, and how several ranks share them.

A container may see 64 cores and be allowed two: the answer is the smaller of the affinity mask and
the control group's quota, never the machine's count alone.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Cores this process may use, at least 1."""
    quota = cgroup_quota()
    visible = len(visible_cores())
    return max(1, visible if quota is None else min(visible, math.floor(quota + 0.5)))


def visible_cores() -> list[int]:
    """The numbers of the cores the affinity mask admits (macOS has no mask: all of them)."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cgroup_quota(root: Path = _CGROUP) -> float | None:
    """CPUs the control group grants (version 2, then 1), or None when it sets no bound."""
    try:
        quota, period = (root / "cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 else None
    except (OSError, ValueError):
        return None


def cores_together(masks: Iterable[str]) -> int:
    """Cores that several processes may use together, from what each says by `cores_here`; at least 1.

    Processes that share cores count them once, those on other machines count their own. A quota bounds its machine.
    """
    numbers: dict[str, set[int]] = {}
    quotas: dict[str, float] = {}
    for mask in masks:
        host, quota, cores = mask.split(" ")
        numbers.setdefault(host, set()).update(int(number) for number in cores.split(","))
        quotas[host] = min(quotas.get(host, math.inf), float(quota))
    counts = [min(len(cores), max(1, math.floor(min(quotas[host], 1e9) + 0.5))) for host, cores in numbers.items()]
    return max(1, sum(counts))


def cores_here() -> str:
    """What this process may use, as text for `cores_together`: host, quota and core numbers."""
    quota = cgroup_quota()
    host = socket.gethostname().replace(" ", "-") or "here"
    return f"{host} {math.inf if quota is None else quota} {','.join(map(str, visible_cores()))}"


def threads_for(ranks: int, cores: int) -> int:
    """Compute threads a rank may start so that all ranks together fit the cores."""
    return max(1, cores // max(1, ranks))


def cores_for(index: int, ranks: int, cores: Sequence[int]) -> list[int] | None:
    """The block of cores of rank `index` out of `ranks` on this node; None when ranks outnumber cores.

    Blocks differ by at most one core. Oversubscribed ranks stay unpinned: the kernel balances them
    better than any fixed choice does when some of them wait.
    """
    if ranks > len(cores):
        return None
    share, extra = divmod(len(cores), ranks)
    start = index * share + min(index, extra)
    return list(cores[start : start + share + (index < extra)])
