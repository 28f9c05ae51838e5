"""One job at a time in a run's folder: living owners are refused, dead ones taken over, however many come at once."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tilemesh.core.errors import RunError, UsageError
from tilemesh.runs import lock
from tilemesh.runs.lock import Owner, RunLock, process_start
from tilemesh.runs.names import LOCK

HOLD = (
    "import sys, time; from pathlib import Path; from tilemesh.runs.lock import RunLock\n"
    "with RunLock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
)


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.stdout.close()
    return process


def test_a_second_job_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        with pytest.raises(
            UsageError, match=rf"{tmp_path} is in use by process {os.getpid()} on .*since.*wait until it ends"
        ):
            RunLock(tmp_path).__enter__()
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path):
        pass


def test_a_lock_survives_its_owner_and_is_taken_over_after_a_kill(tmp_path: Path) -> None:
    process = holder(tmp_path)
    with pytest.raises(UsageError, match=f"process {process.pid} on"):
        RunLock(tmp_path).__enter__()
    process.send_signal(signal.SIGKILL)
    # Killed, and not even waited for yet: what is left of it holds nothing.
    while process_start(process.pid) is not None:
        time.sleep(0.01)
    assert (tmp_path / LOCK).exists()
    said: list[str] = []
    with RunLock(tmp_path, said.append):
        assert f"was left by process {process.pid} on" in said[0]
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    process.wait()


def test_a_process_number_that_was_given_again_is_another_process(tmp_path: Path) -> None:
    before = dataclasses.replace(Owner.me(), started="12")
    (tmp_path / LOCK).write_text(json.dumps(dataclasses.asdict(before)))
    with RunLock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["started"] != "12"


CUT_SHORT = '{\n "host": "node7",\n "scope'


@pytest.mark.parametrize("text", ["", "{", CUT_SHORT, CUT_SHORT + '": 1, "pid": "x"}', "\0"])
def test_from_another_machine_the_touches_decide(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock of another machine, and one that was cut short, are judged alike."""
    monkeypatch.setattr(lock, "_POLL_S", 0.01)
    elsewhere = dataclasses.replace(Owner.me(), host="node7", scope="another", pid=1 << 30)
    path = tmp_path / LOCK
    path.write_text(text or json.dumps(dataclasses.asdict(elsewhere)))
    said: list[str] = []

    def touch() -> None:
        while not said:
            time.sleep(0.001)
        os.utime(path)

    touching = threading.Thread(target=touch)
    touching.start()
    with pytest.raises(UsageError, match="is in use by"):
        RunLock(tmp_path, said.append).__enter__()
    touching.join()
    assert "cannot be looked up from here: waiting for at most 60 s" in said[0]
    monkeypatch.setattr(lock, "STALE_S", 0.05)
    with RunLock(tmp_path, said.append):
        assert "taken over" in said[-1]


@pytest.mark.parametrize("kind", ["[]", '{"pid": 7}', "somebody's own", "link", "folder", "pipe"])
def test_what_no_job_wrote_is_refused_however_old_it_is(tmp_path: Path, kind: str) -> None:
    path = tmp_path / LOCK
    if kind == "link":
        path.symlink_to("nowhere")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text(kind)
    os.utime(path, (1, 1), follow_symlinks=False)
    before = path.lstat().st_ino
    with pytest.raises(UsageError, match=f"{path} is no lock that tilemesh wrote: move it away, or name another"):
        RunLock(tmp_path).__enter__()
    assert path.lstat().st_ino == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_owner_touches_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    with RunLock(tmp_path):
        os.utime(tmp_path / LOCK, (1, 1))
        while (tmp_path / LOCK).stat().st_mtime == 1:
            time.sleep(0.001)


@pytest.mark.parametrize("has_flock", [True, False])
@pytest.mark.parametrize("is_stale", [False, True])
def test_of_hundreds_at_once_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_flock: bool, is_stale: bool
) -> None:
    """Also where a dead owner's lock is there to be taken over, and where the file system has no flock."""
    if not has_flock:
        monkeypatch.setattr(lock.fcntl, "flock", lambda descriptor, how: (_ for _ in ()).throw(OSError(95, "no")))
        monkeypatch.setattr(lock, "_SETTLE_S", 0.3)
    if is_stale:
        dead = dataclasses.replace(Owner.me(), started="12")
        (tmp_path / LOCK).write_text(json.dumps(dataclasses.asdict(dead)))
    jobs = 200
    together, decided, done = threading.Barrier(jobs), threading.Semaphore(0), threading.Event()
    holding: list[int] = []

    def job(number: int) -> None:
        together.wait()
        with contextlib.suppress(UsageError), RunLock(tmp_path):
            holding.append(number)
            decided.release()
            done.wait()
            return
        decided.release()

    threads = [threading.Thread(target=job, args=(number,)) for number in range(jobs)]
    for thread in threads:
        thread.start()
    for _ in range(jobs):
        decided.acquire()
    assert len(holding) == 1
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    done.set()
    for thread in threads:
        thread.join()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *arguments: object, **named: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RunError, match=r"lock.json cannot be written: No space left"):
        RunLock(tmp_path).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"lock.json cannot be written: No such file"):
        RunLock(tmp_path / "not there").__enter__()
