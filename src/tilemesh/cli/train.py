"""`tilemesh train`, `generate`, `export` and `data prepare`: what can be asked; `train_run.py` answers when asked."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

data = typer.Typer(help="Prepare large data for training.")


def train(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG.toml|PRESET]", help="What to train.")] = None,
    ranks: Annotated[int | None, typer.Option(metavar="N", help="How many; by default what the mesh needs.")] = None,
    mesh: Annotated[str | None, typer.Option(metavar="dp=2,tp=2", help="How the ranks are laid out.")] = None,
    plan: Annotated[str | None, typer.Option(metavar="PLAN.toml", help="A plan of `tilemesh plan --save`.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="A=B,...", help="train.steps=200,...")] = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="Go on with a run.")] = None,
    init: Annotated[str | None, typer.Option(metavar="FOLDER", help="Begin with Hugging Face weights.")] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Train for compression: round or prune in every pass.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--out", "--run", metavar="FOLDER", help="Where to write; by default under runs/.")
    ] = None,
    restarts: Annotated[int, typer.Option(metavar="N", help="How often a failed job goes on by itself.")] = 0,
    transport: Annotated[str, typer.Option(help="mpi, torch or auto.")] = "auto",
    max_time: Annotated[
        str | None, typer.Option(metavar="TIME", help="Stop after 90s, 30m, 2h or 1h30m, with a checkpoint.")
    ] = None,
    stop_after: Annotated[int | None, typer.Option(metavar="STEP", help="Stop there, with a checkpoint.")] = None,
    fallback_dir: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="For the last checkpoint, or the run, where its folder is full."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run: model, layout, memory, time, files.")
    ] = False,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="The rows, one object per line; - for stdout.")
    ] = None,
) -> None:
    """Train a Transformer on one or several processes. With checkpoints, restarts and a report."""
    from tilemesh.cli.targets import check_targets
    from tilemesh.cli.train_run import Asked, show_preview
    from tilemesh.cli.train_run import run as run_training

    check_targets(json=json)  # not after hours of training
    asked = Asked(
        config=config,
        ranks=ranks,
        mesh=mesh,
        plan=plan,
        sets=tuple(sets or ()),
        resume=resume,
        init=init,
        recipe=recipe,
        run=run,
        restarts=restarts,
        transport=transport,
        max_time=max_time,
        stop_after=stop_after,
        fallback_dir=fallback_dir,
        json=json,
    )
    raise typer.Exit(show_preview(asked) if dry_run else run_training(asked))


def generate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or a Hugging Face folder.")],
    prompt: Annotated[str, typer.Option(help="What to go on from.")],
    tokens: Annotated[int, typer.Option(metavar="N", help="At most so many; the text ends before an end token.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest.")] = 0.7,
    top_k: Annotated[int, typer.Option(metavar="K", help="Draw only from the K likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(metavar="P", help="Only from the likeliest that together have P.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Another seed draws another text.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end token.")] = False,
    step: Annotated[
        str | None, typer.Option(metavar="N|best", help="Which checkpoint; the newest, if not given.")
    ] = None,
) -> None:
    """Write text with a trained model."""
    from tilemesh.runs.reader import read_step
    from tilemesh.serve.write import generate as write

    drawn = write(
        run,
        prompt,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        ignore_eos=ignore_eos,
        step=read_step(run, step),
        say=_tell,
    )
    print(prompt + drawn)


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.")],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Where to write the Hugging Face folder.")],
    step: Annotated[
        str | None, typer.Option(metavar="N|best", help="Which checkpoint; the newest, if not given.")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapter alone, as PEFT reads it.")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder. `transformers` reads it; adapters (LoRA) are merged."""
    from tilemesh.runs.reader import read_step
    from tilemesh.train.export import export as write

    print(f"step {write(run, folder, read_step(run, step), _tell, adapter=adapter)} of {run}: {folder}")


def _tell(text: str) -> None:
    print(f"tilemesh: {text}", file=sys.stderr)


@data.command("prepare")
def prepare(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="stdlib, a text, JSON, JSONL or Parquet file, or a folder.")
    ],
    out: Annotated[str, typer.Argument(metavar="FOLDER", help="Where to write the shards.")],
    tokenizer: Annotated[str | None, typer.Option(metavar="FILE", help="A tokenizer.json; without one, bytes.")] = None,
    field: Annotated[str, typer.Option(metavar="NAME", help="Of each record; by default text, or messages.")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="Records are conversations; only answers count.")] = False,
    held_out: Annotated[float, typer.Option(help="The fraction that is not trained on.")] = 0.02,
    pattern: Annotated[str, typer.Option(help="Which files of a folder, such as *.py.")] = "*",
) -> None:
    """Make token shards, which training maps into memory. Train on them with
    `tilemesh train --set data.source=FOLDER`.

    Stopped with Ctrl-C or SIGTERM it keeps what it has read, and the same command goes on from there; killed, it goes
    on from the last whole shard.
    """
    from tilemesh.cli.data_run import run_prepare

    run_prepare(source, out, tokenizer, field, chat, held_out, pattern)
