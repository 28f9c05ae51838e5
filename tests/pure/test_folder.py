"""Job folders: gone with the job, and gone after a launcher that could not clean up."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tilemesh.launch.folder import job_folder, sweep


def test_the_folder_is_gone_afterwards_also_after_an_error(tmp_path: Path) -> None:
    with job_folder(tmp_path) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text("x")
    assert not folder.exists()
    with pytest.raises(ValueError, match="no"), job_folder(tmp_path) as folder:
        raise ValueError("no")
    assert not folder.exists()


def test_a_live_jobs_folder_stays_and_a_dead_ones_goes(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tilemesh.launch.folder import job_folder\n"
        "with job_folder(Path(sys.argv[1])) as folder: print(folder, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert sweep(tmp_path) == []
    assert folder.exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert folder.exists()
    assert sweep(tmp_path) == [folder]
    assert not folder.exists()


def test_a_folder_that_has_no_lock_yet_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tilemesh-job-new").mkdir()
    assert sweep(tmp_path) == []
    assert (tmp_path / "tilemesh-job-new").exists()
