"""This machine as a cluster to plan for: its cores as ranks, with the rates that were measured on it.

The one idea: a rank of a CPU is as fast as the cores it gets. Ranks up to the number of cores get some each; beyond
that they take turns, and everything a rank does takes so much longer. Memory and its bandwidth are shared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from tilemesh.core.calibration import Calibration, Rates
from tilemesh.core.cores import threads_for
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import CPU, Cluster, Link, Node, device_for, make_node
from tilemesh.plan import constants

NAME = "local"


@dataclass(frozen=True)
class Local:
    """A cluster whose device rates were measured."""

    cluster: Cluster
    rates: Rates
    words: str
    """Which machine, and when it was measured."""


def local_cpu(calibration: Calibration, ranks: int, cores: int, memory_bytes: int) -> Local:
    """So many ranks on the cores of a machine."""
    if ranks < 1:
        raise UsageError(f"{ranks} ranks on this machine: expected at least 1")
    whole = calibration.rates("all_cores")
    rates = rank_rates(calibration.rates("one_core"), whole, ranks, cores)
    copy = whole.copy_bytes_per_s
    if not rates.matmul_flops_per_s or copy is None:
        raise UsageError(f"the calibration of {calibration.words} has no matmul or copy rate: run `tilemesh calibrate`")
    message_s, more_s = constants.MEMORY_MESSAGE_S
    latency_s = message_s + (more_s * ranks / cores if ranks > cores else 0.0)
    device = replace(
        CPU,
        name=NAME,
        peak_flops_per_s=dict(rates.matmul_flops_per_s),
        memory_bytes=memory_bytes // ranks,
        usable_bytes=memory_bytes // ranks,
        memory_bytes_per_s=rates.copy_bytes_per_s or copy,
        sm_count=threads_for(ranks, cores),
    )
    link = Link("memory", constants.MEMORY_LINK_FRACTION * copy / 2 / ranks, latency_s)
    words = f"{calibration.words}, measured {calibration.when}"
    return Local(Cluster((Node(device, ranks, link, link, ranks),)), rates, words)


def local_gpu(calibration: Calibration, ranks: int, gpus: tuple[str, ...]) -> Local:
    """So many of a machine's GPUs."""
    if not 1 <= ranks <= len(gpus):
        raise UsageError(f"{ranks} ranks on this machine's {len(gpus)} GPUs: expected one rank a GPU")
    device = device_for(gpus[0])
    if device is None:
        raise UsageError(f"no datasheet of '{gpus[0]}' is known here: plan for a GPU that is, such as 1xh100")
    words = f"{calibration.words}, measured {calibration.when}"
    return Local(Cluster((make_node(device, ranks),)), calibration.rates("gpu"), words)


def rank_rates(one: Rates, whole: Rates, ranks: int, cores: int) -> Rates:
    """What a rank gets of a machine's rates when all ranks are busy."""
    threads = threads_for(ranks, cores)
    # Between one core and all, a rate grows as a power of the cores; ranks that outnumber cores take turns.
    power = math.log(threads) / math.log(cores) if cores > 1 else 1.0
    turn = min(1.0, cores / ranks)

    def share(name: str, low: float, high: float | None) -> float:
        if name == "launch_s":
            return low / turn
        each = low * (max(high, low) / low) ** power if high is not None else low
        shared = name.endswith("bytes_per_s") and name != "elementwise_bytes_per_s" and high is not None
        return min(each * turn, max(high, low) / ranks) if shared and high is not None else each * turn

    found: dict[str, object] = {}
    for field in fields(Rates):
        low, high = getattr(one, field.name), getattr(whole, field.name)
        if isinstance(low, (int, float)):
            found[field.name] = share(field.name, low, high)
        elif low:
            found[field.name] = {key: share(field.name, value, (high or {}).get(key)) for key, value in low.items()}
    return Rates(**found)  # type: ignore[arg-type]  # fields of Rates by their own names
