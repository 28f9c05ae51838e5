"""`tilemesh bench all`: the jobs that this machine can run, the most valuable first, in what time there is.

Each command is a process of its own (`python -m tilemesh`, from source where nothing is installed), so one that fails
or is cut takes nothing with it. FOLDER/NAME/ has what a job wrote, FOLDER/jobs.json how far each came and
FOLDER/rows.jsonl the rows of all: another call with the same folder goes on there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path

from tilemesh.bench.jobs import JOBS, BenchJob
from tilemesh.core import calibration
from tilemesh.core.cores import available_cores, visible_cores
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.files import write_text
from tilemesh.measure.machine import this_machine
from tilemesh.measure.row import Row, read_rows, write_rows
from tilemesh.runs import names

PROGRAM = (sys.executable, "-m", "tilemesh")
READY_S = 45.0
"""That jobs may take to compile side by side."""
_SOURCE = Path(__file__).resolve().parents[2]
_RESULTS = _SOURCE.parent / "benchmarks" / "results"
_STATE = "jobs.json"

Say = Callable[[str], None]


@dataclass
class JobState:
    """How far a job came: commands that are over, seconds, and the first failure's words."""

    commands: int = 0
    seconds: float = 0.0
    failure: str = ""
    cut_s: float = 0.0
    """That were too few for the command that was cut."""

    def is_over(self, job: BenchJob) -> bool:
        return self.commands == len(job.commands)

    def needed_s(self, job: BenchJob) -> float:
        """About how long the rest of the job takes."""
        return max(job.seconds * (1 - self.commands / len(job.commands)), 1.5 * self.cut_s)


@dataclass(frozen=True)
class AllFindings:
    """What all calls with a folder came to. `left`: jobs that are not over, and why."""

    states: Mapping[str, JobState]
    left: Mapping[str, str]
    rows: Sequence[Row]


def run_all(folder: Path, seconds: float, names: Sequence[str] = (), say: Say = lambda words: None) -> AllFindings:
    """Jobs of these names (all), until the time is up. What is over is not run again, unless it failed and is named."""
    if seconds <= 0:
        raise UsageError(f"seconds is {seconds:g}: expected more than 0")
    folder.mkdir(parents=True, exist_ok=True)
    runner = JobRunner(folder.resolve(), time.monotonic() + seconds, say)
    adopt_calibration(_RESULTS, say)
    chosen = [job for job in JOBS.values() if not names or job.name in names]
    for job in chosen if names else ():
        if (state := runner.state(job)).failure:
            state.commands, state.failure = 0, ""
    left = {job.name: why for job in chosen if (why := job.why_not())}
    waiting = [job for job in chosen if job.name not in left and not runner.state(job).is_over(job)]
    try:
        for compiles, group in groupby(waiting, key=lambda job: job.compiles):
            left |= (runner.run_together if compiles else runner.run_alone)(list(group))
    except BaseException:
        runner.stop()
        raise
    for job in waiting:
        if job.name not in left and not runner.state(job).is_over(job):
            left[job.name] = "it was cut: the next call goes on with it"
    return AllFindings({job.name: runner.state(job) for job in chosen}, left, runner.gather())


def adopt_calibration(results: Path, say: Say) -> None:
    """Where this machine was not calibrated, what the repository has of it: a borrowed machine begins bare."""
    machine = this_machine().id
    with contextlib.suppress(RunError):
        if calibration.find(machine) is not None:
            return
    for path in sorted(results.glob("calibration-*.json")):
        known = calibration.load(path)
        if known.identity == machine:
            known.save()
            say(f"calibrated as in {path.name}")
            return


class JobRunner:
    """Runs jobs until `end`, and writes how far they came after every command."""

    def __init__(self, folder: Path, end: float, say: Say) -> None:
        self.folder, self.end, self.say = folder, end, say
        self._running: set[subprocess.Popen[bytes]] = set()
        try:
            kept = json.loads((folder / _STATE).read_text(encoding="utf-8"))
            self._states = {name: JobState(**state) for name, state in kept.items()}
        except FileNotFoundError:
            self._states = {}
        except (ValueError, TypeError, AttributeError):
            raise UsageError(f"{folder / _STATE} was not written by `bench all`: give another folder") from None

    def state(self, job: BenchJob) -> JobState:
        return self._states.setdefault(job.name, JobState())

    def stop(self) -> None:
        """No further command begins, and those that run end."""
        self.end = 0.0
        for process in list(self._running):
            _end(process)

    def left_s(self) -> float:
        return self.end - time.monotonic()

    def run_alone(self, jobs: Sequence[BenchJob]) -> dict[str, str]:
        """One after the other, each that still fits; why others were left."""
        left = {}
        for job in jobs:
            needed_s = self.state(job).needed_s(job)
            if self.left_s() < needed_s:
                left[job.name] = f"it takes about {needed_s:.0f} s"
            else:
                self.run(job)
        return left

    def run_together(self, jobs: Sequence[BenchJob]) -> dict[str, str]:
        """Side by side: all compile at once, and each is timed alone."""
        taken, left, needed_s = [], {}, READY_S
        for job in jobs:
            needed_s += self.state(job).needed_s(job)
            if self.left_s() < needed_s:
                left[job.name] = f"it takes about {job.seconds:.0f} s after {READY_S:.0f} s of compiling"
            else:
                taken.append(job)
        with ThreadPoolExecutor(max(1, available_cores())) as pool:
            list(pool.map(self.run, taken))
        return left

    def run(self, job: BenchJob) -> None:
        """The commands that are not over. One that fails is named, and the others go on."""
        state, place, began = self.state(job), self.folder / job.name, time.monotonic()
        place.mkdir(exist_ok=True)
        environment = _environment(job, place / "caches", is_new=state.commands == 0)
        while not state.is_over(job) and self.left_s() > 1:
            started = time.monotonic()
            code = self._command(job, state.commands, environment)
            if code is None:
                state.cut_s = time.monotonic() - started
                break
            state.cut_s = 0.0
            if code:
                state.failure = state.failure or _last_line(place / f"{state.commands}.txt")
            state.commands += 1
            self._keep()
        state.seconds += time.monotonic() - began
        self._keep()
        how = "cut" if not state.is_over(job) else f"failed: {state.failure}" if state.failure else "done"
        self.say(f"{job.name}: {how} after {time.monotonic() - began:.0f} s, {max(0.0, self.left_s()):.0f} s left")

    def _command(self, job: BenchJob, number: int, environment: Mapping[str, str]) -> int | None:
        """The exit code; None where the time was up. Rows of a cut attempt stay if there are more than in this one."""
        place = self.folder / job.name
        words = shlex.split(job.commands[number].format(out=place))
        for flag, word in pairwise(words):  # what a command reads has no flag before it
            if word.startswith(f"{place}/") and flag.startswith("--"):
                shutil.rmtree(word, ignore_errors=True)  # of an attempt that was cut
        turn = ["--turn", str(self.folder / "turn.lock")] if job.compiles else []
        rows = [] if "--fit" in words else ["--json", str(place / f"{number}.new")]
        line = [*PROGRAM, *words, *turn, *rows]
        cores = visible_cores()[: job.cores] if job.cores is not None else None
        with (place / f"{number}.txt").open("w", encoding="utf-8") as printed:
            process = subprocess.Popen(
                line, cwd=place, env=dict(environment), stdout=printed, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=None if cores is None else lambda: _keep_to(cores),
            )  # fmt: skip
            self._running.add(process)
            try:
                code: int | None = process.wait(max(1.0, self.left_s()))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
                self._running.discard(process)
        new, old = place / f"{number}.new", place / f"{number}.jsonl"
        if new.exists() and (code == 0 or _lines(new) >= _lines(old)):
            new.replace(old)
        return code

    def _keep(self) -> None:
        states = {name: asdict(state) for name, state in sorted(self._states.items())}
        write_text(json.dumps(states, indent=1) + "\n", self.folder / _STATE)

    def gather(self) -> list[Row]:
        """The rows of all jobs, in the jobs' order; also those of a call that was ended in the middle."""
        rows: list[Row] = []
        for name in JOBS:
            for number in range(len(JOBS[name].commands)):
                for ending in ("jsonl", "new"):
                    path = self.folder / name / f"{number}.{ending}"
                    if path.exists() and (ending == "jsonl" or not path.with_suffix(".jsonl").exists()):
                        with contextlib.suppress(UsageError):  # grades and cases of the gate are no rows
                            rows += read_rows(path)
        write_rows(rows, self.folder / names.ROWS)
        return rows


def _environment(job: BenchJob, caches: Path, is_new: bool) -> dict[str, str]:
    """Ours, from this source, with the caches that a job is to find; they stay for a job that was cut."""
    path = os.pathsep.join([str(_SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}
    if job.compiles:
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # as many processes as there are cores compile
    if job.cores is not None:  # as many threads as those cores; of ranks, the launcher shares them out
        environment.pop("OMP_NUM_THREADS", None)
    if job.caches != "kept":
        known = calibration.default_folder()
        if is_new:
            shutil.rmtree(caches, ignore_errors=True)
        if is_new and job.caches == "empty" and known.is_dir():
            shutil.copytree(known, caches / "tilemesh" / known.name)
        environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        environment["XDG_CACHE_HOME"] = str(caches)
    return environment


def _keep_to(cores: Sequence[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what a command started, first with a word."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(3)


def _lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it printed nothing"
