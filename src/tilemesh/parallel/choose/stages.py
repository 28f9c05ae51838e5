"""Between operators: which layers on which ranks, as stages of a pipeline (Alpa's dynamic program).

A step of m microbatches through stages that take t1, t2, … takes t1 + t2 + … + (m - 1) × the largest. For every
largest time that there can be, the least sum of stages below it is found, from the last layer and rank to the first.
Ranks need not be alike: a stage may have any stretch of them, two of eight or all of one kind of GPU. The result's
`layers` are a plan's `chunk_layers`, which every pipeline schedule runs where all stages have as many ranks; stages of
placed modules run on as many ranks each as it says (`parallel/staged.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.graph.ir import Graph, Node
from tilemesh.parallel.choose import choose
from tilemesh.plan.place.cost import MeshCost
from tilemesh.plan.place.space import PlacementSpace

StageSeconds = Callable[[range, range], float]
"""What a microbatch takes, there and back, through these layers on these ranks; infinite where they do not fit."""


@dataclass(frozen=True)
class StageCut:
    """How many layers and ranks each stage has, and what a microbatch takes in it."""

    layers: tuple[int, ...]
    ranks: tuple[int, ...]
    stage_s: tuple[float, ...]
    microbatches: int

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.stage_s) + (self.microbatches - 1) * max(self.stage_s)


def cut_stages(
    layers: int, ranks: int, microbatches: int, stage_s: StageSeconds, sizes: Collection[int] = ()
) -> StageCut:
    """The cut of the least time; `sizes`: how many ranks a stage may have, by default any number."""
    allowed = sorted(sizes or range(1, ranks + 1))
    times = {
        (i, j, a, a + size): seconds
        for i in range(layers)
        for j in range(i + 1, layers + 1)
        for size in allowed
        for a in range(ranks - size + 1)
        if (seconds := stage_s(range(i, j), range(a, a + size))) < math.inf
    }
    following: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
    for (i, j, a, b), seconds in times.items():
        following.setdefault((i, a), []).append((j, b, seconds))
    best: StageCut | None = None
    for largest in sorted(set(times.values())):
        if best is not None and largest * microbatches >= best.seconds:
            break  # a stage of this length alone takes that long
        cut = _least_sum(layers, ranks, following, largest)
        if cut is not None:
            candidate = StageCut(tuple(cut[0]), tuple(cut[1]), tuple(cut[2]), microbatches)
            best = candidate if best is None or candidate.seconds < best.seconds else best
    if best is None:
        raise UsageError(f"{layers} layers on {ranks} ranks: no cut into stages fits; allow more memory or ranks")
    return best


def _least_sum(
    layers: int, ranks: int, following: dict[tuple[int, int], list[tuple[int, int, float]]], largest: float
) -> tuple[list[int], list[int], list[float]] | None:
    """Of the rest of layers and ranks, all of both used; no stage above the largest time."""
    least = {(layers, ranks): (0.0, (layers, ranks))}
    for i in reversed(range(layers)):
        for a in reversed(range(ranks)):
            options = [
                (seconds + least[j, b][0], (j, b))
                for j, b, seconds in following.get((i, a), ())
                if seconds <= largest and (j, b) in least
            ]
            if options:
                least[i, a] = min(options)
    if (0, 0) not in least:
        return None
    at = (0, 0)
    counts, sizes, times = list[int](), list[int](), list[float]()
    while at != (layers, ranks):
        total, then = least[at]
        counts.append(then[0] - at[0])
        sizes.append(then[1] - at[1])
        times.append(total - least[then][0])
        at = then
    return counts, sizes, times


def placed_stage_s(
    block: Callable[[int], tuple[Graph, dict[Node, Node]]], devices: Sequence[str], chooser: str = "ilp"
) -> StageSeconds:
    """Of layers that are alike, each placed on a stage's ranks as a chooser says. `block`: so many layers as a graph,
    and which output replaces which input; `devices`: of each rank its device. A stage has devices of one kind."""

    @functools.cache
    def seconds(layers: int, ranks: int, device: str) -> float:
        graph, carried = block(layers)
        cluster = parse_cluster(f"1x{ranks}x{device}")
        cost = MeshCost((("tp", ranks),), cluster)
        space = PlacementSpace(graph, cost, carried, limit_bytes=cluster.device.usable_bytes)
        try:
            figures = choose(space.problem, chooser).figures
        except UsageError:
            return math.inf
        return math.inf if figures is None else figures.seconds

    def of(layers: range, ranks: range) -> float:
        kinds = {devices[rank] for rank in ranks}
        return seconds(len(layers), len(ranks), kinds.pop()) if len(kinds) == 1 else math.inf

    return of
