"""Measuring a fit, as all ranks together: curves at a few sizes, everybody busy at once.

Sizes lie wide apart on purpose: what lies between them is predicted, and a bench of other sizes says how well. Only
where another algorithm is the quickest at the next size are those between measured too, because that is where `auto`
has to decide.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Mapping
from itertools import count, pairwise
from typing import Any

import numpy as np

from tilemesh.bench.collective.cells import COLLECTIVES, ITEM, Cell
from tilemesh.comm.runtime.choose import Request, candidates
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.comm.runtime.fit import Curve, Fit
from tilemesh.comm.runtime.memory import as_bytes
from tilemesh.comm.runtime.transport import Message
from tilemesh.comm.schedules.book import is_direct, is_shared
from tilemesh.core.busy import Busyness
from tilemesh.measure.busy import spread_of
from tilemesh.measure.ranks import rank_timer
from tilemesh.measure.sample import Sample
from tilemesh.measure.timing import LoopTimer, compare

# Powers of two: so are those between. 256 KiB and 1 MiB, because in between payloads begin to pass over the stage in
# segments: what is quicker before and far beyond that step need not be quicker on it.
SIZES = (16, 256, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 64 << 20)
CLOSER = 2  # how often the sizes between are halved
PART_SIZES = (16, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
READING_S = 0.01
LAYER_TURNS = 4
WORKED_CALLS = 12
_TAG = 7  # a user's, of this communicator alone

Say = Callable[[str], None]
Readings = dict[str, dict[int, Sample]]  # by curve and bytes


def measure_fit(comm: Communicator, *, seconds: float = 0.4, most_bytes: int = 64 << 20, say: Say = print) -> Fit:
    """A collective call. `seconds`: of readings for each size of each collective."""
    curves: Readings = {}
    samples: list[Sample] = []
    _parts(comm, curves, seconds, most_bytes)
    curves["call"] = {1: _call(comm, seconds)}
    for collective in COLLECTIVES:
        measured: dict[int, dict[str, float]] = {}
        wanted = [size for size in SIZES if size <= most_bytes]
        for _ in range(1 + CLOSER):
            for size in wanted:
                say(f"{collective} {size}")
                cell = Cell(collective, comm.size, size)
                taken = times(comm, cell, seconds)
                samples += taken.values()
                measured[size] = {name: sample.median for name, sample in taken.items()}
                for name, sample in taken.items():
                    curves.setdefault(f"{collective}/{name}", {})[cell.payload] = sample
            wanted = between(measured)
    say("a layer, alone and beside the others")
    layer_s = layer_times(comm, max(0.5, 2 * seconds))
    say("an exchange after computing")
    worked_s = after_work(comm)
    sync_s = _meeting(comm, seconds)  # last: the first moments of a job belong to what still starts
    when = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    fitted = {name: _curve(points) for name, points in curves.items()}
    busy = Busyness(spread=spread_of(samples))  # what others used, whoever started the ranks has to say
    return Fit(comm.backend, comm.size, comm.cores, sync_s, fitted, when, busy, layer_s, worked_s)


def _curve(points: Mapping[int, Sample]) -> Curve:
    ordered = sorted(points.items())
    return Curve(
        tuple((size, sample.median) for size, sample in ordered),
        tuple((sample.p20, sample.p80) for _, sample in ordered),
    )


def between(measured: Mapping[int, Mapping[str, float]]) -> list[int]:
    """Sizes half way between two that have been measured and have another quickest one for ordinary arrays."""

    def quickest(size: int) -> str:
        ordinary = {name: seconds for name, seconds in measured[size].items() if not is_direct(name)}
        return min(ordinary, key=lambda name: ordinary[name])

    pairs = [(low, high) for low, high in pairwise(sorted(measured)) if high > 2 * low]
    return [
        1 << (low.bit_length() + high.bit_length() - 2) // 2 for low, high in pairs if quickest(low) != quickest(high)
    ]


def times(comm: Communicator, cell: Cell, seconds: float) -> dict[str, Sample]:
    """The library's own and every shared-memory algorithm (without an arena: every other), interleaved."""
    request = Request(cell.collective, cell.payload, "float32", "sum")
    x, out = arrays(comm, cell)
    calls: dict[str, Callable[[int], object]] = {}
    for name, refusal in candidates(request, comm.transport).items():
        if refusal is not None:
            continue
        # The library's own as called by us, which is what auto would do. Messages only where there is nothing to share.
        if name == "native" or is_shared(name) or (not comm.transport.caps.arena and name != "naive"):
            calls[name] = _ours(comm, cell, name, x, out)
    if not calls:
        return {}
    result = compare(calls, timer=timer_of(comm), repeats=9, warmup=2, seconds=seconds * len(calls), on_error="raise")
    return dict(result)


def _ours(comm: Communicator, cell: Cell, name: str, x: Any, out: Any) -> Callable[[int], object]:
    if is_direct(name):
        x, out = arrays(comm, Cell(cell.collective, cell.ranks, cell.nbytes, "empty"))
    call = getattr(comm, cell.collective)
    return lambda _: call(x, out=out, algorithm=name)


class FlagBarrier:
    """What timing needs of the ranks. They leave a meeting by flags closer together than a barrier of messages."""

    def __init__(self, comm: Communicator) -> None:
        self.barrier: Callable[[], None] = comm.barrier if comm.arena is None else comm.arena.flags.meet
        self.max_over_ranks = comm.max_over_ranks


def timer_of(comm: Communicator) -> LoopTimer:
    """Readings so long that it does not matter how far apart ranks begin that share cores."""
    return rank_timer(FlagBarrier(comm), min_reading_s=READING_S)


def arrays(comm: Communicator, cell: Cell) -> tuple[Any, Any]:
    """Input and result of a cell, written to, in the memory that it says."""
    make = comm.empty if cell.buffers == "empty" else np.empty
    x, out = make(cell.elements_in, np.float32), make(cell.elements_out, np.float32)
    x[:] = comm.rank + 1
    out[:] = 0
    return x, out


def _meeting(comm: Communicator, seconds: float) -> float:
    meet = FlagBarrier(comm).barrier
    timed = compare({"meet": lambda _: meet()}, timer=timer_of(comm), repeats=15, seconds=seconds, on_error="raise")
    return timed["meet"].median


def layer_times(comm: Communicator, seconds: float) -> tuple[float, float]:
    """Seconds of a layer's passes while the other ranks sleep, and while all of them do the same.

    A layer like those of a small model, whose tensors do not fit a core's own caches: what ranks lose that share the
    memory, and where they outnumber cores the caches too, is in the second. Both are read in turns and the shortest
    of each counts: a moment of somebody else's work in one of them would be taken for what ranks lose, or gain.
    """
    from tilemesh.measure.calibrate_layer import layer_passes, seconds_each  # torch, for this alone

    step = layer_passes(2, width=128, hidden=384, heads=4, rows=8, tokens=128)
    for _ in range(2):
        step()
    readings = []
    for _ in range(LAYER_TURNS):
        comm.barrier()
        if comm.rank:
            time.sleep(seconds)
        alone_s = seconds_each(step, seconds) if comm.rank == 0 else 0.0
        comm.barrier()
        together_s = seconds_each(step, seconds) / comm.size
        readings.append(comm.all_reduce(np.array([alone_s, together_s])))
    alone, together = np.min(readings, axis=0).tolist()
    return alone, together


def after_work(comm: Communicator) -> float:
    """Seconds that an exchange takes more where ranks come to it from computing than in a loop of exchanges.

    They come apart, wait for the last one (on cores that they share, until that one has had its turns), and their
    caches hold the layer. Read in turns, the shortest of each counts, as in `layer_times`.
    """
    from tilemesh.measure.calibrate_layer import layer_passes  # torch, for this alone

    step = layer_passes(1, width=128, hidden=384, heads=4, rows=1, tokens=128)
    x = np.ones((64 << 10) // ITEM, np.float32)
    out = np.empty_like(x)

    def exchange() -> None:
        comm.all_reduce(x, out=out)

    def both() -> None:
        step()
        exchange()

    calls: tuple[Callable[[], object], ...] = (both, step, exchange)
    for call in calls:
        call()
    readings = []
    for _ in range(LAYER_TURNS):
        taken = []
        for call in calls:
            comm.barrier()
            began = time.perf_counter()
            for _ in range(WORKED_CALLS):
                call()
            taken.append((time.perf_counter() - began) / WORKED_CALLS / comm.size)
        readings.append(comm.all_reduce(np.array(taken)))
    together_s, alone_s, back_to_back_s = np.min(readings, axis=0).tolist()
    return max(0.0, float(together_s - alone_s - back_to_back_s))


def _parts(comm: Communicator, curves: Readings, seconds: float, most_bytes: int) -> None:
    """What other algorithms are made of: a round of messages round the ring, a reduction, a copy."""
    for size in PART_SIZES:
        if size > most_bytes:
            continue
        a, b = np.ones(size // ITEM, np.float32), np.ones(size // ITEM, np.float32)
        calls: dict[str, Callable[[int], object]] = {
            "message": _round(comm, a, b),
            "reduce": lambda _, a=a, b=b: np.add(a, b, a),  # type: ignore[misc]
            "copy": lambda _, a=a, b=b: np.copyto(a, b),  # type: ignore[misc]
        }
        result = compare(calls, timer=timer_of(comm), repeats=9, seconds=seconds * 2, on_error="raise")
        for name, sample in result.items():
            curves.setdefault(name, {})[size] = sample


def _call(comm: Communicator, seconds: float) -> Sample:
    """What one of our message schedules costs beyond its rounds: an all_reduce of nothing, which sends nothing."""
    nothing = np.empty(0, np.float32)
    calls = {"call": lambda _: comm.all_reduce(nothing, algorithm="ring")}
    return compare(calls, timer=timer_of(comm), repeats=15, seconds=seconds, on_error="raise")["call"]


def _round(comm: Communicator, a: Any, b: Any) -> Callable[[int], object]:
    transport, tags = comm.transport, count()
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent, got = as_bytes(a), as_bytes(b)
    messages = [
        Message(False, source, transport.view(got), got.nbytes),
        Message(True, to, transport.view(sent), sent.nbytes),
    ]
    return lambda _: transport.post(messages, _TAG + next(tags) % 1000).wait()
