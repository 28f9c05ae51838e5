"""Exercises of chapter 17, with the wrong answers that have a reason."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tilemesh.guide.exercise import choice, code, numeric

BITS = numeric(
    "bits_per_weight",
    "Weights are kept in 4 bits, with a scale of 16 bits for each group of 64. How many bits per weight is that?",
    4.25,
    wrong={
        4: "The scales are stored, too: 16 bits for 64 weights.",
        20: "20 is a scale for every weight. 64 weights share one.",
        4.0625: "That is 4 bits for 64 weights. A scale has 16.",
    },
    otherwise="4 bits, and each weight's share of its group's scale.",
    explanation="4 + 16/64 = 4.25. In groups of 16 it would be 5, in groups of 128 4.125.",
)

LEVELS = choice(
    "levels",
    "What does one bit less, 7 instead of 8, do to the rounding error?",
    {
        "It doubles it: half as many steps reach as far.": None,
        "It adds a constant.": "The step is the largest weight by the number of steps, and that number halves.",
        "It grows by an eighth.": "Bits are exponents: 7 bits have half as many levels as 8.",
        "Nothing, with a better scale.": "A better scale clips or shrinks; the number of levels still halves.",
    },
    explanation="step = largest / (2^(b-1) - 1), error = step / √12.",
)

ZEROS = choice(
    "zeros",
    "A matrix has 80 % zeros at random places. Why is its product hardly quicker on a CPU or GPU?",
    {
        "Dense products multiply zeros like other numbers, and skipping them costs more than it saves.": None,
        "80 % is too few; 85 % would be quicker.": "There is no such threshold in a dense product. Sparse formats need "
        "an index for each number and read at random places: they win only far above.",
        "The zeros are stored in more bits.": "They take as many as any number.",
        "The cache cannot hold zeros.": "A cache line holds whatever lies in memory.",
    },
    explanation="Hardware likes structure: whole rows, heads, layers, or 2 of every 4 (tensor cores have a mode).",
)


def round_groups(weights: Sequence[float], bits: int, group: int) -> list[float]:
    """The solution."""
    most, result = 2 ** (bits - 1) - 1, []
    for first in range(0, len(weights), group):
        part = weights[first : first + group]
        scale = max(map(abs, part)) / most
        result += [round(weight / scale) * scale if scale else 0.0 for weight in part]
    return result


def why_not_rounded(function: Callable[[Sequence[float], int, int], Any]) -> str | None:
    """Compare with the nearest level of each group."""
    draw = random.Random(0)
    for turn in range(100):
        bits, group = draw.choice((2, 3, 4, 8)), draw.choice((4, 8))
        weights = [draw.gauss(0, 1) * (0 if turn % 10 == 9 and place < group else 1) for place in range(3 * group)]
        result = list(function(list(weights), bits, group))
        task = f"{bits} bits in groups of {group}"
        if len(result) != len(weights):
            return f"{task}: {len(result)} numbers for {len(weights)} weights."
        for first in range(0, len(weights), group):
            part, mine = weights[first : first + group], result[first : first + group]
            step = max(map(abs, part)) / (2 ** (bits - 1) - 1)
            for weight, value in zip(part, mine, strict=True):
                if abs(value - weight) > step / 2 + 1e-9:
                    return (
                        f"{task}: {weight:.3f} becomes {value:.3f}, further than half a step ({step / 2:.3f}) away: "
                        "the nearest level of its own group, times the scale, is nearer."
                    )
                if step and abs(value / step - round(value / step)) > 1e-6:
                    return (
                        f"{task}: {value:.4f} is no level: steps are the group's largest by 2^{bits - 1} - 1, "
                        f"{step:.4f} here."
                    )
    return None


ROUND = code(
    "round_groups",
    "Write rounding to nearest with a scale per group.",
    '''def round_groups(weights, bits, group):
    """The weights as they are after rounding: whole multiples of their group's
    step.

    A group is `group` weights that follow each other; its step is its largest
    magnitude by 2^(bits-1) - 1.
    """
    ...''',
    returns="a list of numbers",
    solution=round_groups,
    correct=why_not_rounded,
    explanation="tilemesh's formats: `kernels/lowbit/formats.py`; what GPTQ and AWQ do better: `compress/methods.py`.",
)

EXERCISES = (BITS, LEVELS, ZEROS, ROUND)
