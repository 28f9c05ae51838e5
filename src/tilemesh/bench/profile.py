"""What a step spends its time on, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tilemesh.core.files import write_text

_STEPS = 3

KernelTime = tuple[float, float, str]
"""Seconds and calls per step, and the name."""


def kernel_times(step: Callable[[], object], device: torch.device) -> list[KernelTime]:
    """Of every kernel of a step, or on a CPU of every operator, the longest first."""
    on_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as seen:
        for _ in range(_STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    operators = []
    for event in seen.key_averages():
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        # A range that somebody named ("Optimizer.step#AdamW.step") holds kernels that are counted by themselves.
        if spent and not (on_gpu and event.is_user_annotation):
            operators.append((spent * 1e-6 / _STEPS, event.count / _STEPS, event.key))
    return sorted(operators, reverse=True)


def write_kernel_times(times: Sequence[KernelTime], path: Path) -> str:
    """A line for each kernel: microseconds per step, calls per step, its name. All of them together, in words."""
    lines = [f"{seconds * 1e6:10.1f} {calls:7.1f}  {name}" for seconds, calls, name in times]
    write_text("\n".join(["        us   calls  per step", *lines, ""]), path)
    total_ms, calls = sum(time[0] for time in times) * 1e3, sum(time[1] for time in times)
    return f"{total_ms:.2f} ms in {calls:.0f} calls per step, by kernel in {path}"
