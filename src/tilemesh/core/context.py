"""Is this process already a rank of somebody's job, and of whose?

`mpiexec`, `srun` and `torchrun` tell each process its place through environment variables. Reading
them is a pure function of the environment, so every launcher's case is a test without that launcher.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tilemesh.core.errors import UsageError

JOB_VARIABLE = "TILEMESH_JOB"  # the folder of the job that our launcher has started this process in
VERDICT_FILE = "verdict"  # in that folder: why a watchdog inside a rank ended the job


@dataclass(frozen=True)
class Membership:
    """One process's place in a job that something else, or our own launcher, has started."""

    starter: str  # "mpiexec", "srun" or "torchrun"
    rank: int
    size: int
    local_rank: int
    local_size: int


# (starter, rank, size, local rank, local size): the names each launcher sets; the first whose names are there counts.
# torchrun stands first because our own launcher speaks its dialect, also inside a SLURM allocation. mpiexec stands
# before srun because inside an allocation it starts its daemons through srun, whose variables its ranks then inherit;
# plain PMI stands last because srun sets it too, and its own variables say more.
_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_DIALECTS = (
    ("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    ("mpiexec", _OPEN_MPI),
    ("mpiexec", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),  # MPICH and Intel MPI
    ("srun", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")),
    ("torchrun", ("RANK", "WORLD_SIZE")),  # set by hand, one process a host
    ("mpiexec", ("PMI_RANK", "PMI_SIZE")),
)
_LAUNCHERS_OWN = ("SLURM_", "PMI_", "PMIX_", "OMPI_COMM_", "PRTE_", "TORCHELASTIC_")


def membership(environ: Mapping[str, str] = os.environ) -> Membership | None:
    """This process's place in a running job, or None when nothing has started it as a rank."""
    for starter, names in _DIALECTS:
        if any(name not in environ for name in names):
            continue
        rank, size = _number(environ, names[0]), _number(environ, names[1])
        if starter == "srun" and size == 1:
            continue  # an interactive `srun --pty` shell is a step of one task: a place to start from, not a rank
        if not 0 <= rank < size:
            raise UsageError(f"{names[0]}={rank} and {names[1]}={size} in the environment: expected 0 <= rank < size")
        if len(names) == 2:
            return Membership(starter, rank, size, local_rank=0, local_size=1)
        return Membership(starter, rank, size, _number(environ, names[2]), _tasks_on_first_node(environ[names[3]]))
    return None


def outside_any_job(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without what launchers have put into it: for a process that must start ranks of its own."""
    names = {name for _, dialect in _DIALECTS for name in dialect}
    return {k: v for k, v in environ.items() if k not in names and not k.startswith(_LAUNCHERS_OWN)}


def torch_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What torch.distributed's `env://` needs, for a process that `srun` or `mpiexec` started.

    Empty when it is all there already (torchrun) or when this process is in no job.
    """
    member = membership(environ)
    if member is None or member.starter == "torchrun":
        return {}
    result = {
        "RANK": str(member.rank),
        "WORLD_SIZE": str(member.size),
        "LOCAL_RANK": str(member.local_rank),
        "LOCAL_WORLD_SIZE": str(member.local_size),
    }
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if "MASTER_ADDR" not in environ:
        if nodes is not None:
            result["MASTER_ADDR"] = first_host(nodes)
        elif member.local_size == member.size:
            result["MASTER_ADDR"] = "127.0.0.1"
    if "MASTER_PORT" not in environ:
        # All ranks must arrive at one port without talking: derive it from the job's number.
        job = environ.get("SLURM_JOB_ID") or environ.get("PMIX_NAMESPACE") or "0"
        digits = re.sub(r"\D", "", job) or "0"
        result["MASTER_PORT"] = str(20_000 + int(digits[-9:]) % 20_000)
    return result


def rank_environment(member: Membership, size: int) -> dict[str, str]:
    """torchrun's names for a rank of the first `size` ranks of its job, which are to be the whole of it."""
    place = {"RANK": member.rank, "WORLD_SIZE": size, "LOCAL_RANK": member.local_rank}
    place["LOCAL_WORLD_SIZE"] = min(member.local_size, size)
    return torch_environment() | {name: str(value) for name, value in place.items()}


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: `gpu[03-07,12],login1` starts with gpu03."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^,]*)", nodelist)
    if match is None:
        raise UsageError(f"SLURM node list '{nodelist}': expected something like node[01-04]")
    prefix, ranges, suffix = match.groups()
    if ranges is None:
        return prefix
    return prefix + re.split(r"[-,]", ranges)[0] + suffix


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UsageError(f"{name}={environ[name]!r} in the environment: expected a whole number") from None


def _tasks_on_first_node(text: str) -> int:
    """SLURM writes `4(x2),3` for tasks a node; the others write a plain number."""
    match = re.match(r"\d+", text)
    if match is None:
        raise UsageError(f"tasks a node '{text}' in the environment: expected a number such as 4 or 4(x2)")
    return int(match.group())
