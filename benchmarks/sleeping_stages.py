"""Every schedule over stages that sleep (F, I and W 10 ms each), 8 microbatches, on 2, 4 and 8 ranks: simulated,
measured, and torch's own in the same run.

    python benchmarks/sleeping_stages.py [--ranks 2,4,8] [--repeats 5] [--schedules gpipe,1f1b] [--no-peers]
        [--transport mpi] [--json FILE]

FILE gets a line per schedule, added as soon as its number of ranks is done.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from tilemesh.bench.train.sleeping import simulated_s
from tilemesh.core.step.book import SCHEDULES, why_not_built
from tilemesh.launch import Ranks
from tilemesh.measure.machine import stamp

MICROBATCHES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--schedules", default=",".join(name for name in SCHEDULES if name != "terapipe"))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--transport", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    peers = not options.no_peers
    print(f"{'schedule':15}{'ranks':>6}{'simulated':>11}{'measured':>10}{'over':>8}{'torch':>10}{'speedup':>9}")
    for number in map(int, options.ranks.split(",")):
        wanted = options.schedules.split(",")
        chosen = [name for name in wanted if why_not_built(name, number, MICROBATCHES) is None]
        transport = options.transport or ("torch" if peers else "auto")
        with Ranks(number, transport=transport) as ranks:
            taken = ranks.call(
                "tilemesh.bench.train.sleeping:on_ranks", chosen, MICROBATCHES, options.repeats, peers, timeout_s=300
            )[0]
        for name in chosen:
            ideal_s, measured_s = simulated_s(name, number, MICROBATCHES), statistics.median(taken[name])
            theirs = taken.get(f"torch {name}")
            torch_s = statistics.median(theirs) if theirs else None
            end = f"{torch_s * 1e3:8.1f}{torch_s / measured_s:9.2f}" if torch_s else ""
            over = measured_s / ideal_s - 1
            print(f"{name:15}{number:6}{ideal_s * 1e3:9.1f}  {measured_s * 1e3:8.1f}{over:8.1%}  {end}", flush=True)
            line = {"schedule": name, "ranks": number, "microbatches": MICROBATCHES, "simulated_s": ideal_s,
                    "measured_s": sorted(taken[name]), "torch_s": sorted(theirs) if theirs else None,
                    "transport": transport, **stamp()}  # fmt: skip
            if options.json is not None:
                with options.json.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
