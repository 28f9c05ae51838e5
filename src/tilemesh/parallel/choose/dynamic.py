"""Choosing by dynamic programming: of all beginnings that look alike to the rest, the best is kept.

What the rest sees of a beginning are the choices of variables that still exchange something with later ones. On a chain
that is one, on a tree few: every beginning is kept, and the answer is exact. Elsewhere there are too many; the cheapest
`most` are kept, and nothing is proved. Memory is not part of a beginning: with a limit that binds, the answer may not
fit, and is then refused.
"""

from __future__ import annotations

import math
import time
from typing import Any

from tilemesh.plan.place.problem import Chosen, PlacementProblem, Transfer

MOST = 100


def dynamic(problem: PlacementProblem, most: int = MOST) -> Chosen:
    begin = time.perf_counter()
    count = len(problem.seconds)
    due: dict[int, list[Transfer]] = {}  # a transfer is paid when the last of its variables is chosen
    last_use = list(range(count))
    for transfer in problem.transfers:
        members = {transfer.source, *(reader for reader, _ in transfer.readers)}
        due.setdefault(max(members), []).append(transfer)
        for variable in members:
            last_use[variable] = max(last_use[variable], max(members))
    # Choices of open variables -> seconds, and all choices so far as a linked list.
    states: dict[tuple[int, ...], tuple[float, Any]] = {(): (0.0, None)}
    opened: list[int] = []
    evaluations, is_exact = 0, True
    for variable in range(count):
        opened.append(variable)
        kept = [place for place, other in enumerate(opened) if last_use[other] > variable]
        further: dict[tuple[int, ...], tuple[float, Any]] = {}
        choice: dict[int, int] = {}
        for state, (seconds, past) in states.items():
            choice = dict(zip(opened, state, strict=False))
            for k, own in enumerate(problem.seconds[variable]):
                choice[variable] = k
                total = seconds + own
                for transfer in due.get(variable, ()):
                    total += _seconds(transfer, choice)
                evaluations += 1
                key = tuple(choice[opened[place]] for place in kept)
                if total < math.inf and total < further.get(key, (math.inf, None))[0]:
                    further[key] = (total, (past, k))
        if len(further) > most:
            is_exact = False
            further = dict(sorted(further.items(), key=lambda entry: entry[1][0])[:most])
        states, opened = further, [opened[place] for place in kept]
    if not states:
        return Chosen("dp", None, None, evaluations, seconds=time.perf_counter() - begin)
    [(total, past)] = states.values()
    answer: list[int] = []
    while past is not None:
        past, k = past
        answer.append(k)
    found = tuple(reversed(answer))
    figures = problem.figures(found)
    fits = figures.memory_bytes <= problem.limit_bytes
    bound = figures.seconds if is_exact else 0.0  # without the limit, so with it too
    return Chosen(
        "dp", found if fits else None, figures if fits else None, evaluations, bound,
        seconds=time.perf_counter() - begin,
    )  # fmt: skip


def _seconds(transfer: Transfer, choice: dict[int, int]) -> float:
    row = transfer.seconds[transfer.states[choice[transfer.source]]]
    return transfer.count * sum(row[target] for target in {wants[choice[v]] for v, wants in transfer.readers})
