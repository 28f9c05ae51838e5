"""Choosing by trying: at random, greedily, and by a Markov chain whose steps cost only what they change (FlexFlow).

All minimise the predicted seconds; a choice that does not fit in memory counts as far slower than any that does, by
how much it exceeds the limit.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import numpy as np

from tilemesh.plan.place.problem import Chosen, PlacementProblem, Transfer

EVALUATIONS = 20_000
EXCESS = 10.0  # of the seconds, for each limit's worth of memory that is missing


class Walk:
    """One choice for each variable, its seconds and its memory, both kept up to date as single variables change."""

    def __init__(self, problem: PlacementProblem, choice: Sequence[int]) -> None:
        self.problem, self.choice = problem, list(choice)
        self.touching: list[list[int]] = [[] for _ in problem.seconds]
        for at, transfer in enumerate(problem.transfers):
            for variable in {transfer.source, *(reader for reader, _ in transfer.readers)}:
                self.touching[variable].append(at)
        self.allowed = [[k for k, cost in enumerate(own) if cost < math.inf] for own in problem.seconds]
        self.evaluations = 0
        self.has_limit = problem.limit_bytes < math.inf
        if self.has_limit:
            self._lay_out_memory()
        # Where there is no way from one placement to another: more than all others together, and a number.
        finite = [cost for own in problem.seconds for cost in own]
        finite += [each.count * cost for each in problem.transfers for row in each.seconds for cost in row]
        self.no_way_s = 2 * math.fsum(cost for cost in finite if cost < math.inf) or 1.0
        self.paid = [self.seconds_of(transfer) for transfer in problem.transfers]
        self.seconds = sum(own[k] for own, k in zip(problem.seconds, self.choice, strict=True)) + sum(self.paid)

    def _lay_out_memory(self) -> None:
        problem = self.problem
        counts = np.zeros((len(problem.moments), len(problem.values)))
        self.copies: list[list[tuple[int, int, int]]] = [[] for _ in problem.seconds]
        for row, moment in enumerate(problem.moments):
            counts[row, list(moment.values)] = list(moment.values.values())
            for transfer, reader in moment.copies:
                ends = {problem.transfers[transfer].source, problem.transfers[transfer].readers[reader][0]}
                for variable in ends:
                    self.copies[variable].append((row, transfer, reader))
        owners = np.array([variable for variable, _ in problem.values])
        self.bytes_of = []  # of each variable: what lives at each moment, for each choice
        for variable, own in enumerate(problem.seconds):
            values = np.flatnonzero(owners == variable)
            sizes = np.array([problem.values[value][1] for value in values]).reshape(len(values), len(own))
            self.bytes_of.append(counts[:, values] @ sizes)
        self.held = np.zeros(len(problem.moments))
        for variable, k in enumerate(self.choice):
            self.held += self.bytes_of[variable][:, k]
        for row, moment in enumerate(problem.moments):
            for transfer, reader in moment.copies:
                self.held[row] += problem.copied(transfer, reader, self.choice)

    def seconds_of(self, transfer: Transfer) -> float:
        """What a transfer takes by the choice there is now."""
        return min(transfer.seconds_of(self.choice), self.no_way_s)

    @property
    def objective(self) -> float:
        return self.seconds * (1.0 + EXCESS * self.excess)

    @property
    def excess(self) -> float:
        """How far memory is above its limit, in limits."""
        if not self.has_limit:
            return 0.0
        over = max(0.0, float(self.held.max(initial=0.0)) / self.problem.limit_bytes - 1)
        return over + (over > 0)

    def move(self, variable: int, k: int) -> None:
        """Another choice for one variable."""
        problem, old = self.problem, self.choice[variable]
        self.evaluations += 1
        if self.has_limit:
            for row, transfer, reader in self.copies[variable]:
                self.held[row] -= problem.copied(transfer, reader, self.choice)
            self.held += self.bytes_of[variable][:, k] - self.bytes_of[variable][:, old]
        self.choice[variable] = k
        if self.has_limit:
            for row, transfer, reader in self.copies[variable]:
                self.held[row] += problem.copied(transfer, reader, self.choice)
        self.seconds += problem.seconds[variable][k] - problem.seconds[variable][old]
        for at in self.touching[variable]:
            paid = self.seconds_of(problem.transfers[at])
            self.seconds += paid - self.paid[at]
            self.paid[at] = paid

    def descend(self, most: int) -> None:
        """The best choice of one variable after the other, until none is better."""
        improved = True
        while improved and self.evaluations < most:
            improved = False
            for variable, allowed in enumerate(self.allowed):
                old, now = self.choice[variable], self.objective
                best = (now * (1 - 1e-9), old)
                for k in allowed:
                    if k != old:
                        self.move(variable, k)
                        best = min(best, (self.objective, k))
                self.move(variable, best[1])
                improved |= best[1] != old


def first_choices(problem: PlacementProblem) -> list[int]:
    return [min(range(len(own)), key=own.__getitem__) for own in problem.seconds]


def answer(
    name: str, problem: PlacementProblem, choice: Sequence[int], evaluations: int, begin: float,
    history: Sequence[tuple[int, float]] = (),
) -> Chosen:  # fmt: skip
    figures = problem.figures(choice)
    fits = figures.memory_bytes <= problem.limit_bytes * (1 + 1e-9) and figures.seconds < math.inf
    taken = time.perf_counter() - begin
    return Chosen(
        name, tuple(choice) if fits else None, figures if fits else None, evaluations, seconds=taken,
        history=tuple(history),
    )  # fmt: skip


def at_random(problem: PlacementProblem, evaluations: int = 1000, seed: int = 0) -> Chosen:
    """The best of some that are drawn."""
    begin, generator = time.perf_counter(), random.Random(seed)
    walk = Walk(problem, first_choices(problem))
    best, history = (math.inf, list(walk.choice)), []
    for turn in range(evaluations):
        for variable, allowed in enumerate(walk.allowed):
            walk.move(variable, generator.choice(allowed))
        if walk.objective < best[0]:
            best = (walk.objective, list(walk.choice))
            history.append((turn + 1, walk.seconds))
    return answer("random", problem, best[1], evaluations, begin, history)


def greedy(problem: PlacementProblem, evaluations: int = EVALUATIONS) -> Chosen:
    """Each variable takes what is best beside all others, one after the other, until none changes."""
    begin = time.perf_counter()
    walk = Walk(problem, first_choices(problem))
    walk.descend(evaluations)
    return answer("greedy", problem, walk.choice, walk.evaluations, begin)


def mcmc(problem: PlacementProblem, evaluations: int = EVALUATIONS, seed: int = 0) -> Chosen:
    """From the greedy choice, single changes: better ones are kept, worse ones by chance, less often as time passes."""
    begin, generator = time.perf_counter(), random.Random(seed)
    walk = Walk(problem, first_choices(problem))
    walk.descend(evaluations // 4)
    open_variables = [variable for variable, allowed in enumerate(walk.allowed) if len(allowed) > 1]
    best, history = (walk.objective, list(walk.choice)), [(walk.evaluations, walk.seconds)]
    while open_variables and walk.evaluations < evaluations:
        variable = generator.choice(open_variables)
        old, before = walk.choice[variable], walk.objective
        walk.move(variable, generator.choice(walk.allowed[variable]))
        warmth = 0.01 * before * (1 - walk.evaluations / evaluations) + 1e-12 * before
        worse = walk.objective - before
        if worse > 0 and generator.random() >= math.exp(-worse / warmth):
            walk.move(variable, old)
        elif walk.objective < best[0]:
            best = (walk.objective, list(walk.choice))
            history.append((walk.evaluations, walk.seconds))
    return answer("mcmc", problem, best[1], walk.evaluations, begin, history)
