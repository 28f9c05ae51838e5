"""What chapter 4 runs beside the hierarchy: Amdahl's law with threads that sleep, topology, and profilers."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path

import numpy as np

from tilemesh.core.hardware import LINKS, Device
from tilemesh.guide.clock import repeated
from tilemesh.guide.locality.measured import together
from tilemesh.measure.row import Row


def half_serial(workers: int, serial_s: float, parallel_s: float) -> float:
    """Seconds of a program with a part that one worker must do and a part that all share. Work is sleeping."""
    began = time.perf_counter()
    time.sleep(serial_s)
    together([partial(time.sleep, parallel_s / workers)] * workers)
    return time.perf_counter() - began


def add_seconds(elements: int) -> float:
    """Seconds of z = x + y on float64 arrays that exist already: the best of some."""
    x, y, z = np.ones(elements), np.ones(elements), np.zeros(elements)
    return min(repeated(lambda: np.add(x, y, out=z), 6))


def matmul_on(device: Device, devices: int, link: str, size: int = 8192) -> float:
    """Seconds of one bf16 product cut by rows over devices, the second matrix sent to all of them first."""
    flops, nbytes = 2 * size**3, 2 * size * size
    sent = 0.0 if devices == 1 else LINKS[link].latency_s + nbytes / LINKS[link].bytes_per_s
    return flops / (devices * device.peak("bf16")) + sent


def topology() -> str:
    """What this machine says of its sockets, memory nodes and cores; `nvidia-smi topo` where there are GPUs."""
    lines = []
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    for node in nodes:
        lines.append(f"memory {node.name}: cores {(node / 'cpulist').read_text().strip()}")
    siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    if siblings.exists():
        lines.append(f"core 0 runs the hardware threads {siblings.read_text().strip()}")
    if shutil.which("nvidia-smi"):
        said = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False, timeout=30)
        lines.append(said.stdout.strip())
    return "\n".join(lines) or "this system does not tell"


def profiled() -> dict[str, int]:
    """Calls by name of a small network's forward and backward pass, as torch.profiler saw them."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it prints when it begins and ends
    import torch
    from torch.profiler import ProfilerActivity, profile

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    x = torch.ones(32, 64)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model(x).sum().backward()
    return {event.key: int(event.count) for event in seen.key_averages()}


def gpu_words() -> str:
    """What nvidia-smi says of the GPUs here; what it would say where there is none."""
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi here: on a GPU machine it prints utilization, memory and clocks of every GPU"
    fields = "name,utilization.gpu,memory.used,memory.total,clocks.sm,power.draw"
    line = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=30).stdout.strip()


def gpu_rows() -> list[Row]:
    """The same questions put to a GPU: peak, memory bandwidth, launches, the link to its host. No rows without one."""
    import torch

    if not torch.cuda.is_available():
        return []
    from tilemesh.measure.calibrate import measure_figures
    from tilemesh.measure.calibrate_gpu import gpu_figures
    from tilemesh.measure.calibrate_link import link_figures

    return measure_figures([*gpu_figures(quick=True), *link_figures()])
