"""Drawings of chapter 10: every block comes from the clock that the chapter runs."""

from __future__ import annotations

from collections.abc import Sequence

from tilemesh.core.scene import LaneBlock, lanes
from tilemesh.guide.host.work import padded, timeline
from tilemesh.report.draw import Line, PlotAxis
from tilemesh.report.picture import curves


def figures() -> dict[str, str]:
    return {
        "device_bound.svg": _kernels("Kernels longer than launches: the device is never idle", [4.0] * 8, [10.0] * 8),
        "host_bound.svg": _kernels("Launches longer than kernels: the device waits", [9.0] * 8, [4.0] * 8),
        "read.svg": _kernels("The host reads a result after each third kernel", [4.0] * 8, [10.0] * 8, every=3),
        "recorded.svg": _kernels("Recorded: one launch for all", [9.0] + [0.0] * 7, [4.0] * 8),
        "buckets.svg": buckets(),
    }


def _kernels(title: str, host: Sequence[float], device: Sequence[float], every: int = 99) -> str:
    """Launches above, kernels below."""
    waits = [place % every == every - 1 for place in range(len(host))]
    spans, blocks, at = timeline(host, device, waits), list[LaneBlock](), 0.0
    for place, (launch, (begin, end)) in enumerate(zip(host, spans, strict=True)):
        if launch:
            blocks.append(LaneBlock(0, at, at + launch, str(place), 6))
        blocks.append(LaneBlock(1, begin, end, str(place), place % 4))
        at = end if waits[place] else at + launch
    idle = spans[-1][1] - sum(device)
    note = f"{spans[-1][1]:g} µs in all; the device is idle for {idle:g}"
    return lanes(title, ["host", "device"], blocks, unit="µs", note=note, end=120.0)


def buckets() -> str:
    """Padding over the number of recordings."""
    sizes = list(range(1, 65))
    points = [(64 // step, padded(sizes, range(step, 65, step))) for step in (64, 32, 16, 8, 4, 2, 1)]
    line = Line("equal steps up to 64", points, 0, dots=True)
    x, y = PlotAxis(0, 66, "recordings"), PlotAxis(0, 0.55, "padding", lambda value: f"{value:.0%}")
    return curves("Rows computed for nothing, batches of 1 to 64 equally likely", x, y, line)
