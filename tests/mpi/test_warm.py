"""A process that starts warm (`warm.py`) is one that starts afresh, but for what it has imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from started import is_running, wait_until
from warm import CAN_FORK, warm_start

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="processes start afresh here: no Linux, or a GPU")

TELLS = """
import os, sys
print(sys.argv, os.getcwd(), os.environ["WORD"], sorted(os.sched_getaffinity(0)), sys.stdin.read())
print([name for name in map(os.path.realpath, os.scandir("/proc/self/fd")) if "socket" in name])  # none of the server's
print("to the other", file=sys.stderr)
sys.exit(7)
"""
WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"


def python() -> str:
    with warm_start():
        return sys.executable


def test_it_has_the_arguments_streams_and_surroundings_and_its_code_comes_back(tmp_path: Path) -> None:
    environ = {**os.environ, "WORD": "a word"}
    (tmp_path / "script.py").write_text(TELLS)
    for how in (["-c", TELLS], ["script.py"], ["-m", "script"]):
        ended = [
            subprocess.run(
                [program, *how, "one", "two"], cwd=tmp_path, env=environ, input="text", capture_output=True, text=True
            )
            for program in (sys.executable, python())
        ]
        assert ended[0].returncode == ended[1].returncode == 7
        assert ended[0].stdout == ended[1].stdout
        assert ended[0].stderr == ended[1].stderr == "to the other\n"


def test_a_death_by_a_signal_is_seen_as_such() -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        words = f"import os; os.kill(os.getpid(), {int(number)})"
        assert subprocess.run([python(), "-c", words], check=False).returncode == -number


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_whoever_signals_it_reaches_the_fork(number: signal.Signals) -> None:
    # As from a terminal: tests may run in a shell's background, whose processes ignore Ctrl-C.
    line = ["env", "--default-signal=INT", python(), "-c", WAITS]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        assert fork != process.pid
        process.send_signal(number)
        assert process.wait(60) == -number
        wait_until(lambda: not is_running(fork))


def test_torch_is_there_and_mpi_is_not() -> None:
    words = "import sys; print('torch' in sys.modules, 'mpi4py.MPI' in sys.modules)"
    assert subprocess.run([python(), "-c", words], capture_output=True, text=True).stdout == "True False\n"
