"""Change the source in small ways, one at a time, and see whether a test notices: `make mutants`.

1. A seeded sample of mutants (mutate.py). 2. A map from each test to the lines it reaches (reach.py), one test file per
process, kept in --folder until the source or the test file changes. 3. For each mutant, in a copy of the checkout, the
tests that reach its line, quickest first, until one fails twice; a line that runs at import counts as reached where the
name it sets is used. Results are JSON lines that a later call continues; survivors.json says of each survivor why.

    python3 tests/mutants/mutants_run.py -n 16 --seconds 560    # from source; again until nothing is left to run
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mutate
import reach
from mutate import Mutant

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tilemesh"
HERE = Path(__file__).parent
SURVIVORS = HERE / "survivors.json"
NOT_RUN = ("tests/fuzz/", "tests/gpu/", "tests/mutants/", "tests/cpu/test_setup.py", "tests/cpu/test_test_script.py")
LEAST_KILLED = 0.85
MANY = 8  # parameters of a test that are run first
FIRST_S, MOST_S = 15.0, 150.0  # a mutant's first tests, and all: seconds that they took without it
SLACK, START_S = 8.0, 90.0  # neighbours and a slower program: a run times out after START_S + SLACK times its seconds
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "CI": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}


@dataclass(frozen=True)
class Reach:
    """One test: how long it takes, and the lines that it reaches by file, as bits of a number."""

    test: str
    seconds: float
    lines: dict[str, int]

    def includes(self, path: str, line: int) -> bool:
        return bool(self.lines.get(path, 0) >> line & 1)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    mutants = chosen_mutants(options)
    if options.list:
        print(*(mutant.name for mutant in mutants), sep="\n")
        return 0
    tests = reached(options, end)
    done = results(options.results)
    left = [mutant for mutant in mutants if mutant.name not in done]
    print(f"{len(mutants)} mutants, {len(left)} to run; {len(tests)} tests pass without one", flush=True)
    judge_all(left, tests, options, end)
    return summary(mutants, results(options.results))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Change the source in small ways and see whether a test notices.")
    parser.add_argument("names", nargs="*", help="parts of names: of all mutants those with one, sampled or not")
    parser.add_argument("-n", type=int, default=2, help="processes at a time")
    parser.add_argument("--number", type=int, default=200, help="mutants in the sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", default="1/1", metavar="I/N", help="every N-th mutant, beginning with the I-th")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after these; a later call goes on")
    parser.add_argument("--folder", type=Path, default=ROOT / ".pytest_cache" / "mutants", help="of map and results")
    parser.add_argument("--results", type=Path, help="JSON lines; results.jsonl in --folder if not given")
    parser.add_argument("--tests", nargs="*", default=[], help="only test files with one of these in their path")
    parser.add_argument("--list", action="store_true", help="name the mutants and run nothing")
    options = parser.parse_args(argv)
    options.results = options.results or options.folder / "results.jsonl"
    return options


def chosen_mutants(options: argparse.Namespace) -> list[Mutant]:
    mutants = mutate.all_mutants(SOURCE)
    if options.names:
        chosen = [mutant for mutant in mutants if any(part in mutant.name for part in options.names)]
    else:
        chosen = mutate.sample(mutants, options.number, options.seed)
    place, shares = map(int, options.share.split("/"))
    return chosen[place - 1 :: shares]


# Which test reaches what ----------------------------------------------------------------------------------------------


def reached(options: argparse.Namespace, end: float) -> list[Reach]:
    """Of every test that passes; made for the files whose map is missing or old."""
    script, checkout = test_script(), fresh_copy(options.folder / "clean")
    shared = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    source = digest(sorted([*SOURCE.rglob("*.py"), *shared]))
    wanted = argparse.Namespace(all=False, n=options.n, parts=["units", "ranks"])
    every: list[Path] = []
    for jobs, at_once in script.file_jobs(wanted):
        names = [job.name for job in jobs if not job.name.startswith(NOT_RUN)]
        names = [name for name in names if not options.tests or any(part in name for part in options.tests)]
        paths = {name: map_path(options.folder, name, source) for name in names}
        every += paths.values()
        with ThreadPoolExecutor(at_once) as pool:
            missing = [name for name in names if not paths[name].exists()]
            list(pool.map(lambda name: make_map(name, paths[name], checkout, script, end), missing))  # noqa: B023
    shutil.rmtree(checkout)
    if lacking := [path.name for path in every if not path.exists()]:
        print(f"no time was left for the maps of {len(lacking)} test files: call again")
        sys.exit(3)
    return [test for path in every for test in read_map(path)]


def test_script() -> ModuleType:
    """scripts/test.py: which files there are, how pytest is called here."""
    spec = importlib.util.spec_from_file_location("test_script", ROOT / "scripts" / "test.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    return script


def digest(paths: Iterable[Path]) -> str:
    code = hashlib.sha256()
    for path in paths:
        code.update(path.read_bytes())
    return code.hexdigest()[:16]


def map_path(folder: Path, name: str, source: str) -> Path:
    return folder / "maps" / f"{name.replace('/', '_')}.{source}.{digest([ROOT / name])}.json"


def make_map(name: str, path: Path, checkout: Path, script: ModuleType, end: float) -> None:
    """Run one test file and write what its tests reached; where it cannot end in time, nothing."""
    if time.monotonic() > end:
        return
    raw = path.with_suffix(".raw")
    shutil.rmtree(raw, ignore_errors=True)
    raw.mkdir(parents=True)
    record = {reach.FOLDER: str(raw), reach.SOURCE: f"{checkout / 'src' / 'tilemesh'}{os.sep}", reach.CONTEXT: ""}
    began = time.monotonic()
    code = pytest_run(script, checkout, [name], raw / "report.xml", record, end - time.monotonic())
    if code is not None:
        keeps_ranks = name.startswith("tests/mpi/") or "ranks_of(" in (ROOT / name).read_text()
        kept = compact(raw, keeps_ranks)
        path.write_text(json.dumps(kept))
        trouble = "" if code in (0, 1, script.NO_TESTS) else f"; pytest ended with code {code}"
        print(f"{time.monotonic() - began:6.0f} s  {len(kept):5} tests  {name}{trouble}", flush=True)
    shutil.rmtree(raw)


def compact(raw: Path, keeps_ranks: bool) -> list[dict[str, Any]]:
    """From the records of all processes: the tests that pass, each with its own lines and those of its fixtures.

    Ranks that are kept from test to test record for the one that started them: theirs are the lines of all.
    """
    by_context: dict[str, dict[str, set[int]]] = {}
    tests: list[dict[str, Any]] = []
    for file in sorted(raw.glob("*.jsonl")):
        for record in map(json.loads, file.read_text().splitlines()):
            if "test" in record:
                tests.append(record)
                continue
            context = "children" if record["child"] and keeps_ranks else record["context"]
            for path, numbers in record["lines"].items():
                by_context.setdefault(context, {}).setdefault(path, set()).update(numbers)
    kept = []
    for test in tests:
        if test["outcome"] == "passed":
            lines: dict[str, set[int]] = {}
            for context in (test["test"], "children", *test["fixtures"]):
                for path, numbers in by_context.get(context, {}).items():
                    lines.setdefault(path, set()).update(numbers)
            bits = {path: f"{sum(1 << number for number in numbers):x}" for path, numbers in lines.items()}
            kept.append({"test": test["test"], "seconds": test["seconds"], "lines": bits})
    return kept


def read_map(path: Path) -> list[Reach]:
    return [
        Reach(test["test"], test["seconds"], {file: int(bits, 16) for file, bits in test["lines"].items()})
        for test in json.loads(path.read_text())
    ]


# One mutant -----------------------------------------------------------------------------------------------------------


def judge_all(mutants: Sequence[Mutant], tests: Sequence[Reach], options: argparse.Namespace, end: float) -> None:
    script, uses = test_script(), uses_of_names()
    texts = {name: (ROOT / name).read_text() for name in {test.test.partition("::")[0] for test in tests}}
    copies: queue.Queue[Path] = queue.Queue()
    for number in range(min(options.n, len(mutants))):
        copies.put(fresh_copy(options.folder / f"copy{number}"))

    def judged(mutant: Mutant) -> None:
        if time.monotonic() > end:
            return
        checkout = copies.get()
        began = time.monotonic()
        verdict = judge(mutant, reaching(mutant, tests, uses, texts), checkout, script, end)
        copies.put(checkout)
        if verdict is not None:
            result = {"name": mutant.name, **verdict, "seconds": round(time.monotonic() - began, 1)}
            with options.results.open("a") as file:
                file.write(json.dumps(result | {"mutant": asdict(mutant)}) + "\n")
            print(f"{verdict['verdict']:>9} {result['seconds']:6.1f} s  {mutant.name[:150]}", flush=True)

    with ThreadPoolExecutor(options.n) as pool:
        list(pool.map(judged, mutants))
    while not copies.empty():
        shutil.rmtree(copies.get())


def fresh_copy(folder: Path) -> Path:
    """The checkout without what it has made itself, which lies at its top."""
    shutil.rmtree(folder, ignore_errors=True)
    made = {".git", ".venv", ".hypothesis", "build", "dist", "runs", "site"} | {
        path.name for path in ROOT.glob(".*_cache")
    }

    def left_out(inside: str, names: list[str]) -> set[str]:
        return made & set(names) if Path(inside) == ROOT else set()

    return Path(shutil.copytree(ROOT, folder, ignore=left_out, symlinks=True))


def uses_of_names() -> dict[str, list[tuple[str, int]]]:
    """Where in the source, inside functions, each name is read: as a name, an attribute or an argument."""
    uses: dict[str, list[tuple[str, int]]] = {}
    for path in SOURCE.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for node in ast.walk(function):
                    name = getattr(node, "id", None) or getattr(node, "attr", None)
                    if isinstance(node, (ast.Name, ast.Attribute)) and name:
                        uses.setdefault(name, []).append((str(path.relative_to(SOURCE)), node.lineno))
    return uses


def reaching(
    mutant: Mutant, tests: Sequence[Reach], uses: dict[str, list[tuple[str, int]]], texts: dict[str, str]
) -> list[Reach]:
    """Tests that reach it: those that name its module first, then the quickest; the rest of many parameters last."""
    places = [(mutant.path, line) for line in range(mutant.line, mutant.last_line + 1)]
    if mutant.uses is not None:
        places = uses.get(mutant.uses, [])
    module = "tilemesh." + mutant.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    seen: dict[str, int] = {}
    keyed = []
    for test in tests:
        if any(test.includes(path, line) for path, line in places):
            function = test.test.partition("[")[0]
            seen[function] = seen.get(function, 0) + 1
            names_it = module in texts[test.test.partition("::")[0]]
            keyed.append(((seen[function] > MANY, not names_it, test.seconds), test))
    return [test for _, test in sorted(keyed, key=lambda pair: (pair[0], pair[1].test))]


def judge(
    mutant: Mutant, tests: Sequence[Reach], checkout: Path, script: ModuleType, end: float
) -> dict[str, Any] | None:
    """killed (by which test), survived, timed out, or unreached; None where the time was up before."""
    if not tests:
        return {"verdict": "unreached", "tests": 0}
    path = checkout / "src" / "tilemesh" / mutant.path
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink()
    text = path.read_text()
    path.write_text(mutate.mutated(text, mutant))
    try:
        ran = 0
        for batch in batches(tests):
            failed, is_late = run_tests(batch, checkout, script, end)
            if time.monotonic() >= end - 1:  # whatever it says, it may have been cut short
                return None
            if is_late:
                return {"verdict": "timed out", "tests": ran + len(batch)}
            if failed is not None:
                again, _ = run_tests([test for test in batch if test.test == failed[0]] or batch, checkout, script, end)
                if again is not None:
                    return {"verdict": "killed", "tests": ran + len(batch), "by": failed[0], "why": failed[1]}
                if time.monotonic() >= end - 1:
                    return None
            ran += len(batch)
        return {"verdict": "survived", "tests": ran, "of": len(tests)}
    finally:
        path.write_text(text)


def batches(tests: Sequence[Reach]) -> list[list[Reach]]:
    """The first that take FIRST_S together, then what else fits into MOST_S; files together, as fixtures want it."""
    parts: list[list[Reach]] = [[], []]
    total = 0.0
    for test in tests:
        total += test.seconds
        if total > MOST_S and parts[0]:
            break
        parts[total > FIRST_S and bool(parts[0])].append(test)
    for part in parts:
        first = {test.test.partition("::")[0]: place for place, test in reversed(list(enumerate(part)))}
        part.sort(key=lambda test: first[test.test.partition("::")[0]])
    return [part for part in parts if part]


def run_tests(
    tests: Sequence[Reach], checkout: Path, script: ModuleType, end: float
) -> tuple[tuple[str, str] | None, bool]:
    """The first test that failed and why, if one did; and whether the run took too long."""
    chosen = checkout / "chosen.json"
    chosen.with_suffix(".failed").unlink(missing_ok=True)
    chosen.write_text(json.dumps([test.test for test in tests]))
    files = list(dict.fromkeys(test.test.partition("::")[0] for test in tests))
    limit_s = START_S + SLACK * sum(test.seconds for test in tests)
    extra = {reach.CHOSEN: str(chosen), "PYTHONDONTWRITEBYTECODE": "1"}
    seconds = min(limit_s, end - time.monotonic())
    code = pytest_run(script, checkout, ["-x", *files], checkout / "report.xml", extra, seconds)
    if code is None:
        return None, True
    if code == 0:
        return None, False
    if chosen.with_suffix(".failed").exists():
        test, why = json.loads(chosen.with_suffix(".failed").read_text())
        return (test, why), False
    return ("collection", f"pytest ended with code {code}"), False


def pytest_run(
    script: ModuleType, checkout: Path, arguments: Sequence[str], report: Path, extra: dict[str, str], seconds: float
) -> int | None:
    """Its exit code, or None where it was ended after these seconds, with all that it had started."""
    job = script.Job(report.stem, tuple(arguments))
    line = [*script.command(job, report.parent), "-q", "-p", "no:cacheprovider", "-p", "reach"]
    path = os.pathsep.join([str(checkout / "src"), str(HERE), os.environ.get("PYTHONPATH", "")])
    environ = os.environ | ENVIRONMENT | extra | {"PYTHONPATH": path}
    with report.with_suffix(".txt").open("wb") as log:
        child = subprocess.Popen(line, cwd=checkout, env=environ, stdout=log, stderr=subprocess.STDOUT, process_group=0)
        try:
            return child.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return None


# What came of it ------------------------------------------------------------------------------------------------------


def results(path: Path) -> dict[str, dict[str, Any]]:
    """By the mutant's name; the last of several counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def summary(mutants: Sequence[Mutant], done: dict[str, dict[str, Any]]) -> int:
    """Print counts and survivors; 0 where enough were killed and every survivor has its reason."""
    verdicts = [str(done[mutant.name]["verdict"]) for mutant in mutants if mutant.name in done]
    reasons: dict[str, str] = json.loads(SURVIVORS.read_text())
    alive = [m.name for m in mutants if m.name in done and done[m.name]["verdict"] in ("survived", "unreached")]
    for name in alive:
        print(f"{done[name]['verdict']}: {name}\n    {reasons.get(name, 'NO REASON GIVEN in survivors.json')}")
    counts = {verdict: verdicts.count(verdict) for verdict in ("killed", "timed out", "survived", "unreached")}
    noticed = counts["killed"] + counts["timed out"]
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()), end="; ")
    print(f"{len(mutants) - len(verdicts)} to run; {noticed / max(1, len(verdicts)):.1%} noticed", flush=True)
    is_enough = noticed >= LEAST_KILLED * len(verdicts) and all(name in reasons for name in alive)
    return 3 if len(verdicts) < len(mutants) else int(not is_enough)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
