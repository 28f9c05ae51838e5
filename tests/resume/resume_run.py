"""Stop training in many ways and resume it: the final checkpoint is that of the run that nobody stopped.

    python tests/resume/resume_run.py --all -n 16             # all cases of cover.txt, 16 at a time
    python tests/resume/resume_run.py 'zero3 threads'         # cases with that part in their names
    python tests/resume/resume_run.py --make                  # write cover.txt anew

A case fails by a line `FAILED name: why`; the last line is `N cases, N failed, N skipped`, and the exit code 1 if any
failed. It needs neither pytest nor an installed tilemesh. What a case is: `resume_cases.py`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).parent))

from resume_cases import AXES, COVER, PLAIN, Case, all_pairs, cover, furnish, is_trained, named, of_name, pairs_of

LEAST = 200
CHEAP = {"transport": "threads"}
TRIES = 30


def attempt(name: str) -> tuple[str, str, float]:
    """(name, why it failed, seconds) of one case, in a folder of its own."""
    from resume_check import why_skipped, why_wrong

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tilemesh-resume-") as folder:
        skipped = why_skipped(of_name(name))
        why = f"skipped: {skipped}" if skipped else why_wrong(of_name(name), Path(folder))
    return name, why, time.monotonic() - began


def make_cover(place: Path, least: int = LEAST, seed: int = 0) -> list[str]:
    """Cases that have all pairs which train: each begins with a pair that is in none yet and takes, axis by axis, the
    value that adds most."""
    pairs = [pair for pair in all_pairs() if is_trained(PLAIN | dict(pair), place)]
    able, missing, dice, cases = set(pairs), set(pairs), random.Random(seed), list[Case]()

    def grown(case: Case) -> Case:
        for axis in dice.sample(list(AXES), len(AXES)):
            if axis in case:
                continue
            options = [
                value
                for value in AXES[axis]
                if all(frozenset({(axis, value), chosen}) in able for chosen in case.items())
            ]
            news = {value: _news(case, axis, value, missing) for value in options}
            best = [value for value in options if news[value] == max(news.values())]
            case[axis] = CHEAP[axis] if CHEAP.get(axis) in best else dice.choice(best)
        return case

    while missing or len(cases) < least:
        pair = min(missing, key=sorted) if missing else dice.choice(pairs)
        tried = (grown(dict(pair)) for _ in range(TRIES))
        case = next((case for case in tried if is_trained(case, place)), PLAIN | dict(pair))
        cases.append(case)
        missing -= pairs_of(case)
    return [named(case) for case in cases]


def _news(case: Case, axis: str, value: str, missing: set[frozenset[tuple[str, str]]]) -> int:
    return sum(frozenset({(axis, value), chosen}) in missing for chosen in case.items())


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Stop and resume training in many ways.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a case's name, or part of the names of several")
    parser.add_argument("--all", action="store_true", help="every case")
    parser.add_argument("--make", action="store_true", help="write the cover anew")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="cases at a time, each in a process of its own")
    options = parser.parse_args(argv)
    if not (options.names or options.all or options.make):
        parser.error("name cases, or ask for --all")
    return options


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    # Ranks, which are started with neither, inherit both.
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.make:
        with tempfile.TemporaryDirectory() as folder:
            COVER.write_text("".join(f"{name}\n" for name in make_cover(furnish(Path(folder)))))
        return 0
    names = [name for name in cover() if options.all or any(part in name for part in options.names)]
    if not options.all and not names:
        names = [named(of_name(name)) for name in options.names]
    failed = skipped = 0
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.n, mp_context=context) as pool:
        for done in as_completed([pool.submit(attempt, name) for name in names]):
            name, why, seconds = done.result()
            skipped += why.startswith("skipped")
            failed += bool(why) and not why.startswith("skipped")
            if why and not why.startswith("skipped"):
                print(f"FAILED {name}: {why}", flush=True)
            else:
                print(f"{name}: {why or 'equal'} in {seconds:.1f} s", flush=True)
    print(f"{len(names)} cases, {failed} failed, {skipped} skipped, {time.monotonic() - began:.0f} s")
    return int(bool(failed or not names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
