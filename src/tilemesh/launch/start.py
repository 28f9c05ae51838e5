"""How ranks are started: which program, which environment, for MPI and for torch.distributed.

Everything here is a value computed from its arguments, so that what a rank will get can be printed
and tested without starting one. Starting and watching is `job.py`.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import tilemesh
from tilemesh.core.context import JOB_VARIABLE
from tilemesh.core.cores import available_cores, threads_for
from tilemesh.core.errors import Argument, RunError, UsageError, unknown
from tilemesh.launch.rank import is_python, set_threads

TRANSPORTS = ("mpi", "torch")
ATTEMPT_VARIABLE = "TILEMESH_ATTEMPT"  # 0 for the first start, then the number of the restart
# Where schedulers and settings of Open MPI 4 and 5 name the machines of a job.
_HOSTS_VARIABLES = (
    "PBS_NODEFILE",
    "PE_HOSTFILE",
    "LSB_MCPU_HOSTS",
    "PRTE_MCA_prte_default_hostfile",
    "OMPI_MCA_orte_default_hostfile",
)
MPI_MISSING = "pip install 'tilemesh[mpi]'"


@dataclass(frozen=True)
class Process:
    """One program the launcher starts itself: all of MPI's ranks through mpiexec, or one rank of torch.distributed."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


def choose_transport(transport: str) -> str:
    """`auto` is MPI where it is installed, else torch.distributed."""
    if transport == "auto":
        return "mpi" if find_mpiexec() is not None and find_spec("mpi4py") is not None else "torch"
    if transport not in TRANSPORTS:
        raise unknown("transport", transport, (*TRANSPORTS, "auto"))
    return transport


def check_restarts(restarts: int) -> None:
    if restarts < 0:
        raise UsageError(Argument("restarts"), f" is {restarts}: expected 0 or more")


def find_mpiexec() -> str | None:
    """The mpiexec beside this Python first: it belongs to the MPI library that this environment's mpi4py loads."""
    beside = Path(sysconfig.get_path("scripts"), "mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def check_command(command: Sequence[str]) -> None:
    """Refuse what cannot start before any rank does."""
    if not command:
        raise UsageError(
            "nothing to launch: expected a script and its arguments after --, such as -- train.py --steps 10"
        )
    if command[0] == "-m":
        if len(command) < 2:
            raise UsageError("-m without a module name: expected -m package.module")
    elif is_python(command):
        if not Path(command[0]).is_file():
            raise UsageError(f"script {command[0]} does not exist (looked in {os.getcwd()})")
    elif shutil.which(command[0]) is None and os.path.dirname(command[0]):
        raise UsageError(f"program {command[0]} is not there, or not executable (looked in {os.getcwd()})")
    elif shutil.which(command[0]) is None:
        raise UsageError(f"command {command[0]} was not found on the PATH; a Python script's name ends in .py")


def processes(
    command: Sequence[str], *, ranks: int, transport: str, job: Path, attempt: int, environ: Mapping[str, str]
) -> list[Process]:
    """What to start for this job, in rank order (MPI: one mpiexec)."""
    common = dict(environ)
    common[JOB_VARIABLE] = str(job)
    common[ATTEMPT_VARIABLE] = str(attempt)
    common.setdefault("HOME", str(Path.home()))  # Open MPI does not start without it
    common["PYTHONUNBUFFERED"] = "1"  # ranks write into pipes: without this their output would come in blocks, or never
    set_threads(common, threads_for(ranks, available_cores()))
    common |= source_path(environ)
    shim = (sys.executable, "-m", "tilemesh.launch.rank", "--", *command)
    if transport == "mpi":
        mpiexec = find_mpiexec()
        if mpiexec is None:
            raise RunError(
                f"no mpiexec beside {sys.executable} or on the PATH: {MPI_MISSING}, or use --transport torch"
            )
        return [Process((mpiexec, "-n", str(ranks), *shim), common | mpi_environment(ranks, job, common))]
    port = str(free_port())
    return [Process(shim, common | torch_rank_environment(rank, ranks, port)) for rank in range(ranks)]


def mpi_environment(ranks: int, job: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What Open MPI needs to run as root, with more ranks than cores, and to leave nothing behind.

    Given as variables rather than options because other MPIs ignore them where they would refuse an option.
    """
    wanted = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",  # rank.py pins, for every transport alike
        "OMPI_MCA_osc": "^ucx",  # its one-sided component prints errors about windows on machines without UCX
        # Session files and shared segments of a killed rank would stay for ever elsewhere; the job's folder is removed.
        "PRTE_MCA_prte_tmpdir_base": str(job),
        "OMPI_MCA_btl_sm_backing_directory": str(job),
        "OMPI_MCA_osc_sm_backing_directory": str(job),
        # The same in Open MPI 4, which calls them by other names. Its own binding leaves the cores that the launcher
        # may use: two ranks get a core each, and more a whole socket.
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_MCA_orte_tmpdir_base": str(job),
        "OMPI_MCA_btl_vader_backing_directory": str(job),
    }
    if on_one_machine(environ):
        wanted["OMPI_MCA_btl"] = "^tcp"  # it would listen on every address of the machine, for ranks that share memory
    if ranks > available_cores():
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return {name: value for name, value in wanted.items() if name not in environ}


def on_one_machine(environ: Mapping[str, str]) -> bool:
    """Whether mpiexec starts all ranks here: neither a scheduler nor a host file names other machines."""
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    if nodes.strip() != "1":  # what is not a number may stand for other machines
        return False
    return not any(environ.get(name) for name in _HOSTS_VARIABLES)


def torch_rank_environment(rank: int, ranks: int, port: str) -> dict[str, str]:
    """torchrun's dialect, for ranks that all live on this machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        # gloo would look up the machine's name, which many containers cannot; one machine needs loopback only.
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def source_path(environ: Mapping[str, str]) -> dict[str, str]:
    """The PYTHONPATH with which another process finds this tilemesh, also when it runs from a source tree."""
    assert tilemesh.__file__ is not None
    root = str(Path(tilemesh.__file__).resolve().parents[1])
    if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [root, environ.get("PYTHONPATH")]))}
