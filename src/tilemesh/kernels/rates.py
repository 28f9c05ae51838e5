"""What of a GPU's datasheet kernels sustain, and the time that a pass over memory should take by it. Pure."""

from __future__ import annotations

from tilemesh.core.cost import Cost
from tilemesh.core.hardware import Device

SUSTAINED_FLOPS = 0.8  # of the dense peak
SUSTAINED_MEMORY = 0.9  # of the bandwidth
LAUNCH_S = 2.0e-6  # start and drain of one kernel inside a graph


def pass_s(work: Cost, device: Device) -> float:
    """Kernel time of an operator that reads its inputs and writes its results once, whatever it does in between."""
    memory_s = work.bytes_moved / (SUSTAINED_MEMORY * device.memory_bytes_per_s)
    peak = device.peak_flops_per_s.get(work.dtype, device.peak_flops_per_s["fp32"])
    return max(memory_s, work.flops / (SUSTAINED_FLOPS * peak)) + work.launches * LAUNCH_S
