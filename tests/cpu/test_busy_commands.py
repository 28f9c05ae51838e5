"""`tilemesh calibrate` and `bench collective --fit` on a machine that is busy for real: processes of this test spin.

Only what is measured is stood in for (it waits a moment); what the kernel counts, what is made of it, the warnings, the
repetition and what is stored are as in a user's run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tilemesh.bench.collective import run as collective
from tilemesh.cli.commands.bench.collective import CollectiveOptions, fit_machine
from tilemesh.cli.main import make_app
from tilemesh.comm.runtime.fit import Curve, Fit
from tilemesh.core.busy import Busyness
from tilemesh.core.calibration import Calibration, find
from tilemesh.core.cores import visible_cores
from tilemesh.measure import busy
from tilemesh.measure import calibrate as measuring
from tilemesh.measure.busy import OtherWork, again_while_busy
from tilemesh.measure.calibrate import Calibrated
from tilemesh.measure.machine import this_machine

MEASURING_S = 0.25  # some dozens of the kernel's ticks
QUIET = Busyness(0.0, 0.0)


@pytest.fixture
def load() -> Iterator[None]:
    """Something else runs on every core."""
    spinning = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in visible_cores()]
    time.sleep(0.1)
    others = OtherWork()
    time.sleep(MEASURING_S)
    try:
        if others.busyness().others is None:
            pytest.skip("this kernel does not tell what the cores do")
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@pytest.fixture(autouse=True)
def own_cache_and_no_pauses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    impatient = partial(again_while_busy, sleep=lambda seconds: None)
    monkeypatch.setattr(busy, "again_while_busy", impatient)
    monkeypatch.setattr(collective, "again_while_busy", impatient)


def calibration(when: str) -> Calibration:
    machine = this_machine()
    return Calibration(machine.id, machine.words, when)


def calibrated(monkeypatch: pytest.MonkeyPatch, when: str) -> tuple[str, Busyness | None]:
    """What the command says, and what is stored to be known of the machine's other work."""

    def measured(**_: Any) -> Calibrated:
        time.sleep(MEASURING_S)
        return Calibrated((), calibration(when))

    monkeypatch.setattr(measuring, "calibrate", measured)
    result = CliRunner().invoke(make_app(["calibrate"]), ["calibrate", "--quick"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = find(this_machine().id)
    assert found is not None
    return result.output, Busyness.from_dict(found.extra["busy"])


@pytest.mark.usefixtures("load")
def test_a_calibration_under_load_is_repeated_marked_and_never_replaces_a_quiet_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, stored = calibrated(monkeypatch, "under load")
    assert said.count("warning: this machine is busy (other work used ") == 2, said
    assert "warning: measured on a busy machine (other work used " in said
    assert stored is not None
    assert stored.is_busy
    calibration("a quiet night").with_section("busy", QUIET.to_dict()).save()
    said, stored = calibrated(monkeypatch, "under load again")
    kept = "not stored: the calibration of a quiet night was measured on a quieter machine, and stays"
    assert kept in " ".join(said.split())
    assert stored == QUIET


@pytest.mark.usefixtures("load")
def test_so_is_a_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fit = Fit("mpi", 2, 2, 1e-6, {"all_reduce/native": Curve(((1024, 5e-6),))}, when="now")

    def in_ranks(*_: Any) -> list[str]:
        time.sleep(MEASURING_S)
        return [json.dumps(fit.to_dict())]

    monkeypatch.setattr(collective, "_in_ranks", in_ranks)
    for is_kept in (True, False):
        fit_machine(CollectiveOptions(sizes="1KiB", transport="mpi", quick=True), "2")
        said = capsys.readouterr().err
        assert said.count("warning: this machine is busy (other work used ") == 2, said
        assert "warning: measured on a busy machine (other work used " in said
        found = find(this_machine().id)
        assert found is not None
        ((key, stored),) = found.extra["collectives"].items()
        busyness = Busyness.from_dict(stored["busy"])
        assert busyness is not None
        assert busyness.is_busy == is_kept
        assert ("was measured on a quieter machine, and stays" in said) != is_kept
        quiet = stored | {"busy": QUIET.to_dict(), "when": "a quiet night"}
        found.with_section("collectives", {key: quiet}).save()
