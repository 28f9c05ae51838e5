"""The collectives of `comm/minimal.py` beside the built-in ones: the same results, and what each takes.

    tilemesh launch --ranks 4 -- examples/minimal.py
    python examples/minimal.py

One row per collective and size. Predicted: what this machine's fit says of the same messages (the algorithm `naive`).
The peers are what `algorithm="auto"` picks and the library's own collective, timed in turn with the minimal version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilemesh.bench.collective.fit import timer_of
from tilemesh.comm import Communicator, connect, minimal, run_threads
from tilemesh.measure.machine import stamp
from tilemesh.measure.row import Row
from tilemesh.measure.table import render
from tilemesh.measure.timing import compare

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
SIZES = (1 << 10, 256 << 10)  # bytes per rank
SECONDS = 0.2  # of readings per row


def main(comm: Communicator, seconds: float = SECONDS) -> str | None:
    """Compare and time each collective; rank 0 returns the table."""
    rows = [row(comm, name, nbytes, seconds) for name in COLLECTIVES for nbytes in SIZES]
    return render(rows) if comm.rank == 0 else None


def row(comm: Communicator, name: str, nbytes: int, seconds: float) -> Row:
    x = np.arange(nbytes // 8, dtype=np.float64) + comm.rank
    ours: Callable[..., Any] = getattr(minimal, name)
    built_in: Callable[..., Any] = getattr(comm, name)
    assert np.allclose(ours(comm, x), built_in(x), rtol=1e-12), name
    payload = nbytes * comm.size if name == "all_gather" else nbytes
    predicted = comm.fit.seconds(name, "naive", payload) if comm.fit is not None else None
    candidates: dict[str, Callable[[int], object]] = {"minimal": lambda _: ours(comm, x), "auto": lambda _: built_in(x)}
    missing = {"limit": "the example does not calibrate; `tilemesh bench collective` prints it"}
    if comm.transport.lacks(name, "float64", "sum", uneven=x.size % comm.size > 0) is None:
        candidates["native"] = lambda _: built_in(x, algorithm="native")
    if predicted is None:
        missing["predicted"] = "no fit for this machine, transport and number of ranks: tilemesh bench collective --fit"
    times = compare(candidates, timer=timer_of(comm), repeats=9, seconds=seconds, on_error="raise")
    peers = {peer: sample for peer, sample in times.items() if peer != "minimal"}
    return Row(
        name=name,
        case={"ranks": comm.size, "bytes": nbytes},
        unit="s",
        predicted=predicted,
        measured=times["minimal"],
        limit=None,
        peers=peers,
        missing=missing,
        **stamp(),
    )


if __name__ == "__main__":
    world = connect()
    text = main(world) if world.size > 1 else run_threads(4, main)[0]
    if text is not None:
        print(text)
