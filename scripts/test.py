"""Run the tests in parts and end with one summary: the failures of all parts, then `N passed, N failed, N skipped`.

`make test` runs the parts `units` (none of which sees a GPU), `gpu` where there is one, and `ranks` (tests that start
processes of their own); each runs even when one before it failed. Units run two tests at a time, ranks three: a test
that starts ranks waits for them half of its time. It needs only pytest: on a machine where nothing can be installed,
`python3 scripts/test.py --by-file -n 16 --logs FOLDER` runs the tests from source, each file in a process of its own.
The totals come from the JUnit files that pytest writes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("units", "gpu", "ranks", "setup", "failed")
SETUP_TESTS = "tests/cpu/test_setup.py"
RANK_TESTS = "tests/mpi"
GPU_TESTS = ("tests/gpu", "tests/cpu/test_matmul_notebook.py")  # the notebook measures where it can
# Files that take longest, in this order: they begin first, so that no core is left alone with one in the end.
LONGEST = (
    *(f"tests/mpi/test_{part}.py" for part in ("gate", "guide", "train_faults", "zero", "comm", "launch", "backward")),
    *(f"tests/mpi/test_{part}.py" for part in ("comm_faults", "forward", "call", "sharding", "shared_memory")),
    *(f"tests/cpu/test_{part}.py" for part in ("row_operators", "methods_train", "operators", "align_run", "guide")),
    *(f"tests/cpu/test_{part}.py" for part in ("train_module", "matmul", "serve_ranks", "train_run", "graph_backend")),
    *("tests/fuzz/test_fuzz.py", "tests/report/test_report_pages.py"),
    *(f"tests/cpu/test_{part}.py" for part in ("compress", "document_commands", "bench_kernel", "serve_families")),
    *(f"tests/cpu/test_{part}.py" for part in ("pipeline", "doctor", "placed_run", "paged_attention")),
    *("tests/pure/test_schedules.py", "tests/pure/test_plan_serve.py", "tests/resume/test_resume.py"),
)
# On a GPU, by file: how many processes share the tests of one that compiles for minutes, and files that measure time.
GPU_SHARES = {"tests/gpu/test_attention.py": 5, "tests/gpu/test_parallel.py": 6, "tests/gpu/test_matmul.py": 3}
TIMED = ("tests/gpu/test_gpu_timing.py", "tests/gpu/test_ladder.py")
# A file stays in one process, which makes what its tests share once. Of rank tests a class or a file does, whose ranks
# tests/mpi/started.py keeps; tests/mpi/conftest.py joins some.
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
BY_SCOPE = ("--dist", "loadscope", "--no-loadscope-reorder")
NO_GPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
# Two jobs of as many ranks as cores: a rank of Open MPI that waits lets others run.
SHARING = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
CORES_PER_RANK_TEST = 2  # how many cores a file that starts two to four ranks keeps busy, where files run side by side
NO_TESTS = 5  # pytest's exit code when nothing was selected


@dataclass(frozen=True)
class Job:
    """One pytest process: its name in the logs, its arguments, and its environment beyond ours."""

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Totals:
    """What the jobs reported: tests by outcome; `failed` maps a test's id to the first line of why."""

    passed: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    seconds: list[tuple[float, str]] = field(default_factory=list)

    def read(self, job: Job, report: Path, code: int) -> None:
        """Add one job's report; a job that ended without one has failed as a whole."""
        failures_before = len(self.failed)
        if report.exists() and report.stat().st_size:
            for case in ET.parse(report).iter("testcase"):
                self._add(case)
        if code not in (0, NO_TESTS) and len(self.failed) == failures_before:
            self.failed[job.name] = f"pytest ended with code {code}"

    def _add(self, case: ET.Element) -> None:
        identity = test_id(case)
        self.seconds.append((float(case.get("time", "0")), identity))
        problem = next((child for child in case if child.tag in ("failure", "error")), None)
        if problem is not None:
            self.failed[identity] = (problem.get("message") or "").partition("\n")[0][:300]
        elif any(child.tag == "skipped" for child in case):
            self.skipped += 1
        else:
            self.passed += 1

    def closing_line(self) -> str:
        return f"{self.passed} passed, {len(self.failed)} failed, {self.skipped} skipped"


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    folder = Path(options.logs or ROOT / ".pytest_cache" / "reports").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    totals, began = Totals(), time.monotonic()
    if options.by_file:
        for jobs, at_once in file_jobs(options):
            with ThreadPoolExecutor(at_once) as pool:
                codes = list(pool.map(lambda job: run_logged(job, folder, options.limit_s), jobs))
            for job, code in zip(jobs, codes, strict=True):
                totals.read(job, report_of(job, folder), code)
    else:
        for job in part_jobs(options):
            words = [word for word in job.arguments if not word.endswith(".py")]
            print(f"\n{job.name}: pytest {' '.join(words)}, {len(job.arguments) - len(words)} files", flush=True)
            totals.read(job, report_of(job, folder), run(job, folder))
    alone = retry(totals, folder) if options.again and totals.failed else []
    say(totals, alone, time.monotonic() - began, options.slowest)
    return int(bool(totals.failed))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the tests in parts and print one summary.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; the first three if not given")
    parser.add_argument("-n", type=int, default=2, metavar="N", help="tests (or files) at a time")
    parser.add_argument("--all", action="store_true", help="also the slow tests")
    parser.add_argument("--again", action="store_true", help="run what failed once more, alone; it counts if it passes")
    parser.add_argument("--by-file", action="store_true", help="each file in a process of its own, output into --logs")
    parser.add_argument("--logs", metavar="FOLDER", help="where JUnit files and logs go")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="with --by-file: seconds a file may take")
    parser.add_argument("--slowest", type=int, default=0, metavar="N", help="name the N tests that took longest")
    options = parser.parse_args(argv)
    options.parts = options.parts or ["units", "gpu", "ranks"]
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"unknown part '{unknown[0]}': known are {', '.join(PARTS)}")
    return options


def part_jobs(options: argparse.Namespace) -> list[Job]:
    """One job for each part, to run one after the other."""
    slow = ("-m", "slow or not slow") if options.all else ()
    is_several = find_spec("xdist") is not None and options.n > 1
    units = ("-n", str(options.n), *BY_FILE) if is_several else ()
    ranks = ("-n", str(options.n * 3 // 2), *BY_SCOPE) if is_several else ()
    unit_files, _, rank_files = ([str(path.relative_to(ROOT)) for path in files] for files in files_of_parts())
    jobs = {
        "units": Job("units", (*units, *slow, *unit_files), NO_GPU),
        "gpu": Job("gpu", (*slow, *GPU_TESTS)),
        "ranks": Job("ranks", (*ranks, *slow, *rank_files), SHARING),
        "setup": Job("setup", ("-m", "slow", SETUP_TESTS)),
        # What failed in the last run of each part, slow or not, one after the other.
        "failed": Job("failed", ("--last-failed", "--last-failed-no-failures=none", "-m", "slow or not slow")),
    }
    return [jobs[part] for part in options.parts if part != "gpu" or has_gpu()]


def files_of_parts() -> tuple[list[Path], list[Path], list[Path]]:
    """Those of units, of the GPU and of ranks, the longest first."""
    order = {ROOT / name: number for number, name in enumerate(LONGEST)}
    files = sorted((ROOT / "tests").rglob("test_*.py"), key=lambda path: (order.get(path, len(order)), path))
    ranks = [path for path in files if path.is_relative_to(ROOT / RANK_TESTS)]
    gpu = [path for path in files if path.is_relative_to(ROOT / GPU_TESTS[0])]
    return [path for path in files if path not in ranks and path not in gpu], gpu, ranks


def file_jobs(options: argparse.Namespace) -> list[tuple[list[Job], int]]:
    """Jobs of one file each, in groups that run one after the other; beside each group how many run at once."""
    slow = ("-m", "slow or not slow") if options.all else ()

    def jobs(paths: Sequence[Path], environment: dict[str, str]) -> list[Job]:
        names = [str(path.relative_to(ROOT)) for path in paths]
        return [Job(name, (*slow, name), environment) for name in names if name != SETUP_TESTS]

    units, gpu, ranks = files_of_parts()
    groups = []
    if "units" in options.parts:
        groups.append((jobs(units, NO_GPU), options.n))
    if "gpu" in options.parts and has_gpu():
        names = [str(path.relative_to(ROOT)) for path in gpu]
        shares = [(name, part, GPU_SHARES.get(name, 1)) for name in names for part in range(GPU_SHARES.get(name, 1))]
        # Threads of their parts on the CPU: as many as cores in each process make them 20 times slower.
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.n))}
        shared = [
            Job(f"{name} {part + 1}/{count}", (*slow, name), {"TEST_SHARE": f"{part}/{count}"} | threads)
            for name, part, count in sorted(shares, key=lambda share: -share[2])
            if name not in TIMED
        ]
        groups += [(shared, options.n), (jobs([ROOT / name for name in TIMED], {}), 1)]
    if "ranks" in options.parts:
        groups.append((jobs(ranks, SHARING), max(1, options.n // CORES_PER_RANK_TEST)))
    if "setup" in options.parts:
        groups.append(([Job("setup", ("-m", "slow", SETUP_TESTS))], 1))
    return groups


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def command(job: Job, folder: Path) -> list[str]:
    report_of(job, folder).unlink(missing_ok=True)  # of an earlier run
    line = [sys.executable, "-m", "pytest", "-o", "junit_family=xunit1", f"--junit-xml={report_of(job, folder)}"]
    if find_spec("pytest_timeout") is None:  # the configuration names its option and its mark
        line += ["-o", "addopts=--import-mode=importlib -ra", "-W", "ignore::pytest.PytestUnknownMarkWarning"]
        line += ["-W", "ignore::pytest.PytestConfigWarning"]
        line += [] if "-m" in job.arguments else ["-m", "not slow"]
    return [*line, *job.arguments]


def environment(job: Job) -> dict[str, str]:
    """Ours, with this checkout's source first; what the job wants holds unless the user decided.

    Bytecode is kept, also where the environment says otherwise (as in many containers): a hundred ranks and commands
    would each compile the source anew.
    """
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    made = job.environment | os.environ | {"PYTHONPATH": path}
    made.pop("PYTHONDONTWRITEBYTECODE", None)
    return made


def report_of(job: Job, folder: Path) -> Path:
    return folder / f"{job.name.replace('/', '_')}.xml"


def run(job: Job, folder: Path) -> int:
    """With its output on ours."""
    return subprocess.run(command(job, folder), cwd=ROOT, env=environment(job), check=False).returncode


def run_logged(job: Job, folder: Path, limit_s: float) -> int:
    """With its output in a file, and a bound on its time."""
    began = time.monotonic()
    line = [*command(job, folder), "-q", "-p", "no:cacheprovider", "--durations=10"]
    with report_of(job, folder).with_suffix(".txt").open("wb") as log:
        child = subprocess.Popen(
            line, cwd=ROOT, env=environment(job), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
    print(f"{code:>4} {time.monotonic() - began:6.0f} s  {job.name}", flush=True)
    return code


def retry(totals: Totals, folder: Path) -> list[str]:
    """Run the failed tests once more, one after the other; those that pass move to `passed` and are returned."""
    again, second = Job("again", tuple(name for name in totals.failed if "::" in name)), Totals()
    if not again.arguments:
        return []
    print("\nonce more, alone:", flush=True)
    second.read(again, report_of(again, folder), run(again, folder))
    alone = [name for name in again.arguments if name not in second.failed] if second.passed else []
    for name in alone:
        del totals.failed[name]
    totals.passed += len(alone)
    return alone


def test_id(case: ET.Element) -> str:
    """What pytest takes to run this test again: tests/cpu/test_x.py::Class::test_y[1]."""
    file, name = case.get("file"), case.get("name", "")
    if file is None:  # a file that could not be imported
        return name
    module = file.removesuffix(".py").replace("/", ".")
    classes = case.get("classname", "").removeprefix(module).strip(".").split(".")
    return "::".join(filter(None, [file, *classes, name]))


def say(totals: Totals, alone: Sequence[str], seconds: float, slowest: int) -> None:
    print()
    for time_s, name in sorted(totals.seconds, reverse=True)[:slowest]:
        print(f"{time_s:8.1f} s  {name}")
    for name in alone:
        print(f"PASSED ALONE {name}: it depends on the load, or on other tests")
    for name, why in totals.failed.items():
        print(f"FAILED {name}{f' - {why}' if why else ''}")
    print(f"tests took {seconds:.0f} s")
    print(totals.closing_line(), flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
