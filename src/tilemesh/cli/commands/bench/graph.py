"""Time a compiled training step beside eager and Inductor. Compiled by torch.compile(backend="tilemesh")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tilemesh.cli.output import console_beside, words_of
from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.core.options import ROWS, Count, OutFile, Seconds, argument, option
from tilemesh.core.units import format_bytes

_PEERS = "Some of eager, compile, operators (ours, no kernels), recorded (CUDA graphs)."


@dataclass(frozen=True, kw_only=True)
class GraphBenchOptions:
    models: tuple[str, ...] = argument((), "gpt2, llama, bert, t5, resnet, lstm, …; `all` for all.", "[MODEL]...")
    study: str = option("", "Instead: search, partial, symbolic, host, branches, trees, memory.", "A,B")
    size: str = option("small", "tiny, small, gpt2 (12 layers of 768), gpt2-blocks, llama-blocks or pictures.")
    dtype: Literal["float32", "float64", "bfloat16"] = option("float32", "float32, float64 or bfloat16.")
    device: Literal["cpu", "cuda"] = option("cpu", "cpu or cuda.")
    peers: str = option("eager,compile", _PEERS, "A,B")
    repeats: Count = option(30, "Interleaved rounds.")
    seconds: Seconds = option(20.0, "Time at most so many seconds of each model.")
    json: OutFile | None = option(None, ROWS, "FILE")


def graph(options: GraphBenchOptions) -> None:
    import torch

    from tilemesh.bench.graph.models import MODELS, SIZES
    from tilemesh.bench.graph.run import PEERS, bench_model
    from tilemesh.bench.graph.studies import STUDIES, study_rows
    from tilemesh.measure.row import write_rows
    from tilemesh.measure.table import print_rows

    names = list(MODELS) if options.models == ("all",) else options.models
    studies, peers = words_of(options.study), words_of(options.peers)
    if not names and not studies:
        raise UsageError("no model was given; give some of " + ", ".join(MODELS) + ", or --study")
    for word, kind, allowed in (
        *((name, "model", MODELS) for name in names),
        (options.size, "size", SIZES),
        *((peer, "peer", PEERS) for peer in peers),
        *((study, "study", STUDIES) for study in studies),
    ):
        if word not in allowed:
            raise unknown(kind, word, allowed)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise RunError("--device cuda: torch sees no GPU here; use --device cpu")
    console, device = console_beside(options.json), torch.device(options.device)
    rows = []
    for study in studies:
        rows += (measured := study_rows(study, options.seconds, device))
        print_rows(measured, console)
    for name in names:
        findings = bench_model(
            name,
            SIZES[options.size],
            dtype=getattr(torch, options.dtype),
            device=device,
            peers=peers,
            repeats=options.repeats,
            seconds=options.seconds,
        )
        figures = findings.figures
        console.print(
            f"{name}: {figures.operators} operators became {figures.launches}, {figures.opaque} of them torch's own; "
            f"{format_bytes(figures.moved_before)} moved became {format_bytes(figures.moved)}"
        )
        for reason in figures.refused:
            console.print(f"  as torch traced it: {reason}")
        print_rows(findings.rows, console)
        rows += findings.rows
    if options.json is not None:
        write_rows(rows, options.json)
