"""What chapter 11 runs: rejection sampling over small vocabularies, and n-gram guesses in the real engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tilemesh.guide.requests.work import MODEL
from tilemesh.serve import Engine, Sampling
from tilemesh.serve.history import ServeHistory
from tilemesh.serve.load import ServedModel

Probabilities = Sequence[float]


def verify(
    target: Sequence[Probabilities],
    draft: Sequence[Probabilities],
    guesses: Sequence[int],
    uniform: Callable[[], float],
) -> list[int]:
    """The tokens that come out of one pass of the large model over some guesses of a small one.

    target[i] and draft[i] are what the two say for place i; `target` has one place more. A guess x stays with
    probability min(1, target / draft); the first that does not is replaced by what the draft gave too little.
    """
    tokens = []
    for place, guess in enumerate(guesses):
        if uniform() * draft[place][guess] < target[place][guess]:
            tokens.append(guess)
            continue
        lacking = [max(0.0, q - p) for q, p in zip(target[place], draft[place], strict=True)]
        return [*tokens, pick(lacking, uniform())]
    return [*tokens, pick(target[len(guesses)], uniform())]  # all stayed: the pass gives one more


def pick(weights: Sequence[float], at: float) -> int:
    """The token at this share of all weights."""
    left = at * sum(weights)
    for token, weight in enumerate(weights):
        if left < weight:
            return token
        left -= weight
    return max(token for token, weight in enumerate(weights) if weight > 0)


def acceptance(target: Probabilities, draft: Probabilities) -> float:
    """How often a guess stays: the part that both distributions have in common."""
    return sum(map(min, target, draft))


def exact_output(target: Probabilities, draft: Probabilities) -> list[float]:
    """The probability of each token after guess and rejection, by enumerating every guess: no drawing, no chance."""
    kept = [p * min(1.0, q / p) if p else 0.0 for q, p in zip(target, draft, strict=True)]
    lacking = [max(0.0, q - p) for q, p in zip(target, draft, strict=True)]
    rejected, total = 1.0 - sum(kept), sum(lacking)
    return [keep + (rejected * lack / total if total else 0.0) for keep, lack in zip(kept, lacking, strict=True)]


def tokens_per_pass(rate: float, guesses: int) -> float:
    """(1 - a^(g+1)) / (1 - a) where each of g guesses stays with probability a, independently."""
    return guesses + 1 if rate == 1 else (1 - rate ** (guesses + 1)) / (1 - rate)


def speedup(rate: float, guesses: int, draft_cost: float) -> float:
    """Over one token per pass, where a guess costs this part of a pass."""
    return tokens_per_pass(rate, guesses) / (1 + draft_cost * guesses)


def mixed(target: Probabilities, share: float) -> list[float]:
    """A draft model that is right for a share of its mind, and knows nothing for the rest."""
    return [share * q + (1 - share) / len(target) for q in target]


def counted_tokens(target: Probabilities, draft: Probabilities, guesses: int, passes: int, seed: int = 0) -> list[int]:
    """How many tokens each of so many passes gave."""
    draw = np.random.default_rng(seed)
    counts = []
    for _ in range(passes):
        guessed = [pick(draft, draw.random()) for _ in range(guesses)]
        counts.append(len(verify([target] * (guesses + 1), [draft] * guesses, guessed, draw.random)))
    return counts


def chi_squared(counts: Sequence[int], expected: Probabilities) -> float:
    """How far counts are from a distribution; about as large as there are tokens where only chance is at work."""
    total = sum(counts)
    return sum((count - total * p) ** 2 / (total * p) for count, p in zip(counts, expected, strict=True))


class EngineRun(NamedTuple):
    """One answer of the real engine: its tokens, and the steps that gave them."""

    tokens: list[int]
    decode_steps: int
    seconds: float


def engine_run(served: ServedModel, speculate: int, output: int = 96) -> EngineRun:
    """Greedy decoding with n-gram guesses: what stood behind the same tokens before. Weights are random, and such a
    model soon repeats itself."""
    history = ServeHistory()
    prompt = [(7 * place) % MODEL.vocabulary for place in range(24)]
    sampling = Sampling(max_tokens=output, temperature=0.0, ignore_eos=True)
    with Engine(served, history=history, speculate=speculate) as engine:
        list(engine.generate([prompt], sampling))
    (record,) = history.requests.values()
    steps = [step for step in history.steps if step.decode_tokens]
    return EngineRun(list(record.output), len(steps), sum(step.seconds for step in steps))
