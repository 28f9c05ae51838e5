"""Exercises of chapter 14, with the wrong answers that have a reason."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tilemesh.guide.exercise import choice, code, numeric

SPLIT = numeric(
    "split_step",
    "Drawing takes 12 rank-seconds and training 6. On 6 ranks, 4 of which draw and 2 train, one batch ahead: how many "
    "seconds does a step take?",
    3,
    wrong={
        6: "6 is 3 + 3: one after the other. A batch ahead, both work at the same time.",
        1: "1 s is training on all 6 ranks.",
        2: "2 s is drawing on all 6 ranks. 4 of them draw.",
    },
    otherwise="Each part's work by its ranks; the slower of the two sets the pace.",
    explanation="12 / 4 = 3 and 6 / 2 = 3: balanced. Colocated it would be 18 / 6 = 3 as well.",
)

STALE = choice(
    "stale",
    "What makes answers that were drawn one update ago safe to train on?",
    {
        "Ratios to the log-probabilities as they were drawn weigh them, and the clip bounds it.": None,
        "One update changes nothing.": "It changes every weight; how much probabilities change is measured.",
        "They are drawn again before the update.": "That would be the split placement, and take its time.",
        "The critic corrects for it.": "The critic says what to expect; it does not know who drew.",
    },
    explanation="The ratio of chapter 12. What must be kept with every token: its log-probability as sampled, and the "
    "version of the weights.",
)

RECEIVED = numeric(
    "received",
    "A model has 140 GB in 16 bits. It is trained with tp 4 and pp 2 and drawn with engines of 2 ranks. How many GB "
    "does each rank receive after an update? (It keeps what it has.)",
    140 * (1 / 2 - 1 / 8),
    counted_in="GB",
    wrong={
        70: "70 is all that an engine's rank needs. An eighth of the model, 17.5 GB, lies there already.",
        122.5: "122.5 is 140 - 17.5: as if every rank needed the whole model. Engines of 2 ranks need a half each.",
        17.5: "17.5 is what the rank has: an eighth.",
        35: "35 is a quarter: training cuts over tp times pp, 8 ranks.",
    },
    otherwise="What a rank of the engine needs, less what a rank of training has.",
    explanation="70 - 17.5 = 52.5 GB (HybridFlow's formula). Laid out alike it would be 0.",
)


def best_split(ranks: int, draw: float, update: float, least_training: int) -> int:
    """The solution: try all."""
    return min(range(1, ranks - least_training + 1),
               key=lambda drawing: max(draw / drawing, update / (ranks - drawing)))  # fmt: skip


def why_not_best(function: Callable[[int, float, float, int], Any]) -> str | None:
    """Compare the step's seconds with the best of all splits."""
    chance = random.Random(0)
    for _ in range(200):
        ranks = chance.randint(2, 16)
        draw, update, least = float(chance.randint(1, 30)), float(chance.randint(1, 30)), chance.randint(1, ranks - 1)
        drawing = function(ranks, draw, update, least)
        task = f"{ranks} ranks, drawing {draw:g}, training {update:g}, at least {least} ranks train"
        if not isinstance(drawing, int) or not 1 <= drawing < ranks:
            return f"{task}: {drawing!r:.20} ranks draw: expected a whole number from 1 to {ranks - 1}."
        if ranks - drawing < least:
            return f"{task}: only {ranks - drawing} train with your {drawing}: the model does not fit on them."
        right = best_split(ranks, draw, update, least)
        mine, best = (max(draw / count, update / (ranks - count)) for count in (drawing, right))
        if mine > best + 1e-9:
            return (
                f"{task}: with {drawing} that draw a step takes {mine:.3g} s, with {right} only {best:.3g} s: both "
                "work at once, so the slower of the two counts."
            )
    return None


BEST = code(
    "best_split",
    "Write the choice of a split, one batch ahead: how many ranks should draw so that a step is shortest?",
    '''def best_split(ranks, draw, update, least_training):
    """How many of the ranks draw; the others train, at least `least_training`
    of them (or the model does not fit).

    draw, update: rank-seconds of the two parts of a step; both work at the same
    time.
    """
    ...''',
    returns="a whole number of ranks",
    solution=best_split,
    correct=why_not_best,
    explanation="The planner does the same over layouts, with memory and a clock of each: `plan/placements.py`.",
)

EXERCISES = (SPLIT, STALE, RECEIVED, BEST)
