"""How much of a pipeline's messages computing hides, where cores are free: one row per transport and size of message.

    python benchmarks/pipeline_sends.py [--ranks 4] [--transports mpi,torch] [--mib 1,8] [--schedule 1f1b]
        [--microbatches 8] [--products 8] [--repeats 7] [--json FILE]

A rank computes on one core, so with more cores than ranks those that are free can move messages. The hidden fraction is
(waited for - left to move) / (waited for - tiny): 1, everything; 0, nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from tilemesh.bench.train.sends import RUNS
from tilemesh.core.cores import available_cores
from tilemesh.launch import Ranks
from tilemesh.measure.machine import stamp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--transports", default="mpi,torch")
    parser.add_argument("--mib", default="1,8")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--products", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    lines = []
    print(f"{given.ranks} ranks on {available_cores()} cores, {given.schedule}, {given.microbatches} microbatches; ms")
    for transport in given.transports.split(","):
        with Ranks(given.ranks, transport=transport) as ranks:
            for mib in map(float, given.mib.split(",")):
                asked = (given.schedule, transport, given.microbatches, given.products, int(mib * 2**20), given.repeats)
                taken = ranks.call("tilemesh.bench.train.sends:on_ranks", *asked, timeout_s=120)[0]
                left_s, waited_s, tiny_s = (statistics.median(taken[name]) for name in RUNS)
                cost_s = waited_s - tiny_s
                hidden = (waited_s - left_s) / cost_s if cost_s > 0 else None
                words = ", ".join(f"{name} {statistics.median(taken[name]) * 1e3:.1f}" for name in RUNS)
                shown = "nothing to hide" if hidden is None else f"hidden {hidden:.2f}"
                print(f"{transport:6}{mib:6g} MiB  {words}; {shown}", flush=True)
                lines.append(
                    {"name": "pipeline sends", "ranks": given.ranks, "transport": transport, "mib": mib,
                     "schedule": given.schedule, "microbatches": given.microbatches, "seconds": taken,
                     "hidden": hidden, **stamp()}
                )  # fmt: skip
    if given.json is not None:
        given.json.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
