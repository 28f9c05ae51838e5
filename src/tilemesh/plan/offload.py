"""What moving states, activations or weights to the host's memory saves and costs.

The one idea: what is moved crosses the link to the host beside computing, so it costs what the passes do not cover.
Optimizer states travel when nothing is left to compute but their own update: in and out at the same time, and they cost
nearly all of it. Activations leave in the forward pass and come back in the backward pass. Weights leave in a step's
first forward pass, and come back for every pass after it; nothing is written that the host has already. On a CPU
optimizer states are where they belong already, and the cores that compute do the copies, so nothing hides them.
"""

from __future__ import annotations

from typing import NamedTuple

from tilemesh.core.calibration import Rates
from tilemesh.core.hardware import Device, host_link
from tilemesh.core.plan import OFFLOAD_PART_BYTES, OFFLOAD_PARTS, ParallelPlan
from tilemesh.plan import constants


class MovedBytes(NamedTuple):
    """What a rank moves of each; activations are those of one microbatch."""

    optimizer: int
    activations: int
    weights: int


class RankPassTimes(NamedTuple):
    """Of one microbatch through all of a rank's layers, and of the step's update."""

    forward_s: float
    backward_s: float
    update_s: float


class HostRates(NamedTuple):
    """Bytes per second between a device and its host: to the device, to the host, and each way while both are busy."""

    inward: float
    outward: float
    both: float


def host_rates(device: Device, measured: Rates | None = None) -> HostRates:
    """As `tilemesh calibrate` measured them; else from the link's datasheet. A CPU copies within its own memory."""
    known = {} if measured is None else measured.host_link_bytes_per_s
    if device.kind == "cpu" and measured is not None and measured.copy_bytes_per_s:
        copied = measured.copy_bytes_per_s / 2  # a copied byte is read and written
        return HostRates(copied, copied, copied)
    assumed = host_link(device).bytes_per_s * constants.LINK_FRACTION
    return HostRates(*(known.get(way, assumed) for way in ("in", "out", "both")))


def on_device(plan: ParallelPlan, layers: int) -> float:
    """Of what passes move, the part that is on the device at once: the layer at work and those fetched ahead."""
    return min(1.0, (1 + plan.prefetch) / max(1, layers))


def optimizer_on_device(optimizer: int, largest: int) -> int:
    """Of optimizer states in the host's memory, at most what the device holds while they are stepped.

    `largest`: those of a layer; a part has no more unless a layer is small."""
    return min(optimizer, OFFLOAD_PARTS * max(OFFLOAD_PART_BYTES, largest))


def offload_s(plan: ParallelPlan, rates: HostRates, moved: MovedBytes, times: RankPassTimes) -> float:
    """Seconds that a step takes longer."""
    if not plan.offloads:
        return 0.0
    total = 0.0
    if "optimizer" in plan.offloads:
        part = min(moved.optimizer, OFFLOAD_PART_BYTES)  # the first comes in and the last goes out alone
        moving_s = (moved.optimizer - part) / rates.both + part / rates.inward + part / rates.outward
        total += max(0.0, moving_s - times.update_s)
    kept = moved.activations if "activations" in plan.offloads else 0
    weights = moved.weights if "weights" in plan.offloads else 0
    both = rates.both if kept and weights else rates.outward if kept else rates.inward
    first_s = (kept + weights) / rates.outward
    later_s = max(kept, weights) / both
    backward_s = (kept + weights) / rates.inward
    waits = max(0.0, first_s - times.forward_s) + (plan.accumulation - 1) * max(0.0, later_s - times.forward_s)
    return total + waits + plan.accumulation * max(0.0, backward_s - times.backward_s)
