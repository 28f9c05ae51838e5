"""Ranks and commands that start as forks of one process that has imported torch, which takes a fresh one 3 s.

A test asks for the fixture `warm`: `sys.executable`, by which the launcher and tests start Python, is then a client
(`warm_client.py`) of a server (`warm_server.py`), and a process so started runs, is signalled and ends as a fresh one
does. What is about starting itself stays fresh: the launcher's tests, `doctor`, what a process imports or remembers.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tilemesh.launch.start import source_path

HERE = Path(__file__).parent
CAN_FORK = sys.platform == "linux" and shutil.which("nvidia-smi") is None  # a fork cannot use CUDA that was looked at


@contextlib.contextmanager
def warm_start() -> Iterator[None]:
    """What is started by `sys.executable` in here has torch imported already, where it can."""
    fresh = sys.executable
    sys.executable = warm_python() if CAN_FORK else fresh
    try:
        yield
    finally:
        sys.executable = fresh


@functools.cache
def warm_python() -> str:
    """The path of a program to start instead of Python; one server serves all workers of pytest, and ends with it."""
    pytest = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    began = Path(f"/proc/{pytest}/stat").read_text().rpartition(")")[2].split()[19]  # numbers come again
    folder = Path(tempfile.gettempdir(), f"tilemesh-warm-{pytest}-{began}")
    folder.mkdir(mode=0o700, exist_ok=True)
    address, program = folder / "socket", folder / "python"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            client = [sys.executable, "-IS", str(HERE / "warm_client.py"), str(address)]
            program.write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
            program.chmod(0o700)
            line = [sys.executable, str(HERE / "warm_server.py"), str(address), str(program), str(pytest)]
            environ = dict(os.environ) | source_path(os.environ)
            server = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environ, start_new_session=True
            )
            while not address.exists():
                assert server.poll() is None, "the server of warm processes did not start"
                time.sleep(0.02)
    return str(program)
