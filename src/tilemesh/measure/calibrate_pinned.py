"""Figures of one core, measured as ranks run: processes of one thread, each on a core of its own, all busy at once.

A process that began with several threads cannot measure one core: a library beneath torch (Arm's, for products with a
transposed operand) keeps threads of its own and uses the other cores all the same. And a core whose neighbours are idle
has the memory to itself, which a rank never has.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any

from tilemesh.core.cores import visible_cores
from tilemesh.core.errors import RunError
from tilemesh.core.heap import keep_freed_memory
from tilemesh.measure.figure import Figure, FigureOutcome
from tilemesh.measure.sample import Sample

MOST_PROCESSES = 8
"""More of them would tell little more and each takes as much memory as torch does."""
LONGEST_S = 120.0


class Pinned:
    """Measures once, when the first of its figures is asked for."""

    def __init__(self, cores: int, seconds: float) -> None:
        self._processes = max(1, min(cores, MOST_PROCESSES))
        self._seconds = seconds

    def bind(self, figure: Figure) -> Figure:
        """The same figure, measured here."""
        return replace(figure, measure=partial(self._outcome, figure.rate, figure.key))

    def _outcome(self, rate: str, key: str) -> FigureOutcome:
        reading = self._found[f"{rate} {key}"]
        if "why" in reading:
            raise RunError(str(reading["why"]))
        return FigureOutcome(Sample(**reading["sample"]), case=reading["case"])

    @cached_property
    def _found(self) -> Mapping[str, dict[str, Any]]:
        """What the first of the processes read while all were busy."""
        started = [self._start(core) for core in visible_cores()[: self._processes]]
        try:
            for process in started:  # all have torch loaded before the first measures
                assert process.stdout is not None
                if not process.stdout.readline():
                    raise RunError("a process that was to measure one core ended before it began")
            for process in started:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            texts = [process.communicate(timeout=LONGEST_S)[0] for process in started]
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunError(f"one core could not be measured: {error}") from None
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        try:
            readings: dict[str, dict[str, Any]] = json.loads(texts[0])
        except ValueError:
            raise RunError("a process that measured one core said nothing that can be read") from None
        return readings

    def _start(self, core: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tilemesh.measure.calibrate_pinned", str(core), str(self._seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def main(core: int, seconds: float) -> None:
    """A process on one core: load, say so, wait for the word, measure, tell."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    # Only now: what torch and the libraries beneath it start is then on this core.
    from tilemesh.measure.calibrate_layer import layer_figures
    from tilemesh.measure.calibrate_operators import operator_figures
    from tilemesh.measure.timing import reason_of

    keep_freed_memory()  # as a rank that trains does
    gc.collect()
    gc.freeze()  # each figure begins with a collection, which need not look at all that was imported
    print("ready", flush=True)
    sys.stdin.readline()
    readings: dict[str, object] = {}
    for figure in (*operator_figures("one_core", 1, seconds), *layer_figures("one_core", 1, seconds)):
        try:
            outcome = figure.measure()
            assert outcome.measured is not None, outcome.missing.get("measured", "nothing was measured")
            readings[f"{figure.rate} {figure.key}"] = {"sample": asdict(outcome.measured), "case": dict(outcome.case)}
        except Exception as error:  # one figure less, not none
            readings[f"{figure.rate} {figure.key}"] = {"why": reason_of(error)}
    print(json.dumps(readings))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
