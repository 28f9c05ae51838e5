"""Run cases of the fuzzer from a shell: some by name, or all of them on several cores.

    python tests/fuzz/fuzz_run.py 'plan: --batch is zero'          # one; part of a name runs every case with that part
    FUZZ=all python tests/fuzz/fuzz_run.py --all -n 16             # every value everywhere, 16 cases at a time
    python tests/fuzz/fuzz_run.py --all -n 2 --share 1/4           # the first of four parts, which together are all

It needs neither pytest nor an installed tilemesh. Ends with `N cases, N violations`; exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fuzz_client import Server, report, shuffled

FEW = 20  # of so many or fewer cases everything that they print is shown
SLOWEST = 10


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run cases of the fuzzer.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a case's name, or part of the names of several")
    parser.add_argument("--all", action="store_true", help="every case")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="cases at a time, each N a process of its own")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="only the I-th of N parts of the cases")
    options = parser.parse_args(argv)
    part, _, parts = options.share.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        parser.error(f"--share {options.share}: expected I/N with I from 1 to N, such as 1/4")
    if not options.names and not options.all:
        parser.error("name cases, or ask for --all")
    options.part, options.parts = int(part), int(parts)
    return options


def chosen(cases: Sequence[tuple[str, str]], options: argparse.Namespace) -> list[str]:
    """The cases asked for, in the fuzzer's own order; those that start ranks, which take longest, come first."""
    groups = dict(cases)
    names = shuffled(groups)
    if not options.all:
        exactly = [name for name in names if name in options.names]
        names = exactly or [name for name in names if any(word in name for word in options.names)]
    return sorted(names[options.part - 1 :: options.parts], key=lambda name: groups[name] != "ranks")


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    began = time.monotonic()
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    outcomes: list[dict[str, Any]] = []
    broken: list[str] = []
    said = threading.Lock()

    def work(server: Server, total: int) -> None:
        while not broken:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                outcome = server.run_calmly(name)
            except Exception as error:
                broken.append(f"{name}: {error}")
                return
            with said:
                outcomes.append(outcome)
                _say(outcome, len(outcomes), total, time.monotonic() - began)

    servers = [Server() for _ in range(options.n)]
    try:
        names = chosen(servers[0].cases, options)
        for name in names:
            waiting.put(name)
        workers = [threading.Thread(target=work, args=(server, len(names))) for server in servers]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        for server in servers:
            server.close()
    for reason in broken:
        print(f"the fuzzer itself failed at {reason}")
    violations = [outcome for outcome in outcomes if outcome["wrong"]]
    if len(outcomes) > FEW:
        for outcome in sorted(outcomes, key=lambda one: -one["seconds"])[:SLOWEST]:
            print(f"{outcome['seconds']:6.2f} s {outcome['name'][:100]}")
    print(f"{len(outcomes)} cases, {len(violations)} violations, {time.monotonic() - began:.0f} s")
    return int(bool(violations or broken or len(outcomes) < len(names) or not names))


def _say(outcome: dict[str, Any], number: int, total: int, elapsed_s: float) -> None:
    if total <= FEW:
        print(f"{outcome['name']}: {outcome['code']} in {outcome['seconds']} s", outcome["wrong"] or "")
        print(outcome["out"][-600:] + outcome["err"] + outcome["began_work"], flush=True)
    elif outcome["wrong"]:
        print(report(outcome), flush=True)
    if number % 200 == 0:
        print(f"{number} of {total} cases after {elapsed_s:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
