"""Exercises of chapter 4, with the wrong answers that have a reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilemesh.guide.exercise import choice, code, numeric
from tilemesh.guide.machine.processor import amdahl

AMDAHL = numeric(
    "amdahl",
    "20 % of a program can use one processor only, the rest any number. How many times faster is it on 100 processors?",
    amdahl(0.2, 100),
    wrong={
        5.0: "5 is the limit for infinitely many processors, 1 / 0.2. With 100 the other 80 % still take 0.8 / 100.",
        80.0: "80 would be so if the serial 20 % took no time at all. They take as long as before.",
        100.0: "100 would need every part of the program to use all processors.",
        1.25: "1.25 = 1 / 0.8 takes the two parts for each other: it is the 80 % that become faster.",
    },
    otherwise="Let the program take 1 on one processor. How long do the two parts take on 100? Their sum is the new "
    "time.",
    explanation="1 / (0.2 + 0.008) = 4.8. The 20 % already take 96 % of the new time.",
)

CYCLES = numeric(
    "cycles",
    "A processor has five stages of one cycle each. How many cycles do 100 instructions take in a pipeline, if none "
    "waits for another?",
    104,
    wrong={
        500: "500 is without a pipeline: each instruction has all five cycles to itself.",
        100: "100 is one instruction per cycle, but the first one comes out only after five cycles.",
        20: "20 = 100 / 5 would need five whole instructions to finish in every cycle. One finishes per cycle.",
        105: "105 = 100 + 5 counts the last instruction twice: it begins in cycle 100 and needs 4 more.",
    },
    otherwise="The first instruction is done after 5 cycles. After that, how many come out per cycle?",
    explanation="5 + 99. CPI, cycles per instruction, is 1.04 and tends to 1; without a pipeline it is 5.",
)

BOUND = choice(
    "bound",
    "A GPU computes 989 TFLOP/s and reads 3.35 TB/s from memory. An addition z = x + y of large fp16 arrays does 1 "
    "FLOP per 6 bytes. What bounds it?",
    {
        "Memory: at full bandwidth it reaches about 0.06 % of the peak.": None,
        "Arithmetic: additions are what a GPU is slow at.": "3.35 TB/s / 6 bytes is 0.56 T additions per second; the "
        "GPU could do over a thousand times as many. It waits for data.",
        "Both alike.": "That is so at the ridge, 989 / 3.35 = 295 FLOPs per byte. Here it is 1/6.",
        "Neither: such a small operation is bound by its launch.": "A launch takes microseconds; large arrays take "
        "much longer. For small arrays it would be right.",
    },
    explanation="This is why fusing element-wise operations into a matrix product pays: they ride along for free.",
)


def bound_time(flops: float, nbytes: float, peak: float, bandwidth: float) -> float:
    """The solution: whichever takes longer."""
    return max(flops / peak, nbytes / bandwidth)


WRONG_TIMES: Mapping[str, Callable[[float, float, float, float], float]] = {
    "computing and reading happen at the same time. The roofline takes the longer, not the sum.":
        lambda flops, nbytes, peak, bandwidth: flops / peak + nbytes / bandwidth,
    "this is a rate, the height of the roof in FLOP/s. Asked for is the time in seconds.":
        lambda flops, nbytes, peak, bandwidth: min(peak, flops / nbytes * bandwidth),
    "the bytes take longer than the FLOPs, and this counts only the FLOPs.":
        lambda flops, nbytes, peak, bandwidth: flops / peak,
    "this is the shorter of the two times. The work is done when *both* are.":
        lambda flops, nbytes, peak, bandwidth: min(flops / peak, nbytes / bandwidth),
}  # fmt: skip
"""What people compute instead, by what to say to it."""


def why_not_bound(function: Callable[[float, float, float, float], Any]) -> str | None:
    """What is wrong with a roofline, tried on either side of the ridge."""
    peak, bandwidth = 100.0, 10.0
    for flops, nbytes, side in ((1000.0, 20.0, "right"), (50.0, 40.0, "left")):
        result = function(flops, nbytes, peak, bandwidth)
        try:
            time_s = float(result)
        except Exception as error:
            return f"bound_time({flops:g}, {nbytes:g}, {peak:g}, {bandwidth:g}) did not return a number: {error!r}"
        if time_s == bound_time(flops, nbytes, peak, bandwidth):
            continue
        case = f"{flops:g} FLOPs and {nbytes:g} bytes at {peak:g} FLOP/s and {bandwidth:g} B/s ({side} of the ridge)"
        for why, wrong in WRONG_TIMES.items():
            if time_s == wrong(flops, nbytes, peak, bandwidth):
                return f"{case}: {why}"
        return f"{case}: expected {bound_time(flops, nbytes, peak, bandwidth):g} s, got {time_s:g}."
    return None


ROOF = code(
    "bound_time",
    "Write the roofline as a function: the least time of work with so many FLOPs and bytes on a machine with this peak "
    "and bandwidth.",
    '''def bound_time(flops, nbytes, peak, bandwidth):
    """Seconds; peak in FLOP/s, bandwidth in bytes/s."""
    ...''',
    returns="the time in seconds, a number",
    solution=bound_time,
    correct=why_not_bound,
    explanation="`core/cost.py` is this function with counted work and measured ceilings; every limit in this "
    "project is it.",
)

EXERCISES = (CYCLES, AMDAHL, BOUND, ROOF)
