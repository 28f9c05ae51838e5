"""A run that goes on with fewer ranks than it was asked for, and with all of them once they are back.

The one idea: which layout so many ranks get is a function of the configuration and of their number alone, so every rank
of every host finds the same one without asking. As many ranks as were asked for get the mesh that was asked for; fewer
get the fastest layout of the same batch that the planner finds. What is trained stays what it was: checkpoints are
independent of the layout, and every layout computes what one process computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tilemesh.core.conflicts import is_runnable
from tilemesh.core.errors import Argument, RunError, UsageError
from tilemesh.core.hardware import CPU, GPUS_PER_NODE, H200, Cluster, device_for, make_node
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.units import format_seconds
from tilemesh.launch.blame import Failure
from tilemesh.measure.machine import usable_gpus
from tilemesh.model.work.task import Code
from tilemesh.plan.choose import NothingFitsError, search
from tilemesh.plan.space import Pins
from tilemesh.runs.folder import newest_checkpoint
from tilemesh.runs.names import LOCK, PREDICTED
from tilemesh.train.check import check_stored, check_values
from tilemesh.train.config import TrainConfig

MIN_RANKS = Argument("min_ranks")
_STAYS = ("precision", "fp8_scales", "attention", "offload", "cp_exchange")
"""What a run is computed with, whatever its mesh."""
_POLL_S, _PATIENCE_S = 0.5, 600.0
_MANY = 16


def check_min_ranks(config: TrainConfig, fewest: int) -> None:
    """Refuse a bound that is none, and runs whose weights depend on how many ranks train them."""
    if not 1 <= fewest <= config.ranks:
        raise UsageError(MIN_RANKS, f" is {fewest}: expected 1 to {config.ranks}, the ranks of the mesh")
    if config.trains_module:
        raise UsageError(MIN_RANKS, ": the planner finds layouts of Transformers, not of other modules; leave it out")
    method: str = config.train.method if config.train.method != "synchronous" else config.method.compress
    if config.plan.is_asynchronous:
        method = config.plan.schedule_name
    if method != "none":
        raise UsageError(
            MIN_RANKS, f" and {method}: on another number of ranks it trains other weights; leave one of them out"
        )


def fit_to_ranks(full: TrainConfig, ranks: int, fewest: int, gpus: Sequence[str] = ()) -> TrainConfig:
    """The run on at most so many ranks: as it was asked for, if they are enough, else by the fastest layout of the same
    batch on as many of them as it can use."""
    if ranks >= full.ranks:
        return full
    if ranks < fewest:
        raise RunError(f"{ranks} ranks are there, and --min-ranks is {fewest}: go on when there are more")
    best: tuple[float, TrainConfig] | None = None
    for count in range(ranks, fewest - 1, -1):
        if best is not None and count < ranks * (0.5 if ranks <= _MANY else 0.75):
            break  # so few of them are not faster, and each count takes a second to search
        fastest = _fastest(full, count, gpus)
        if fastest is not None and (best is None or fastest[0] < best[0]):
            best = fastest
    if best is None:
        raise RunError(
            f"no layout of a batch of {full.batch} on {fewest} to {ranks} ranks fits: go on when there are more"
        )
    return best[1]


def _fastest(full: TrainConfig, ranks: int, gpus: Sequence[str]) -> tuple[float, TrainConfig] | None:
    """The fastest layout on exactly so many ranks, with its predicted time, if there is one that training takes."""
    device = (device_for(gpus[0]) or H200) if gpus and full.train.device != "cpu" else CPU
    in_node = max(count for count in range(1, GPUS_PER_NODE + 1) if ranks % count == 0)
    cluster = Cluster((make_node(device, in_node),) * (ranks // in_node))
    pins = Pins(**{name: getattr(full.plan, name) for name in _STAYS})
    code: Code = "compiled" if full.train.compile else "eager"
    try:
        result = search(
            full.model, cluster, batch=full.batch, context=full.context, pins=pins, code=code, accepts=is_runnable
        )
    except (NothingFitsError, UsageError):  # nothing divides so, or nothing fits
        return None
    for prediction in result.predictions:
        config = dataclasses.replace(full, plan=prediction.settled_plan)
        try:
            check_values(config)
            check_stored(config)
        except UsageError:
            continue
        return prediction.step_time_s, config
    return None


def change_words(before: ParallelPlan, after: ParallelPlan, seconds: object) -> str:
    """What the run says when its mesh changes."""
    how = "fewer ranks" if after.world < before.world else "ranks are back"
    if after.world == before.world:
        how = "another layout"
    time_words = f", predicted {format_seconds(seconds)} per step" if isinstance(seconds, int | float) else ""
    return f"{how}: {_ranks(before)}, now {_ranks(after)}{time_words}"


def _ranks(plan: ParallelPlan) -> str:
    return f"{plan.world} rank{'s' * (plan.world > 1)} as {plan.short()}"


class LostRanks:
    """What the next attempt on this machine is laid on, by what became of the ranks before.

    A rank that dies is started again like all others. One that dies again before there was another checkpoint is taken
    for lost, if fewer have a layout, and so is a GPU that this machine no longer shows; once a checkpoint was written,
    all are tried again.
    """

    def __init__(self, folder: Path, full: TrainConfig, fewest: int, gpus: Callable[[], int]) -> None:
        self.folder, self.full, self.fewest, self.gpus = folder, full, fewest, gpus
        self.laid = full
        self.had_gpus = gpus()
        self.saved: list[int | None] = [newest_checkpoint(folder)]

    def after(self, failure: Failure) -> TrainConfig:
        """The next attempt's configuration."""
        saved = newest_checkpoint(self.folder)
        is_stuck = len(self.saved) > 1 and saved == self.saved[-1] and failure.rank is not None
        self.saved.append(saved)
        most = self.full.ranks
        if self.had_gpus >= most:  # each rank had one of its own
            most = min(most, self.gpus())
        fewer = min(most, self.laid.ranks - 1)
        if is_stuck and fewer >= self.fewest:
            with contextlib.suppress(RunError):
                self.laid = fit_to_ranks(self.full, fewer, self.fewest, usable_gpus())
                return self.laid
        if not is_stuck or self.laid.ranks > most:
            self.laid = fit_to_ranks(self.full, most, self.fewest, usable_gpus())
        return self.laid


def wait_beside(folder: Path) -> None:
    """As a rank for which this attempt's layout has no place: until the others have ended, who hold the run's lock.
    Whoever started the ranks ends this one too when they fail."""
    lock, sign = folder / LOCK, folder / PREDICTED
    before, began = _time_of(sign), time.monotonic()
    has_begun = False
    while not has_begun or lock.exists():
        has_begun = has_begun or lock.exists() or _time_of(sign) != before
        if not has_begun and time.monotonic() - began > _PATIENCE_S:
            return
        time.sleep(_POLL_S)


def _time_of(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
