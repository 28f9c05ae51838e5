"""`tilemesh bench train`: tokens a second of ours and of what a user would write instead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tilemesh.cli.targets import check_targets


def bench_train(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG.toml|PRESET]", help="What to train.")] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="dp=2", help="Ours; peers on ranks get as many and the same layout.")
    ] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="A=B,...", help="train.batch=32,...")] = None,
    peers: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="Some of eager, compile, ddp, zero-optimizer, fsdp, deepspeed, pipeline, fsdp-pipeline "
            "(default: those that suit the plan).",
        ),
    ] = "",
    also: Annotated[
        list[str] | None,
        typer.Option("--also", metavar="A=B,...", help="Ours with these settings too, in turns with the others."),
    ] = None,
    blocks: Annotated[int, typer.Option(metavar="N", help="How many turns each gets.")] = 8,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps in a turn.")] = 5,
    transport: Annotated[str, typer.Option(help="Ours: mpi, torch or auto.")] = "auto",
    profile: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Then write what each spends a step on, kernel by kernel.")
    ] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="The rows, one object per line; - for stdout.")
    ] = None,
) -> None:
    """Time training steps beside PyTorch and DeepSpeed. One model and batch in turns: ours, PyTorch, its DDP, sharding
    and pipelining, DeepSpeed.

    A row of tokens per second, and one of the fullest rank's memory.
    """
    from rich.console import Console

    from tilemesh.bench.train.compare import PEERS, compare, usual_peers
    from tilemesh.bench.train.rows import train_rows
    from tilemesh.core.errors import UsageError, unknown
    from tilemesh.launch.start import choose_transport
    from tilemesh.measure.machine import usable_gpus
    from tilemesh.measure.row import write_rows
    from tilemesh.measure.table import print_rows
    from tilemesh.train.load import load
    from tilemesh.train.predict import predict_run

    console = Console(stderr=json == "-", highlight=False, markup=False)
    gpus = usable_gpus()
    mesh = mesh or ("dp=1" if gpus else "dp=2")
    made = load(config, sets=sets or (), mesh=mesh, gpus=len(gpus))
    others = {
        f"ours {given}": load(config, sets=[*(sets or ()), given], mesh=mesh, gpus=len(gpus)) for given in also or ()
    }
    names = [name.strip() for name in (peers or ",".join(usual_peers(made))).split(",") if name.strip()]
    for name in names:
        if name not in PEERS:
            raise unknown("peer", name, PEERS)
    if blocks < 1 or steps < 1:
        raise UsageError(f"--blocks {blocks} --steps {steps}: expected at least 1 of each")
    if gpus and transport == "auto":
        transport = "torch"
    choose_transport(transport)
    check_targets(json=json)
    if profile is not None:
        if os.path.lexists(profile) and not profile.is_dir():
            raise UsageError(f"--profile {profile}: expected a folder, and this is a file")
        check_targets(profile=profile / "kernels.txt")
    predicted = predict_run(made, gpus)  # before anything is measured
    compared = compare(
        made,
        peers=names,
        also=others,
        transport=transport,
        blocks=blocks,
        steps=steps,
        at_once=bool(gpus),
        profile=profile,
        say=console.print,
    )
    rows = train_rows(made, compared, predicted, gpus)
    print_rows(rows, console)
    if json is not None:
        write_rows(rows, json)
