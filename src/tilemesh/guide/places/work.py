"""What chapter 14 runs: placements on the planner's clock, and the same ones carried out by threads that sleep."""

from __future__ import annotations

import queue
import threading
import time
from typing import NamedTuple

from tilemesh.core import placement as placed
from tilemesh.core.placement import ACTOR, ENGINE, ROLLOUT, SYNC, UPDATE, Placement, Pool, StepTime


class StepWork(NamedTuple):
    """Rank-seconds: what one rank would take alone. `sync_s` is the time to bring new weights to other ranks."""

    draw: float
    update: float
    sync_s: float = 0.0


def placement(kind: str, ranks: int, drawing: int = 0) -> Placement:
    """All ranks for both, or so many of them for drawing alone."""
    if kind == "colocated":
        return Placement((Pool(ranks, (ACTOR, ENGINE)),))
    return Placement((Pool(ranks - drawing, (ACTOR,)), Pool(drawing, (ENGINE,))), placed.KINDS[kind])


def phase_seconds(place: Placement, work: StepWork) -> dict[str, float]:
    """Both phases divide perfectly here; a colocated update hands its weights over in place."""
    sync_s = work.sync_s if len(place.pools) > 1 else 0.0
    return {ROLLOUT: work.draw / place.pool(ENGINE).ranks, UPDATE: work.update / place.pool(ACTOR).ranks, SYNC: sync_s}


def predicted(kind: str, ranks: int, work: StepWork, drawing: int = 0) -> tuple[StepTime, float]:
    """A step on the planner's clock, and the share of all ranks' time that is idle."""
    place = placement(kind, ranks, drawing)
    step = placed.simulate(place, phase_seconds(place, work))
    return step, placed.idle_share(place, step)


class Carried(NamedTuple):
    """What a run came to: seconds of a step, and for each update how many updates older its answers' weights were."""

    step_s: float
    staleness: list[int]


def carry_out(kind: str, ranks: int, work: StepWork, drawing: int = 0, steps: int = 12) -> Carried:
    """Run it with a thread for each pool; a phase is a sleep. Answers carry the version of their weights."""
    place = placement(kind, ranks, drawing)
    seconds, ahead = phase_seconds(place, work), place.ahead
    answers: queue.Queue[int] = queue.Queue()
    weights: queue.Queue[int] = queue.Queue()
    for _ in range(ahead + 1):  # so many batches may be under way with the weights of the beginning
        weights.put(0)

    def draw_one() -> None:
        version = weights.get()
        time.sleep(seconds[ROLLOUT])
        answers.put(version)

    def draw_all() -> None:
        for _ in range(steps):
            draw_one()

    drawer = threading.Thread(target=draw_all)
    if len(place.pools) > 1:
        drawer.start()
    ends, staleness = [], []
    for step in range(steps):
        if len(place.pools) == 1:
            draw_one()
        staleness.append(step - answers.get())
        time.sleep(seconds[UPDATE] + seconds[SYNC])
        weights.put(step + 1)
        ends.append(time.perf_counter())
    if len(place.pools) > 1:
        drawer.join()
    later = ends[steps // 3 :]  # a steady state
    return Carried((later[-1] - later[0]) / (len(later) - 1), staleness)


def best_split(ranks: int, work: StepWork) -> tuple[int, float]:
    """How many ranks should draw, one batch ahead, and the step's seconds then: every size is tried."""
    steps = {drawing: predicted("one-step-off", ranks, work, drawing)[0].seconds for drawing in range(1, ranks)}
    best = min(steps, key=steps.__getitem__)
    return best, steps[best]
