"""Drawings of chapter 8: both timelines come from the code that the chapter runs."""

from __future__ import annotations

from collections.abc import Sequence

from tilemesh.core.scene import LaneBlock, Scene, lanes
from tilemesh.guide.requests.work import Load, continuous, static_batches
from tilemesh.report.draw import Line, PlotAxis
from tilemesh.report.picture import curves
from tilemesh.serve.history import RequestRecord
from tilemesh.serve.scheduler import ServeLimits

ANSWERS = (40, 4, 6, 5, 4, 30, 5, 6)
FIXED_S, TOKEN_S = 0.020, 0.0005
"""A step of the drawings: 20 ms to read the weights, 0.5 ms for each token."""


def step_s(tokens: int) -> float:
    return FIXED_S + TOKEN_S * tokens


def figures() -> dict[str, str]:
    loads = [Load(0.0, 8, answer) for answer in ANSWERS]
    limits = ServeLimits(pages=64, context=64, running=4, step_tokens=64)
    static = static_batches(loads, 4, step_s)
    flowing = list(continuous(loads, limits, step_s).requests.values())
    end_ms = max(record.token_ns[-1] for record in static) * 1e-6
    return {
        "life.svg": life(),
        "static.svg": timeline("Static batches: four at a time, until the longest is done", static, end_ms),
        "continuous.svg": timeline("Continuous batching: who ends leaves, who waits joins", flowing, end_ms),
        "batch.svg": batch(),
    }


def life() -> str:
    """From a text to a text."""
    scene = Scene(860, 150, "A request's life")
    steps = (
        ("tokenise", "text → numbers", 6), ("queue", "waits its turn", 6), ("prefill", "the prompt, at once", 0),
        ("decode", "a token per step", 1), ("sample", "one of all words", 2), ("stream", "numbers → text", 6),
    )  # fmt: skip
    for place, (name, words, colour) in enumerate(steps):
        x = 24 + place * 138
        scene.box(x, 48, 114, 36, name, colour=colour)
        scene.text(x + 57, 104, words, align="mid", quiet=True, size=11)
        if place + 1 < len(steps):
            scene.arrow(x + 115, 66, x + 137, 66, colour=6)
    scene.line(633, 48, 633, 34)
    scene.line(495, 34, 633, 34)
    scene.arrow(495, 34, 495, 47, colour=6)
    scene.text(564, 30, "until the answer ends", align="mid", quiet=True, size=11)
    return scene.svg()


def timeline(title: str, records: Sequence[RequestRecord], end_ms: float) -> str:
    """When each request waits and gets its tokens."""
    blocks = []
    for lane, record in enumerate(records):
        first, last = record.token_ns[0] * 1e-6, record.token_ns[-1] * 1e-6
        blocks.append(LaneBlock(lane, 0.0, first, "", 6, pale=True))
        blocks.append(LaneBlock(lane, first, last, str(len(record.token_ns)), lane % 4))
    names = [f"request {number}" for number in range(len(records))]
    last = max(record.token_ns[-1] for record in records) * 1e-6
    note = f"all done after {last:,.0f} ms; grey: until the first token; the number: tokens of the answer"
    return lanes(title, names, blocks, unit="ms", note=note, end=end_ms)


def batch() -> str:
    """Throughput and the gap between tokens over the batch."""
    sizes = [1, 2, 4, 8, 16, 32, 64, 128]
    rate = Line("tokens per second", [(size, size / step_s(size)) for size in sizes], 0, dots=True)
    x = PlotAxis(0, 132, "requests in a step")
    y = PlotAxis(0, 1600, "tokens/s")
    title = "A step of 20 ms and 0.5 ms per request: tokens per second over the batch"
    return curves(title, x, y, rate)
