"""What is measured of the link between a GPU and its host's memory: bytes per second in either direction, and in both.

Page-locked memory and large copies, as offloading makes them. With both directions busy a byte of either has to share
the host's memory, which on some machines is what bounds them.
"""

from __future__ import annotations

import time
from functools import partial

import torch

from tilemesh.core.hardware import Device, device_for, host_link
from tilemesh.measure.calibrate_gpu import datasheet_figure
from tilemesh.measure.figure import MEMORY_SHARE, Figure, FigureOutcome
from tilemesh.measure.sample import Sample

BUFFER_BYTES = 256 << 20
"""Of one copy; a power of two, since torch rounds page-locked memory up to one."""
COPIES = 4
ROUNDS = 7
WAYS = {"in": "host to GPU", "out": "GPU to host", "both": "both at once"}


def link_figures() -> list[Figure]:
    """Three figures of the current GPU, predicted; nothing is measured yet."""
    name = torch.cuda.get_device_name()
    return [_figure(name, device_for(name), way) for way in WAYS]


def _figure(name: str, device: Device | None, way: str) -> Figure:
    limit = None if device is None else host_link(device).bytes_per_s
    return datasheet_figure(
        "host link", "host_link_bytes_per_s", "B/s", {"gpu": name, "direction": WAYS[way]}, limit, MEMORY_SHARE,
        f"no datasheet of '{name}' is known here", partial(_measure, way), key=way,
    )  # fmt: skip


def _measure(way: str) -> FigureOutcome:
    """Copies in one direction, or in each of both, from the first one's start to the last one's end."""
    homes = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1) for _ in range(2)]
    places = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cuda").fill_(2) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    seconds = []
    for round_number in range(ROUNDS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(COPIES):
            if way != "out":
                with torch.cuda.stream(streams[0]):
                    places[0].copy_(homes[0], non_blocking=True)
            if way != "in":
                with torch.cuda.stream(streams[1]):
                    homes[1].copy_(places[1], non_blocking=True)
        torch.cuda.synchronize()
        if round_number:  # the first one warms up
            seconds.append((time.perf_counter() - began) / COPIES)
    return FigureOutcome(Sample.of(seconds).rate(BUFFER_BYTES), case={"copy": f"{BUFFER_BYTES >> 20} MiB"})
