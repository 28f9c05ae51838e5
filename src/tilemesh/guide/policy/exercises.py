"""Exercises of chapter 12, with the wrong answers that have a reason."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tilemesh.guide.exercise import choice, code, numeric

LEAVE_ONE_OUT = numeric(
    "leave_one_out",
    "Four answers to one prompt score 1, 0, 0 and 1. What is the leave-one-out advantage of the first (RLOO)?",
    2 / 3,
    wrong={
        0.5: "0.5 subtracts the mean of all four (GRPO without the standard deviation). Leave the answer itself out.",
        1.0: "1 is its score without any baseline.",
        1 / 3: "1/3 is the baseline: the mean of the other three. Subtract it from the score.",
    },
    otherwise="Its score minus the mean score of the other three.",
    explanation="1 - (0 + 0 + 1) / 3 = 2/3. The mean of all would make it 1/2: the same direction, a quarter smaller.",
)

CLIP = numeric(
    "clip_value",
    "A token's advantage is 1, its ratio 1.5, the clip 0.2. What is min(ratio · A, clip(ratio, 0.8, 1.2) · A)?",
    1.2,
    wrong={
        1.5: "1.5 is ratio · A. The clipped one is 1.2, and the smaller of the two counts.",
        0.8: "The ratio is above 1.2, so it is clipped to 1.2, not to 0.8.",
        1.0: "The ratio may go as far as 1 + 0.2.",
        1.3: "The clip is of the ratio itself, to 0.8 and 1.2; nothing is subtracted from it.",
    },
    otherwise="Clip the ratio to 1.2, multiply both by the advantage, take the smaller.",
    explanation="1.2, a constant: the token is already half as likely again as it was, and is pushed no further.",
)

WHY = choice(
    "why_baseline",
    "Why may any number be subtracted from the rewards without making the policy gradient wrong?",
    {
        "Probabilities sum to 1, so ∇ log π is 0 on average.": None,
        "The number is the same as the mean reward.": "The mean makes the error small. The average is right for any "
        "number that does not depend on what was drawn.",
        "The optimizer normalises gradients.": "Adam scales each weight's gradient; it does not know about offsets.",
        "Only the order of rewards matters.": "Their size matters, too: twice the reward, twice the gradient.",
    },
    explanation="E[∇ log π] = Σ π ∇π / π = ∇ Σ π = ∇ 1 = 0. A baseline may depend on the prompt and on earlier tokens, "
    "never on the token itself.",
)


def advantages(rewards: Sequence[float], values: Sequence[float], discount: float, decay: float) -> list[float]:
    """The solution: backwards in time."""
    result, after, value_after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        after = reward + discount * value_after - value + discount * decay * after
        value_after = value
        result.append(after)
    return result[::-1]


def why_not_gae(function: Callable[..., Any]) -> str | None:
    """Compare with the definition: A_t is the sum of (γλ)^k (r + γ V(next) - V) over what follows."""
    draw = random.Random(0)
    for _ in range(100):
        count = draw.randint(1, 6)
        rewards = [0.0] * (count - 1) + [float(draw.randint(1, 4))]
        values = [float(draw.randint(-2, 2)) / 2 for _ in range(count)]
        discount, decay = draw.choice(((1.0, 0.95), (0.9, 0.5), (0.5, 1.0), (0.9, 0.0)))
        steps = [
            reward + discount * (values[place + 1] if place + 1 < count else 0.0) - values[place]
            for place, reward in enumerate(rewards)
        ]
        right = [
            sum((discount * decay) ** (later - place) * steps[later] for later in range(place, count))
            for place in range(count)
        ]
        result = list(function(rewards, values, discount, decay))
        task = f"rewards {rewards}, values {values}, γ {discount}, λ {decay}"
        if len(result) != count:
            return f"{task}: {len(result)} advantages for {count} tokens."
        for place, (value, wanted) in enumerate(zip(result, right, strict=True)):
            if abs(value - wanted) > 1e-9:
                hint = (
                    f"the last token has nothing after it: r - V = {steps[-1]:g}" if place == count - 1 else
                    f"its own step r + γ V(next) - V is {steps[place]:g}, and γλ times the next advantage comes on top"
                )  # fmt: skip
                return f"{task}: token {place} gets {value:g}, not {wanted:g}: {hint}."
    return None


ADVANTAGES = code(
    "advantages",
    "Write generalized advantage estimation for one answer.",
    '''def advantages(rewards, values, discount, decay):
    """One advantage per token: δ_t + γλ δ_(t+1) + (γλ)² δ_(t+2) + …, with δ_t =
    r_t + γ V_(t+1) - V_t.

    rewards, values: one number per token; discount is γ, decay is λ; nothing
    follows the last token.
    """
    ...''',
    returns="a list of numbers",
    solution=advantages,
    correct=why_not_gae,
    explanation="tilemesh's is `align/formulas/advantages.py`: the same, for all answers of a batch at once.",
)

EXERCISES = (LEAVE_ONE_OUT, CLIP, WHY, ADVANTAGES)
