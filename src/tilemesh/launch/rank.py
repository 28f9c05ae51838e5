"""The rank's side of the launcher: `python -m tilemesh.launch.rank -- script.py args…`.

It connects this process's output to the launcher, keeps its record on the board, pins it to its cores,
runs the script, and makes sure that an exception ends the whole job instead of leaving the others
waiting for a rank that is gone. It needs only the standard library, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import math
import os
import runpy
import signal
import sys
import textwrap
import traceback
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from tilemesh.core.context import JOB_VARIABLE, Membership, membership
from tilemesh.core.cores import cgroup_quota, cores_for, threads_for, visible_cores
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.exhausted import out_of_memory
from tilemesh.launch.board import DONE, FAILED, INTERRUPTED, my_status

INTERRUPTED_CODE = 128 + signal.SIGINT
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_PR_SET_PDEATHSIG = 1
_MESSAGE_CHARACTERS = 400  # of an error, in the job's last line; the rank has printed all of it
# Loaded now: the launcher calls die_with_parent between fork and exec, where nothing may be loaded any more.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def set_threads(environ: MutableMapping[str, str], threads: int) -> None:
    """So many per process, unless the user says how many: OMP_NUM_THREADS alone then counts for all libraries."""
    for name in THREAD_VARIABLES:
        environ.setdefault(name, environ.get(THREAD_VARIABLES[0], str(threads)))


def main(argv: Sequence[str]) -> NoReturn:
    member = membership()
    if member is None:
        raise SystemExit("tilemesh.launch.rank: this process is in no job; start it with `tilemesh launch`")
    command = list(argv[1:] if argv[:1] == ["--"] else argv)
    if JOB_VARIABLE in os.environ:
        _join_launcher(Path(os.environ[JOB_VARIABLE]), member)
    run_command(command, member)


def run_command(command: Sequence[str], member: Membership) -> NoReturn:
    """Run the command as this rank and end the process with its outcome: this does not return."""
    # Inside somebody else's mpiexec or srun the thread count is ours to set, unless the user did; a rank that was bound
    # to some cores uses those. OpenMP reads it when torch is first imported, which is still to come.
    granted = min(cgroup_quota() or math.inf, os.cpu_count() or 1)  # not the mask: that may be this rank's alone
    threads = min(len(visible_cores()), threads_for(member.local_size, max(1, round(granted))))
    set_threads(os.environ, threads)
    status = my_status()
    if not is_python(command):
        _exec(command)
    try:
        _run_python(command)
    except SystemExit as stop:
        code = _exit_code(stop)
        words = f": {_first_line(stop)}" if isinstance(stop.code, str) else ""
        status.end(DONE if code == 0 else FAILED, "" if code == 0 else f"exited with code {code}{words}")
        _leave(code)
    except KeyboardInterrupt:
        status.end(INTERRUPTED, "was interrupted")
        _leave(INTERRUPTED_CODE)
    except BaseException as error:
        exhausted = out_of_memory(error) if _is_ours(command) else None
        if exhausted is not None:
            traceback.clear_frames(error.__traceback__)  # words need a little memory too
        shown = error if exhausted is None else RunError(exhausted)
        status.end(FAILED, f"raised {type(shown).__name__}: {_first_line(shown)}")
        _print_error(shown.with_traceback(error.__traceback__))
        _leave(1)
    status.end(DONE)
    _leave(0)


def is_python(command: Sequence[str]) -> bool:
    """Whether the command is a Python script or `-m module`, which run inside this process."""
    return command[0] == "-m" or command[0].endswith(".py")


def _is_ours(command: Sequence[str]) -> bool:
    """Whether it is a module of tilemesh: a user's own script that runs out of memory keeps its traceback."""
    return command[0] == "-m" and command[1].partition(".")[0] == "tilemesh"


def _run_python(command: Sequence[str]) -> None:
    if command[0] == "-m":
        sys.argv = list(command[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")


def _exec(command: Sequence[str]) -> NoReturn:
    my_status().became(command[0])
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        my_status().end(FAILED, f"could not start {command[0]}: {error.strerror}")
        _leave(127)


def _leave(code: int) -> NoReturn:
    """End this process; a failure must not wait for anybody.

    At a normal end atexit handlers run and MPI finalises. After a failure both could wait for other ranks,
    so the process goes at once; under MPI by Abort, which every mpiexec takes as the end of the job.
    """
    if code == 0:
        sys.exit(0)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)
    os._exit(code)


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return textwrap.shorten(lines[0], _MESSAGE_CHARACTERS, placeholder=" …") if lines else "(no message)"


def _print_error(error: BaseException) -> None:
    """Our own two errors are one line; everything else is a bug and keeps its traceback, less our frames."""
    if isinstance(error, UsageError | RunError) and "--debug" not in sys.argv:
        print(f"tilemesh: {error}", file=sys.stderr)
        return
    frames = own_frames(error.__traceback__)
    if frames is None:  # a module that does not exist: no line of the user's has run
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    else:
        traceback.print_exception(type(error), error, frames)


def own_frames(trace: TracebackType | None, *files: str) -> TracebackType | None:
    """The traceback from the script's first line on: without the frames before it, of this file, `files` and Python."""
    ours = {__file__, *files, runpy.__file__, importlib.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _join_launcher(job: Path, member: Membership) -> None:
    """Hand output to the launcher, die with it, take our cores."""
    for stream, number in (("out", 1), ("err", 2)):
        pipe = os.open(job / f"{member.rank}.{stream}", os.O_WRONLY)
        if pipe != number:
            os.dup2(pipe, number)
            os.close(pipe)
        # Made anew: Python looked whether one can seek in it when it was something else, and `reconfigure` would.
        before, raw = getattr(sys, f"std{stream}"), io.FileIO(number, "w", closefd=False)
        setattr(sys, f"std{stream}", io.TextIOWrapper(raw, before.encoding, before.errors, write_through=True))
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # one group a rank: whatever it starts ends with it
    die_with_parent()
    mine = cores_for(member.local_rank, member.local_size, visible_cores())
    if mine is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, mine)


def die_with_parent() -> None:
    """Ask the kernel to end this process with the one that started it (Linux; elsewhere nothing does)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
