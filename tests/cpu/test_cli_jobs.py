"""How commands end with a job: its page, what was lost, and how to go on with one that was stopped or failed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tilemesh.cli.jobs import run_job
from tilemesh.launch.rank import INTERRUPTED_CODE
from tilemesh.train.progress import Shown
from tilemesh.train.result import RanksFailedError, Result, WeightsLostError


def result(folder: Path, by_signal: str = "") -> Result:
    return Result(folder, 6, 1.5, None, interrupted=False, by_signal=by_signal, saved_step=2, saved_in=folder)


def test_weights_that_are_lost_are_a_line_and_the_run_is_shown(tmp_path: Path) -> None:
    def fit(shown: Shown) -> Result:
        raise WeightsLostError(result(tmp_path))

    ended = run_job(fit, "align", Console(file=io.StringIO()))
    assert not isinstance(ended, int)
    assert ended[0].step == 6
    assert ended[1].startswith("no page: ")
    assert ended[2].startswith("the weights of step 6 could not be saved: step 2 is safe")


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_job_that_ends_early_says_how_to_go_on(
    tmp_path: Path, is_interrupted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(shown: Shown) -> Result:
        raise RanksFailedError("rank 1 died", tmp_path, is_interrupted)

    for name in ("newest_whole_checkpoint", "newest_checkpoint"):
        monkeypatch.setattr(f"tilemesh.runs.folder.{name}", lambda folder: 4)
    printed = io.StringIO()
    assert run_job(fit, "align", Console(file=printed, width=400)) == (INTERRUPTED_CODE if is_interrupted else 1)
    said = capsys.readouterr().err
    assert said.startswith("tilemesh: rank 1 died")
    assert f"align --resume {tmp_path}" in (said if is_interrupted else printed.getvalue())
    assert ("checkpoint of step 4" if is_interrupted else "checkpoint is of step 4") in said + printed.getvalue()


def test_a_signal_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_job(lambda shown: result(tmp_path, by_signal="stopped by SIGTERM"), "train", Console(file=io.StringIO()))
    assert code == INTERRUPTED_CODE
    assert capsys.readouterr().err == "tilemesh: stopped by SIGTERM; there was no checkpoint yet\n"
