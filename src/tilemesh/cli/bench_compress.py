"""`tilemesh bench compress`: what compression costs and gains on one model, beside other libraries."""

from __future__ import annotations

from typing import Annotated

import typer

from tilemesh.cli.targets import check_targets


def bench_compress(
    model: Annotated[str, typer.Argument(metavar="RUN|FOLDER", help="A run's folder, or a Hugging Face folder.")],
    recipes: Annotated[str, typer.Option(metavar="A,B,...", help="Names or TOML files; by default fifteen.")] = "",
    peers: Annotated[str, typer.Option(help="torchao, bitsandbytes; or none.")] = "torchao,bitsandbytes",
    calibrate: Annotated[int, typer.Option(metavar="N", help="Sequences of text that recipes look at.")] = 64,
    sequences: Annotated[int, typer.Option(metavar="N", help="Held-out sequences that models are judged by.")] = 32,
    seconds: Annotated[float, typer.Option(metavar="S", help="For the times of each recipe.")] = 3.0,
    data: Annotated[str | None, typer.Option(metavar="SOURCE", help="The text, where not the run's own.")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of calibration text.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="What is timed and counted in bytes: fp32 or bf16; losses are fp32's.")
    ] = None,
    run: Annotated[str | None, typer.Option(metavar="FOLDER", help="Write a run with its page there.")] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="The rows, one object per line; - for stdout.")
    ] = None,
) -> None:
    """Compare compression recipes beside peers. Held-out loss, bytes, a forward pass and a decoded token."""
    from tilemesh.cli.bench_compress_run import CompressBenchQuestion, answer

    check_targets(json=json)
    asked = (model, recipes, peers, calibrate, sequences, seconds, data, seed, device, dtype, run, json)
    answer(CompressBenchQuestion(*asked))
