"""`tilemesh bench exchange`: a training step with gradients exchanged during backward, after it, and naively."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tilemesh.cli.targets import check_targets
from tilemesh.core.errors import UsageError, unknown

MOST_TOKENS = 1 << 20  # per rank and step: a benchmark that would take hours says so at once


def bench_exchange(
    ranks: Annotated[int, typer.Option(help="Replicas; each takes its own rows.")] = 2,
    transport: Annotated[str, typer.Option(help="mpi, torch or auto.")] = "auto",
    model: Annotated[str, typer.Option(help="small (3.7M parameters), medium (29M), or a preset.")] = "small",
    rows: Annotated[int, typer.Option(help="Sequences of one replica.")] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 128,
    bucket_bytes: Annotated[int, typer.Option(help="About how much travels together.")] = 8 << 20,
    algorithm: Annotated[str, typer.Option(help="Of the global-sum: auto, native, ring, …")] = "auto",
    repeats: Annotated[int, typer.Option(help="Readings of each.")] = 20,
    json_file: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Rows, one object per line.")] = None,
) -> None:
    """Time the bucketed gradient exchange beside a naive one. And how much of the exchange backward hides."""
    from tilemesh.bench.train.exchange import exchange_rows
    from tilemesh.measure.row import write_rows
    from tilemesh.measure.table import print_rows

    given: dict[str, Any] = {
        "model": model, "rows": rows, "tokens": tokens, "bucket_bytes": bucket_bytes, "algorithm": algorithm,
        "repeats": repeats,
    }  # fmt: skip
    _check(ranks, transport, given)
    check_targets(json=json_file)
    made = exchange_rows(ranks, transport, **given)
    print_rows(made)
    if json_file is not None:
        write_rows(made, json_file)


def _check(ranks: int, transport: str, given: dict[str, Any]) -> None:
    """Refuse what cannot be before any rank is started."""
    from tilemesh.bench.train.exchange import config_of
    from tilemesh.comm.schedules.book import algorithms
    from tilemesh.launch.job import check_ranks
    from tilemesh.launch.start import choose_transport

    config = config_of(given["model"])
    if ranks < 2:
        raise UsageError(f"--ranks {ranks}: an exchange needs at least 2")
    check_ranks(ranks)
    choose_transport(transport)
    for name in ("rows", "bucket_bytes", "repeats"):
        if not 1 <= given[name] < 1 << 40:
            raise UsageError(f"--{name.replace('_', '-')} {given[name]}: expected at least 1, and a number that fits")
    if not 1 <= given["tokens"] <= config.context:
        raise UsageError(f"--tokens {given['tokens']}: expected 1 to {config.context}, the model's context")
    if given["rows"] * given["tokens"] > MOST_TOKENS:
        raise UsageError(
            f"--rows {given['rows']} --tokens {given['tokens']}: expected at most {MOST_TOKENS:,} tokens per rank"
        )
    known = ("auto", "native", *algorithms("all_reduce"))
    if given["algorithm"] not in known:
        raise unknown("algorithm", given["algorithm"], known)
