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
from tilemesh.core.plan import Precision
from tilemesh.core.step.book import find, synchronous
from tilemesh.parallel.gate.cases import MODELS, ROWS, Case, GateLayout, cases, numerics

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
    """One value of each setting. What has no effect in a layout has its first value there."""

    model: str
    dp: int
    tp: int
    pp: int
    sequence: bool
    schedule: str
    zero: int
    zero_group: int
    prefetch: int
    recompute: tuple[str, int | str]
    offload: str
    turns: int


def every_case(ranks: int, models: Sequence[str] = (), precision: str = "fp64", pairs: bool = True) -> list[Case]:
    """All that `tilemesh verify` compares: `cases`, `numerics`, and with `pairs` the combinations, of these models."""
    plain = cases(ranks, models, precision)
    plain += numerics(ranks, models) if precision == "fp64" else []
    if not pairs or ranks < 2:
        return plain
    return plain + [case for case in combinations(ranks, plain[0].precision) if case.model in (models or MODELS)]


def combinations(ranks: int, precision: Precision = "fp64") -> list[Case]:
    """Few layouts of up to so many ranks, at least two, that have every pair of settings that can be together."""
    return [Case(choice.model, _layout(choice), precision) for choice in _chosen(ranks)]


@functools.cache
def _chosen(ranks: int) -> tuple[_Combination, ...]:
    every = list(_possible(ranks))
    number: dict[object, int] = {}  # of each pair of values
    masks = []
    for combination in every:
        pairs = itertools.combinations(enumerate(combination), 2)
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
                    choice = _Combination("", dp, tp, pp, sequence, schedule, zero, group, ahead, again, moved, count)
                    if is_runnable(_layout(choice).plan("fp64")):
                        for model in MODELS:
                            yield choice._replace(model=model)


def _schedules(pp: int) -> tuple[str, ...]:
    return ("1f1b",) if pp == 1 else synchronous()


def _layout(choice: _Combination) -> GateLayout:
    again, every = choice.recompute
    return GateLayout(
        dp=choice.dp, tp=choice.tp, sequence=choice.sequence, accumulation=choice.turns, pp=choice.pp,
        schedule=choice.schedule,
        zero=choice.zero, zero_group=choice.zero_group, prefetch=choice.prefetch,
        recompute=again,  # type: ignore[arg-type]
        recompute_every=every,  # type: ignore[arg-type]
        offload=choice.offload,
    )  # fmt: skip
