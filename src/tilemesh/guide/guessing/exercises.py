"""Exercises of chapter 11, with the wrong answers that have a reason."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tilemesh.guide.exercise import choice, code, numeric
from tilemesh.guide.guessing.work import chi_squared, pick, verify

PER_PASS = numeric(
    "per_pass",
    "Each guess stays with probability 0.8, independently; 3 guesses per pass. How many tokens does a pass give on "
    "average?",
    1 + 0.8 + 0.64 + 0.512,
    wrong={
        2.4: "2.4 is 3 × 0.8: as if a guess behind a wrong one could stay; and a pass always gives one token itself.",
        3.4: "3.4 is 1 + 3 × 0.8: as if a guess behind a wrong one could stay.",
        0.8 + 0.64 + 0.512: "The pass itself gives one token more: the replacement, or the one behind the last guess.",
        4.0: "4 is the most: all three stay, and one more.",
        5.0: "5 is 1 / (1 - 0.8): with guesses without end.",
    },
    otherwise="Guess i stays only if all before it did: 0.8^i. Add the token that the pass always gives.",
    explanation="1 + 0.8 + 0.8² + 0.8³ = (1 - 0.8⁴) / (1 - 0.8) = 2.95.",
)

WITH_COST = numeric(
    "with_cost",
    "The same, and a guess costs a tenth of a pass of the large model. How many times quicker is it than one token per "
    "pass?",
    2.952 / 1.3,
    wrong={
        2.952: "That is tokens per pass. The three guesses take 0.3 passes as well.",
        2.952 / 1.1: "1.1 is one guess. There are three in each pass.",
        2.952 - 0.3: "Time divides: 2.952 tokens in 1.3 passes.",
    },
    otherwise="Tokens of a pass by the time of a pass and its guesses.",
    explanation="2.952 / (1 + 3 · 0.1) = 2.27.",
)

LOSES = choice(
    "loses",
    "Where does guessing ahead make answers slower?",
    {
        "In large batches, where a step is bound by arithmetic.": None,
        "On long answers.": "The gain per pass is the same, however long the answer is.",
        "At temperature 0.": "Guesses stay more often there: the likeliest token is easier to guess.",
        "On text with rare words, whatever the batch.": "Rare words are rejected now and then; "
        "each pass still gives at least one token.",
    },
    explanation="Guesses spend idle arithmetic. A step that is already bound by it takes longer for each of them, and "
    "those that do not stay are lost.",
)

Rows = Sequence[Sequence[float]]
Uniform = Callable[[], float]


SAMPLES = 12_000
MOST_APART = 60.0
"""Of a chi-squared sum with 15 degrees of freedom: chance goes beyond it once in three million."""


def why_not_exact(function: Callable[[Rows, Rows, Sequence[int], Uniform], Any]) -> str | None:
    """Draw pairs of tokens; what came must be what the large model alone would give."""
    target, draft = (
        [[0.5, 0.2, 0.2, 0.1], [0.1, 0.3, 0.2, 0.4], [0.25] * 4],
        [[0.1, 0.5, 0.3, 0.1], [0.4, 0.3, 0.1, 0.2]],
    )
    chance = random.Random(3)
    pairs: Counter[tuple[int, int]] = Counter()
    firsts: Counter[int] = Counter()
    lengths: Counter[int] = Counter()
    for _ in range(SAMPLES):
        guesses = [pick(row, chance.random()) for row in draft]
        tokens = list(function(target, draft, guesses, chance.random))
        if not 1 <= len(tokens) <= 3:
            return f"{len(tokens)} tokens for 2 guesses: at least 1 and at most 3 come out of a pass."
        lengths[len(tokens)] += 1
        firsts[tokens[0]] += 1
        if len(tokens) == 1:  # the next pass draws the second: as the large model alone would
            tokens.append(pick(target[1], chance.random()))
        pairs[tokens[0], tokens[1]] += 1
    apart = chi_squared([firsts[token] for token in range(4)], target[0])
    if apart > MOST_APART:
        shares = ", ".join(f"{firsts[token] / SAMPLES:.2f}" for token in range(4))
        return (
            f"The first token comes with shares {shares} where the large model says {target[0]}: a guess stays with "
            "probability min(1, target / draft), and a replacement is drawn from max(0, target - draft)."
        )
    both = [(one, two) for one, two in itertools.product(range(4), repeat=2)]
    expected = [target[0][one] * target[1][two] for one, two in both]
    if chi_squared([pairs[pair] for pair in both], expected) > MOST_APART:
        return "The first token is right, pairs are not: one rule at every place, and nothing behind a replaced guess."
    stay = [sum(map(min, target[place], draft[place])) for place in range(2)]
    wanted = [1 - stay[0], stay[0] * (1 - stay[1]), stay[0] * stay[1]]
    if chi_squared([lengths[count] for count in (1, 2, 3)], wanted) > MOST_APART:
        mean = sum(count * lengths[count] for count in lengths) / SAMPLES
        best = 1 + stay[0] + stay[0] * stay[1]
        return (
            f"The tokens are right, and {mean:.2f} of them come from a pass where {best:.2f} should: behind guesses "
            "that all stay the pass gives one more, and nothing comes behind a replaced one."
        )
    return None


VERIFY = code(
    "verify",
    "Write the rejection step: which tokens come out of one pass over two or more guesses, exactly as the large model "
    "alone would draw them.",
    '''def verify(target, draft, guesses, uniform):
    """A list of tokens, at least one.

    target[i][x], draft[i][x]: the probability of token x at place i; target has
    one place more than there are guesses. guesses[i] was drawn from draft[i];
    uniform() gives a random number from 0 to 1.
    """
    ...''',
    returns="a list of tokens",
    solution=verify,
    correct=why_not_exact,
    explanation="The engine does it on the device for all requests of a step: `serve/speculate.py`, `serve/draft.py`.",
)

EXERCISES = (PER_PASS, WITH_COST, LOSES, VERIFY)
