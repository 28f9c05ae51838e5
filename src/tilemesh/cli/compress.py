"""`tilemesh compress`: what can be asked; `compress_run.py` answers when asked."""

from __future__ import annotations

from typing import Annotated

import typer

from tilemesh.cli.targets import check_targets


def compress(
    source: Annotated[str, typer.Argument(metavar="RUN|FOLDER", help="A run's folder, or a Hugging Face folder.")],
    recipe: Annotated[
        str,
        typer.Option(metavar="NAME|FILE", help="Such as int8, int4-g128, int4-g64-gptq, 2:4, mlp-25; or a TOML file."),
    ],
    out: Annotated[str, typer.Option(metavar="FOLDER", help="Where to write the compressed model.")],
    calibrate: Annotated[int, typer.Option(metavar="N", help="Sequences of text that recipes look at.")] = 64,
    sequences: Annotated[
        int, typer.Option(metavar="N", help="Held-out sequences that both models are judged by.")
    ] = 32,
    data: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="The text; by default the run's own, or the standard library.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Which checkpoint of a run; the newest, if not given.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of calibration text.")] = 0,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="The rows, one object per line; - for stdout.")
    ] = None,
) -> None:
    """Quantise, prune or factorise a model. Judge it on held-out text, and write it as a Hugging Face folder."""
    from tilemesh.cli.compress_run import CompressQuestion, answer

    check_targets(json=json)
    answer(CompressQuestion(source, recipe, out, calibrate, sequences, data, step, seed, json))
