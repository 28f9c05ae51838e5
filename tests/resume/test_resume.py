"""Resume is a function of the checkpoint: a sample of its cases in `make test`, all of them in `make test-all`.

A run that is stopped anywhere, or killed, and goes on comes to the checkpoint of the run that nobody stopped, bit for
bit: weights, optimizer states, metrics and sample. What a case is: `resume_cases.py`. A failure prints the line that
repeats it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from resume_cases import AXES, PLAIN, all_pairs, cover, furnish, is_trained, named, of_name, pairs_of
from resume_check import why_wrong
from resume_kills import RUNS
from resume_run import LEAST

from tilemesh.core.cores import available_cores

SAMPLE = (
    {"method": "powersgd", "optimizer": "sgd", "data": "chat", "stop": "3"},
    {"layout": "pipemare", "optimizer": "lion", "stop": "2-5"},
    {"method": "asp", "data": "padded", "stop": "killed"},
)


def check(name: str, place: Path) -> None:
    why = why_wrong(of_name(name), place)
    assert not why, f"{why}; repeat it with: python tests/resume/resume_run.py '{name}'"


@pytest.mark.parametrize("values", SAMPLE, ids=lambda values: " ".join(values.values()))
def test_a_sample(values: dict[str, str], tmp_path: Path) -> None:
    check(named(PLAIN | values), tmp_path)


def test_the_cover_has_every_value() -> None:
    cases = [of_name(name) for name in cover()]
    assert len(set(cover())) == len(cases) >= LEAST
    assert {axis: {case[axis] for case in cases} for axis in AXES} == {axis: set(AXES[axis]) for axis in AXES}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_cover_has_every_pair_that_trains(tmp_path: Path) -> None:
    furnish(tmp_path)
    covered = set().union(*(pairs_of(of_name(name)) for name in cover()))
    for pair in all_pairs():
        assert pair in covered or not is_trained(PLAIN | dict(pair), tmp_path), sorted(pair)


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_all() -> None:
    """As many at a time as there are cores."""
    script = Path(__file__).parent / "resume_run.py"
    command = [sys.executable, str(script), "--all", "-n", str(available_cores())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"{len(cover())} cases, 0 failed" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", RUNS)
def test_all_ranks_killed_at_many_moments(name: str) -> None:
    """By a process that forks, which this one, full of threads, must not."""
    command = [sys.executable, str(Path(__file__).parent / "resume_kills.py"), name, "--moments", "30"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
