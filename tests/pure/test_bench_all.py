"""`tilemesh bench all`: jobs in the order of their worth, until the time is up, and where the last call was cut."""

from __future__ import annotations

import json
import shlex
import sys
import time

import pytest
import typer

from tilemesh.bench import all as bench_all
from tilemesh.bench.all import adopt_calibration, run_all
from tilemesh.bench.harness import Estimate, exactly, make_row
from tilemesh.bench.jobs import JOBS, NEEDS, BenchJob
from tilemesh.cli.main import main, make_app, redirected
from tilemesh.core import calibration
from tilemesh.core.calibration import Calibration
from tilemesh.core.errors import UsageError
from tilemesh.measure.machine import this_machine

# Writes a row of each name at once, and then sleeps.
PROGRAM = """import os, sys, time
name, seconds, code = sys.argv[1:4]
path = sys.argv[sys.argv.index("--json") + 1]
with open(path, "w") as file:
    file.write(os.environ["ROW"].replace("NAME", name) + "\\n")
with open(os.environ["SEEN"], "a") as seen:
    seen.write(name + " " + os.environ.get("XDG_CACHE_HOME", "")[-20:] + "\\n")
if code != "0":
    print("this went wrong")
time.sleep(float(seconds))
sys.exit(int(code))
"""


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """Makes a table of jobs whose commands are `NAME SECONDS EXIT_CODE`; what ran is in `seen`."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    row = make_row("NAME", {}, exactly(1.0), predicted=Estimate(1.0), limit=Estimate(1.0), no_peers="none")
    monkeypatch.setenv("ROW", row.to_json())
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setattr(bench_all, "PROGRAM", (sys.executable, str(script)))
    monkeypatch.setattr(bench_all, "adopt_calibration", lambda results, say: None)

    def make(*made):
        table = {job.name: job for job in made}
        monkeypatch.setattr(bench_all, "JOBS", table)

    make.seen = lambda: [line.split()[0] for line in (tmp_path / "seen").read_text().splitlines()]
    return make


def test_ranks_of_a_job_that_is_kept_to_two_cores_share_these(monkeypatch, tmp_path):
    """A number of threads in the environment is each rank's: two of two ranks were four on two cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "OMP_NUM_THREADS" not in bench_all._environment(JOBS["layouts"], tmp_path, is_new=True)


def test_rows_of_what_ran_are_kept_and_the_next_call_goes_on_where_it_was_cut(jobs, tmp_path):
    jobs(
        BenchJob("first", 0.1, ("one 0 0", "slow 60 0", "three 0 0")),
        BenchJob("broken", 0.1, ("broken 0 1",)),
        BenchJob("long", 1e4, ("long 0 0",)),
        BenchJob("elsewhere", 0.1, ("elsewhere 0 0",), needs=("gpu",)),
    )
    began = time.monotonic()
    found = run_all(tmp_path / "out", 3.0)
    assert time.monotonic() - began < 12
    assert jobs.seen() == ["one", "slow"]
    assert (found.states["first"].commands, found.left["first"][:10]) == (1, "it was cut")
    assert run_all(tmp_path / "out", 2.0, ["first"]).left["first"].startswith("it takes about")  # 2 s were too few
    assert [row.name for row in found.rows] == ["one", "slow"]  # of the one that was cut as well
    jobs(
        BenchJob("first", 0.1, ("one 0 0", "slow 0 0", "three 0 0")),
        BenchJob("broken", 0.1, ("broken 0 1",)),
        BenchJob("long", 1e4, ("long 0 0",)),
        BenchJob("elsewhere", 0.1, ("elsewhere 0 0",), needs=("gpu",)),
    )
    found = run_all(tmp_path / "out", 60.0)
    assert jobs.seen()[2:] == ["slow", "three", "broken"]
    assert found.states["broken"].failure == "this went wrong"
    assert found.left["long"].startswith("it takes about 10000 s")
    assert ("elsewhere" in found.left) != NEEDS["gpu"][0]()
    assert [row.name for row in found.rows[:4]] == ["one", "slow", "three", "broken"]
    kept = json.loads((tmp_path / "out" / "jobs.json").read_text())
    assert (kept["first"]["commands"], kept["broken"]["commands"]) == (3, 1)
    run_all(tmp_path / "out", 60.0)
    assert jobs.seen().count("broken") == 1
    run_all(tmp_path / "out", 60.0, ["broken"])  # a failed one that is named runs again
    assert jobs.seen().count("broken") == 2


def test_what_a_cut_attempt_wrote_goes_and_what_a_command_reads_stays(jobs, tmp_path):
    jobs(BenchJob("job", 0.1, ("one 0 0 {out}/start --out {out}/written",)))
    for name in ("start", "written"):
        (tmp_path / "out" / "job" / name).mkdir(parents=True)
    (tmp_path / "out" / "jobs.json").write_text("{}")
    run_all(tmp_path / "out", 20)
    assert [(tmp_path / "out" / "job" / name).exists() for name in ("start", "written")] == [True, False]


def test_jobs_that_compile_run_side_by_side_and_caches_are_the_jobs_own(jobs, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_all, "READY_S", 0.0)
    monkeypatch.setattr(bench_all, "available_cores", lambda: 4)
    jobs(*(BenchJob(name, 0.1, (f"{name} 2 0",), compiles=True, caches="empty") for name in ("a", "b", "c", "d")))
    began = time.monotonic()
    found = run_all(tmp_path / "out", 60.0)
    assert time.monotonic() - began < 7  # one after the other would be 8 s
    assert sorted(jobs.seen()) == ["a", "b", "c", "d"]
    assert [row.name for row in found.rows] == ["a", "b", "c", "d"]
    assert "out/a/caches" in (tmp_path / "seen").read_text()


def test_a_folder_of_something_else_is_refused(jobs, tmp_path):
    jobs()
    (tmp_path / "jobs.json").write_text('["nothing of ours"]')
    with pytest.raises(UsageError, match="was not written by `bench all`"):
        run_all(tmp_path, 1.0)
    with pytest.raises(UsageError, match="seconds is 0"):
        run_all(tmp_path, 0.0)


def test_a_bare_machine_takes_the_calibration_that_the_repository_has_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    results, machine = tmp_path / "results", this_machine()
    for name, identity in (("other", "another machine"), ("this", machine.id)):
        known = Calibration(identity, "words", "2026-01-01T00:00:00+00:00")
        known.save(results / f"calibration-{name}.json")
    said = []
    adopt_calibration(results, said.append)
    assert calibration.find(machine.id) is not None
    assert said == ["calibrated as in calibration-this.json"]
    adopt_calibration(results, said.append)
    assert len(said) == 1  # what is there stays


def test_every_command_of_a_job_is_one_that_tilemesh_takes(tmp_path):
    app = typer.main.get_command(make_app())
    compiling = {command: job.compiles for job in JOBS.values() for command in job.commands}
    for command, compiles in compiling.items():
        node, words = app, redirected(shlex.split(command.format(out=tmp_path)))
        while hasattr(node, "commands"):
            node, words = node.commands[words[0]], words[1:]
        taken = {flag for parameter in node.params for flag in parameter.opts}
        assert "--json" in taken
        assert "--turn" in taken or not compiles
        node.make_context(command, words)


def test_what_would_run_here_can_be_asked(capsys, tmp_path):
    assert main(["bench", "all", "--out", str(tmp_path / "out"), "--jobs", "studies,train_gpt2", "--list"]) == 0
    printed = capsys.readouterr().out
    assert "studies" in printed
    assert "train_gpt2" in printed
    assert not (tmp_path / "out").exists()
