"""Job folders: gone with the job, and gone after a launcher that could not clean up."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tilemesh.launch.folder import is_leaving, job_folder, sweep


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


def test_a_sweep_in_the_middle_of_a_start_leaves_the_new_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another launcher looks just before the lock is taken, and again just after."""
    lock = fcntl.flock
    swept: list[list[Path]] = []

    def looked_at(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        swept.append(sweep(tmp_path))
        lock(descriptor, operation)
        swept.append(sweep(tmp_path))

    monkeypatch.setattr(fcntl, "flock", looked_at)
    with job_folder(tmp_path) as folder:
        assert (folder / "lock").exists()
        assert sweep(tmp_path) == []
    assert swept == [[], []]


def test_a_sweep_that_locks_what_its_owner_has_just_removed_takes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening a lock and holding it the owner ends, and the same name is another launcher's."""
    folder = tmp_path / "tilemesh-job-again"
    folder.mkdir()
    (folder / "lock").touch()
    lock = fcntl.flock

    def replaced(descriptor: int, operation: int) -> None:
        (folder / "lock").unlink()
        (folder / "lock").touch()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", replaced)
    assert sweep(tmp_path) == []
    assert folder.exists()


def test_hundreds_of_starts_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each thread is a launcher: a lock belongs to a descriptor, so threads keep one another out as processes do."""
    starts, launchers = 25, 16
    together = threading.Barrier(launchers)
    failed: list[BaseException] = []

    def launch_often() -> None:
        together.wait()
        try:
            for _ in range(starts):
                with job_folder(tmp_path) as folder:
                    (folder / "board").write_bytes(b"x")
                    assert (folder / "board").read_bytes() == b"x"
        except (OSError, AssertionError) as error:
            failed.append(error)

    threads = [threading.Thread(target=launch_often) for _ in range(launchers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert list(tmp_path.iterdir()) == []


def test_what_was_killed_before_it_had_its_lock_goes_when_it_is_old(tmp_path: Path) -> None:
    new = tmp_path / ".tilemesh-new-x"
    new.mkdir()
    assert sweep(tmp_path) == []
    os.utime(new, (1, 1))
    assert sweep(tmp_path) == [new]
    assert not new.exists()


def test_a_process_that_is_being_ended_and_has_not_gone_yet(tmp_path: Path) -> None:
    """Lines of /proc/PID/stat: a name may have spaces and brackets, the seventh field after it has the flags."""
    for pid, (state, flags) in enumerate([("D", 0x4), ("R", 0x400104), ("S", 0x400100), ("Z", 0x40C)]):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (python (rank) 3) {state} 1 1 1 0 -1 {flags} 0 0 0 0\n")
    assert [is_leaving(pid, tmp_path) for pid in range(5)] == [True, True, False, False, False]
    assert not is_leaving(os.getpid())
