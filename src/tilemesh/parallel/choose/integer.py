"""Choosing by integer programming: one of the choices of every variable, by HiGHS through scipy.

For two variables that exchange anything there is a flow between their choices, which sums to both of them; costs lie on
the flows, so that without whole numbers the bound is tight (on a tree exact). An exchange that several readers share
is a number of its own, at least as large as each of theirs. Memory is checked after: a moment that is too full becomes
a row, and the programme is solved again, which leaves every bound a bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilemesh.core.errors import RunError
from tilemesh.plan.place.problem import Chosen, Moment, PlacementProblem, Transfer

TIME_LIMIT_S = 120.0
MOST_ROUNDS = 60  # of adding moments
AT_ONCE = 8  # moments that one round adds


class _Programme:
    """Columns with costs and bounds, rows with bounds."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.cost: list[float] = []
        self.most: list[float] = []
        self.rows: list[tuple[list[int], list[float], float, float]] = []
        finite = [cost for own in problem.seconds for cost in own if cost < math.inf]
        self.scale = 1e3 / max(math.fsum(finite) / max(1, len(finite)) * len(problem.seconds), 1e-12)
        self.choice = [[self.column(cost) for cost in own] for own in problem.seconds]
        for own in self.choice:
            self.rows.append((own, [1.0] * len(own), 1.0, 1.0))
        self.whole = len(self.cost)
        self._flows()
        for transfer in problem.transfers:
            self._pay(transfer)

    def column(self, cost: float = 0.0) -> int:
        self.cost.append(0.0 if cost == math.inf else cost * self.scale)
        self.most.append(0.0 if cost == math.inf else 1.0)
        return len(self.cost) - 1

    def _flows(self) -> None:
        """For each pair of variables with a transfer: from each class of choices of one to each of the other."""
        tables: dict[tuple[int, int], tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = {}
        for transfer in self.problem.transfers:
            for reader, wants in transfer.readers:
                if reader != transfer.source:
                    pair = (min(reader, transfer.source), max(reader, transfer.source))
                    sides = tables.setdefault(pair, ([], []))
                    sides[pair.index(transfer.source)].append(transfer.states)
                    sides[pair.index(reader)].append(wants)
        self.flows: dict[tuple[int, int], tuple[list[int], list[int], list[list[int]]]] = {}
        for pair, sides in tables.items():
            (left, first), (right, second) = (_classes(side) for side in sides)
            flow = [[self.column() for _ in range(second)] for _ in range(first)]
            self.flows[pair] = (left, right, flow)
            columns = [list(column) for column in zip(*flow, strict=True)]
            for variable, classes, lines in ((pair[0], left, flow), (pair[1], right, columns)):
                for at, line in enumerate(lines):
                    own = [self.choice[variable][k] for k, each in enumerate(classes) if each == at]
                    self.rows.append(([*line, *own], [1.0] * len(line) + [-1.0] * len(own), 0.0, 0.0))

    def between(self, transfer: Transfer, reader: int) -> list[tuple[int, int, int]]:
        """Columns that say (state, what is wanted) for one reader of a transfer."""
        variable, wants = transfer.readers[reader]
        source = transfer.source
        if variable == source:
            return [(transfer.states[k], wants[k], column) for k, column in enumerate(self.choice[source])]
        pair = (min(variable, source), max(variable, source))
        left, right, flow = self.flows[pair]
        lefts, rights = (transfer.states, wants) if source == pair[0] else (wants, transfer.states)
        ends = {at: lefts[k] for k, at in enumerate(left)}, {at: rights[k] for k, at in enumerate(right)}
        cells = [(ends[0][a], ends[1][b], column) for a, line in enumerate(flow) for b, column in enumerate(line)]
        return cells if source == pair[0] else [(state, target, column) for target, state, column in cells]

    def _pay(self, transfer: Transfer) -> None:
        readers = [self.between(transfer, reader) for reader in range(len(transfer.readers))]
        shared: dict[tuple[int, int], int] = {}
        for cells in readers:
            paid: dict[tuple[int, int], list[int]] = {}
            for state, target, column in cells:
                seconds = transfer.count * transfer.seconds[state][target]
                if seconds == math.inf:
                    self.most[column] = 0.0
                elif seconds and len(readers) == 1:
                    self.cost[column] += seconds * self.scale
                elif seconds:
                    paid.setdefault((state, target), []).append(column)
            for (state, target), columns in paid.items():
                if (state, target) not in shared:
                    shared[state, target] = self.column(transfer.count * transfer.seconds[state][target])
                self.rows.append(([shared[state, target], *columns], [1.0] + [-1.0] * len(columns), 0.0, math.inf))

    def limit(self, moment: Moment) -> None:
        """No more than the limit at a moment."""
        weights: dict[int, float] = {}
        for value, count in moment.values.items():
            variable, sizes = self.problem.values[value]
            for column, size in zip(self.choice[variable], sizes, strict=True):
                weights[column] = weights.get(column, 0.0) + count * size / self.problem.limit_bytes
        for transfer, reader in moment.copies:
            this = self.problem.transfers[transfer]
            for state, target, column in self.between(this, reader):
                size = this.copy_bytes[state][target] / self.problem.limit_bytes
                weights[column] = weights.get(column, 0.0) + size
        self.rows.append((list(weights), list(weights.values()), -math.inf, 1.0))

    def solve(self, whole: bool, seconds: float) -> Any:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        lengths = [len(columns) for columns, _, _, _ in self.rows]
        at = np.repeat(np.arange(len(self.rows)), lengths)
        columns = np.concatenate([np.array(columns, dtype=np.int64) for columns, _, _, _ in self.rows])
        weights = np.concatenate([np.array(values, dtype=float) for _, values, _, _ in self.rows])
        matrix = csr_array((weights, (at, columns)), shape=(len(self.rows), len(self.cost)))
        least, most = (np.array([row[side] for row in self.rows]) for side in (2, 3))
        integrality = np.zeros(len(self.cost))
        integrality[: self.whole] = whole
        return milp(
            np.array(self.cost), constraints=LinearConstraint(matrix, least, most), integrality=integrality,
            bounds=Bounds(0.0, np.array(self.most)), options={"time_limit": max(seconds, 1.0), "mip_rel_gap": 1e-7},
        )  # fmt: skip

    def chosen(self, columns: Any) -> tuple[int, ...]:
        return tuple(int(np.argmax(columns[own[0] : own[-1] + 1])) for own in self.choice)

    def is_whole(self, columns: Any) -> bool:
        own = columns[: self.whole]
        return bool(np.all(np.abs(own - np.round(own)) < 1e-6))


def _classes(tables: Sequence[tuple[int, ...]]) -> tuple[list[int], int]:
    """Choices that no table tells apart are one class."""
    numbers: dict[tuple[int, ...], int] = {}
    classes = [numbers.setdefault(each, len(numbers)) for each in zip(*tables, strict=True)]
    return classes, len(numbers)


def integer(problem: PlacementProblem, time_limit_s: float = TIME_LIMIT_S) -> Chosen:
    """The least time, with proof; where time runs out, the best that was found and the bound."""
    import time

    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        raise RunError("choosing by integer programming needs scipy: pip install 'tilemesh[choose]'") from None
    begin, programme = time.perf_counter(), _Programme(problem)
    lp_bound = bound = 0.0
    choice, figures = None, None
    solves = 0
    for _ in range(MOST_ROUNDS):
        left = time_limit_s - (time.perf_counter() - begin)
        result = programme.solve(False, left)
        solves += 1
        if result.x is None:
            break
        lp_bound = max(lp_bound, result.fun / programme.scale)
        bound = max(bound, lp_bound)
        if not programme.is_whole(result.x):
            result = programme.solve(True, time_limit_s - (time.perf_counter() - begin))
            solves += 1
            if result.mip_dual_bound is not None and np.isfinite(result.mip_dual_bound):
                bound = max(bound, result.mip_dual_bound / programme.scale)
            if result.x is None:
                break
        candidate = programme.chosen(result.x)
        full = sorted(problem.moments, key=lambda moment: -problem.held(moment, candidate))[:AT_ONCE]
        full = [moment for moment in full if problem.held(moment, candidate) > problem.limit_bytes * (1 + 1e-9)]
        if not full:
            choice, figures = candidate, problem.figures(candidate)
            break
        for moment in full:
            programme.limit(moment)
    if figures is not None:
        bound = min(bound, figures.seconds)
    taken = time.perf_counter() - begin
    return Chosen("ilp", choice, figures, solves, bound, lp_bound, taken)
