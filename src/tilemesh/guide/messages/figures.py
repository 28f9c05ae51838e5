"""Drawings of chapter 2."""

from __future__ import annotations

from tilemesh.core.hardware import LINKS
from tilemesh.core.scene import Scene, files_of
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.report.draw import Line, PlotAxis
from tilemesh.report.picture import curves

NAMES = {
    "memory": "shared memory of a host",
    "nvlink4": "NVLink of an H100",
    "ndr": "InfiniBand NDR",
    "ethernet10": "10 Gbit/s Ethernet",
}


def figures() -> dict[str, str]:
    return files_of(deadlock, message_time)


def deadlock() -> str:
    """Two ranks over time: both send first; in turns; both at once."""
    scene = Scene(860, 300, "Two ranks swap arrays: three programs, time runs downwards")
    programs = (
        ("deadlock", (("send →", "← send"), ("recv\nnever reached", "recv\nnever reached")), 1),
        ("in turns", (("send →", "recv"), ("recv", "← send")), 2),
        ("both at once", (("irecv, isend", "irecv, isend"), ("wait, wait", "wait, wait")), 0),
    )
    for place, (name, rows, colour) in enumerate(programs):
        x = 20 + place * 285
        scene.text(x + 125, 54, name, bold=True, align="mid")
        for rank in range(2):
            scene.text(x + 60 + rank * 130, 76, f"rank {rank}", align="mid", quiet=True)
        for number, row in enumerate(rows):
            y = 88 + number * 62
            for rank, words in enumerate(row):
                scene.box(x + rank * 130, y, 120, 34, words, colour=colour, pale=name == "deadlock" and number == 1)
        if name == "deadlock":
            scene.arrow(x + 60, 122, x + 186, 148, colour=1, dashed=True)
            scene.arrow(x + 190, 122, x + 64, 148, colour=1, dashed=True)
            scene.text(x + 125, 232, "each send waits for the other's recv:", align="mid", quiet=True)
            scene.text(x + 125, 250, "a circle, for ever", align="mid", quiet=True)
        elif name == "in turns":
            scene.arrow(x + 120, 105, x + 130, 105, colour=2)
            scene.arrow(x + 130, 167, x + 120, 167, colour=2)
            scene.text(x + 125, 232, "two messages, one after the other", align="mid", quiet=True)
        else:
            scene.arrow(x + 62, 122, x + 188, 148, colour=0)
            scene.arrow(x + 188, 122, x + 62, 148, colour=0)
            scene.text(x + 125, 232, "two messages at the same time", align="mid", quiet=True)
    return scene.svg()


def message_time() -> str:
    """Seconds of a message over its size, for links of the hardware table: flat, then proportional."""
    sizes = [float(2**power) for power in range(31)]
    lines = [
        Line(name, [(size, LINKS[key].latency_s + size / LINKS[key].bytes_per_s) for size in sizes], colour)
        for colour, (key, name) in enumerate(NAMES.items())
    ]
    x = PlotAxis(1, 2.0**30, "bytes of a message", lambda value: format_bytes(value), log=True, binary=True)
    top = max(value for line in lines for _, value in line.points if value is not None)
    y = PlotAxis(5e-7, top * 1.2, "seconds", format_seconds, log=True)
    return curves("Time of one message: α + N·β", x, y, *lines)
