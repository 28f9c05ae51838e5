"""What moving states, activations or weights to the host's memory saves and costs.

The one idea: what is moved is on the device for the layer at work and for those fetched ahead (`prefetch`), and crosses
the link to the host once out and once back. Activations and weights travel beside computing, so only what the passes do
not cover costs time; optimizer states travel when nothing is left to compute, and cost all of it.
"""

from __future__ import annotations

from typing import NamedTuple

from tilemesh.core.hardware import LINKS, Device
from tilemesh.core.plan import ParallelPlan
from tilemesh.plan import constants

_HOST_LINKS = {"t4": "pcie3", "a10": "pcie4", "a100-80": "pcie4", "h100": "pcie5", "h200": "pcie5", "b200": "pcie5"}
"""Sixteen lanes for each GPU, by their datasheets."""


class MovedBytes(NamedTuple):
    """What a rank holds of each in a step without offloading; activations are those of one microbatch."""

    optimizer: int
    activations: int
    weights: int


def host_bytes_per_s(device: Device) -> float:
    """In one direction, from a device to its host; a CPU's own memory where the device is one."""
    link = LINKS[_HOST_LINKS.get(device.name, "memory" if device.kind == "cpu" else "pcie4")]
    return link.bytes_per_s * constants.LINK_FRACTION


def on_device(plan: ParallelPlan, layers: int) -> float:
    """Of what is moved, the part that is on the device at once."""
    return min(1.0, (1 + plan.prefetch) / max(1, layers))


def offload_s(plan: ParallelPlan, device: Device, moved: MovedBytes, forward_s: float, backward_s: float) -> float:
    """Seconds that a step takes longer. The passes are those of one microbatch through all of a rank's layers."""
    if not plan.offloads:
        return 0.0
    rate, total = host_bytes_per_s(device), 0.0
    if "optimizer" in plan.offloads:
        total += 2 * moved.optimizer / rate
    beside_forward = beside_backward = 0.0
    if "activations" in plan.offloads:
        beside_forward, beside_backward = moved.activations / rate, moved.activations / rate
    if "weights" in plan.offloads:  # read for either pass; written when they were stepped
        beside_forward, beside_backward = beside_forward + moved.weights / rate, beside_backward + moved.weights / rate
        total += moved.weights / rate
    waits = max(0.0, beside_forward - forward_s) + max(0.0, beside_backward - backward_s)
    return total + plan.accumulation * waits
