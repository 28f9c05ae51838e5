"""Drawings of chapter 4. What is measured comes from `measured.json`, which names its machine; the rest is computed."""

from __future__ import annotations

import json
from pathlib import Path

from tilemesh.core.cost import Ceiling
from tilemesh.core.hardware import H100, LINKS
from tilemesh.core.scene import LaneBlock, Scene, files_of, lanes
from tilemesh.core.units import format_bytes, format_rate, format_seconds
from tilemesh.guide.machine.growth import GPUS, MODELS, TRAINING_BYTES
from tilemesh.guide.machine.hierarchy import MemoryLevel
from tilemesh.guide.machine.layers import rows
from tilemesh.guide.machine.processor import CYCLE, amdahl, chained, cycles, independent, pipelined
from tilemesh.report.draw import Dots, Line, Note, PlotAxis
from tilemesh.report.picture import curves

SHORT = {"execute": "exec"}


def figures() -> dict[str, str]:
    return files_of(hierarchy, cycle, gpu, links, roofline, growth) | {"amdahl.svg": amdahl_curves()}


def measured() -> tuple[str, list[MemoryLevel]]:
    """The committed measurement: the machine's words, and its levels."""
    body = json.loads((Path(__file__).parent / "measured.json").read_text(encoding="utf-8"))
    return body["machine"], [MemoryLevel(**level) for level in body["levels"]]


def hierarchy() -> str:
    """Latency of each level on a logarithmic scale, with its bandwidth beside it."""
    machine, levels = measured()
    levels = [level for level in levels if level.latency_s is not None]
    scene = Scene(860, 76 + 36 * len(levels) + 24, f"How long one read takes, level by level, measured on {machine}")
    scale = PlotAxis(1e-10, 1e-2, "", log=True)
    for power in range(-10, -1):
        x = 190 + 460 * scale.place(10.0**power)
        scene.line(x, 52, x, 60 + 36 * len(levels), faint=True)
        scene.text(x, 48, format_seconds(10.0**power), size=10, align="mid", quiet=True)
    for place, level in enumerate(levels):
        y = 62 + place * 36
        assert level.latency_s is not None
        size = f" ({format_bytes(level.size_bytes)} read)" if level.size_bytes else ""
        rate = "" if level.bytes_per_s is None else f", {format_rate(level.bytes_per_s, 'B/s')}"
        value, colour = f"{format_seconds(level.latency_s)}{rate}", (0, 2, 2, 2, 1, 3, 5)[min(place, 6)]
        length = 460 * scale.place(level.latency_s)
        scene.bar(190, y, length, 26, level.name + size, value, colour=colour, quiet=False)
    scene.note(190, 80 + 36 * len(levels), "each line to the right is ten times slower")
    return scene.svg()


def cycle(count: int = 5) -> str:
    """Instructions in a pipeline: independent ones above, each waiting for the one before below."""
    blocks: list[LaneBlock] = []
    names: list[str] = []
    for program, words in ((independent(count), "independent"), (chained(count), "chained")):
        fetched = pipelined(program)
        for place, at in enumerate(fetched):
            lane = len(names)
            names.append(f"{words} {place + 1}" if place == 0 else f"{place + 1}")
            blocks += [
                LaneBlock(lane, at + step, at + step + 1, SHORT.get(stage, stage), step)
                for step, stage in enumerate(CYCLE)
            ]
    few, many = cycles(pipelined(independent(count))), cycles(pipelined(chained(count)))
    title = (
        f"{count} instructions: {few} cycles if none waits, {many} if each needs the one before, "
        f"{len(CYCLE) * count} without a pipeline"
    )
    return lanes(title, names, blocks, unit="cycles", left=116)


def gpu() -> str:
    """The levels of an H100, from its datasheet."""
    scene = Scene(860, 300, "Where data lives on a GPU: an H100, from the thread to the other GPUs")
    registers = H100.sm_count * H100.registers_per_sm * 4
    shared = H100.sm_count * H100.shared_bytes_per_sm
    between = [format_rate(LINKS[name].bytes_per_s, "B/s") for name in ("nvlink4", "pcie5")]
    rate = format_rate(H100.memory_bytes_per_s, "B/s")
    per_sm = format_bytes(H100.shared_bytes_per_sm)
    levels = (
        ("registers", registers, f"{H100.registers_per_sm:,} of 4 bytes per SM; a thread's own", 0, 260),
        ("shared memory", shared, f"{per_sm} per SM; the threads of a block share it", 2, 330),
        ("L2 cache", H100.l2_bytes, f"all {H100.sm_count} SMs share it", 3, 400),
        ("HBM (device memory)", H100.memory_bytes, f"{rate}; weights and activations live here", 1, 470),
        ("other GPUs, the host", 0, f"NVLink {between[0]}, PCIe 5 {between[1]}, each direction", 6, 520),
    )
    for place, (name, size, words, colour, width) in enumerate(levels):
        y = 44 + place * 50
        scene.box(20, y, width, 40, f"{name}   {format_bytes(size) if size else ''}".strip(), colour=colour)
        scene.text(32 + width, y + 25, words, size=10, quiet=True)
    return scene.svg()


def links() -> str:
    """Bandwidths of links, one direction, on a logarithmic scale."""
    shown = ("nvlink5", "nvlink4", "nvlink3", "pcie5", "pcie4", "ndr", "hdr", "ethernet100", "ethernet10")
    scene = Scene(860, 60 + 30 * (len(shown) + 1), "Links in one direction (advertised figures often count both)")
    scale = PlotAxis(1e9, 5e12, "", log=True)
    values = {"HBM of an H100": H100.memory_bytes_per_s, **{name: LINKS[name].bytes_per_s for name in shown}}
    for place, (name, value) in enumerate(values.items()):
        colour = 1 if place == 0 else 0 if "nvlink" in name else 2 if "pcie" in name else 3
        length = 560 * scale.place(value)
        scene.bar(150, 40 + place * 30, length, 22, name, format_rate(value, "B/s"), colour=colour, quiet=False)
    scene.text(150, 54 + 30 * len(values), "the scale is logarithmic", size=10, quiet=True)
    return scene.svg()


_ABOVE, _BELOW = 1.4, 1.8  # factors on the logarithmic axis: some ten pixels


def roofline() -> str:
    """The roof of an H100 in bf16 and four layers under it."""
    ceiling = Ceiling.of_device(H100)
    peak, rate = ceiling.peak("bf16"), ceiling.read_bytes_per_s
    low, high = 0.1, 3000.0
    roof = [(low, low * rate), (peak / rate, peak), (high, peak)]
    layers = rows()
    points = [(row.cost.intensity, min(peak, row.cost.intensity * rate)) for row in layers]
    # MLP and Transformer stand so close that one label serves both.
    names = {"Transformer": "Transformer, MLP", "MLP": ""}
    # Names stand beside the roof, not on it: to the left above, to the right below.
    notes = [
        Note(x, y * _ABOVE if row.name == "CNN" else y / _BELOW, names.get(row.name, row.name), row.name == "CNN")
        for row, (x, y) in zip(layers, points, strict=True)
    ]
    notes.append(Note(1 / 6, rate / 6 / _BELOW, "x + y"))
    dots = Dots("layers of the table", [*points, (1 / 6, rate / 6)], 1)
    x_axis = PlotAxis(low, high, "FLOPs per byte moved", log=True)
    y_axis = PlotAxis(1e11, 2e15, "FLOP/s at best", lambda value: format_rate(value, "FLOP/s"), log=True)
    title = "Roofline of an H100 in bf16: left of the ridge memory is the limit, right of it arithmetic"
    return curves(title, x_axis, y_axis, Line("roof", roof, 0), dots, *notes)


def amdahl_curves() -> str:
    """Speedup over processors for several serial parts."""
    counts = [1, 2, 4, 8, 16, 32, 64, 100, 128, 256]
    lines = [
        Line(f"{serial:.0%} serial", [(count, amdahl(serial, count)) for count in counts], colour)
        for colour, serial in enumerate((0.0, 0.01, 0.05, 0.2))
    ]
    at = amdahl(0.2, 100)
    dot = Dots("20 % serial, 100 processors", [(100, at)], 4)
    x = PlotAxis(1, 256, "processors", log=True)
    y = PlotAxis(1, 256, "times faster", log=True)
    return curves(f"Amdahl's law: with 20 % serial, 100 processors make it {at:.2g} times faster", x, y, *lines, dot)


def growth() -> str:
    """Bytes to train models against bytes of a GPU, by year."""
    models = [(year, count * TRAINING_BYTES) for year, (_, count) in MODELS.items()]
    gpus = [(year, float(gpu.memory_bytes)) for year, gpu in GPUS.items()]
    notes = [Note(year, count * TRAINING_BYTES, name) for year, (name, count) in MODELS.items()]
    notes.append(Note(2024, float(GPUS[2024].memory_bytes), GPUS[2024].name, at_left=True))
    lines = [
        Line("weights, gradients and Adam's states of a model", models, 1, dots=True),
        Line("memory of one GPU", gpus, 0, dots=True),
    ]
    x = PlotAxis(2017.5, 2024.8, "year", lambda value: f"{value:.0f}", whole=True)
    y = PlotAxis(1e9, 3e13, "bytes", lambda value: format_rate(value, "B/s").removesuffix("/s"), log=True)
    return curves("Models grew faster than the GPUs that train them", x, y, *lines, *notes)
