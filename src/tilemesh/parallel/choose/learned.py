"""Choosing by a learned policy: REINFORCE on the predicted time, groups of operators as in ColocRL.

State: the variable at hand, and what those before it have chosen. Action: one of its choices. Reward: how much less the
whole placement takes than the average of late, in shares of it. The policy is a softmax over a number for each choice
of each variable, plus weights that all variables share, of three features of a choice: what it computes, what it
exchanges with what was chosen before, what it holds.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from tilemesh.parallel.choose.walk import Walk, answer, first_choices
from tilemesh.plan.place.problem import Chosen, PlacementProblem

PLACEMENTS = 300
AT_ONCE = 10  # placements for one step of the policy
RATE = 2.0


def learned(problem: PlacementProblem, placements: int = PLACEMENTS, seed: int = 0) -> Chosen:
    begin, generator = time.perf_counter(), np.random.default_rng(seed)
    walk = Walk(problem, first_choices(problem))
    logits = [np.zeros(len(allowed)) for allowed in walk.allowed]
    weights = np.array([-1.0, -1.0, 0.0])  # what takes long, or exchanges much, is not the first guess
    statics = [_static(problem, variable, allowed) for variable, allowed in enumerate(walk.allowed)]
    best, history, average = (math.inf, list(walk.choice)), [], 0.0
    for turn in range(0, placements, AT_ONCE):
        episodes = []
        for each in range(AT_ONCE):
            steps = _episode(walk, logits, weights, statics, generator)
            reward = -math.log(walk.objective)
            episodes.append((steps, reward))
            if walk.objective < best[0]:
                best = (walk.objective, list(walk.choice))
                history.append((turn + each + 1, walk.seconds))
        rewards = np.array([reward for _, reward in episodes])
        average = float(rewards.mean()) if turn == 0 else 0.8 * average + 0.2 * float(rewards.mean())
        shared = np.zeros(3)
        for steps, reward in episodes:
            advantage = (reward - average) / (float(rewards.std()) + 1e-3) / AT_ONCE
            for variable, (place, chances, features) in enumerate(steps):
                toward = -chances
                toward[place] += 1.0
                logits[variable] += RATE * advantage * toward
                shared += advantage * (toward @ features)
        weights += 0.2 * shared / len(logits)
    return answer("learned", problem, best[1], placements, begin, history)


def _static(problem: PlacementProblem, variable: int, allowed: list[int]) -> Any:
    """Shares of computing and of bytes, for each choice, between 0 and 1."""
    own = np.array([problem.seconds[variable][k] for k in allowed])
    held = np.zeros(len(allowed))
    for owner, sizes in problem.values:
        if owner == variable:
            held += np.array([sizes[k] for k in allowed])
    return np.stack([own / max(own.max(), 1e-30), np.zeros(len(allowed)), held / max(held.max(), 1e-30)], axis=1)


def _episode(
    walk: Walk, logits: list[Any], weights: Any, statics: list[Any], generator: np.random.Generator
) -> list[tuple[int, Any, Any]]:
    """A whole placement, one variable after the other: what was drawn, from which chances, by which features."""
    steps, problem = [], walk.problem
    for variable, allowed in enumerate(walk.allowed):
        features = statics[variable].copy()
        exchanged = np.zeros(len(allowed))
        before = [
            problem.transfers[at]
            for at in walk.touching[variable]
            if all(each <= variable for each in (problem.transfers[at].source, *dict(problem.transfers[at].readers)))
        ]
        if before:
            old = walk.choice[variable]
            for place, k in enumerate(allowed):
                walk.choice[variable] = k
                exchanged[place] = sum(walk.seconds_of(transfer) for transfer in before)
            walk.choice[variable] = old
        features[:, 1] = exchanged / max(exchanged.max(), 1e-30)
        scores = logits[variable] + 4.0 * (features @ weights)
        chances = np.exp(scores - scores.max())
        chances /= chances.sum()
        place = int(generator.choice(len(allowed), p=chances))
        walk.move(variable, allowed[place])
        steps.append((place, chances, features))
    return steps
