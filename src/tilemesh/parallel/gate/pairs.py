"""Layouts that between them have every pair of settings together: mesh × schedule × ZeRO × recomputation × offload.

The one idea: a bug of a combination mostly needs two settings to meet. All combinations of 8 ranks are tens of
thousands, those that have every pair at least once some dozens: taken greedily, each time the combination with the most
pairs that none before it had. Nothing is random, so everybody compares the same layouts.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tilemesh.core.conflicts import is_runnable
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.book import find, synchronous
from tilemesh.model.work.weights import cp_exchanges
from tilemesh.parallel.gate.cases import MODELS, OF_EXPERTS, ROWS, Case, cases, gate_plan, in_precision, numerics

RECOMPUTED: tuple[tuple[str, int | str], ...] = (
    ("none", 1),
    ("operators", 1),
    ("full", 1),
    ("full", 2),
    ("full", "sqrt"),
)
EXCHANGED = ((1, "ring"), (2, "ring"), (2, "heads"), (4, "ring"), (2, "gather"), (4, "heads-ring"))
"""Ranks that share a sequence, and how."""
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
    for values, alike in itertools.groupby(every, key=lambda combination: combination.values):
        singles = list(enumerate(values))
        inside = sum(1 << number.setdefault(pair, len(number)) for pair in itertools.combinations(singles, 2))
        for model, _, _ in alike:  # one after the other
            masks.append(inside | sum(1 << number.setdefault((model, one), len(number)) for one in singles))
    left, chosen = (1 << len(number)) - 1, []
    # What a combination adds only falls as others are taken: who was best with a figure that still holds is the best.
    waiting = [(-mask.bit_count(), place) for place, mask in enumerate(masks)]  # the first of equals comes first
    heapq.heapify(waiting)
    while left:
        figure, place = waiting[0]
        now = (masks[place] & left).bit_count()
        if now < -figure:
            heapq.heapreplace(waiting, (-now, place))
            continue
        chosen.append(every[place])
        left &= ~masks[place]
    return tuple(chosen)


def _possible(ranks: int) -> Iterator[_Combination]:
    sizes = [size for size in (1, 2, 4, 8) if size <= ranks]
    for dp, tp, pp, (cp, exchange) in itertools.product(sizes, sizes, sizes, EXCHANGED):
        # Beyond 4 there are more rows and layers, and nothing new.
        if not 1 < dp * tp * pp * cp <= ranks or max(dp, pp) > 4:
            continue
        sequences, stages = (False, True) if tp > 1 else (False,), range(4) if dp * cp > 1 else (0,)
        for schedule, sequence, zero in itertools.product(_schedules(pp), sequences, stages):
            groups = (0, 2) if zero and dp == 4 else (0,)
            turns = (1, 2) if pp == 1 else (find(schedule).microbatches_from(pp, pp),)
            # Ranks that share a sequence meet what a pass does, not how often or how far ahead something is done.
            again_of = RECOMPUTED if cp == 1 else RECOMPUTED[:3]
            for group, again, moved, count in itertools.product(
                groups, again_of, OFFLOADED, turns[:1] if cp > 1 else turns
            ):
                if count > ROWS // dp:
                    continue
                for ahead in (0 if moved else 1,) if cp > 1 else (1, 0, 2) if zero == 3 else (1, 0) if moved else (1,):
                    layout = gate_plan(
                        dp, tp, sequence, count, pp, schedule, zero=zero, zero_group=group, prefetch=ahead,
                        recompute=again[0], recompute_every=again[1], offload=moved, cp=cp, cp_exchange=exchange,
                    )  # fmt: skip
                    if not is_runnable(layout) or (layout.slices > 1 and cp > 2):  # three slices of ten tokens
                        continue
                    shared = f"{cp} by {exchange}"
                    values = (dp, tp, pp, sequence, schedule, zero, group, ahead, again, moved, count, shared)
                    for model, config in MODELS.items():
                        if model != OF_EXPERTS[1] and exchange in cp_exchanges(config, tp, cp):
                            yield _Combination(model, layout, values)


def _schedules(pp: int) -> tuple[str, ...]:
    return ("1f1b",) if pp == 1 else synchronous()
