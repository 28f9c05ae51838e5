"""Runs whose ranks are all killed at once, before one change of a file that they make or another, and resumed.

    python tests/resume/resume_kills.py powersgd --moments 20      # evenly over the changes that the run makes

Ranks are threads of a process that is forked for each moment, so that SIGKILL ends all of them in the middle of
whatever each does. Resumed, the run has to end as the one that nobody killed, bit for bit (SSP and ASP: as the serial
replay of what it did), or, where not even its configuration was written yet, be refused.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))

from fuzz_kills import die_before
from resume_cases import PLAIN, Case, config_of, furnish
from resume_check import ASYNCHRONOUS, _unlike, difference, train, weights

from tilemesh.core.errors import UsageError
from tilemesh.runs.names import CONFIG
from tilemesh.train.load import load

RUNS = {
    "pipedream": {"layout": "pipedream"},
    "pipemare": {"layout": "pipemare"},
    "powersgd": {"method": "powersgd"},
    "top-k": {"method": "top-k"},
    "local": {"method": "local"},
    "diloco": {"method": "diloco"},
    "bsp": {"method": "bsp"},
    "ssp": {"method": "ssp"},
    "asp": {"method": "asp"},
    "zero3": {"layout": "zero3"},
}
WITHIN_S = 120


def apart(work: Callable[[], str]) -> tuple[int, str]:
    """Do it in a process of its own; its exit code (less than 0: the signal that ended it) and what it returned."""
    with tempfile.NamedTemporaryFile("r+") as told:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(WITHIN_S)  # a run that hangs is ended, and counts as wrong
                Path(told.name).write_text(work())
                code = 0
            except BaseException:
                Path(told.name).write_text(" ".join(traceback.format_exc().split())[-600:])
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), Path(told.name).read_text()


def wrong_moments(name: str, place: Path, moments: int) -> tuple[int, list[str]]:
    """How many moments were tried, and what was wrong after which."""
    case: Case = PLAIN | RUNS[name]
    config = config_of(case, furnish(place, case))
    whole, folder = place / "whole", place / "killed"

    def run(change: int, target: Path) -> str:
        made = die_before(change, str(target))
        train(config, target, "threads")
        return str(made())

    def resumed() -> str:
        if not (folder / CONFIG).exists():
            try:
                load(resume=folder)
            except UsageError:
                return ""
            return "it was resumed without a configuration"
        if load(resume=folder) != config:
            return "the configuration that it is resumed with is another"
        train(config, folder, "threads", resume=True)
        if case["method"] not in ASYNCHRONOUS:
            return _unlike(whole, folder)
        from resume_replay import replayed

        return difference(weights(folder), replayed(config, folder))

    code, told = apart(lambda: run(sys.maxsize, whole))
    if code != 0:
        return 0, [f"the run that nobody killed: {told}"]
    changes, wrong = int(told), []
    chosen = sorted({1 + number * changes // moments for number in range(min(moments, changes))})
    for change in chosen:
        shutil.rmtree(folder, ignore_errors=True)
        code, told = apart(lambda: run(change, folder))  # noqa: B023
        if code == 0:
            continue  # threads made fewer changes this time
        if code != -signal.SIGKILL:
            wrong.append(f"change {change}: ended with {code} and not by SIGKILL: {told}")
            continue
        code, told = apart(resumed)
        if code != 0 or told:
            wrong.append(f"change {change} of {changes}: {told or f'ended with {code}'}")
    return len(chosen), wrong


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Kill all ranks of a run at many moments, and resume it.")
    parser.add_argument("names", nargs="*", default=list(RUNS), metavar="NAME", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--moments", type=int, default=20, metavar="N")
    options = parser.parse_args(argv)
    failed = False
    for name in options.names:
        with tempfile.TemporaryDirectory() as place:
            tried, wrong = wrong_moments(name, Path(place), options.moments)
        print(f"{name}: {tried} moments, {len(wrong)} wrong", *wrong, sep="\n  ", flush=True)
        failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
