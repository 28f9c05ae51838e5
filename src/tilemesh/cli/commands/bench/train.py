"""Time training steps beside PyTorch and DeepSpeed. One model and batch in turns: ours, PyTorch, its DDP, sharding
and pipelining, DeepSpeed.

A row of tokens per second, and one of the fullest rank's memory.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from tilemesh.cli.next_command import after_layout, again
from tilemesh.cli.output import Output, console_beside
from tilemesh.cli.targets import check_filled
from tilemesh.core.options import ROWS, Count, Known, OutFile, OutFolder, Words, argument, option

_PEERS = "Some of eager, compile, ddp, zero-optimizer, fsdp, deepspeed, pipeline, fsdp-pipeline"


@dataclass(frozen=True, kw_only=True)
class TrainBenchOptions:
    config: str | None = argument(None, "What to train.", "[CONFIG.toml|PRESET]")
    mesh: str | None = option(None, "Ours; peers on ranks get as many and the same layout.", "dp=2,tp=2")
    plan: str | None = option(None, "Instead: a plan of `tilemesh plan --out`.", "PLAN.toml")
    sets: tuple[str, ...] = option((), "train.batch=32,...", "A=B,...", flag="--set")
    peers: Annotated[Words, Known("peer", "tilemesh.bench.train.compare:PEERS")] = option(
        (), f"{_PEERS} (default: those that suit the plan).", "A,B"
    )
    also: tuple[str, ...] = option((), "Ours with these settings too, in turns with the others.", "A=B,...")
    malloc: Annotated[Words, Known("setting", "tilemesh.bench.train.compare:MALLOC")] = option(
        (), "Ours under glibc's kept, mapped or one-arena too (Linux).", "A,B"
    )
    blocks: Count = option(8, "How many turns each gets.", "N")
    steps: Count = option(5, "Steps in a turn.", "N")
    transport: str = option("auto", "Ours: mpi, torch or auto.")
    profile: OutFolder | None = option(None, "Then write what each spends a step on, kernel by kernel.", "FOLDER")
    json: OutFile | None = option(None, ROWS, "FILE")


def train(options: TrainBenchOptions) -> Output:
    from tilemesh.bench.train.compare import compare, usual_peers
    from tilemesh.bench.train.rows import train_rows
    from tilemesh.launch.start import choose_transport
    from tilemesh.measure.machine import usable_gpus
    from tilemesh.train.load import load
    from tilemesh.train.predict import predict_run

    console, gpus = console_beside(options.json), usable_gpus()
    profile = None if options.profile is None else Path(options.profile)
    mesh = options.mesh or (None if options.plan else "dp=1" if gpus else "dp=2")
    loaded = partial(load, options.config, mesh=mesh, plan=options.plan, gpus=len(gpus))
    config = loaded(sets=options.sets)
    others = {f"ours {sets}": loaded(sets=[*options.sets, sets]) for sets in options.also}
    transport = "torch" if gpus and options.transport == "auto" else options.transport
    choose_transport(transport)
    if profile is not None:
        check_filled("--profile", str(profile))
    predicted = predict_run(config, gpus)  # before anything is measured
    also = {name: (settings, predict_run(settings, gpus)) for name, settings in others.items()}
    compared = compare(
        config, peers=options.peers or usual_peers(config), also=others, malloc=options.malloc, transport=transport,
        blocks=options.blocks, steps=options.steps, at_once=bool(gpus), profile=profile, say=console.print,
    )  # fmt: skip
    rows = train_rows(config, compared, predicted, gpus, also)
    after = after_layout(
        config,
        lambda changes: f"{again('').words} --also {shlex.quote(','.join(changes))}",
        again("--profile profile").words,
    )
    return Output([rows], rows, next=after)
