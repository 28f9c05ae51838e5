"""Exercises of chapter 10, with the wrong answers that have a reason."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tilemesh.guide.exercise import choice, code, numeric
from tilemesh.guide.host.work import timeline

SHARE = numeric(
    "share",
    "A step computes for 5 ms on the GPU; before it the CPU prepares it for 2 ms, and the GPU waits. Which share of "
    "the step does the CPU take?",
    2 / 7,
    unit="fraction",
    wrong={
        0.4: "40 % is 2 / 5: compared with the GPU's time. The step takes 7 ms.",
        0.2: "20 % would be 2 of 10 ms. The step takes 5 + 2.",
        5 / 7: "71 % is the GPU's share.",
    },
    otherwise="The CPU's time by the time of the step, which has both.",
    explanation="2 / 7 = 29 %. Prepared ahead, the step takes 5 ms and the CPU nothing of it.",
)

KERNELS = numeric(
    "kernels",
    "A decode step has 400 kernels of 3 µs; the host launches one in 7 µs. How many microseconds does the step take?",
    400 * 7 + 3,
    counted_in="µs",
    tolerance=0.0005,
    wrong={
        1200: "1,200 is the device alone. It waits 4 µs for each launch.",
        4000: "4,000 adds both. The device computes a kernel while the host launches the next.",
        2800: "Nearly: the last kernel runs after the last launch.",
    },
    otherwise="The slower of the two sets the pace; at the end the last kernel still runs.",
    explanation="400 · 7 + 3 = 2,803 µs, of which the device computes 1,200. As a CUDA graph: 1,200 and one launch.",
)

PROFILE = choice(
    "profile",
    "A profile of a GPU step: kernels of 4 µs with gaps of 9 µs between them, the CPU busy in `aten::` calls all the "
    "time. What helps most?",
    {
        "Record the step as a CUDA graph, or fuse operators into fewer.": None,
        "A GPU that is twice as fast.": "Kernels would take 2 µs and gaps 11: the CPU launches no faster.",
        "A larger network link.": "Nothing is sent here: the gaps are full of CPU work.",
        "Smaller kernels.": "More launches: the CPU is what is too slow.",
    },
    explanation="Busy CPU and idle GPU: fewer launches. A larger batch helps, too: kernels grow, launches do not.",
)

Times = Sequence[float]


def why_not_timeline(function: Callable[[Times, Times, Sequence[bool]], Any]) -> str | None:
    """Hold it to the rules, one by one, on random steps."""
    draw = random.Random(1)
    for _ in range(200):
        count = draw.randint(1, 8)
        host, device = ([float(draw.randint(1, 9)) for _ in range(count)] for _ in range(2))
        waits = [draw.random() < 0.3 for _ in range(count)]
        spans = [tuple(map(float, span)) for span in function(host, device, waits)]
        step = f"host {host}, device {device}, waits {waits}"
        if len(spans) != count:
            return f"{step}: {len(spans)} kernels came back, not {count}."
        for place, ((begin, end), (right, _)) in enumerate(zip(spans, timeline(host, device, waits), strict=True)):
            if abs(end - begin - device[place]) > 1e-9:
                return f"{step}: kernel {place} runs for {end - begin:g}, not {device[place]:g}."
            if place and begin < spans[place - 1][1] - 1e-9:
                return f"{step}: kernel {place} begins at {begin:g}, while kernel {place - 1} runs: one at a time."
            if begin < right - 1e-9:
                return (
                    f"{step}: kernel {place} begins at {begin:g} and cannot before {right:g}: its launch comes after "
                    "all earlier ones, and after the end of every kernel that the host waited for."
                )
            if begin > right + 1e-9:
                return (
                    f"{step}: kernel {place} begins at {begin:g} and could at {right:g}: the host launches ahead while "
                    "the device runs, unless it waits."
                )
    return None


TIMELINE = code(
    "timeline",
    "Write the clock of a host and a device: when does each kernel begin and end?",
    '''def timeline(host, device, waits):
    """A list of (begin, end), one per kernel.

    The host needs host[i] to launch kernel i, one after the other; the device
    runs one kernel at a time, in order, for device[i]; where waits[i] is true,
    the host goes on only when kernel i has ended.
    """
    ...''',
    returns="a list of (begin, end)",
    solution=timeline,
    correct=why_not_timeline,
    explanation="The planner's clock of serving (`plan/serving_clock.py`) and the simulator's `launching` rest on it.",
)

EXERCISES = (SHARE, KERNELS, PROFILE, TIMELINE)
