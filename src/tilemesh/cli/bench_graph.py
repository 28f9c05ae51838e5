"""`tilemesh bench graph MODEL`: a training step eager, by Inductor and by our backend."""

from __future__ import annotations

from typing import Annotated

import typer

from tilemesh.cli.targets import check_targets


def bench_graph(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="gpt2, llama, bert, t5, resnet, lstm, …; `all` for all."),
    ] = None,
    study: Annotated[
        str,
        typer.Option(
            "--study", metavar="A,B", help="Instead: search, partial, symbolic, host, branches, trees, memory."
        ),
    ] = "",
    size: Annotated[
        str,
        typer.Option("--size", help="tiny, small, gpt2 (12 layers of 768), gpt2-blocks, llama-blocks or pictures."),
    ] = "small",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, float64 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    peers: Annotated[
        str,
        typer.Option(
            "--peers",
            metavar="A,B",
            help="Some of eager, compile, operators (ours, no kernels), recorded (CUDA graphs).",
        ),
    ] = "eager,compile",
    repeats: Annotated[int, typer.Option("--repeats", help="Interleaved rounds.")] = 30,
    seconds: Annotated[float, typer.Option("--seconds", help="Time at most so many seconds of each model.")] = 20.0,
    json: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the rows; - for stdout.")] = None,
) -> None:
    """Time a compiled training step beside eager and Inductor. Compiled by torch.compile(backend="tilemesh")."""
    import torch
    from rich.console import Console

    from tilemesh.bench.graph.models import MODELS, SIZES
    from tilemesh.bench.graph.run import PEERS, bench_model
    from tilemesh.bench.graph.studies import STUDIES, study_rows
    from tilemesh.core.errors import RunError, UsageError, unknown
    from tilemesh.core.ranges import Range
    from tilemesh.core.units import format_bytes
    from tilemesh.measure.row import write_rows
    from tilemesh.measure.table import print_rows

    check_targets(json=json)
    names = list(MODELS) if models == ["all"] else models or []
    studies = [each for each in study.split(",") if each]
    if not names and not studies:
        raise UsageError("no model was given; give some of " + ", ".join(MODELS) + ", or --study")
    for given, kind, allowed in (
        *((name, "model", MODELS) for name in names),
        (size, "size", SIZES),
        (dtype, "dtype", ("float32", "float64", "bfloat16")),
        (device, "device", ("cpu", "cuda")),
        *((peer, "peer", PEERS) for peer in peers.split(",") if peer),
        *((each, "study", STUDIES) for each in studies),
    ):
        if given not in allowed:
            raise unknown(kind, given, allowed)
    Range(1, 100_000).check("--repeats", repeats, whole=True)
    Range(0, 1e4, above=True).check("--seconds", seconds)
    if device == "cuda" and not torch.cuda.is_available():
        raise RunError("--device cuda: torch sees no GPU here; use --device cpu")
    console = Console(stderr=json == "-", highlight=False, markup=False)
    rows = []
    for each in studies:
        found_rows = study_rows(each, seconds, torch.device(device))
        print_rows(found_rows, console)
        rows += found_rows
    for name in names:
        findings = bench_model(
            name,
            SIZES[size],
            dtype=getattr(torch, dtype),
            device=torch.device(device),
            peers=[peer for peer in peers.split(",") if peer],
            repeats=repeats,
            seconds=seconds,
        )
        made = findings.figures
        console.print(
            f"{name}: {made.operators} operators became {made.launches}, {made.opaque} of them torch's own; "
            f"{format_bytes(made.moved_before)} moved became {format_bytes(made.moved)}"
        )
        for reason in made.refused:
            console.print(f"  as torch traced it: {reason}")
        print_rows(findings.rows, console)
        rows += findings.rows
    if json is not None:
        write_rows(rows, json)
