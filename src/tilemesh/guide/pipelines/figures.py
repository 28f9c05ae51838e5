"""Drawings of chapter 7: every box comes from the simulator of schedules."""

from __future__ import annotations

from tilemesh.core.scene import LaneBlock, Scene, files_of, lanes
from tilemesh.core.step.book import build
from tilemesh.core.step.check import check
from tilemesh.core.step.draw import curves
from tilemesh.core.step.draw import svg as step_svg
from tilemesh.core.step.memory import memory_curve
from tilemesh.core.step.pace import bubble_fraction
from tilemesh.core.step.search import PassTimes
from tilemesh.core.step.simulate import simulate
from tilemesh.guide.pipelines.work import STAGES
from tilemesh.report.draw import Line, PlotAxis
from tilemesh.report.picture import curves as curve_picture


def figures() -> dict[str, str]:
    schedules = ("gpipe", "1f1b", "interleaved", "zb-h1", "chimera")
    return files_of(software, bubble, axes) | {f"{name}.svg": schedule(name) for name in schedules}


def software(items: int = 5) -> str:
    """Load, preprocess, infer, postprocess: items one behind the other."""
    free = [0.0] * len(STAGES)
    blocks = []
    for item in range(items):
        at = 0.0
        for place, seconds in enumerate(STAGES.values()):
            begin = max(at, free[place])
            at = free[place] = begin + seconds * 1e3
            blocks.append(LaneBlock(place, begin, at, str(item), item % 4))
    alone = items * sum(STAGES.values()) * 1e3
    title = f"{items} items through four stages: {free[-1]:g} ms instead of {alone:g} ms one by one"
    note = "infer, the slowest stage, is never idle once it has begun; one item still takes 35 ms or more"
    return lanes(title, list(STAGES), blocks, unit="ms", note=note)


def schedule(name: str, stages: int = 4, microbatches: int = 8) -> str:
    """A schedule on the clock; forward 1, backward 2."""
    program = build(name, stages, microbatches)
    check(program)
    passes = PassTimes()
    timeline = simulate(program, passes.times(program), keep_slots=True)
    memory = memory_curve(program, passes.sizes(program))
    title = f"{name}: {timeline.bubble:.1%} bubble, at most {max(map(max, memory)):g} microbatches kept"
    return step_svg(program, timeline, curves(program, timeline, memory), title)


def bubble(stages: int = 8) -> str:
    """The bubble over the number of microbatches."""
    counts = [8, 16, 24, 32, 48, 64, 96, 128]
    shown = {"gpipe": "GPipe, 1F1B", "interleaved": "interleaved, 2 chunks per rank"}
    lines = [
        Line(
            words,
            [(count, bubble_fraction(name, stages, count, 2 if name == "interleaved" else 1)) for count in counts],
            colour,
            dots=True,
        )
        for colour, (name, words) in enumerate(shown.items())
    ]
    x = PlotAxis(0, 132, "microbatches")
    y = PlotAxis(0, 0.5, "bubble", lambda value: f"{value:.0%}")
    return curve_picture(f"Bubble of {stages} stages over the number of microbatches", x, y, *lines)


def axes() -> str:
    """Which axis for what is too large."""
    scene = Scene(860, 240, "What is too large? The order in which to try")
    steps = (
        ("one device", "does it fit, and is it fast enough? then stop", 6),
        ("data parallel", "the batch takes too long: more devices, other samples", 3),
        ("ZeRO 1 to 3", "weights, gradients or optimizer states do not fit", 1),
        ("tensor parallel", "a layer does not fit or a token takes too long: inside a node", 0),
        ("pipeline", "still too large: across nodes, few bytes between stages", 2),
    )
    for place, (name, words, colour) in enumerate(steps):
        y = 44 + place * 38
        scene.box(40, y, 170, 30, name, colour=colour)
        scene.text(226, y + 20, words)
        if place + 1 < len(steps):
            scene.arrow(125, y + 31, 125, y + 38, colour=6)
    return scene.svg()
