"""What our door adds to the library's own collectives: dispatch_collectives.py [ROWS.jsonl], as the ranks of one job.

    tilemesh launch --ranks 8 --transport mpi -- benchmarks/dispatch_collectives.py rows.jsonl

Both call the same function of the same library on the same arrays, one directly and one as `algorithm="native"`, in
turns; the difference of the medians is what a call costs for going through us (2 µs asked where every rank has a core).
Ten seconds or so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tilemesh.bench.collective.cells import Cell
from tilemesh.bench.collective.fit import arrays, timer_of
from tilemesh.bench.collective.peers import peer_call
from tilemesh.comm.connection import connect
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.measure.machine import stamp
from tilemesh.measure.ranks import ranks_case
from tilemesh.measure.row import Row
from tilemesh.measure.timing import compare

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
SIZES = (32, 1 << 10)
SECONDS = 0.8
ASKED_S = 2e-6


def main(arguments: Sequence[str]) -> None:
    comm = connect(timeout_s=120.0)
    sys.setswitchinterval(1e-3)
    added(
        comm, Cell("all_reduce", comm.size, SIZES[0])
    )  # for nothing: a job's first moments belong to what still starts
    rows = [added(comm, Cell(collective, comm.size, size)) for collective in COLLECTIVES for size in SIZES]
    if comm.rank == 0:
        for row in rows:
            assert row.measured is not None
            ours, native = row.measured.median, row.peers["native"].median
            mark = "ok" if ours - native <= ASKED_S else "--"
            print(
                f"{row.case['collective']:<15}{row.case['bytes']:>6} B: native {native * 1e6:7.2f} µs, through us "
                f"{ours * 1e6:7.2f} µs, added {(ours - native) * 1e6:6.2f} µs {mark}"
            )
        if arguments:
            Path(arguments[0]).write_text("".join(row.to_json() + "\n" for row in rows), encoding="utf-8")
    comm.barrier()


def added(comm: Communicator, cell: Cell) -> Row:
    x, out = arrays(comm, cell)
    native, ours = peer_call(comm, cell.collective, x, out), getattr(comm, cell.collective)
    result = compare(
        {"ours": lambda _: ours(x, out=out, algorithm="native"), "native": lambda _: native()},
        timer=timer_of(comm),
        repeats=25,
        warmup=2,
        seconds=SECONDS,
        on_error="raise",
    )
    return Row(
        name="dispatch",
        case={
            "collective": cell.collective,
            "bytes": cell.payload,
            "transport": comm.backend,
            **ranks_case(comm.size, comm.cores),
        },
        unit="s",
        predicted=None,
        measured=result["ours"],
        limit=None,
        peers={"native": result["native"]},
        missing={"predicted": "what is asked about is the difference", "limit": "the library's own call is the least"},
        **(stamp() | {"command": f"tilemesh launch --ranks {comm.size} -- benchmarks/dispatch_collectives.py"}),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
