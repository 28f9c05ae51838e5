"""What an observer costs a repeated 1 KiB all_reduce: observer_collectives.py [ROWS.jsonl], as the ranks of one job.

    tilemesh launch --ranks 4 --transport mpi -- benchmarks/observer_collectives.py rows.jsonl

Three communicators over the same ranks make the same call in turns: one without an observer, one with an observer as it
is by default and as training records (one in 61 repeated short calls is timed), one that is told of every call. 5 %
are allowed by default.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tilemesh.bench.collective.cells import Cell
from tilemesh.bench.collective.fit import arrays, timer_of
from tilemesh.comm.connection import connect
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.comm.runtime.observe import Note, Seen
from tilemesh.measure.machine import stamp
from tilemesh.measure.ranks import ranks_case
from tilemesh.measure.row import Row
from tilemesh.measure.timing import compare

ALGORITHMS = ("auto", "flat", "native")
NBYTES = 1 << 10
ALLOWED = 0.05


def main(arguments: Sequence[str]) -> None:
    comm = connect(timeout_s=120.0)
    sys.setswitchinterval(1e-3)
    comms = {"unobserved": comm, "ours": comm.duplicate(), "every call": comm.duplicate()}
    comms["ours"].observe(count)
    comms["every call"].observe(count, every=1)
    measured(comms, ALGORITHMS[0])  # for nothing: a job's first moments belong to what still starts
    rows = [measured(comms, algorithm) for algorithm in ALGORITHMS]
    if comm.rank == 0:
        for row in rows:
            assert row.measured is not None
            plain = row.peers["unobserved"].median
            told = {"by default": row.measured.median, "of every call": row.peers["every call"].median}
            words = ", ".join(
                f"told {how} {seconds * 1e6:.2f} µs ({seconds / plain - 1:+.1%})" for how, seconds in told.items()
            )
            mark = "ok" if told["by default"] <= plain * (1 + ALLOWED) else "--"
            print(f"{row.case['algorithm']:<8}{comm.size} ranks: unobserved {plain * 1e6:.2f} µs, {words} {mark}")
        if arguments:
            Path(arguments[0]).write_text("".join(row.to_json() + "\n" for row in rows), encoding="utf-8")
    comm.barrier()


def count(seen: Seen) -> Note:
    """An observer that adds up what it is told, as a recorder does."""
    calls, seconds = 0, 0.0

    def note(began_s: float, ended_s: float, number: int) -> None:
        nonlocal calls, seconds
        calls += number
        seconds += (ended_s - began_s) * number

    return note


def measured(comms: dict[str, Communicator], algorithm: str) -> Row:
    comm = comms["unobserved"]
    cell = Cell("all_reduce", comm.size, NBYTES)
    x, out = arrays(comm, cell)

    def call(chosen: Communicator) -> Callable[[int], object]:
        return lambda _: chosen.all_reduce(x, out=out, algorithm=algorithm)

    result = compare(
        {name: call(chosen) for name, chosen in comms.items()},
        timer=timer_of(comm),
        repeats=25,
        warmup=2,
        seconds=1.5,
        on_error="raise",
    )
    return Row(
        name="observed call",
        case={
            "collective": "all_reduce",
            "bytes": NBYTES,
            "algorithm": algorithm,
            "transport": comm.backend,
            **ranks_case(comm.size, comm.cores),
        },
        unit="s",
        predicted=None,
        measured=result["ours"],
        limit=None,
        peers={name: result[name] for name in comms if name != "ours"},
        missing={"predicted": "what is asked about is the difference", "limit": "the unobserved call is the least"},
        **(stamp() | {"command": f"tilemesh launch --ranks {comm.size} -- benchmarks/observer_collectives.py"}),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
