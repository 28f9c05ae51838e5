"""Time a compiled training step beside eager and Inductor. Compiled by torch.compile(backend="tilemesh")."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tilemesh.cli.next_command import again
from tilemesh.cli.output import Output, console_beside, print_block
from tilemesh.core.errors import UsageError
from tilemesh.core.options import ROWS, TURN, Count, Known, OutFile, OutFolder, Seconds, Words, argument, option
from tilemesh.core.units import format_bytes

_PEERS = "Some of eager, compile, operators (ours, no kernels), recorded (CUDA graphs)."


@dataclass(frozen=True, kw_only=True)
class GraphBenchOptions:
    models: Annotated[tuple[str, ...], Known("model", "tilemesh.bench.graph.models:MODELS", "all")] = argument(
        (), "gpt2, llama, bert, t5, resnet, lstm, …; `all` for all.", "[MODEL]..."
    )
    study: Annotated[Words, Known("study", "tilemesh.bench.graph.studies:STUDIES")] = option(
        (), "Instead: symbolic, host, trees, blocks.", "A,B"
    )
    size: Annotated[str, Known("size", "tilemesh.bench.graph.models:SIZES")] = option(
        "small", "tiny, small, gpt2 (12 layers of 768), gpt2-blocks, llama-blocks or pictures."
    )
    dtype: Literal["float32", "float64", "bfloat16"] = option("float32", "float32, float64 or bfloat16.")
    device: Literal["cpu", "cuda"] = option("cpu", "cpu or cuda.")
    peers: Annotated[Words, Known("peer", "tilemesh.bench.graph.run:PEERS")] = option(
        ("eager", "compile"), _PEERS, "A,B"
    )
    repeats: Count = option(30, "Interleaved rounds.")
    seconds: Seconds = option(20.0, "Time at most so many seconds of each model.")
    profile: OutFolder | None = option(None, "Then write the kernels of each way's step, and our programs.", "FOLDER")
    turn: OutFile | None = option(None, TURN, "FILE")
    json: OutFile | None = option(None, ROWS, "FILE")


def graph(options: GraphBenchOptions) -> Output:
    import torch

    from tilemesh.bench.graph.models import MODELS, SIZES
    from tilemesh.bench.graph.run import bench_model
    from tilemesh.bench.graph.studies import study_rows
    from tilemesh.bench.harness import KeptRows, TimingTurn
    from tilemesh.kernels.launch.tensors import read_device

    names = list(MODELS) if "all" in options.models else options.models
    if not names and not options.study:
        raise UsageError("no model was given; give some of " + ", ".join(MODELS) + ", or --study")
    console, device = console_beside(options.json), read_device(options.device)
    rows, turn = KeptRows(options.json), None if options.turn is None else TimingTurn(options.turn)
    for study in options.study:
        measured = study_rows(study, options.seconds, device)
        print_block(measured, console)
        rows.add(measured)
    for name in names:
        findings = bench_model(
            name, SIZES[options.size], dtype=getattr(torch, options.dtype), device=device, peers=options.peers,
            repeats=options.repeats, seconds=options.seconds, alone=None if turn is None else turn.alone(),
            profile=None if options.profile is None else Path(options.profile),
        )  # fmt: skip
        figures = findings.figures
        console.print(
            f"{name}: {figures.operators} operators became {figures.launches}, {figures.opaque} of them torch's own; "
            f"{format_bytes(figures.moved_before)} moved became {format_bytes(figures.moved)}"
        )
        for reason in figures.refused:
            console.print(f"  as torch traced it: {reason}")
        print_block(findings.rows, console)
        rows.add(findings.rows)
    return Output(json=rows, next=again("--profile profile"))
