"""`tilemesh bench graph`: a training step of a model, eager, by Inductor and by our backend, in turns.

Beside the times: how many operators a step launches before and after, the bytes they move, how long compiling took, and
the memory of the values of a program beside the least that any plan needs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilemesh.bench.graph.models import ModelSize, Trained, make_trained
from tilemesh.bench.graph.peak import measured_peak
from tilemesh.bench.harness import NO_PEERS, OURS, Estimate, calling, exactly, make_row
from tilemesh.bench.profile import kernel_times, write_kernel_times
from tilemesh.core import calibration
from tilemesh.core.errors import RunError, unknown
from tilemesh.core.files import write_text
from tilemesh.core.hardware import Device
from tilemesh.graph.backend import Backend, Compiled
from tilemesh.graph.by_torch import dtype_of
from tilemesh.graph.cost import PEAKS, graph_roof_seconds, graph_seconds
from tilemesh.graph.memory import arena
from tilemesh.measure.gpu import call_timer
from tilemesh.measure.machine import this_machine
from tilemesh.measure.row import CaseValue, Row
from tilemesh.measure.sample import Sample
from tilemesh.measure.timing import LoopTimer, compare, reason_of

PEERS = ("eager", "compile", "operators", "recorded", "launched")
"""`operators`: our backend without kernels; `recorded` and `launched`: all of it as CUDA graphs on a GPU, and none."""
RECURRENT = "rnn_layer"
"""In the name of operators whose backward pass reads what only their forward pass can have left: oneDNN dies on inputs
that were made up."""


@dataclass(frozen=True)
class GraphFigures:
    """What became of a model: its pieces together."""

    operators: int
    launches: int
    opaque: int
    moved_before: int
    moved: int
    arena: int
    bound: int
    flops: int
    refused: tuple[str, ...]


def figures(pieces: Sequence[Compiled]) -> GraphFigures:
    graphs = [piece.graph for piece in pieces if piece.graph is not None]
    before = [piece.before for piece in pieces if piece.before is not None]
    plans = [arena(graph) for graph in graphs]
    return GraphFigures(
        operators=sum(graph.launches for graph in before),
        launches=sum(graph.launches for graph in graphs),
        opaque=sum(len(piece.opaque) for piece in pieces),
        moved_before=sum(graph.moved_bytes for graph in before),
        moved=sum(graph.moved_bytes for graph in graphs),
        arena=sum(plan.size for plan in plans),
        bound=sum(plan.bound for plan in plans),
        flops=sum(graph.flops for graph in graphs),
        refused=tuple(piece.reason for piece in pieces if piece.graph is None),
    )


def calibrated_device(device: torch.device) -> tuple[Device | None, str]:
    """This machine as a device with its measured rates, or why there is none."""
    try:
        known = calibration.find(this_machine().id)
    except RunError as error:
        return None, str(error)
    rates = None if known is None else (known.gpu if device.type == "cuda" else known.all_cores)
    if rates is None or rates.copy_bytes_per_s is None or not rates.matmul_flops_per_s:
        return None, "this machine has no calibration: run `tilemesh calibrate` once"
    kind: Any = "gpu" if device.type == "cuda" else "cpu"
    return Device(
        name=this_machine().id,
        kind=kind,
        peak_flops_per_s=rates.matmul_flops_per_s,
        memory_bytes=0,
        usable_bytes=0,
        memory_bytes_per_s=rates.copy_bytes_per_s,
        l2_bytes=0,
        launch_s=rates.launch_s or 0.0,
    ), ""


@dataclass(frozen=True)
class GraphBench:
    """A model's rows, and what its pieces became."""

    rows: list[Row]
    figures: GraphFigures
    pieces: Sequence[Compiled]


def bench_model(
    name: str,
    size: ModelSize,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    peers: Sequence[str] = ("eager", "compile"),
    repeats: int = 30,
    seconds: float = 20.0,
    alone: AbstractContextManager[Any] | None = None,
    profile: Path | None = None,
) -> GraphBench:
    """Steps of one model in turns. The prediction is made before anything is timed.

    alone: entered while steps are timed, so that processes which compile side by side time one after the other.
    profile: a folder for the kernels of a step of each way, longest first, once all are timed, and our programs.
    """
    for peer in peers:
        if peer not in PEERS:
            raise unknown("peer", peer, PEERS)
    device = device or torch.device("cpu")
    trained = make_trained(name, size, dtype, device)
    backend = Backend()
    calls, first, missing = _ways(trained, backend, peers)
    pieces = list(backend.report.pieces)
    counted = figures(pieces)
    machine, why = calibrated_device(device)
    predicted = limit = Estimate(None, why)
    if machine is not None:
        predicted = Estimate(sum(graph_seconds(piece.graph, machine) for piece in pieces if piece.graph))
        peak = machine.peak_flops_per_s.get(PEAKS.get(str(dtype).removeprefix("torch."), "fp32"))
        limit = Estimate(counted.flops / peak if peak else None, f"no matmul in {dtype} was calibrated on this machine")
    timer = call_timer(device) if device.type == "cuda" else LoopTimer()
    steps = {key: calling(trained.step, call) for key, call in calls.items()}
    with alone or nullcontext():
        timed = compare(steps, timer=timer, repeats=repeats, seconds=seconds)
        if profile is not None:
            _write_profile(profile, name, steps, pieces, device)
    missing |= timed.missing
    case: dict[str, CaseValue] = {
        "model": name, "width": size.width, "layers": size.layers, "batch": size.batch, "tokens": size.tokens,
        "dtype": str(dtype).removeprefix("torch."), "device": device.type, "operators": counted.operators,
        "launches": counted.launches, "opaque": counted.opaque,
    }  # fmt: skip
    samples = {key: exactly(value) for key, value in first.items()}
    rows = [
        make_row(
            "graph step", case, timed[OURS], predicted=predicted, limit=limit, peers=_others(timed), missing=missing,
            no_peers=NO_PEERS,
        ),
        make_row(
            "graph first step", case, samples[OURS], peers=_others(samples), no_peers=NO_PEERS,
            predicted=Estimate(None, "how long compiling takes is not predicted"),
            limit=Estimate(None, "no compiler was said to be the fastest possible"),
            missing={name: why for name, why in missing.items() if name not in samples},
        ),
    ]  # fmt: skip
    if not any(RECURRENT in target for piece in pieces for target in piece.opaque):
        rows.append(_memory_row(case, counted, pieces, device))
    if machine is not None:
        rows.append(_roof_row(case, counted, pieces, machine, timed))
    return GraphBench(rows, counted, pieces)


def _ways(
    trained: Trained, backend: Backend, peers: Sequence[str]
) -> tuple[dict[str, Callable[..., Any]], dict[str, float], dict[str, str]]:
    """Every way's call, the seconds of its first step where that compiles, and why a peer is not there."""
    calls: dict[str, Callable[..., Any]] = {OURS: _compiled(trained, backend)}
    first = {OURS: _first_call(trained, calls[OURS])}
    missing: dict[str, str] = {}
    for peer in peers:
        try:
            calls[peer] = trained.module if peer == "eager" else _compiled(trained, _backend_of(peer))
            taken = _first_call(trained, calls[peer])
            if peer != "eager":
                first[peer] = taken
        except Exception as error:  # a peer that cannot compile a model is left out with its reason
            missing[peer] = reason_of(error)
            calls.pop(peer, None)
    return calls, first, missing


def _write_profile(
    folder: Path, name: str, steps: Mapping[str, Callable[[int], object]], pieces: Sequence[Compiled],
    device: torch.device,
) -> None:  # fmt: skip
    for way, step in steps.items():
        write_kernel_times(kernel_times(functools.partial(step, 0), device), folder / f"{name}.{way}.txt")
    programs = [f"{piece.graph}\n" for piece in pieces if piece.graph is not None]
    write_text("\n".join(programs), folder / f"{name}.programs.txt")


def _others(samples: Mapping[str, Sample]) -> dict[str, Sample]:
    return {name: sample for name, sample in samples.items() if name != OURS}


def _backend_of(peer: str) -> Any:
    if peer == "compile":
        return "inductor"
    return Backend(kernels=False) if peer == "operators" else Backend(cuda_graphs=peer == "recorded")


def _compiled(trained: Trained, backend: Any) -> Callable[..., Any]:
    torch._dynamo.config.allow_rnn = True
    # One entry per backend and piece: what a peer compiled is not forgotten when the next one compiles.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(trained.module, backend=backend)


def _first_call(trained: Trained, call: Callable[..., Any]) -> float:
    """Seconds of the first step, which compiles."""
    began = time.perf_counter()
    trained.step(call)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _memory_row(case: Any, counted: GraphFigures, pieces: Sequence[Compiled], device: torch.device) -> Row:
    """The bytes of values at the fullest moment of each program, together: by liveness, in an arena, and measured."""
    peak = sum(measured_peak(piece.run, _made_up(piece, device)) for piece in pieces if piece.run is not None)
    bound = Estimate(float(counted.bound))
    return make_row(
        "graph values", case | {"arena": counted.arena}, exactly(float(peak)), unit="B", predicted=bound, limit=bound,
        no_peers="other compilers do not say what their values need",
    )  # fmt: skip


def _made_up(piece: Compiled, device: torch.device) -> list[torch.Tensor]:
    """Inputs of a program's shapes; numbers of tokens and the like are 0."""
    assert piece.before is not None
    inputs = piece.before.inputs[: piece.given]
    return [torch.zeros(node.shape, dtype=dtype_of(node.dtype), device=device) for node in inputs]


def _roof_row(
    case: Any, counted: GraphFigures, pieces: Sequence[Compiled], machine: Device, timed: Mapping[str, Sample]
) -> Row:
    """Launches, bytes and the share of the roof before fusion and after it.

    The roof of a program is the time of its operators at the machine's rates, without their launches. Before fusion it
    is compared with eager, where eager's operators are the program's: not where one of eager's became several.
    """
    before = sum(graph_roof_seconds(piece.before, machine) for piece in pieces if piece.before)
    after = sum(graph_roof_seconds(piece.graph, machine) for piece in pieces if piece.graph)
    case = case | {
        "bytes before": counted.moved_before, "bytes": counted.moved, "roof_s before": before, "roof_s": after,
        "share of the roof": round(after / timed[OURS].median, 4),
    }  # fmt: skip
    if "eager" in timed and before < timed["eager"].median:
        case["share of the roof before"] = round(before / timed["eager"].median, 4)
    return make_row(
        "graph roof", case, timed[OURS], predicted=Estimate(None, "the row `graph step` has the prediction"),
        limit=Estimate(after), no_peers="in the row `graph step`",
    )  # fmt: skip
