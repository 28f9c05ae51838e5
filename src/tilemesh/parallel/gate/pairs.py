"""Layouts that between them have every pair of settings together: mesh × schedule × ZeRO × recomputation × offload.

The one idea: a bug of a combination mostly needs two settings to meet. All combinations of 8 ranks are tens of
thousands, those that have every pair at least once some dozens: taken greedily, each time the combination with the most
pairs that none before it had. Nothing is random, so everybody compares the same layouts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tilemesh.core.conflicts import is_runnable
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.book import find, synchronous
from tilemesh.parallel.gate.cases import MODELS, ROWS, Case, cases, gate_plan, in_precision, numerics

RECOMPUTED: tuple[tuple[str, int | str], ...] = (
    ("none", 1),
    ("operators", 1),
    ("full", 1),
    ("full", 2),
    ("full", "sqrt"),
)
OFFLOADED = ("", "activations", "activations+weights")
"""Optimizer states on the host are no part of what the gate trains by: `tests/mpi/test_zero.py` has them."""


class _Combination(NamedTuple):
    """A model on a layout, and the settings that meet in it; what has no effect in a layout has its first value."""

    model: str
    layout: ParallelPlan
    values: tuple[object, ...]


def every_case(ranks: int, models: Sequence[str] = (), precision: str = "fp64", pairs: bool = True) -> list[Case]:
    """All that `tilemesh verify` compares: `cases`, `numerics`, and with `pairs` the combinations, of these models."""
    plain = cases(ranks, models, precision)
    plain += numerics(ranks, models) if precision == "fp64" else []
    if not pairs or ranks < 2:
        return plain
    every = in_precision(combinations(ranks), precision)
    return plain + [case for case in every if case.model in (models or MODELS)]


def combinations(ranks: int) -> list[Case]:
    """Few layouts of up to so many ranks, at least two, that have every pair of settings that can be together."""
    return [Case(choice.model, choice.layout) for choice in _chosen(ranks)]


@functools.cache
def _chosen(ranks: int) -> tuple[_Combination, ...]:
    every = list(_possible(ranks))
    number: dict[object, int] = {}  # of each pair of values
    masks = []
    for combination in every:
        pairs = itertools.combinations(enumerate((combination.model, *combination.values)), 2)
        masks.append(sum(1 << number.setdefault(pair, len(number)) for pair in pairs))
    left, chosen = (1 << len(number)) - 1, []
    while left:
        best = max(range(len(every)), key=lambda place: (masks[place] & left).bit_count())  # the first of equals
        chosen.append(every[best])
        left &= ~masks[best]
    return tuple(chosen)


def _possible(ranks: int) -> Iterator[_Combination]:
    sizes = [size for size in (1, 2, 4, 8) if size <= ranks]
    for dp, tp, pp in itertools.product(sizes, repeat=3):
        if not 1 < dp * tp * pp <= ranks or max(dp, pp) > 4:  # beyond 4 there are more rows and layers, and nothing new
            continue
        sequences = (False, True) if tp > 1 else (False,)
        for schedule, sequence, zero in itertools.product(_schedules(pp), sequences, range(4) if dp > 1 else (0,)):
            groups = (0, 2) if zero and dp == 4 else (0,)
            turns = (1, 2) if pp == 1 else (find(schedule).microbatches_from(pp, pp),)
            for group, again, moved, count in itertools.product(groups, RECOMPUTED, OFFLOADED, turns):
                if count > ROWS // dp:
                    continue
                for ahead in (1, 0, 2) if zero == 3 else (1, 0) if moved else (1,):
                    layout = gate_plan(
                        dp, tp, sequence, count, pp, schedule, zero=zero, zero_group=group, prefetch=ahead,
                        recompute=again[0], recompute_every=again[1], offload=moved,
                    )  # fmt: skip
                    if is_runnable(layout):
                        values = (dp, tp, pp, sequence, schedule, zero, group, ahead, again, moved, count)
                        for model in MODELS:
                            yield _Combination(model, layout, values)


def _schedules(pp: int) -> tuple[str, ...]:
    return ("1f1b",) if pp == 1 else synchronous()
