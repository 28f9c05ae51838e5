"""This machine as a cluster to plan for: its cores as ranks, with the rates that were measured on it.

The one idea: a rank of a CPU is as fast as the cores it gets. Ranks up to the number of cores get some each; beyond
that they take turns, and everything a rank does takes so much longer. Memory and its bandwidth are shared. What an
exchange costs is measured too, where collectives were fitted for that many ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from tilemesh.core import calibration
from tilemesh.core.busy import SECTION as BUSY
from tilemesh.core.busy import Busyness
from tilemesh.core.calibration import Calibration, Rates
from tilemesh.core.cores import threads_for
from tilemesh.core.errors import UsageError, nearest, unknown
from tilemesh.core.hardware import CPU, DEVICES, LOCAL, Cluster, ClusterNode, Link, device_for, make_node
from tilemesh.core.heap import torch_heap
from tilemesh.plan import constants

FITS = "collectives"
"""The section of a calibration that `comm` keeps its fits in, by transport and number of ranks."""
TRANSPORTS = ("mpi", "torch")
"""What `tilemesh train` takes on a CPU, best first."""
_PATTERN = re.compile(r"(?:([0-9]{1,6})x)?local(-cpu)?")
_NAMES = (LOCAL, "local-cpu")
LINK_BYTES = 1 << 20
"""The size whose time gives a link's bandwidth: what a layer exchanges, about."""


@dataclass(frozen=True)
class MeasuredCluster:
    """A cluster whose device rates were measured."""

    cluster: Cluster
    rates: Rates
    words: str
    """Which machine, and when it was measured."""


class AnyMachine(Protocol):
    """What is asked of a machine (`measure.machine.this_machine()` knows this one)."""

    @property
    def id(self) -> str: ...

    @property
    def words(self) -> str: ...

    @property
    def cores(self) -> int: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def gpus(self) -> tuple[str, ...]: ...


def is_local(text: str) -> bool:
    """Whether a cluster means this machine; a UsageError where it nearly does (`4xlocl`)."""
    folded = text.strip().lower()
    if _PATTERN.fullmatch(folded) is not None:
        return True
    name = re.sub(r"^(\d+x)+", "", folded)
    if name not in _NAMES and nearest(name, (*DEVICES, *_NAMES)) in _NAMES:
        raise unknown("device", name, (*DEVICES, *_NAMES))
    if name in _NAMES:
        raise UsageError(f"'{text}' is one machine of several: write local, 4xlocal or 4xlocal-cpu")
    return False


def local_machine(text: str, machine: AnyMachine) -> MeasuredCluster:
    """This machine from its stored calibration: `local_readings`, the newest."""
    return local_readings(text, machine)[0]


def local_readings(text: str, machine: AnyMachine) -> list[MeasuredCluster]:
    """This machine as each reading that its stored calibration keeps says it is, the newest first.

    "local": one rank per GPU, or per core; "4xlocal": so many; "4xlocal-cpu": cores, also where there is a GPU.
    """
    match = _PATTERN.fullmatch(text.strip().lower())
    if match is None:
        raise UsageError(f"'{text}' is not understood: write local, 4xlocal or 4xlocal-cpu")
    known = calibration.find(machine.id)
    if known is None:
        raise UsageError(f"this machine ({machine.words}) was not measured yet: run `tilemesh calibrate`, then again")
    on_gpu = bool(machine.gpus) and match[2] is None
    ranks = int(match[1]) if match[1] else (len(machine.gpus) if on_gpu else machine.cores)
    if on_gpu:
        return [local_gpu(each, ranks, machine.gpus) for each in known.readings if each.gpu is not None]
    return [local_cpu(each, ranks, machine.cores, machine.memory_bytes, torch_heap()) for each in known.readings]


def local_cpu(calibration: Calibration, ranks: int, cores: int, memory_bytes: int, heap: str = "") -> MeasuredCluster:
    """So many ranks on the cores of a machine; `heap` as a `Device`'s."""
    if ranks < 1:
        raise UsageError(f"{ranks} ranks on this machine: expected at least 1")
    whole = calibration.rates("all_cores")
    crowd = crowding(calibration, ranks, cores)
    rates = rank_rates(calibration.rates("one_core"), whole, ranks, cores, crowd, _measured_cores(calibration, cores))
    copy = whole.copy_bytes_per_s
    if not rates.matmul_flops_per_s or copy is None:
        raise UsageError(f"the calibration of {calibration.words} has no matmul or copy rate: run `tilemesh calibrate`")
    device = replace(
        CPU,
        name=LOCAL,
        peak_flops_per_s=dict(rates.matmul_flops_per_s),
        memory_bytes=memory_bytes // ranks,
        usable_bytes=memory_bytes // ranks,
        memory_bytes_per_s=rates.copy_bytes_per_s or copy,
        sm_count=threads_for(ranks, cores),
        ranks_per_core=max(1.0, ranks / cores),
        heap=heap,
    )
    link = measured_link(calibration, ranks, cores) or assumed_link(copy, ranks, cores)
    words = _measured(calibration)
    return MeasuredCluster(Cluster((ClusterNode(device, ranks, link, link, ranks),)), rates, words)


def _measured(calibration: Calibration) -> str:
    """Which machine, when, and whether other work disturbed it."""
    busy = Busyness.from_dict(calibration.extra.get(BUSY))
    disturbed = "" if busy is None or not busy.is_busy else f" while it was busy ({busy.words})"
    return f"{calibration.words}, measured {calibration.when}{disturbed}"


def assumed_link(copy_bytes_per_s: float, ranks: int, cores: int) -> Link:
    """Between ranks of a CPU whose collectives were not fitted."""
    message_s, more_s = constants.MEMORY_MESSAGE_S
    latency_s = message_s + (more_s * ranks / cores if ranks > cores else 0.0)
    return Link("memory", constants.MEMORY_LINK_FRACTION * copy_bytes_per_s / 2 / ranks, latency_s)


def measured_link(calibration: Calibration, ranks: int, cores: int) -> Link | None:
    """The link that makes the planner's all_reduce what `tilemesh bench collective --fit` measured for so many ranks
    on so many cores.

    All of them were busy then, so what ranks that share cores cost one another is in it. Of the algorithms the quickest
    counts, as in a run: at the smallest size for the latency, at the one nearest to 1 MiB for the bandwidth. What an
    exchange takes more after computing is added to each.
    """
    fits = _fits(calibration, ranks, cores)
    try:
        # "direct" ones need arrays in memory that ranks share, which a model's are not.
        names = [name for name in fits[0]["curves"] if name.startswith("all_reduce/") and "direct" not in name]
        curves = [dict(fits[0]["curves"][name]) for name in names]
        quickest = {size: min(curve[size] for curve in curves if size in curve) for size in set().union(*curves)}
        small, large = min(quickest), min(quickest, key=lambda size: (abs(math.log(size / LINK_BYTES)), size))
        alpha_s = quickest[small] / (2 * math.ceil(math.log2(ranks)))  # a tree's messages, up and down
        each_s = quickest[large] / (2 * (ranks - 1)) - alpha_s  # of a ring's messages, the bytes
        if large <= small or each_s <= 0:
            return None
        meeting_s = float(fits[0].get("worked_s") or 0.0)
    except (LookupError, TypeError, ValueError, AttributeError):  # none, or of another version: as if there were none
        return None
    return Link("memory", large / ranks / each_s / constants.LINK_FRACTION, alpha_s, meeting_s)


def _fits(calibration: Calibration, ranks: int, cores: int) -> list[Any]:
    """What was measured of so many ranks on so many cores, the transport that training takes first."""
    fits = calibration.extra.get(FITS)
    if ranks < 2 or not isinstance(fits, Mapping):
        return []
    return [fits[key] for key in (f"{name}/{ranks}/{cores}" for name in TRANSPORTS) if key in fits]


def crowding(calibration: Calibration, ranks: int, cores: int) -> float:
    """How many times as long computing takes beside the other ranks as it would if nobody were in the way, and those
    that outnumber cores only took turns. 1: no worse, or not measured.

    Ranks share the memory and the last cache; on one core they also empty each other's caches at every turn.
    """
    try:
        alone, together = map(float, _fits(calibration, ranks, cores)[0]["layer_s"])
        factor = together / alone / max(1.0, ranks / cores)
    except (LookupError, TypeError, ValueError, ZeroDivisionError):  # none, or of another version
        return 1.0
    return max(1.0, factor) if math.isfinite(factor) else 1.0


def local_gpu(calibration: Calibration, ranks: int, gpus: tuple[str, ...]) -> MeasuredCluster:
    """So many of a machine's GPUs."""
    if not 1 <= ranks <= len(gpus):
        raise UsageError(f"{ranks} ranks on this machine's {len(gpus)} GPUs: expected one rank per GPU")
    device = device_for(gpus[0])
    if device is None:
        raise UsageError(f"no datasheet of '{gpus[0]}' is known here: plan for a GPU that is, such as 1xh100")
    words = _measured(calibration)
    return MeasuredCluster(Cluster((make_node(device, ranks),)), calibration.rates("gpu"), words)


def _measured_cores(calibration: Calibration, cores: int) -> int:
    """How many cores `all_cores` were: a process that is bound to some of a machine's has fewer."""
    match = re.search(r", (\d+) cores?,", calibration.words)
    return max(cores, int(match[1])) if match else cores


def rank_rates(
    single: Rates, whole: Rates, ranks: int, cores: int, crowd: float = 1.0, measured_cores: int | None = None
) -> Rates:
    """What a rank gets of a machine's rates when all ranks are busy, which makes everything take `crowd` times as long
    but for streams, whose rate was measured with all cores at it. `measured_cores`: how many those were, if not
    `cores`."""
    threads, all_cores = threads_for(ranks, cores), measured_cores or cores
    # Between one core and all, a rate grows as a power of the cores; ranks that outnumber cores take turns.
    power = math.log(threads) / math.log(all_cores) if all_cores > 1 else 1.0
    turn = min(1.0, cores / ranks)

    def share(name: str, low: float, high: float | None) -> float:
        if name in ("launch_s", "operation_s"):
            return low / turn * crowd
        each = low * (max(high, low) / low) ** power if high is not None else low
        # Streams share the memory; what half fits a core's caches does not.
        shared = name in ("copy_bytes_per_s", "read_bytes_per_s", "write_bytes_per_s") and high is not None
        return min(each * turn, max(high, low) / ranks) if shared and high is not None else each * turn / crowd

    shares: dict[str, object] = {}
    for field in fields(Rates):
        low, high = getattr(single, field.name), getattr(whole, field.name)
        if isinstance(low, (int, float)):
            shares[field.name] = share(field.name, low, high)
        elif low:
            shares[field.name] = {key: share(field.name, value, (high or {}).get(key)) for key, value in low.items()}
    return Rates(**shares)  # type: ignore[arg-type]  # fields of Rates by their own names
